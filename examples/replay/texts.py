"""The texts and common options of `sweep.py` and `rounds.py`.

The texts are answers of the target: rollouts of `specdecpp train --stage rollouts` (`--rollouts`), or answers to the
prompts of `--data`, generated here. Both programs continue a killed run.

`python examples/replay/sweep.py --help` and `python examples/replay/rounds.py --help` list the options.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hf_specdecpp.benchmark.live import answer, neutralise
from hf_specdecpp.benchmark.questions import Benchmark, Question, RunLog, environment
from hf_specdecpp.benchmark.report import notes
from hf_specdecpp.cli_options import BenchmarkConfig, parse_names, parse_temperatures
from hf_specdecpp.files import save_text
from hf_specdecpp.models.causal_lm import eos_ids
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.prompts import sample_prompts
from hf_specdecpp.texts.sampling import Sampling, seed_of


@dataclass
class Text:
    """A text of the target: prompt and answer, which would have ended at `max_length` at the latest."""

    ids: list[int]
    prompt_length: int
    max_length: int
    eos: frozenset[int] = frozenset()

    @property
    def first(self) -> int:
        """The first place for a candidate: the answer's first token comes from the pass over the prompt."""
        return self.prompt_length + 1


TextSet = tuple[str, dict[str, Text], Sampling]  # name, texts by prompt, how they were sampled


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of both programs; most are those of `specdecpp bench`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Hub id or folder of the model")
    parser.add_argument("--assistant", required=True, help="Hub id or folder of its assistant")
    parser.add_argument("--draft", help="folder of the draft that the assistant's repository names")
    parser.add_argument("--rollouts", type=Path, metavar="WORK_DIR", help="take the answers of a `specdecpp train`")
    parser.add_argument("--data", action="append", default=[], help="prompts: JSON Lines files, each a set")
    parser.add_argument("--max_prompts", type=int, help="the most taken of each set, all by default")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="the longest answer to prompts of --data")
    parser.add_argument("--temperatures", type=parse_temperatures, default=[0.0, 1.0], help="such as 0,1; 0 is greedy")
    parser.add_argument("--dtype", default="auto", help="dtype of the target")
    parser.add_argument("--threads", type=int, help="number of torch's threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contestants", type=parse_names, default=[], help="such as 'fixed*,dyspec*' (rounds.py)")
    parser.add_argument("--output", type=Path, default=Path("replay"), help="folder of the results")
    return parser


def load(arguments: argparse.Namespace) -> Benchmark:
    """The models and prompts that the options name."""
    names = ("target", "assistant", "draft", "data", "max_prompts", "max_new_tokens", "temperatures", "dtype",
             "threads", "seed", "contestants", "output")  # fmt: skip
    config = BenchmarkConfig(**{name: getattr(arguments, name) for name in names})
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    benchmark = Benchmark.load(config)
    neutralise(benchmark.target)
    return benchmark


def once(log: RunLog, where: dict[str, Any], make: Callable[[], Any]) -> Any:
    """The row of a log with the values `where`; made if it is not there yet."""
    found = next((row for row in log.rows if where.items() <= row.items()), None)
    return log.add({**where, **make()}) if found is None else found


def write(benchmark: Benchmark, found: dict[str, Any], parts: list[str]) -> None:
    """Write what was `found` as `results.json`, and the `parts` of a Markdown page as `report.md`."""
    settings, where, folder = benchmark.settings, environment(benchmark.target.device), benchmark.config.output
    settings = {**settings, "products": benchmark.assistant.setup().products(benchmark.target).described}
    command = shlex.join(["python", *sys.argv])
    results = {"command": command, "environment": where, "settings": settings, "runs": [], **found}
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "hf_specdecpp"))
    head = ["# Benchmark", *notes(results), f"Made by\n\n```console\n{command}\n```",
            f"{versions}; seed {settings['seed']}."]  # fmt: skip
    save_text(json.dumps(results) + "\n", folder / "results.json")
    save_text("\n\n".join([*head, *parts]) + "\n", folder / "report.md")


def text_sets(benchmark: Benchmark, rollouts: Path | None) -> Iterator[TextSet]:
    """Each set at each temperature."""
    for temperature in benchmark.config.temperatures:
        if rollouts is None:
            yield from _answers(benchmark, temperature)
        else:
            yield from _rollouts(benchmark, rollouts, temperature)


def _answers(benchmark: Benchmark, temperature: float) -> Iterator[TextSet]:
    config, eos = benchmark.config, eos_ids(benchmark.target.generation_config)
    log = RunLog(config.output, benchmark.settings, "texts.jsonl")
    for name, group in groupby(benchmark.questions, key=lambda question: question.set):
        texts = {}
        for question in logging.tqdm(list(group), desc=f"texts of {name} at temperature {temperature:g}", unit="text"):
            where = {"set": name, "prompt": question.prompt, "temperature": temperature}
            said = once(log, where, partial(_write, benchmark, question, temperature))["answer"]
            [prompt] = question.ids
            texts[question.prompt] = Text(prompt + said, len(prompt), len(prompt) + config.max_new_tokens, eos)
        yield name, texts, Sampling(temperature, 0)


def _write(benchmark: Benchmark, question: Question, temperature: float) -> dict[str, Any]:
    seed = seed_of(benchmark.config.seed, *question.key, temperature)
    options = {"max_new_tokens": benchmark.config.max_new_tokens}
    return {"answer": answer(benchmark.target, question.ids, temperature, seed, options)[0]}


def _rollouts(benchmark: Benchmark, work: Path, temperature: float) -> Iterator[TextSet]:
    config, eos = benchmark.config, eos_ids(benchmark.target.generation_config)
    settings = answers.record(work)["settings"]
    splits = {path.parent.name for path in (work / answers.FOLDER).glob("*/shard-*.parquet")}
    for name in sorted(splits - {answers.TRAIN, answers.HELDOUT}):
        rows = list(answers.load(work, name, temperature))
        texts = {}
        chosen: list[Any] = sample_prompts(rows, config.max_prompts, config.seed)
        for row in chosen:
            ids, length = row["input_ids"], row["prompt_length"]
            most = len(ids) if not row["finished"] else length + settings["max_new_tokens"]
            texts[f"{row['prompt_id']}-{row['sample']}"] = Text(ids, length, most, eos)
        yield name, texts, Sampling(temperature, settings["top_k"])
