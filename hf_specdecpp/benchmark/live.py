"""Every contestant on the same prompts, in turns, timed; and whether what was timed is the target's own text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from hf_specdecpp.benchmark.contestants import BASELINES, PLAIN, Contestant
from hf_specdecpp.benchmark.loading import Benchmark, Question
from hf_specdecpp.benchmark.run_log import RunLog
from hf_specdecpp.benchmark.summary import comparable
from hf_specdecpp.benchmark.timing import PassClock, quietest
from hf_specdecpp.files import measured_in
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CausalLM, eos_ids, until_end
from hf_specdecpp.sampling.randomness import seed_of
from hf_specdecpp.texts.encoding import padded
from hf_specdecpp.throughput.known_costs import forget_costs

WARM_UP_TOKENS = 8
# How far apart two logits may be, relative to the largest, for rounding to decide between them: four times the spacing
# of the type's numbers. A pass over several tokens rounds differently from a pass over one.
ROUNDING = {torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}
Row = dict[str, Any]
Answers = list[list[int]]


class LiveBenchmark:
    """Times generations.

    Args:
        benchmark: the generation config of its target is replaced by a neutral one: contestants sample from its own
            distribution.
        log: what is done already, and where the rest goes.
    """

    def __init__(self, benchmark: Benchmark, log: RunLog) -> None:
        self.target, self.assistant, self.contestants = benchmark.target, benchmark.assistant, benchmark.contestants
        self.config, self.log = benchmark.config, log
        neutralise(self.target)

    def run(self, questions: Sequence[Question]) -> None:
        """All generations that are missing. Who begins changes from question to question."""
        todo = [
            (question, temperature, missing)
            for temperature in self.config.temperatures
            for number, question in enumerate(questions)
            if (missing := self._missing(question, temperature, rotated(self._able(question), number)))
        ]
        with TemporaryDirectory() as folder, measured_in(Path(folder)):  # the first texts know no costs
            for question in {question.batch: question for question, _, _ in reversed(todo)}.values():
                for contestant in self._able(question):
                    self._generate(question, 0.0, contestant, WARM_UP_TOKENS)
                    contestant.memory.clear()
            forget_costs()
            self._run(todo)

    def _run(self, todo: Sequence[tuple[Question, float, list[Contestant]]]) -> None:
        with logging.tqdm(total=sum(len(missing) for _, _, missing in todo), desc="benchmark", unit="answer") as bar:
            for question, temperature, missing in todo:
                for contestant in missing:
                    bar.set_postfix_str(contestant.name, refresh=False)
                    self.log.add(self._time(question, temperature, contestant))
                    bar.update()

    def _able(self, question: Question) -> list[Contestant]:
        """Those that can answer a question: trees and transformers' own speculation take no batches."""
        return [each for each in self.contestants if each.takes_batches or not question.batch]

    def _missing(self, question: Question, temperature: float, order: list[Contestant]) -> list[Contestant]:
        here = (*question.key, temperature)
        rows = [row for row in self.log.rows if (row["set"], row["prompt"], row["temperature"]) == here]
        done = {row["contestant"] for row in comparable(rows)}
        missing = [contestant for contestant in order if contestant.name not in done]
        # A speed is compared with those of plain generation in the same session.
        return [*(each for each in BASELINES if each not in missing), *missing] if missing else []

    def _time(self, question: Question, temperature: float, contestant: Contestant) -> Row:
        """One generation, with what its passes did and how many texts the contestant had answered in this session."""
        names = [row["contestant"] for row in self.log.rows if row["session"] == self.log.session]
        earlier = names.count(contestant.name)

        def generate() -> tuple[Answers, PassClock]:
            with PassClock(self.target) as clock:
                return self._generate(question, temperature, contestant, self.config.max_new_tokens), clock

        def describe(generated: tuple[Answers, PassClock]) -> Row:
            answers, clock = generated
            row = {
                "set": question.set, "prompt": question.prompt, "batch": question.batch, "temperature": temperature,
                "contestant": contestant.name, "earlier": earlier, "answers": answers,
                "tokens": sum(map(len, answers)),
            }  # fmt: skip
            return row | (_counted(self.assistant.stats) if contestant.ours else _watched(clock, question, answers))

        return quietest(self.config.attempts, generate, describe)

    def _generate(self, question: Question, temperature: float, contestant: Contestant, max_new_tokens: int) -> Answers:
        seed = seed_of(self.config.seed, *question.key, temperature)
        with contestant.arguments(self.assistant, self.target) as arguments:
            return answer(self.target, question.ids, temperature, seed, {"max_new_tokens": max_new_tokens, **arguments})


def _counted(stats: SpeculationStats) -> Row:
    """Target passes of all rows, those of them that verified candidates, and the candidates; `split`: the seconds of
    the prompt's pass, of drafting, and of the other passes."""
    return {
        "passes": stats.target_passes, "drafting": stats.rounds - stats.idle_rounds, "drafted": stats.drafted,
        "accepted": stats.accepted, "split": [stats.prompt_seconds, stats.draft_seconds, stats.target_seconds],
    }  # fmt: skip


def _watched(clock: PassClock, question: Question, answers: Answers) -> Row:
    """The same of contestants that count nothing, whose drafting is not known apart.

    The pass over the prompt reads this and candidates, each other pass the token before it and candidates. A pass emits
    those that it accepts and one token more: so does the last one, as far as is known here.
    """
    read, seconds = zip(*clock.passes, strict=True)
    tokens, passes = sum(map(len, answers)), sum(map(len, answers)) if question.batch else len(read)
    candidates = [read[0] - max(map(len, question.ids)), *(each - 1 for each in read[1:])]
    return {
        "passes": passes, "drafting": sum(each > 0 for each in candidates), "drafted": sum(candidates),
        "accepted": tokens - passes, "split": [seconds[0], 0.0, sum(seconds[1:])],
    }  # fmt: skip


def answer(
    target: CausalLM, prompts: list[list[int]], temperature: float, seed: int, arguments: dict[str, Any]
) -> Answers:
    """What `generate()` says to each prompt, up to the token that ends it; `temperature` 0 is greedy."""
    inputs = padded(prompts, target.generation_config.pad_token_id or 0)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0.0:  # from the target's own distribution
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(seed)
    output = target.generate(**{name: each.to(target.device) for name, each in inputs.items()}, **sampling, **arguments)
    eos = eos_ids(target.generation_config)
    return [until_end(row, eos) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]


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


# Losslessness --------------------------------------------------------------------------------------------------------


def mismatches(
    rows: Sequence[Row], questions: Sequence[Question], target: CausalLM, decode: Callable[[int], Any]
) -> list[Row]:
    """Greedy texts that are not those of plain generation: `explain_parting` of each, and the tokens' `texts`."""
    prompts = {question.key: question.ids for question in questions}
    greedy = [row for row in rows if row["temperature"] == 0.0]
    plain = {(row["set"], row["prompt"]): row["answers"] for row in greedy if row["contestant"] == PLAIN.name}
    found = []
    for row in greedy:
        where = row["set"], row["prompt"]
        for ids, expected, said in zip(prompts[where], plain[where], row["answers"], strict=True):
            if expected != said:
                names = {name: row[name] for name in ("set", "prompt", "contestant")}
                parting = explain_parting(target, ids, expected, said)
                texts = [None if token is None else decode(token) for token in parting["tokens"]]
                found.append({**names, **parting, "texts": texts})
    return found


@torch.no_grad()
def explain_parting(target: CausalLM, prompt: list[int], plain: list[int], other: list[int]) -> Row:
    """How a greedy answer came to part from that of plain generation, from which it differs.

    Returns:
        `place`, the first that differs; the `tokens` there (`None`: the text had ended); `gap`, the difference of their
        logits relative to the largest logit; `near_tie`, whether both are within rounding of the largest, which excuses
        half precision only.
    """
    pairs = enumerate(zip(plain, other, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), min(len(plain), len(other)))
    tokens = [text[place] if place < len(text) else None for text in (plain, other)]
    logits = target(torch.tensor([prompt + plain[:place]], device=target.device)).logits[0, -1].float()
    largest, scale = float(logits.max()), float(logits.abs().max())
    gaps = [(largest - float(logits[token])) / scale for token in tokens if token is not None]
    near = len(gaps) == 2 and max(gaps) <= ROUNDING.get(target.dtype, -1.0)
    return {"place": place, "tokens": tokens, "gap": max(gaps), "near_tie": near}
