"""The exact distribution of whole generations with multi-token layers of real classes: one layer, two, a hybrid target.

Everything is product code, from the files that the layers are read from to the caches that are rolled back; only the
random numbers are replaced by a `Replay`. Mutants: a q of another temperature, one that is told as that of the next
candidate, and a candidate that is dropped because of its own value.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.models import told
from support.mtp_files import Files
from support.stock_rounds import VOCAB
from support.whole_generations import (
    NEW_TOKENS,
    Enumerate,
    assert_caught,
    assert_exactly_p,
    change_chains,
    hotter,
    tell_another_q,
)

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.tree import DraftTree

CHAINS: dict[str, dict[str, Any]] = {
    "block": {"rule": "fixed", "num_tokens": 2},
    "token": {"rule": "fixed", "num_tokens": 2, "verification": "token"},
    "threshold": {"rule": "threshold", "threshold": 0.6, "max_tokens": 2},
    "throughput": {"rule": "throughput", "max_tokens": 2, "costs": {"draft": 0.05, "verify": [1.0]}},
}
TREES: dict[str, dict[str, Any]] = {
    "dyspec, block": {"tree": "dyspec", "tree_budget": 3, "tree_depth": 2},
    "dyspec, token": {
        "tree": "dyspec",
        "tree_budget": 3,
        "tree_depth": 2,
        "verification": "token",
    },
    "static, block": {"tree": [2, 1]},
}
TARGETS = {"one layer": ("glm4_moe", 1), "two layers": ("glm4_moe", 2), "hybrid": ("qwen3_5_text", 1)}


@cache
def loaded(name: str) -> tuple[CausalLM, Any]:
    """A target, and its assistant's config and layers."""
    with TemporaryDirectory() as folder:
        target = Files(*TARGETS[name], seed=3, overrides={"vocab_size": VOCAB}).load(Path(folder))
        return target, assist(target, "mtp", default=False)


def pair(name: str, **speculation: Any) -> tuple[CausalLM, SpecDecPPAssistant]:
    target, assistant = loaded(name)
    told(assistant, **speculation)
    return target, assistant


@pytest.mark.every(3)
@pytest.mark.parametrize("shape", CHAINS)
@pytest.mark.parametrize("name", TARGETS)
def test_chains_emit_exactly_p(name: str, shape: str, enumerate_torch: Enumerate) -> None:
    assert_exactly_p(*pair(name, **CHAINS[shape]), enumerate_torch)


@pytest.mark.every(2)
@pytest.mark.parametrize("shape", TREES)
def test_trees_emit_exactly_p(shape: str, enumerate_torch: Enumerate) -> None:
    assert_exactly_p(*pair("one layer", **TREES[shape]), enumerate_torch)


@pytest.mark.slow
def test_two_layers_go_on_by_themselves(enumerate_torch: Enumerate) -> None:
    """A third candidate, which the second layer drafts of what it has just returned."""
    assert_exactly_p(*pair("two layers", rule="fixed", num_tokens=3), enumerate_torch, NEW_TOKENS + 1)


# Mutants. -------------------------------------------------------------------------------------------------------------


def warmer(chain: Any) -> Any:
    chain.distributions = {node: hotter(row).softmax(-1) for node, row in chain.scores.items()}
    return chain


def of_the_next(chain: Any) -> Any:
    rows = chain.drawn_from
    chain.distributions = {place: row.softmax(-1) for place, row in enumerate([*rows[1:], *rows[:1]])}
    return chain


def unlikely(chain: Any) -> Any:
    """Dropped because of its own value: the less likely one of the two that may come."""
    if len(chain) > 1 and float(chain.q(len(chain) - 1)[chain.tokens[-1]]) < 0.5:
        return DraftTree.chain(chain.candidates[:-1], chain.drawn_from[:-1])
    return chain


@pytest.mark.every(4)
@pytest.mark.parametrize("mutate", [warmer, of_the_next, unlikely])
@pytest.mark.parametrize("name", TARGETS)
def test_mutants_are_caught(
    name: str, mutate: Any, enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_chains(monkeypatch, mutate)
    assert_caught(*pair(name, **CHAINS["token"]), enumerate_torch)


def test_a_mutant_of_trees_is_caught(enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_another_q(monkeypatch, hotter)
    assert_caught(*pair("one layer", **TREES["dyspec, block"]), enumerate_torch)
