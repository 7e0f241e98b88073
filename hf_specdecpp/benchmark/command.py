"""What `specdecpp bench` does with its options."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hf_specdecpp.benchmark import report
from hf_specdecpp.benchmark.live import LiveBenchmark, mismatches
from hf_specdecpp.benchmark.loading import RESULTS, Benchmark, RunLog, environment
from hf_specdecpp.benchmark.summary import busy_elsewhere, comparable, next_step, overall, speed_table, summarise
from hf_specdecpp.cli_options import BenchmarkConfig
from hf_specdecpp.files import save_text
from hf_specdecpp.models.loading import load_tokenizer, show_bars
from hf_specdecpp.provenance import command


def run(config: BenchmarkConfig, console: Console) -> bool:
    """Benchmark, write and print the report; whether all greedy texts of ours were those of plain generation."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    benchmark = Benchmark.load(config)
    settings = benchmark.settings
    if config.assistant is None and config.layers is None and not config.lookup and not config.mtp:
        drafts = benchmark.assistant.ready_drafter().places
        chosen = f"the draft is {settings['draft_name']}" if drafts else "nothing drafts: the text itself is searched"
        console.print(f"Without --assistant or --layers {chosen}.", soft_wrap=True)
    log = RunLog(config.output, settings)
    show_bars()  # ours, after those of loading
    LiveBenchmark(benchmark, log).run(benchmark.asked)
    results = _results(benchmark, log)
    write(results, config.output)
    report.print_report(results, console)
    pictures = "pictures" if results["pictures"] else "no pictures, which need matplotlib"
    console.print(f"Written to {config.output}: {RESULTS}, report.md, {pictures}.")
    if lossless := report.lossless(results):
        fastest = overall(results["summary"], benchmark.config.temperatures[0])
        console.print(f"next      {next_step(fastest, benchmark.contestants, benchmark.assistant)}", soft_wrap=True)
    if config.card is not None:
        save_text(json.dumps(results["speeds"], indent=2) + "\n", config.card)
    return lossless


def write(results: dict[str, Any], folder: Path) -> None:
    """The results as JSON, Markdown and, where matplotlib is installed, pictures."""
    save_text(json.dumps(results) + "\n", folder / RESULTS)
    save_text(report.markdown(results), folder / "report.md")
    for temperature in results["settings"]["temperatures"] if results["pictures"] else ():
        if rows := overall(results["summary"], temperature):
            report.plot_speeds(rows, folder / f"speed-up-{temperature:g}.png", report.mode(temperature))


def _results(benchmark: Benchmark, log: RunLog) -> dict[str, Any]:
    """What was measured of what was asked now, summed up."""
    config, settings, target = benchmark.config, benchmark.settings, benchmark.target
    wanted = {
        (*question.key, temperature, contestant.name)
        for question in benchmark.asked
        for temperature in config.temperatures
        for contestant in benchmark.contestants
    }
    named = ("set", "prompt", "temperature", "contestant")
    rows = [row for row in comparable(log.rows) if tuple(row[name] for name in named) in wanted]
    summary = summarise(rows, benchmark.contestants)
    where = environment(target.device)
    busy = busy_elsewhere(rows)
    load = f", other processes keeping {busy:.1f} of {where['processors']} processors busy" if busy else ""
    facts = {"command": command(), "device": where["device"] + load, "dtype": settings["dtype"]}
    return {
        "command": command(), "environment": where, "pictures": find_spec("matplotlib") is not None,
        "settings": {
            **settings, "temperatures": config.temperatures,
            "products": benchmark.assistant.setup().described_products(target),
        },
        "ours": [contestant.name for contestant in benchmark.contestants if contestant.ours],
        "summary": summary, "speeds": speed_table(summary, facts),
        "mismatches": mismatches(rows, benchmark.asked, target, load_tokenizer(config.target).decode),
        "runs": rows,
    }  # fmt: skip
