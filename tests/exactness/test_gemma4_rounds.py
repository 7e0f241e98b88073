"""The exact distribution of whole generations with a Gemma 4 assistant on its target: chains and trees.

Everything is product code and transformers' own classes, from the hooks that catch the target's states and the cache
that the assistant reads to what is rolled back; only the random numbers are replaced by a `Replay`. Mutants: a q of
another temperature, one that also counts tokens outside the likeliest clusters, and candidates that are dropped because
of what they are.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.gemma4_files import FULL, SLIDING, Variant, target_for
from support.models import told
from support.stock_rounds import VOCAB
from support.whole_generations import (
    Enumerate,
    as_if_of_all,
    assert_caught,
    assert_exactly_p,
    change_chains,
    hotter,
    tell_another_q,
)

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.tree import DraftTree

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
}
# With clusters two of the four tokens are drafted.
VARIANTS = {"all": Variant((SLIDING, FULL)), "clusters": Variant((FULL,), clusters=True)}
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "layer_types": [SLIDING, FULL],
    "sliding_window": 4,
}


def pair(variant: str, **speculation: Any) -> tuple[CausalLM, SpecDecPPAssistant]:
    target = target_for(seed=7, **SMALL)
    draft = VARIANTS[variant].theirs(vocab_size=VOCAB, sliding_window=4)
    assistant = told(SpecDecPPAssistant.from_draft(draft, target=target), **speculation)
    return target, assistant


@pytest.mark.every(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_generate_emits_exactly_p(variant: str, shape: str, enumerate_torch: Enumerate) -> None:
    assert_exactly_p(*pair(variant, **SHAPES[shape]), enumerate_torch)


# Mutants. -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutate", [hotter, as_if_of_all])
@pytest.mark.parametrize("shape", ["chain, block", "dyspec, block"])
def test_mutants_are_caught(
    shape: str, mutate: Any, enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They draw from q, and tell another one."""
    tell_another_q(monkeypatch, mutate)
    assert_caught(*pair("clusters", **SHAPES[shape]), enumerate_torch)


def test_candidates_that_are_dropped_for_what_they_are(
    enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(chain: DraftTree) -> DraftTree:
        if len(chain) and chain.tokens[-1] != int(chain.drawn_from[-1].argmax()):
            return DraftTree.chain(chain.candidates[:-1], chain.drawn_from[:-1])
        return chain

    change_chains(monkeypatch, wrong)
    assert_caught(*pair("all", **SHAPES["chain, token"]), enumerate_torch)
