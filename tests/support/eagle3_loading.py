"""Load small EAGLE-3 checkpoints, change them, and see them refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.drafting.session import DraftSession
from hf_specdecpp.models.target_states import TargetStates
from support.eagle3_files import VARIANTS
from support.hub_server import HubServer
from support.models import tiny
from support.repos import PROMPT, files_of

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


def in_shards(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(sorted(tensors))}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return folder


def publish(hub: HubServer, folder: Path) -> str:
    """The commit of the repository `org/eagle` with these files."""
    commit: str = hub.commit("org/eagle", files_of(folder))
    return commit


@torch.no_grad()
def drafted(assistant: SpecDecPPAssistant, target: Any) -> Tensor:
    """Logits of its draft after a text, and after two candidates."""
    drafter = assistant.ready_drafter()
    with TargetStates(target, drafter.fusion) as caught:
        target(PROMPT)
        states = caught.take()
    assert states is not None
    session = DraftSession(drafter, 48)
    session.begin_round(PROMPT[:, 1:], 0, states[:, :-1])
    found = [session.step([torch.tensor(each) for each in [3, 17][:step]])[0].clone() for step in range(3)]
    return torch.stack(found)
