"""What `specdecpp bench` does with its options."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark import plots, report
from hf_specdecpp.benchmark.contestants import (
    PASSES,
    Contestant,
    all_contestants,
    choose,
    quick_contestants,
    without_draft,
)
from hf_specdecpp.benchmark.live.batches import BatchBenchmark, summarise_batches
from hf_specdecpp.benchmark.live.runner import LiveBenchmark, Question, mismatches, neutralise
from hf_specdecpp.benchmark.replay.rounds import replay_rounds
from hf_specdecpp.benchmark.replay.runner import replay, text_sets
from hf_specdecpp.benchmark.replay.sweep import PAPER, read_costs
from hf_specdecpp.benchmark.run_log import BATCHES, RESULTS, ROUNDS, RunLog, environment
from hf_specdecpp.benchmark.settings import BenchmarkConfig
from hf_specdecpp.benchmark.summary import busy_elsewhere, comparable, next_step, overall, speed_table, summarise
from hf_specdecpp.choosing import as_told
from hf_specdecpp.cli_options import DraftChoice
from hf_specdecpp.drafts.known import describe, kind_of
from hf_specdecpp.files import save_text
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_model, show_bars
from hf_specdecpp.provenance import command, commit_of
from hf_specdecpp.texts.encoding import Codec
from hf_specdecpp.texts.prompts import EXAMPLES, Prompt, read_prompts, sample_prompts
from hf_specdecpp.trees.checks import check_tree

logger = logging.get_logger("hf_specdecpp")

QUICK_PROMPTS, QUICK_TOKENS = 3, 48


def run(config: BenchmarkConfig, console: Console) -> bool:
    """Benchmark, write `results.json`, `report.md` and pictures, and print the report.

    Returns:
        Whether all greedy texts of ours were those of plain generation.

    Raises:
        ValueError, OSError: an option makes no sense, or a file or model is missing.
    """
    read_costs(config.costs, lambda: PAPER)  # a mistake is found now, not after an hour of generations
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    config = _quicker(config) if config.quick else config
    target, assistant = load(config)
    if not (config.assistant or config.layers or config.lookup or config.mtp):
        console.print(f"Without --assistant or --layers the draft is {describe(assistant.config)}.", soft_wrap=True)
    config = _without_replays(config, kind_of(assistant.config).cannot.get("replays"))
    contestants = choose(_contestants(config, target, assistant), config.contestants)
    questions = _questions(config)
    settings = _settings(config, target, assistant, questions)
    log = RunLog(config.output, settings)
    show_bars()  # ours, after those of loading
    if config.live:
        live = LiveBenchmark(target, assistant, log, config.max_new_tokens, config.seed, config.attempts)
        live.run(questions, contestants, config.temperatures)
    batches = RunLog(config.output, settings, BATCHES)
    if config.batch_size:
        timed = BatchBenchmark(target, assistant, batches, config.max_new_tokens, config.seed, config.attempts)
        timed.run(questions, contestants, config.temperatures, config.batch_size)
    results = _results(config, settings, log, contestants, target, assistant, questions)
    results["batches"] = summarise_batches(batches.rows)
    write(results, config.output)
    report.print_report(results, console)
    console.print(f"Written to {config.output}: {RESULTS}, report.md, pictures.")
    if lossless := report.lossless(results):
        fastest = overall(results["summary"], config.temperatures[0])
        console.print(f"next      {next_step(fastest, contestants, assistant)}", soft_wrap=True)
    if config.card is not None:
        save_text(json.dumps(results["speeds"], indent=2) + "\n", config.card)
    return lossless


def write(results: dict[str, Any], folder: Path) -> None:
    """The results as JSON, Markdown and pictures."""
    save_text(json.dumps(results) + "\n", folder / RESULTS)
    save_text(report.markdown(results), folder / "report.md")
    plots.plot_all(results, folder)


def load(config: BenchmarkConfig) -> tuple[CausalLM, SpecDecPPAssistant]:
    """The target and its assistant."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    target = load_model(config.target, dtype=config.dtype, device=config.device or accelerator or "cpu")
    return target, _assistant(config, target)


def _assistant(config: BenchmarkConfig, target: CausalLM) -> SpecDecPPAssistant:
    """The assistant, its passes as its repository has them unless the command says otherwise."""
    if config.assistant is None or config.lookup:
        assistant = as_told(target, DraftChoice(config.target, None, config.layers, config.lookup, config.mtp))
    else:
        assistant = SpecDecPPAssistant.from_pretrained(config.assistant, target=target, draft=config.draft)
    told = {name: value for name in PASSES if (value := getattr(config, name)) is not None}
    assistant.speculation = replace(assistant.speculation, **told)
    return assistant


def _contestants(config: BenchmarkConfig, target: CausalLM, assistant: SpecDecPPAssistant) -> list[Contestant]:
    has_head = assistant.head is not None
    if assistant.ready_drafter().model is None:
        return without_draft()
    if config.quick:
        contestants = quick_contestants(has_head)
    else:
        can_tree, has_rates = _can_tree(target, assistant), bool(assistant.config.acceptance_by_rank)
        contestants = all_contestants(has_head, can_tree, has_rates)
    if "unattached" in assistant.ready_drafter().cannot:  # nor can transformers' own loop draft with it
        contestants = [each for each in contestants if each.stock is None]
    return contestants


def _without_replays(config: BenchmarkConfig, reason: str | None) -> BenchmarkConfig:
    """Replays are left out for a reason, if there is one."""
    if reason is None or not config.replay:
        return config
    logger.warning(f"--replay does nothing: {reason}. --replay_rounds does.")
    return replace(config, replay=False)


def _can_tree(target: CausalLM, assistant: SpecDecPPAssistant) -> bool:
    try:
        check_tree(target)
        assistant.ready_drafter().check_tree()
    except ValueError as error:
        logger.warning(f"No trees take part: {error}")
        return False
    return True


def _quicker(config: BenchmarkConfig) -> BenchmarkConfig:
    prompts = min(config.max_prompts or QUICK_PROMPTS, QUICK_PROMPTS)
    tokens = min(config.max_new_tokens, QUICK_TOKENS)
    return replace(config, max_prompts=prompts, max_new_tokens=tokens, temperatures=[0.0], replay=False, attempts=1)


def _questions(config: BenchmarkConfig) -> list[Question]:
    codec = Codec.from_pretrained(config.target)
    sets = {Path(source).stem: read_prompts(source) for source in config.data}
    if not sets:
        messages = ([{"role": "user", "content": text}] for text in EXAMPLES)
        sets = {"demo": [Prompt(f"demo-{number}", "demo", each) for number, each in enumerate(messages, 1)]}
    return [
        Question(name, item.prompt.id, item.input_ids)
        for name, prompts in sets.items()
        for item in codec.encode_all(sample_prompts(prompts, config.max_prompts, config.seed))
    ]


def _settings(
    config: BenchmarkConfig, target: CausalLM, assistant: SpecDecPPAssistant, questions: list[Question]
) -> dict[str, Any]:  # fmt: skip
    """What the generations depend on. Further contestants and temperatures may join later."""
    prompts = json.dumps([[each.set, each.prompt, each.ids] for each in questions])
    return {
        "target": config.target,
        "target_revision": commit_of(target),
        "assistant": config.assistant,
        "draft_name": describe(assistant.config),
        "assistant_contents": _digest(assistant),
        "prompts": f"{len(questions)} with hash {hashlib.sha256(prompts.encode()).hexdigest()[:16]}",
        "max_new_tokens": config.max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "seed": config.seed,
        **{name: getattr(assistant.speculation, name) for name in PASSES},
        **environment(target.device),
    }


def _digest(assistant: SpecDecPPAssistant) -> str:
    """Of config, adapter and head, which change with every training."""
    digest = hashlib.sha256(json.dumps(assistant.config.to_dict(), sort_keys=True, default=str).encode())
    if assistant.parts.adapter is not None:
        digest.update((assistant.parts.adapter / ADAPTER_FILES[1]).read_bytes())
    for part in (assistant.head, assistant.parts.module):
        for name, tensor in part.state_dict().items() if part is not None else ():
            digest.update(name.encode() + tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _results(
    config: BenchmarkConfig, settings: dict[str, Any], log: RunLog, contestants: list[Contestant],
    target: CausalLM, assistant: SpecDecPPAssistant, questions: list[Question],
) -> dict[str, Any]:  # fmt: skip
    here = {question.prompt for question in questions}
    names = {contestant.name for contestant in contestants}
    rows = [
        row
        for row in comparable(log.rows)
        if row["temperature"] in config.temperatures and row["prompt"] in here and row["contestant"] in names
    ]
    summary = summarise(rows, contestants)
    where = environment(target.device)
    busy = busy_elsewhere(rows)
    load = f", other processes keeping {busy:.1f} of {where['processors']} processors busy" if busy else ""
    facts = {"command": command(), "device": where["device"] + load, "dtype": settings["dtype"]}
    results = {
        "command": command(), "environment": where,
        "settings": {**settings, "temperatures": config.temperatures, "rollouts": config.rollouts is not None},
        "ours": [contestant.name for contestant in contestants if contestant.ours],
        "summary": summary, "speeds": speed_table(summary, facts), "mismatches": mismatches(rows, target),
        "costs": {}, "replays": [], "replay_agreement": None, "round_replays": [], "runs": rows,
    }  # fmt: skip
    if config.replay:
        results |= replay(config, log.rows, contestants, target, assistant, questions)
    if config.replay_rounds:
        neutralise(target)
        sets = chain.from_iterable(
            text_sets(config, log.rows, questions, temperature, target) for temperature in config.temperatures
        )
        rounds = RunLog(config.output, settings, ROUNDS)
        results["round_replays"] = replay_rounds(config, rounds, contestants, target, assistant, sets)
    return results
