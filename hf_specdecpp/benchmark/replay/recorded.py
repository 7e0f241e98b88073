"""The replayed half of a benchmark: whose texts, their records, and every rule on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, groupby, islice
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from hf_specdecpp.benchmark.contestants import PLAIN, changed
from hf_specdecpp.benchmark.live import answer, neutralise
from hf_specdecpp.benchmark.loading import Benchmark, Question
from hf_specdecpp.benchmark.replay.chains import ChainReplay
from hf_specdecpp.benchmark.replay.record import MAX_TOKENS, Text, record
from hf_specdecpp.benchmark.replay.sweep import read_costs, sweep
from hf_specdecpp.benchmark.run_log import RECORDS, TEXTS, RunLog
from hf_specdecpp.benchmark.settings import BenchmarkConfig
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.generation.setup import plan_of
from hf_specdecpp.models.causal_lm import eos_ids
from hf_specdecpp.sampling.randomness import seed_of
from hf_specdecpp.texts.prompts import sample_prompts
from hf_specdecpp.texts.sampling import Sampling

TIMED_TEXTS, TIMED_TOKENS = 4, 96  # of which rounds are timed, with each number of candidates in turn
Texts = dict[str, Text]  # by prompt


def replay(benchmark: Benchmark, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every rule on records of the target's texts: `costs` and `replays` of the results.

    Args:
        runs: generations, whose plain texts are taken where they are not from rollouts.
    """
    config, assistant = benchmark.config, benchmark.assistant
    neutralise(benchmark.target)
    costs = read_costs(config.costs, partial(timed_costs, benchmark))
    replays = []
    for temperature in config.temperatures:
        for name, texts, sampling in text_sets(benchmark, runs, temperature):
            if chains := _chain_replays(benchmark, name, texts, sampling):
                found = sweep(chains, assistant.head, sampling.greedy, costs)
                replays.append({"set": name, "temperature": temperature, **found})
    return {"costs": {name: each.to_dict() for name, each in costs.items()}, "replays": replays}


def timed_costs(benchmark: Benchmark) -> Costs:
    """What rounds cost here, by those of a few texts, in which each length is tried."""
    target, assistant = benchmark.target, benchmark.assistant
    speculation = replace(assistant.speculation, rule="throughput", max_tokens=MAX_TOKENS, tree=None, costs=None)
    options = {"max_new_tokens": TIMED_TOKENS, "assistant_model": assistant}
    with changed(assistant, speculation=speculation):
        plan: Any = plan_of(assistant.setup(), target, GenerationConfig(do_sample=False), captures=False)
        for question in islice(cycle(benchmark.questions), TIMED_TEXTS):
            plan.asked = list(range(MAX_TOKENS, -1, -1))
            answer(target, question.ids, 0.0, 0, options)
    return plan.costs


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


def _chain_replays(benchmark: Benchmark, name: str, texts: Texts, sampling: Sampling) -> list[ChainReplay]:
    """The records of a set's texts, each made once; of sampled texts several, with other draws."""
    config, chains = benchmark.config, []
    log = RunLog(config.output, benchmark.settings, RECORDS)
    for prompt, text in logging.tqdm(texts.items(), desc=f"records of {name}", unit="text"):
        if text.first >= len(text.ids):
            continue  # too short for a round
        for draw in range(1 if sampling.greedy else config.draws):
            seed = seed_of(config.seed, name, prompt, sampling.temperature, draw, text.ids)
            made = partial(record, text, benchmark.assistant, benchmark.target, sampling, seed)
            chains.append(ChainReplay(text, log.once({"seed": seed}, made)))
    return chains
