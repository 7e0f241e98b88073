"""Token trees on real models in float32: SmolLM2-135M (`make demo` leaves it in `.models/smollm2`) and Gemma 3 270M.

Gemma is in `.models/gemma3` (`examples/prepare_gemma3.py` makes it) or where `SPECDECPP_GEMMA3` says."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import told
from support.tree_generation import assert_trees_mattered
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant

MODELS = Path(__file__).parents[2] / ".models"
FOLDERS = {"smollm2": MODELS / "smollm2", "gemma3": Path(os.environ.get("SPECDECPP_GEMMA3", MODELS / "gemma3"))}
TREES: dict[str, dict[str, Any]] = {
    "dyspec": {"tree": "dyspec", "tree_budget": 10, "tree_depth": 3},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 5, "tree_depth": 3},
    "static": {"tree": [2, 2]},
}
PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
# Untrained early exits guess a few tokens right if they have most of the layers, the last one among them.
LAYERS: dict[str, Any] = {"smollm2": 24, "gemma3": [*range(14), 17]}
NEW_TOKENS = 104
pytestmark = pytest.mark.slow


@lru_cache
def target_of(name: str) -> Any:
    if not (FOLDERS[name] / "config.json").exists():
        pytest.skip(f"{FOLDERS[name]} is missing: see the head of this file")
    return AutoModelForCausalLM.from_pretrained(FOLDERS[name], dtype=torch.float32)


@lru_cache
def plain_text(name: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt, `length` tokens or its own, and the greedy text."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[name])
    text = PROMPT if length == 0 else f"# Chapter 1\n\n{Path(__file__).read_text(encoding='utf-8')}" * 2
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : length or None]
    return ids, generate(name, ids)


def generate(name: str, ids: torch.Tensor, assistant: Any = None) -> torch.Tensor:
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "no_repeat_ngram_size": 8}
    return target_of(name).generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, eos_token_id=None, **arguments
    )


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize(("name", "length"), [("smollm2", 0), ("gemma3", 0), ("gemma3", 450)])
def test_greedy_text_is_the_same(name: str, length: int, kind: str) -> None:
    """Also across Gemma's window of 512 tokens, which a prompt of 450 leaves after the 62nd token."""
    target = target_of(name)
    ids, plain = plain_text(name, length)
    assert plain.shape[1] - ids.shape[1] == NEW_TOKENS
    if length:
        assert ids.shape[1] < target.config.sliding_window < plain.shape[1]
    assistant = told(SpecDecPPAssistant.from_early_exit(target, LAYERS[name]), **TREES[kind])
    try:
        assert torch.equal(generate(name, ids, assistant), plain)
    finally:
        assistant.detach()
    assert_trees_mattered(assistant.stats)
