"""Load small EAGLE-3 checkpoints, change them, and see them refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hf_specdecpp import SpecDecPPAssistant
from support.eagle3_files import VARIANTS
from support.models import tiny

PLAIN = VARIANTS["plain"]
DIALECTS = pytest.mark.parametrize("dialect", ["original", "speculators"])


def load(folder: Path, target: Any = None, **options: Any) -> Any:
    """The model of a draft that has met its target."""
    target = tiny("llama") if target is None else target
    return SpecDecPPAssistant.from_pretrained(folder, target=target, **options).ready_drafter().model


def settings_of(folder: Path, **options: Any) -> Any:
    """Those of a draft that has met no target."""
    return SpecDecPPAssistant.from_pretrained(folder, **options).parts.module.settings


def refused(folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        load(folder, **options)


def edited(folder: Path, **changed: Any) -> Path:
    """Its tensors with these in the place of what was there; `None` leaves one out. `d2t` stands for itself."""
    path = folder / "model.safetensors"
    tensors: dict[str, Any] = {**load_file(path), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(load_file(folder / "model.safetensors"))
