"""The replayed half of a benchmark: whose texts, their records, every rule on them, and a check against live runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark.contestants import PLAIN, Contestant
from hf_specdecpp.benchmark.live.runner import Question, answer, neutralise
from hf_specdecpp.benchmark.replay.chains import ChainReplay, recorded_estimator
from hf_specdecpp.benchmark.replay.record import MAX_TOKENS, Text, load, record, save
from hf_specdecpp.benchmark.replay.sweep import read_costs, sweep
from hf_specdecpp.benchmark.settings import BenchmarkConfig
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.files import read_json, save_text
from hf_specdecpp.generation.setup import make_rule, plan_of
from hf_specdecpp.models.causal_lm import CausalLM, eos_ids
from hf_specdecpp.sampling.randomness import seed_of
from hf_specdecpp.texts.prompts import sample_prompts
from hf_specdecpp.texts.sampling import Sampling

RECORDS = "records"
TIMED_TEXTS, TIMED_TOKENS = 4, 96  # of which rounds are timed, with each number of candidates in turn
Texts = dict[str, Text]  # by prompt


def replay(
    config: BenchmarkConfig,
    runs: Sequence[dict[str, Any]],
    contestants: Sequence[Contestant],
    target: CausalLM,
    assistant: SpecDecPPAssistant,
    questions: Sequence[Question],
) -> dict[str, Any]:
    """Every rule on records of the target's texts: `costs`, `replays` and `replay_agreement` of the results.

    Args:
        runs: generations, whose plain texts are taken where they are not from rollouts.
    """
    costs = read_costs(config.costs, lambda: timed_costs(target, assistant, [each.ids for each in questions]))
    neutralise(target)
    replays, agreement = [], {"compared": 0, "equal": 0}
    for temperature in config.temperatures:
        for name, texts, sampling in text_sets(config, runs, questions, temperature, target):
            chains = _chain_replays(config, name, texts, sampling, target, assistant)
            everywhere = [chain for draws in chains.values() for chain in draws]
            if not everywhere:
                continue
            replays.append({"set": name, "temperature": temperature, **sweep(everywhere, assistant.head, costs)})
            if temperature == 0.0 and config.rollouts is None:
                here = [row for row in runs if row["set"] == name and row["temperature"] == 0.0]
                _compare(agreement, chains, here, contestants, assistant)
    return {
        "costs": {name: each.to_dict() for name, each in costs.items()},
        "replays": replays,
        "replay_agreement": agreement if agreement["compared"] else None,
    }


def timed_costs(target: CausalLM, assistant: SpecDecPPAssistant, prompts: Sequence[list[int]]) -> Costs:
    """What rounds cost here, by those of a few texts, in which each length is tried."""
    setting = assistant.speculation
    assistant.speculation = replace(setting, rule="throughput", max_tokens=MAX_TOKENS, tree=None, costs=None)
    try:
        plan: Any = plan_of(assistant.setup(), target, GenerationConfig(do_sample=False), captures=False)
        for number in range(TIMED_TEXTS):
            plan.asked = list(range(MAX_TOKENS, -1, -1))
            text = prompts[number % len(prompts)]
            answer(target, text, 0.0, TIMED_TOKENS, 0, {"assistant_model": assistant})
        return plan.costs
    finally:
        assistant.speculation = setting


def text_sets(
    config: BenchmarkConfig,
    runs: Sequence[dict[str, Any]],
    questions: Sequence[Question],
    temperature: float,
    target: CausalLM,
) -> Iterator[tuple[str, Texts, Sampling]]:
    """Name, texts, and how they were sampled, for each set."""
    if config.rollouts is not None:
        yield from _rollouts(config, config.rollouts, temperature, eos_ids(target.generation_config))
        return
    written = {
        (row["set"], row["prompt"]): row["ids"]
        for row in runs
        if row["contestant"] == PLAIN.name and row["temperature"] == temperature
    }
    for name, group in groupby(questions, key=lambda question: question.set):
        texts = {}
        for question in logging.tqdm(list(group), desc=f"texts of {name} at temperature {temperature:g}", unit="text"):
            ids = written.get((name, question.prompt)) or _write(config, question, temperature, target)
            length = len(question.ids)
            eos = eos_ids(target.generation_config)
            texts[question.prompt] = Text(ids, length, length + config.max_new_tokens, eos)
        yield name, texts, Sampling(temperature, 0)


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


def _write(config: BenchmarkConfig, question: Question, temperature: float, target: CausalLM) -> list[int]:
    """A text of plain generation, kept for the next time."""
    seed = seed_of(config.seed, question.set, question.prompt, temperature)
    path = config.output / RECORDS / f"{question.set}-{temperature:g}" / f"text-{seed}.json"
    if path.is_file():
        found: list[int] = read_json(path)
        return found
    ids = answer(target, question.ids, temperature, config.max_new_tokens, seed, {})
    path.parent.mkdir(parents=True, exist_ok=True)
    save_text(json.dumps(ids) + "\n", path)
    return ids


def _chain_replays(
    config: BenchmarkConfig,
    name: str,
    texts: Texts,
    sampling: Sampling,
    target: CausalLM,
    assistant: SpecDecPPAssistant,
) -> dict[str, list[ChainReplay]]:
    """The records of a set's texts, each made unless it is on disk already."""
    folder = config.output / RECORDS / f"{name}-{sampling.temperature:g}"
    folder.mkdir(parents=True, exist_ok=True)
    chains: dict[str, list[ChainReplay]] = {}
    for prompt, text in logging.tqdm(texts.items(), desc=f"records of {name}", unit="text"):
        if text.first >= len(text.ids):
            continue  # too short for a round
        chains[prompt] = []
        for draw in range(1 if sampling.greedy else config.draws):
            seed = seed_of(config.seed, name, prompt, sampling.temperature, draw)
            path = folder / f"{seed}.safetensors"
            if not path.is_file() or (found := load(path)).text != text:
                found = record(text, assistant, target, sampling, seed)
                save(found, path)
            chains[prompt].append(ChainReplay(found))
    return chains


def _compare(
    agreement: dict[str, int],
    chains: dict[str, list[ChainReplay]],
    rows: Sequence[dict[str, Any]],
    contestants: Sequence[Contestant],
    assistant: SpecDecPPAssistant,
) -> None:
    """Count greedy generations whose live rounds are those of the replay."""
    rules = {c.name: (c.speculation, c.with_head) for c in contestants if c.speculation and _replayable(c.speculation)}
    for row in rows:
        if row["contestant"] in rules and row["prompt"] in chains:
            speculation, with_head = rules[row["contestant"]]
            estimator = recorded_estimator("head" if with_head else "q", assistant.head, greedy=True)
            replayed = chains[row["prompt"]][0].rounds(make_rule(speculation, estimator))
            live = [(drafted, accepted) for drafted, accepted, *_ in row["rounds"][1:]]
            agreement["compared"] += 1
            agreement["equal"] += live == [(drafted, accepted) for drafted, accepted, _ in replayed]


def _replayable(speculation: SpeculationConfig) -> bool:
    # What remembers earlier generations begins a replay with others.
    remembers = speculation.rule == "throughput" or (speculation.rule == "threshold" and speculation.adapt)
    return speculation.tree is None and not remembers
