"""Load small EAGLE-3 checkpoints, see them refused, and what they draft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.drafting.drafter import DraftSession
from support.files.eagle3_files import VARIANTS
from support.files.repos import PROMPT, files_of
from support.runs.hub_server import HubServer
from support.targets.formulas import states_of
from support.targets.models import tiny

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


def publish(hub: HubServer, folder: Path) -> str:
    """The commit of the repository `org/eagle` with these files."""
    commit: str = hub.commit("org/eagle", files_of(folder))
    return commit


@torch.no_grad()
def drafted(assistant: SpecDecPPAssistant, target: Any) -> Tensor:
    """Logits of its draft after a text, and after two candidates."""
    drafter = assistant.ready_drafter()
    session = DraftSession(drafter, 48)
    session.read_verified(PROMPT[:, 1:], 0, states_of(target, drafter, PROMPT)[:, :-1])
    found = [session.propose_next([torch.tensor(each) for each in [3, 17][:step]])[0].clone() for step in range(3)]
    return torch.stack(found)
