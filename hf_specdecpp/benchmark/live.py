"""`specdecpp bench`: times all contestants on the same prompts, and compares greedy answers with plain generation."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import GenerationConfig
from transformers.utils import logging
from typing_extensions import Self

from hf_specdecpp.benchmark import report
from hf_specdecpp.benchmark.contestants import BASELINES, PLAIN, Contestant
from hf_specdecpp.benchmark.questions import RESULTS, Benchmark, Question, RunLog, environment
from hf_specdecpp.benchmark.summary import Row, busy_elsewhere, comparable, next_step, overall, speed_table, summarise
from hf_specdecpp.cli_options import BenchmarkConfig
from hf_specdecpp.files import save_text
from hf_specdecpp.models.causal_lm import CausalLM, eos_ids, until_end
from hf_specdecpp.models.cpu.weight_copies import background
from hf_specdecpp.models.loading import load_tokenizer, show_bars
from hf_specdecpp.provenance import command
from hf_specdecpp.texts.encoding import padded
from hf_specdecpp.texts.parting import explain_parting
from hf_specdecpp.texts.sampling import seed_of
from hf_specdecpp.throughput.known_costs import forget_costs, without_known_costs

WARM_UP_TOKENS = 8
MOST_WAITING = 0.05  # a run counts as disturbed if its threads wait for a processor for a larger share of its time
Answers = list[list[int]]


def run(config: BenchmarkConfig, console: Console) -> bool:
    """Run the benchmark, and write and print the report. Returns whether the package's greedy answers are lossless."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    benchmark = Benchmark.load(config)
    settings, target = benchmark.settings, benchmark.target
    log = RunLog(config.output, settings)
    show_bars()  # again, after loading without bars
    LiveBenchmark(benchmark, log).run(benchmark.asked)
    keys, names = {question.key for question in benchmark.asked}, {each.name for each in benchmark.contestants}
    rows = [row for row in comparable(log.rows) if (row["set"], row["prompt"]) in keys and row["contestant"] in names]
    rows = [row for row in rows if row["temperature"] in benchmark.config.temperatures]
    summary = summarise(rows, benchmark.contestants)
    where = environment(target.device)
    busy = busy_elsewhere(rows)
    load = f", other processes keeping {busy:.1f} of {where['processors']} processors busy" if busy else ""
    facts = {"command": command(), "device": where["device"] + load, "dtype": settings["dtype"]}
    results: dict[str, Any] = {
        "command": command(), "environment": where,
        "settings": {
            **settings, "temperatures": benchmark.config.temperatures,
            "products": benchmark.assistant.setup().products(target).described,
        },
        "ours": [contestant.name for contestant in benchmark.contestants if contestant.ours],
        "summary": summary, "speeds": speed_table(summary, facts),
        "mismatches": mismatches(rows, benchmark.asked, target, load_tokenizer(config.target).decode),
        "runs": rows,
    }  # fmt: skip
    save_text(json.dumps(results) + "\n", config.output / RESULTS)
    save_text(report.markdown(results), config.output / "report.md")
    report.print_report(results, console)
    console.print(f"Written to {config.output}: {RESULTS}, report.md.")
    if lossless := report.lossless(results):
        fastest = overall(results["summary"], benchmark.config.temperatures[0])
        console.print(f"next      {next_step(fastest, benchmark.contestants, benchmark.assistant)}", soft_wrap=True)
    if config.card is not None:
        save_text(json.dumps(results["speeds"], indent=2) + "\n", config.card)
    return lossless


class LiveBenchmark:
    """Times those generations of a benchmark that the log lacks, with a neutral generation config (`neutralise`)."""

    def __init__(self, benchmark: Benchmark, log: RunLog) -> None:
        self.target, self.assistant, self.contestants = benchmark.target, benchmark.assistant, benchmark.contestants
        self.config, self.log = benchmark.config, log
        neutralise(self.target)

    def run(self, questions: Sequence[Question]) -> None:
        """Time all missing generations. The order of contestants rotates from question to question."""
        todo = [
            (question, temperature, missing)
            for temperature in self.config.temperatures
            for number, question in enumerate(questions)
            if (missing := self._missing(question, temperature, number))
        ]
        with without_known_costs():  # as in a new process
            for question in {question.batch: question for question, _, _ in reversed(todo)}.values():
                for contestant in self._able(question):
                    self._generate(question, 0.0, contestant, WARM_UP_TOKENS)
                    contestant.memory.clear()
            background.wait()  # for copies of weights, which would disturb the first answers
            forget_costs()
            runs = [(question, temperature, each) for question, temperature, missing in todo for each in missing]
            with logging.tqdm(runs, desc="benchmark", unit="answer") as bar:
                for question, temperature, contestant in bar:
                    bar.set_postfix_str(contestant.name, refresh=False)
                    self.log.add(self._time(question, temperature, contestant))

    def _able(self, question: Question) -> list[Contestant]:
        """The contestants that can answer a question: trees and transformers' speculation do not support batches."""
        alone = [each for each in self.contestants if each.speculation is None or each.speculation.draws_trees]
        return [each for each in self.contestants if not question.batch or each in BASELINES or each not in alone]

    def _missing(self, question: Question, temperature: float, number: int) -> list[Contestant]:
        """The contestants without an answer, rotated by the question's number; if any, also both baselines."""
        here, able = (*question.key, temperature), self._able(question)
        rows = [row for row in self.log.rows if (row["set"], row["prompt"], row["temperature"]) == here]
        done = {row["contestant"] for row in comparable(rows)}
        first = number % len(able)
        missing = [each for each in able[first:] + able[:first] if each.name not in done]
        # Speeds are compared with baselines of the same session only.
        return [*(each for each in BASELINES if each not in missing), *missing] if missing else []

    def _time(self, question: Question, temperature: float, contestant: Contestant) -> Row:
        """Time up to `attempts` runs, until one is undisturbed. Returns the log's row of the least disturbed one."""
        names = [row["contestant"] for row in self.log.rows if row["session"] == self.log.session]
        rows: list[Row] = []
        while len(rows) < self.config.attempts and not (rows and not rows[-1]["disturbed"]):
            with Disturbance() as load, noted_passes(self.target) as read:
                answers = self._generate(question, temperature, contestant, self.config.max_new_tokens)
            counts, stats = _watched(read, question, answers), self.assistant.stats
            if contestant.ours:
                counts = {
                    "passes": stats.target_passes, "drafting": stats.rounds - stats.idle_rounds,
                    "drafted": stats.drafted, "accepted": stats.accepted,
                }  # fmt: skip
            rows.append({
                "set": question.set, "prompt": question.prompt, "batch": question.batch, "temperature": temperature,
                "contestant": contestant.name, "earlier": names.count(contestant.name), "answers": answers,
                "tokens": sum(map(len, answers)), **counts, "seconds": load.seconds, "disturbed": load.disturbed,
                "waited": round(load.waited, 4), "others": None if load.others is None else round(load.others, 3),
            })  # fmt: skip
        return {**min(rows, key=lambda row: row["waited"]), "attempts": len(rows)}

    def _generate(self, question: Question, temperature: float, contestant: Contestant, max_new_tokens: int) -> Answers:
        seed = seed_of(self.config.seed, *question.key, temperature)
        with contestant.arguments(self.assistant, self.target) as arguments:
            return answer(self.target, question.ids, temperature, seed, {"max_new_tokens": max_new_tokens, **arguments})


def _watched(read: list[int], question: Question, answers: Answers) -> Row:
    """Counts of passes and candidates of a method without statistics, from the tokens that each pass `read`."""
    tokens, passes = sum(map(len, answers)), sum(map(len, answers)) if question.batch else len(read)
    candidates = [read[0] - max(map(len, question.ids)), *(each - 1 for each in read[1:])]
    return {
        "passes": passes, "drafting": sum(each > 0 for each in candidates), "drafted": sum(candidates),
        "accepted": tokens - passes,
    }  # fmt: skip


def answer(
    target: CausalLM, prompts: list[list[int]], temperature: float, seed: int, arguments: dict[str, Any]
) -> Answers:
    """Return the new tokens of `generate()` for each prompt, without padding. `temperature` 0 is greedy."""
    inputs = padded(prompts, target.generation_config.pad_token_id or 0)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0.0:  # without top-k and top-p
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(seed)
    output = target.generate(**{name: each.to(target.device) for name, each in inputs.items()}, **sampling, **arguments)
    eos = eos_ids(target.generation_config)
    return [until_end(row, eos) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]


def neutralise(target: CausalLM) -> None:
    """Remove penalties, top-k etc. from the target's generation config, and keep only its special tokens."""
    own = target.generation_config
    special = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if special["pad_token_id"] is None:  # the choice of generate(), without its message
        eos = special["eos_token_id"]
        special["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
    target.generation_config = GenerationConfig(**special)


# Passes and other load -----------------------------------------------------------------------------------------------


@contextmanager
def noted_passes(target: CausalLM) -> Iterator[list[int]]:
    """Context that yields a list, to which every pass of `target` appends its number of tokens per row."""
    read: list[int] = []
    hook = target.register_forward_pre_hook(
        lambda _module, _args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield read
    finally:
        hook.remove()


class Disturbance:
    """Context that measures other load on the machine.

    Attributes:
        seconds: wall time.
        waited: share of the wall time in which the most delayed thread of this process waited for a processor, plus the
            share that the host took from a virtual machine. On systems without these counts: the share in which a
            single thread did not run, or 0 with several threads.
        others: processors that other processes used on average; `None` if unknown.
    """

    others: float | None = None

    def __enter__(self) -> Self:
        self._begin = _clocks()
        return self

    def __exit__(self, *_: object) -> None:
        (wall0, own0, delays0, machine0), (wall, own, delays, machine) = self._begin, _clocks()
        self.seconds, own = wall - wall0, own - own0
        self.waited = max(1.0 - own / self.seconds, 0.0) if torch.get_num_threads() == 1 else 0.0
        if delays:
            self.waited = max(delay - delays0.get(thread, 0.0) for thread, delay in delays.items()) / self.seconds
        if machine and machine0:
            busy, stolen = (after - before for after, before in zip(machine, machine0, strict=True))
            self.waited += stolen / self.seconds
            self.others = max(busy - own, 0.0) / self.seconds

    @property
    def disturbed(self) -> bool:
        return self.waited > MOST_WAITING


def _clocks() -> tuple[float, float, dict[str, float], tuple[float, float] | None]:
    return time.perf_counter(), time.process_time(), _delays(), _machine()


def _delays() -> dict[str, float]:
    """Seconds that each thread of this process has waited for a processor; empty if the system does not count them."""
    delays = {}
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError, IndexError):  # the thread has just ended
            delays[thread.name] = int((thread / "schedstat").read_text("utf-8").split()[1]) / 1e9
    return delays


def _machine() -> tuple[float, float] | None:
    """Busy seconds of all processors together, and seconds stolen by the host; `None` if the system is not Linux."""
    try:
        fields = Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, softirq, steal, *_ = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
    except (OSError, ValueError):
        return None
    return user + nice + system + irq + softirq, steal


# Losslessness --------------------------------------------------------------------------------------------------------


def mismatches(
    rows: Sequence[Row], questions: Sequence[Question], target: CausalLM, decode: Callable[[int], Any]
) -> list[Row]:
    """Greedy answers that differ from plain generation: set, prompt, contestant, `explain_parting`, token `texts`."""
    prompts = {question.key: question.ids for question in questions}
    greedy = [row for row in rows if row["temperature"] == 0.0]
    plain = {(row["set"], row["prompt"]): row["answers"] for row in greedy if row["contestant"] == PLAIN.name}
    found = []
    for row in greedy:
        where = row["set"], row["prompt"]
        for ids, expected, tokens in zip(prompts[where], plain[where], row["answers"], strict=True):
            if expected != tokens:
                names = {name: row[name] for name in ("set", "prompt", "contestant")}
                parting = explain_parting(target, ids, expected, tokens)
                texts = [None if token is None else decode(token) for token in parting["tokens"]]
                found.append({**names, **parting, "texts": texts})
    return found
