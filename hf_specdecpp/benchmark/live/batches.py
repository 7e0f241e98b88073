"""Several prompts in one `generate()`, timed: what speculation gains as the batch grows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from hf_specdecpp.benchmark.contestants import BASELINES, PLAIN, SAME_PASSES, Contestant
from hf_specdecpp.benchmark.live.clock import quietest
from hf_specdecpp.benchmark.live.runner import WARM_UP_TOKENS, Benchmark, Question, rotated, sampling_at
from hf_specdecpp.intervals import median_of_ratios
from hf_specdecpp.models.causal_lm import eos_ids, until_end
from hf_specdecpp.sampling.randomness import seed_of
from hf_specdecpp.texts.encoding import padded


class BatchBenchmark(Benchmark):
    """Times generations of several prompts at once."""

    def run(
        self,
        questions: Sequence[Question],
        contestants: Sequence[Contestant],
        temperatures: Sequence[float],
        sizes: Sequence[int],
    ) -> None:
        """All generations that are missing: whole batches only. Who begins changes from batch to batch.

        Raises:
            ValueError: there are fewer prompts than a batch has rows.
        """
        if max(sizes) > len(questions):
            raise ValueError(
                f"batch_size={max(sizes)}, and there are {len(questions)} prompts: not enough for one batch."
            )
        contestants = [each for each in contestants if each in BASELINES or _drafts_chains(each)]
        todo = [
            (temperature, size, begin)
            for temperature in temperatures
            for size in sizes
            for begin in range(0, len(questions) - size + 1, size)
        ]
        with logging.tqdm(total=len(todo) * len(contestants), desc="batches", unit="batch") as bar:
            for number, (temperature, size, begin) in enumerate(todo):
                batch = questions[begin : begin + size]
                if begin == 0:
                    for contestant in contestants:
                        self._generate(batch, temperature, contestant, WARM_UP_TOKENS)
                where = {"size": size, "batch": begin // size, "temperature": temperature}
                self._time_batch(batch, where, rotated(contestants, number))
                bar.update(len(contestants))

    def _time_batch(self, batch: Sequence[Question], where: dict[str, Any], order: list[Contestant]) -> None:
        """One batch with every contestant, unless all have had it: speeds are compared within a session."""
        done = {row["contestant"] for row in self.log.rows if where.items() <= row.items()}
        if {each.name for each in order} <= done:
            return
        for contestant in order:
            self.log.add({**where, **self._time(batch, where["temperature"], contestant)})

    def _time(self, batch: Sequence[Question], temperature: float, contestant: Contestant) -> dict[str, Any]:
        """One generation of a batch."""

        def describe(texts: list[list[int]]) -> dict[str, Any]:
            passes = self.assistant.stats.tokens_per_pass if contestant.ours else 1.0
            tokens = sum(map(len, texts))
            return {"contestant": contestant.name, "tokens": tokens, "tokens_per_pass": passes, "texts": texts}

        generate = partial(self._generate, batch, temperature, contestant, self.max_new_tokens)
        return quietest(self.attempts, generate, describe)

    def _generate(
        self, batch: Sequence[Question], temperature: float, contestant: Contestant, max_new_tokens: int
    ) -> list[list[int]]:
        """What each row said, up to the token that ended it."""
        inputs = padded([question.ids for question in batch], self.target.generation_config.pad_token_id or 0)
        inputs = {name: each.to(self.target.device) for name, each in inputs.items()}
        torch.manual_seed(seed_of(self.seed, *(question.prompt for question in batch), temperature))
        with contestant.arguments(self.assistant, self.target) as arguments:
            output = self.target.generate(
                **inputs, max_new_tokens=max_new_tokens, **sampling_at(temperature), **arguments
            )
        eos = eos_ids(self.target.generation_config)
        return [until_end(row, eos) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]


def _drafts_chains(contestant: Contestant) -> bool:
    return contestant.speculation is not None and contestant.speculation.tree is None


def summarise_batches(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each temperature, size and contestant.

    Each has its speed over both baselines in the same session, medians over the batches with intervals, and how many
    greedy texts are not those of plain generation.
    """
    by_moment = {(*_moment(row), row["contestant"]): row for row in rows}
    groups: dict[tuple[float, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        if all((*_moment(row), each.name) in by_moment for each in BASELINES):
            groups.setdefault((row["temperature"], row["size"], row["contestant"]), []).append(row)
    summary = []
    for (temperature, size, contestant), group in groups.items():
        plain, same = ([by_moment[(*_moment(row), each.name)] for row in group] for each in (PLAIN, SAME_PASSES))
        different = sum(
            ours != theirs
            for row, other in zip(group, plain, strict=True)
            for ours, theirs in zip(row["texts"], other["texts"], strict=True)
        )
        summary.append({
            "temperature": temperature, "size": size, "contestant": contestant, "batches": len(group),
            "speedup": _speedup(group, plain), "same_passes": _speedup(group, same),
            "tokens_per_second": sum(row["tokens"] for row in group) / sum(row["seconds"] for row in group),
            "tokens_per_pass": sum(row["tokens_per_pass"] for row in group) / len(group),
            "different": different if temperature == 0.0 else None,
            "disturbed": sum(row["disturbed"] for row in group),
        })  # fmt: skip
    return sorted(summary, key=lambda row: (row["temperature"], row["size"], -row["speedup"][0]))


def _moment(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["temperature"], row["size"], row["batch"], row["session"]


def _speedup(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    speeds = ([row["tokens"] / row["seconds"] for row in each] for each in (rows, others))
    return median_of_ratios([ours / theirs for ours, theirs in zip(*speeds, strict=True)])
