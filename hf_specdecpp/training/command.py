"""What `specdecpp train` does with its options."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import datasets
import typer
import yaml
from rich.console import Console

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.cli_options import TrainOptions
from hf_specdecpp.hub.repository import CARD
from hf_specdecpp.training.card import summary
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.run import train
from hf_specdecpp.training.trainers import process_state

INTERRUPTED = 130  # exit code of a command that Ctrl-C ended


def run(options: TrainOptions) -> None:
    """Merge the options into the settings of their file, train, say what was made, and upload it if asked to.

    Raises:
        typer.Exit: code 130 after Ctrl-C.
    """
    settings = read_settings(options.config) if options.config is not None else {}
    rollouts = settings.setdefault("rollouts", {})
    given = {name: value for name, value in vars(options).items() if value not in (None, [])}
    settings.update({name: given[name] for name in ("target", "output", "draft", "layers") if name in given})
    rollouts.update({name: given[name] for name in ("data", "server") if name in given})
    config = TrainingConfig.from_dict(settings)
    _hide_what_users_cannot_mend()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        train(config, options.stage or None)
    except KeyboardInterrupt:
        console.print(f"\nInterrupted. What is finished is kept in {config.work}: run the same command to go on.")
        raise typer.Exit(INTERRUPTED) from None
    if process_state().is_main_process:
        more = "next        the same command with the other stages, or without --stage"
        console.print(f"\n{summary(config)}" if not options.stage or "card" in options.stage else more)
    if options.push_to_hub is not None:
        assistant = SpecDecPPAssistant.from_pretrained(config.output, draft=config.named_draft)
        card = Path(config.output, CARD).read_text(encoding="utf-8")
        uploaded = assistant.push_to_hub(options.push_to_hub, card=card)
        console.print(f"uploaded    {uploaded.commit_url}")


def _hide_what_users_cannot_mend() -> None:
    """Bars of data sets that are read in a moment, deprecations within libraries, and Trainer's doubts about mtime."""
    datasets.disable_progress_bars()
    for library in ("transformers", "peft", "accelerate", "torch", "datasets"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{library}\.")
    logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)


def read_settings(file: Path) -> dict[str, Any]:
    """The settings of a YAML file.

    Raises:
        ValueError: it is not YAML, or not a mapping.
    """
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds {type(settings).__name__}, not settings such as `target: org/model`.")
    return settings
