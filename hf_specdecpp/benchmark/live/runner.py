"""Every contestant on the same prompts, in turns, timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark.contestants import BASELINES, PLAIN, Contestant
from hf_specdecpp.benchmark.live.clock import RoundClock, quietest
from hf_specdecpp.benchmark.live.losslessness import explain_parting, parting
from hf_specdecpp.benchmark.run_log import RunLog
from hf_specdecpp.benchmark.summary import comparable
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.sampling.randomness import seed_of

WARM_UP_TOKENS = 8


@dataclass
class Question:
    """A prompt as tokens, and where it is from."""

    set: str
    prompt: str
    ids: list[int]


class Benchmark:
    """What is timed, how, and where it is written down.

    Args:
        target: its generation config is replaced by a neutral one: contestants sample from its own distribution.
        assistant: attached to it.
        log: what is done already, and where the rest goes.
        attempts: most at one generation.
    """

    def __init__(
        self,
        target: CausalLM,
        assistant: SpecDecPPAssistant,
        log: RunLog,
        max_new_tokens: int,
        seed: int,
        attempts: int = 3,
    ) -> None:
        self.target, self.assistant, self.log = target, assistant, log
        self.max_new_tokens, self.seed, self.attempts = max_new_tokens, seed, attempts
        neutralise(target)


class LiveBenchmark(Benchmark):
    """Times generations of one prompt after the other."""

    def run(
        self, questions: Sequence[Question], contestants: Sequence[Contestant], temperatures: Sequence[float]
    ) -> None:
        """All generations that are missing. Who begins changes from prompt to prompt."""
        todo = [
            (question, temperature, missing)
            for temperature in temperatures
            for number, question in enumerate(questions)
            if (missing := self._missing(question, temperature, rotated(contestants, number)))
        ]
        if not todo:
            return
        self._warm_up(todo[0][0], contestants)
        with logging.tqdm(total=sum(len(missing) for _, _, missing in todo), desc="benchmark", unit="answer") as bar:
            for question, temperature, missing in todo:
                for contestant in missing:
                    bar.set_postfix_str(contestant.name, refresh=False)
                    self.log.add(self._time(question, temperature, contestant))
                    bar.update()

    def _missing(self, question: Question, temperature: float, order: list[Contestant]) -> list[Contestant]:
        here = (question.set, question.prompt, temperature)
        rows = [row for row in self.log.rows if (row["set"], row["prompt"], row["temperature"]) == here]
        done = {row["contestant"] for row in comparable(rows)}
        missing = [contestant for contestant in order if contestant.name not in done]
        # A speed is compared with those of plain generation in the same session.
        return [*(each for each in BASELINES if each not in missing), *missing] if missing else []

    def _warm_up(self, question: Question, contestants: Sequence[Contestant]) -> None:
        for contestant in contestants:
            self._generate(question, 0.0, contestant, WARM_UP_TOKENS, 0)

    def _time(self, question: Question, temperature: float, contestant: Contestant) -> dict[str, Any]:
        """One generation, its rounds included."""
        seed = seed_of(self.seed, question.set, question.prompt, temperature)

        def generate() -> tuple[list[int], RoundClock]:
            with RoundClock(self.target) as clock:
                return self._generate(question, temperature, contestant, self.max_new_tokens, seed), clock

        def describe(generated: tuple[list[int], RoundClock]) -> dict[str, Any]:
            ids, clock = generated
            rounds = clock.rounds(ids, len(question.ids))
            row = {
                "set": question.set, "prompt": question.prompt, "temperature": temperature,
                "contestant": contestant.name, "seed": seed, "prompt_length": len(question.ids),
                "tokens": len(ids) - len(question.ids),
                "rounds": [[r.drafted, r.accepted, round(r.between, 6), round(r.target, 6)] for r in rounds],
                "ids": ids,
            }  # fmt: skip
            if contestant.ours:
                stats = self.assistant.stats
                row["split"] = [stats.prompt_seconds, stats.draft_seconds, stats.target_seconds, stats.overhead_seconds]
            return row

        return quietest(self.attempts, generate, describe)

    def _generate(
        self, question: Question, temperature: float, contestant: Contestant, max_new_tokens: int, seed: int
    ) -> list[int]:
        with contestant.arguments(self.assistant, self.target) as arguments:
            return answer(self.target, question.ids, temperature, max_new_tokens, seed, arguments)


def answer(
    target: CausalLM, ids: list[int], temperature: float, max_new_tokens: int, seed: int, arguments: dict[str, Any]
) -> list[int]:
    """The whole text that `generate()` returns."""
    inputs = torch.tensor([ids], device=target.device)
    options = {"max_new_tokens": max_new_tokens, **sampling_at(temperature), **arguments}
    torch.manual_seed(seed)
    output = target.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    found: list[int] = output[0].tolist()
    return found


def sampling_at(temperature: float) -> dict[str, Any]:
    """Arguments of `generate()` that sample from the target's own distribution; 0 is greedy."""
    if temperature > 0.0:
        return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return {"do_sample": False}


def neutralise(target: CausalLM) -> None:
    """Take penalties, top-k and the like out of a target's generation defaults; its special tokens stay."""
    own = target.generation_config
    special = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if special["pad_token_id"] is None:  # generate() would choose the same, and say so each time
        eos = special["eos_token_id"]
        special["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
    target.generation_config = GenerationConfig(**special)


def rotated(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """The contestants, another one first for each number."""
    first = number % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def mismatches(rows: Sequence[dict[str, Any]], target: CausalLM) -> list[dict[str, Any]]:
    """Greedy texts that are not those of plain generation, with the place and the gap between the tokens there."""
    plain = {(row["set"], row["prompt"]): row["ids"] for row in rows if row["contestant"] == PLAIN.name and greedy(row)}
    found = []
    for row in filter(greedy, rows):
        expected = plain[row["set"], row["prompt"]]
        if (place := parting(expected, row["ids"])) is not None:
            where = {name: row[name] for name in ("set", "prompt", "contestant", "prompt_length")}
            found.append({**where, **explain_parting(target, expected, row["ids"], place)})
    return found


def greedy(row: dict[str, Any]) -> bool:
    return bool(row["temperature"] == 0.0)
