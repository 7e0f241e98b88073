"""An early exit shares its target's tensors: it costs the memory of its adapter and heads, and changes none of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import tiny
from support.snapshots import FIXED, generate, snapshot
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.early_exit import early_exit


def bytes_of(tensors: Any, without: set[int] = frozenset()) -> int:  # type: ignore[assignment]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for pointer, size in storages.items() if pointer not in without)


def all_tensors(model: Any) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def lora_folder(target: CausalLM, folder: Path) -> Path:
    """An adapter for the first two layers of the target."""
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    draft = copy.deepcopy(early_exit(target, 2))
    get_peft_model(draft, config, autocast_adapter_dtype=False).save_pretrained(str(folder))
    return folder


def test_an_early_exit_shares_the_targets_tensors(tmp_path: Path) -> None:
    target = tiny("llama").train()
    target.get_input_embeddings().requires_grad_(False)
    before = snapshot(target)
    shared = {t.untyped_storage().data_ptr() for t in all_tensors(target)}
    vocab = list(range(0, 48, 3))
    for adapter, draft_vocab in ((None, None), (lora_folder(target, tmp_path), None), (None, vocab)):
        assistant = SpecDecPPAssistant.from_early_exit(
            target, 2, adapter, draft_vocab=draft_vocab, speculation=FIXED, merge=False
        )
        drafter = assistant.drafter
        assert drafter is not None
        own = bytes_of([*all_tensors(drafter.model), *all_tensors(drafter)], without=shared)
        if adapter is not None:  # A and B of rank 2 at 32 x 32 in two layers
            assert own == 2 * 2 * (2 * 32) * 8
        elif draft_vocab is not None:  # the head's rows, and their ids
            assert own == len(vocab) * 32 * 8 + len(vocab) * 8
        else:
            assert own == 0
        assert snapshot(target) == {**before, "class": type(target)}
        assistant.detach()
    assert snapshot(target) == before


def test_moving_an_early_exit_assistant_leaves_the_target(tmp_path: Path) -> None:
    target = tiny("llama")
    before = snapshot(target)
    folder = lora_folder(target, tmp_path)
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, folder, speculation=FIXED, merge=False)
    assistant.half()
    assistant.train()
    assistant.requires_grad_(False)
    assert {**snapshot(target), "class": None} == {**before, "class": None}
    assert torch.equal(generate(target, assistant_model=assistant), generate(target))
    assistant.detach()


def test_merging_an_adapter_copies_only_what_it_changes(tmp_path: Path) -> None:
    target = tiny("llama")
    before = snapshot(target)
    shared = {t.untyped_storage().data_ptr() for t in all_tensors(target)}
    folder = lora_folder(target, tmp_path)
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, folder, speculation=FIXED, merge=True)
    assert assistant.drafter is not None
    assert bytes_of(all_tensors(assistant.drafter.model), without=shared) == 2 * 32 * 32 * 8  # q_proj of two layers
    assert torch.equal(generate(target, assistant_model=assistant), generate(target))
    assistant.detach()
    assert snapshot(target) == before


def test_an_adapter_that_does_not_fit_leaves_the_target(tmp_path: Path) -> None:
    target = tiny("llama")
    before = snapshot(target)
    folder = lora_folder(target, tmp_path)  # for two layers
    with pytest.raises(
        ValueError, match="adapter in .* does not fit LlamaForCausalLM: 1 modules or tensors have no counterpart"
    ):
        SpecDecPPAssistant.from_early_exit(target, 1, folder, speculation=FIXED)
    assert snapshot(target) == before
