"""Generations with DFlash blocks: the target's own text, and in each round what a draft that reads all anew drafts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.dflash_files import VARIANTS, VOCAB, assisted, target_for
from support.models import prompt
from support.rounds_anew import check_rounds
from transformers import AutoConfig, AutoModelForCausalLM

from hf_specdecpp.models.causal_lm import CausalLM

TEXT = 1 + prompt(9) % (VOCAB - 1)


OWN_ROWS: dict[str, Any] = {"draft_successors": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 9},
    "dyspec": {"tree": "dyspec", "tree_budget": 8},
}


HYBRID: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 0, "vocab_size": VOCAB, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.2, "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip


def hybrid_target() -> CausalLM:
    """With recurrent layers, whose states are taken back where a candidate is rejected."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **HYBRID)).double().eval()


PAIRS: dict[str, tuple[Callable[[], CausalLM], str]] = {
    **{name: (target_for, name) for name in ("windows alone", "the last layer read", "samples the anchor", "scaled")},
    # Windows, scaled embeddings and logits of the target's own, and learned positions.
    "gemma2": (lambda: target_for("gemma2", layer_types=["sliding_attention", "full_attention"] * 2), "windows"),
    "granite": (lambda: target_for("granite"), "windows"),
    "gpt2": (lambda: target_for("gpt2", n_layer=4), "windows"),
    "hybrid": (hybrid_target, "windows"),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", PAIRS)
def test_variants_and_other_targets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, variant = PAIRS[name]
    target = make()
    check_rounds(target, assisted(target, VARIANTS[variant], **SETTINGS["fixed"], **OWN_ROWS), TEXT, monkeypatch)


@pytest.mark.parametrize("is_attached", [False, True])
def test_transformers_own_is_left_alone(is_attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, target = VARIANTS["plain"].theirs(), target_for()
    assistant = assisted(target, VARIANTS["windows"]) if is_attached else None
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    output = target.generate(TEXT, assistant_model=theirs, speculation_type="dflash", **how)
    assert torch.equal(output, target.generate(TEXT, **how))
    assert assistant is None or assistant.stats.rounds == 0
