"""`specdecpp train`: runs the stages in order. Each stage resumes its own unfinished work."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import typer
import yaml
from rich.console import Console

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.cli_options import TrainOptions
from hf_specdecpp.files import UNFINISHED
from hf_specdecpp.hub.repository import CARD
from hf_specdecpp.training import calibration, card, evaluation, models, rollouts
from hf_specdecpp.training import head as head_fitting
from hf_specdecpp.training.card import summary
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.trainers import check_trackers, process_state

STAGES = {
    "rollouts": rollouts.run,
    "distill": distillation.run,
    "head": head_fitting.run,
    "calibrate": calibration.run,
    "eval": evaluation.run,
    "card": card.run,
}

# Short stages that write one result: only the main process runs them.
ON_MAIN_PROCESS = ("calibrate", "eval", "card")


def train(config: TrainingConfig, stages: Sequence[str] | None = None) -> None:
    """Run all stages, or those in `stages`, in the order of `STAGES`. `ValueError` if a setting, model, tracker or
    stage is invalid, or the results of an earlier stage are missing."""
    config.find_ready_made()
    config.validate()
    unknown = sorted(set(stages or ()) - set(STAGES))
    if unknown:
        raise ValueError(f"Unknown stage {unknown[0]!r}. The stages are {', '.join(STAGES)}.")
    check_trackers(config.report_to)
    models.check(config)
    state = process_state()
    if state.is_main_process:
        for unfinished in config.work.glob(f"*/**/{UNFINISHED}"):  # left by a run that was killed while writing
            unfinished.unlink()
    state.wait_for_everyone()
    console = Console(stderr=True, highlight=False, quiet=not state.is_main_process)
    for name, run in STAGES.items():
        if stages is not None and name not in stages:
            continue
        console.print(f"[bold]{name}[/]")
        begin = time.perf_counter()
        if state.is_main_process or name not in ON_MAIN_PROCESS:
            run(config)
        state.wait_for_everyone()
        console.print(f"[dim]{name}: {time.perf_counter() - begin:.0f} s[/]")


# The command ----------------------------------------------------------------------------------------------------------

INTERRUPTED = 130  # exit code of a command that Ctrl-C ended


def run(options: TrainOptions) -> None:
    """Merge the options into the settings of `--config`, train, print a summary, and upload with `--push_to_hub`."""
    settings = read_settings(options.config) if options.config is not None else {}
    rollouts = settings.setdefault("rollouts", {})
    given = {name: value for name, value in vars(options).items() if value not in (None, [])}
    settings.update({name: given[name] for name in ("target", "output", "draft", "layers") if name in given})
    rollouts.update({name: given[name] for name in ("data", "server") if name in given})
    if options.head_only:
        settings["head"] = {"inputs": "path", **settings.get("head", {})}
        settings["distill"] = {**settings.get("distill", {}), "enabled": False}
    config = TrainingConfig.from_dict(settings)
    # Hide messages that users cannot act on: bars of short data sets, deprecations in libraries, Trainer on mtime.
    datasets.disable_progress_bars()
    for library in ("transformers", "peft", "accelerate", "torch", "datasets"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{library}\.")
    logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        train(config, options.stage or None)
    except KeyboardInterrupt:
        console.print(f"\nInterrupted. Finished work is kept in {config.work}: run the same command to continue.")
        raise typer.Exit(INTERRUPTED) from None
    if process_state().is_main_process:
        more = "next        the same command with the other stages, or without --stage"
        console.print(f"\n{summary(config)}" if not options.stage or "card" in options.stage else more)
    if options.push_to_hub is not None:
        assistant = SpecDecPPAssistant.from_pretrained(config.output, draft=config.named_draft)
        card = Path(config.output, CARD).read_text(encoding="utf-8")
        uploaded = assistant.push_to_hub(options.push_to_hub, card=card)
        console.print(f"uploaded    {uploaded.commit_url}")


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings in a YAML file. `ValueError` if the file is not YAML, or not a mapping."""
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds {type(settings).__name__}, not settings such as `target: org/model`.")
    return settings
