"""What `specdecpp train` does with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.cli_options import parse_layers
from hf_specdecpp.hub.repository import CARD
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.run import train


def run(
    file: Path | None,
    target: str | None,
    data: list[str] | None,
    output: str | None,
    draft: str | None,
    layers: str | None,
    server: str | None,
    stages: list[str] | None,
    push_to_hub: str | None,
) -> None:
    """Merge the options into the settings of `file`, train, and upload if asked to."""
    settings = read_settings(file) if file is not None else {}
    rollouts = settings.setdefault("rollouts", {})
    own = {"target": target, "output": output, "draft": draft, "layers": parse_layers(layers) if layers else None}
    settings.update({name: value for name, value in own.items() if value is not None})
    rollouts.update({name: value for name, value in {"data": data, "server": server}.items() if value})
    config = TrainingConfig.from_dict(settings)
    train(config, stages)
    if push_to_hub is not None:
        assistant = SpecDecPPAssistant.from_pretrained(config.output, draft=config.draft)
        assistant.push_to_hub(push_to_hub, card=Path(config.output, CARD).read_text(encoding="utf-8"))


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
