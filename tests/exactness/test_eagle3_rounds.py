"""The exact distribution of whole generations with an EAGLE-3 draft: chains and trees, of all tokens or of some.

Everything is product code, from the hooks that catch the target's states to the caches that are rolled back; only the
random numbers are replaced by a `Replay`. Mutants: a q that is told as if the draft could have proposed all tokens, and
one of another temperature.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import random_layer, tiny, told
from support.stock_rounds import VOCAB
from support.whole_generations import Enumerate, as_if_of_all, assert_caught, assert_exactly_p, hotter, tell_another_q

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import CausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "chain, block": {"rule": "fixed", "num_tokens": 2},
    "chain, token": {"rule": "fixed", "num_tokens": 2, "verification": "token"},
    "chain, threshold": {"rule": "threshold", "threshold": 0.6, "max_tokens": 2},
    "dyspec, block": {"tree": "dyspec", "tree_budget": 3, "tree_depth": 2},
    "dyspec, token": {
        "tree": "dyspec",
        "tree_budget": 3,
        "tree_depth": 2,
        "verification": "token",
    },
    "static, block": {"tree": [2, 1]},
    "static, token": {"tree": [2, 1], "verification": "token"},
}
VOCABS = {"all": None, "some": [1, 3]}


def pair(vocab: str, **speculation: Any) -> tuple[CausalLM, SpecDecPPAssistant]:
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=2)
    ids = VOCABS[vocab]
    layer = random_layer(target, vocab=None if ids is None else torch.tensor(ids))
    return target, told(SpecDecPPAssistant.from_eagle3(target, layer), **speculation)


@pytest.mark.every(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_generate_emits_exactly_p(shape: str, vocab: str, enumerate_torch: Enumerate) -> None:
    assert_exactly_p(*pair(vocab, **SHAPES[shape]), enumerate_torch)


# Mutants. -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutate", [as_if_of_all, hotter])
@pytest.mark.parametrize("shape", ["chain, block", "dyspec, block"])
def test_mutants_are_caught(
    shape: str, mutate: Any, enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They draw from q, and tell another one."""
    tell_another_q(monkeypatch, mutate)
    assert_caught(*pair("some", **SHAPES[shape]), enumerate_torch)
