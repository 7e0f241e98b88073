"""Whose texts are replayed: those of plain generation, or the answers that `specdecpp train` has written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_specdecpp.benchmark.contestants import PLAIN
from hf_specdecpp.benchmark.live import answer
from hf_specdecpp.benchmark.loading import Benchmark, Question
from hf_specdecpp.benchmark.replay.record import Text
from hf_specdecpp.benchmark.run_log import TEXTS, RunLog
from hf_specdecpp.benchmark.settings import BenchmarkConfig
from hf_specdecpp.models.causal_lm import eos_ids
from hf_specdecpp.sampling.randomness import seed_of
from hf_specdecpp.texts.prompts import sample_prompts
from hf_specdecpp.texts.sampling import Sampling

Texts = dict[str, Text]  # by prompt


def text_sets(
    benchmark: Benchmark, runs: Sequence[dict[str, Any]], temperature: float
) -> Iterator[tuple[str, Texts, Sampling]]:
    """Name, texts, and how they were sampled, for each set."""
    config, eos = benchmark.config, eos_ids(benchmark.target.generation_config)
    if config.rollouts is not None:
        yield from _rollouts(config, config.rollouts, temperature, eos)
        return
    log = RunLog(config.output, benchmark.settings, TEXTS)
    written = {
        (row["set"], row["prompt"]): row["answers"][0]
        for row in runs
        if row["contestant"] == PLAIN.name and row["temperature"] == temperature and not row["batch"]
    }
    for name, group in groupby(benchmark.questions, key=lambda question: question.set):
        texts = {}
        for question in logging.tqdm(list(group), desc=f"texts of {name} at temperature {temperature:g}", unit="text"):
            [prompt] = question.ids
            said = written.get(question.key)
            if said is None:
                where = {"set": question.set, "prompt": question.prompt, "temperature": temperature}
                said = log.once(where, partial(_write, benchmark, question, temperature))["answer"]
            texts[question.prompt] = Text(prompt + said, len(prompt), len(prompt) + config.max_new_tokens, eos)
        yield name, texts, Sampling(temperature, 0)


def _write(benchmark: Benchmark, question: Question, temperature: float) -> dict[str, Any]:
    """An answer of plain generation."""
    seed = seed_of(benchmark.config.seed, *question.key, temperature)
    options = {"max_new_tokens": benchmark.config.max_new_tokens}
    return {"answer": answer(benchmark.target, question.ids, temperature, seed, options)[0]}


def _rollouts(
    config: BenchmarkConfig, work: Path, temperature: float, eos: frozenset[int]
) -> Iterator[tuple[str, Texts, Sampling]]:
    """The answers to test sets that `specdecpp train` has had the target write."""
    from hf_specdecpp.texts import answers  # needs the extra `train`

    settings = answers.record(work)["settings"]
    for name in answers.test_sets(work):
        rows = list(answers.written_at(answers.load(work, name), temperature))
        chosen: list[Any] = sample_prompts(rows, config.max_prompts, config.seed)
        texts = {}
        for row in chosen:
            ids, length = row["input_ids"], row["prompt_length"]
            most = len(ids) if not row["finished"] else length + settings["max_new_tokens"]
            texts[f"{row['prompt_id']}-{row['sample']}"] = Text(ids, length, most, eos)
        yield name, texts, Sampling(temperature, settings["top_k"])
