"""Compilation without its time: dynamo traces, and what it has traced is run as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.drafting import compiled
from hf_specdecpp.models.causal_lm import CausalLM
from support.models import prompt


def graphs() -> int:
    """How many graphs have been compiled in this test."""
    found: int = counters["stats"]["unique_graphs"]
    return found


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest would format all of it


def generate(target: CausalLM, assistant: SpecDecPPAssistant | None, length: int, **options: Any) -> Tensor:
    """A text to a prompt of so many tokens, under one seed."""
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **options}
    torch.manual_seed(0)
    text: Tensor = target.generate(prompt(length), assistant_model=assistant, **settings)
    return text


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> CompileConfig:
    """How targets are compiled."""
    _forget(monkeypatch)
    config = CompileConfig(backend="eager", dynamic=False)  # each width for itself
    config._compile_all_devices = True  # type: ignore[assignment]  # transformers annotates a class attribute
    return config


@pytest.fixture
def untraced() -> Iterator[None]:
    """What would be compiled runs as it is, and is not traced either: for tests that look at something else."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def traced_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's steps are compiled so."""
    _forget(monkeypatch)
    monkeypatch.setattr(
        compiled, "torch", SimpleNamespace(**{**vars(torch), "compile": partial(torch.compile, backend="eager")})
    )
