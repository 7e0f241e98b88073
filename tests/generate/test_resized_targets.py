"""Targets whose embeddings are resized while an assistant is attached: the same draft, plain `generate()`'s texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import dflash_files, gemma4_files
from support.models import assistant_of, tiny, told

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import CausalLM

TEXT = torch.arange(1, 9)[None]  # ids that all sizes have
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}


def dflash(folder: Path) -> tuple[CausalLM, SpecDecPPAssistant]:
    target = dflash_files.target_for("llama")
    repository = dflash_files.VARIANTS["plain"].save(folder)
    return target, SpecDecPPAssistant.from_pretrained(repository, target=target)


def gemma4(name: str) -> Callable[[Path], tuple[CausalLM, SpecDecPPAssistant]]:
    def make(_: Path) -> tuple[CausalLM, SpecDecPPAssistant]:
        target = gemma4_files.target_for()
        return target, SpecDecPPAssistant.from_draft(gemma4_files.VARIANTS[name].theirs(), target=target)

    return make


def own(kind: str) -> Callable[[Path], tuple[CausalLM, SpecDecPPAssistant]]:
    def make(_: Path) -> tuple[CausalLM, SpecDecPPAssistant]:
        target = tiny("llama")
        return target, assistant_of(kind, target)

    return make


MAKERS = {
    "dflash": dflash,
    "gemma4": gemma4("plain"),
    "gemma4 with clusters": gemma4("clusters"),
    **{kind: own(kind) for kind in ("independent", "early_exit", "conditioned", "eagle3")},
}
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 3}
WAYS: dict[str, dict[str, Any]] = {
    "chains": FIXED,
    "successors": {**FIXED, "draft_successors": True},
    "trees": {"rule": "fixed", "tree": "dyspec", "tree_budget": 6, "tree_depth": 3},
}


@pytest.mark.every(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [-3, 5])
@pytest.mark.parametrize("kind", MAKERS)
def test_texts(kind: str, change: int, way: str, tmp_path: Path) -> None:
    target, assistant = MAKERS[kind](tmp_path)
    told(assistant, **WAYS[way])
    target.resize_token_embeddings(target.config.get_text_config().vocab_size + change, mean_resizing=False)
    plain = target.generate(TEXT, **GREEDY)
    assert torch.equal(target.generate(TEXT, **GREEDY, assistant_model=assistant), plain)
    assert assistant.stats.drafted > 0
    if way == "chains":
        sampled = {**GREEDY, "do_sample": True}
        assert target.generate(TEXT, **sampled, assistant_model=assistant).shape == plain.shape
