"""Targets whose embeddings are resized while an assistant is attached: the same draft, plain `generate()`'s texts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import dflash_files, gemma4_files
from support.models import told
from support.whole_rounds import Made, dflash, made

from hf_specdecpp import SpecDecPPAssistant

TEXT = torch.arange(1, 9)[None]  # ids that all sizes have
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
KINDS = ("dflash", "gemma 4", "gemma 4 with clusters", "independent", "early_exit", "conditioned", "eagle3")
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 3}
WAYS: dict[str, dict[str, Any]] = {
    "chains": FIXED,
    "successors": {**FIXED, "draft_successors": True},
    "trees": {"rule": "fixed", "tree": "dyspec", "tree_budget": 6, "tree_depth": 3},
}


def made_of(kind: str, folder: Path) -> Made:
    if kind == "dflash":
        return dflash(dflash_files.VARIANTS["plain"])
    if kind == "gemma 4 with clusters":
        target = gemma4_files.target_for()
        return target, SpecDecPPAssistant.from_draft(gemma4_files.VARIANTS["clusters"].theirs(), target=target)
    return made(kind, folder, **FIXED)


@pytest.mark.every(11)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [-3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_texts(kind: str, change: int, way: str, tmp_path: Path) -> None:
    target, assistant = made_of(kind, tmp_path)
    told(assistant, **WAYS[way])
    target.resize_token_embeddings(target.config.get_text_config().vocab_size + change, mean_resizing=False)
    plain = target.generate(TEXT, **GREEDY)
    assert torch.equal(target.generate(TEXT, **GREEDY, assistant_model=assistant), plain)
    assert assistant.stats.drafted > 0
    if way == "chains":
        assert target.generate(TEXT, **{**GREEDY, "do_sample": True}, assistant_model=assistant).shape == plain.shape
