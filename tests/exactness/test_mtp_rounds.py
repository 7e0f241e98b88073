"""The exact distribution of whole generations with multi-token layers of real classes: one layer, two, a hybrid target.

Everything is product code, from the files that the layers are read from to the caches that are rolled back; only the
random numbers are replaced by a `Replay`. Mutants: a q of another temperature, one that is told as that of the next
candidate, and a candidate that is dropped because of its own value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.exact_distribution import Probs, Replay, Tokens, exact_distribution, worst_error
from support.mtp_files import Files
from support.stock_rounds import PROMPT, VOCAB, target_distribution

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.models.causal_lm import CausalLM

TOLERANCE, VISIBLE = 1e-6, 1e-3  # logits become float32 before anything else
CHAINS: dict[str, dict[str, Any]] = {
    "block": {"rule": "fixed", "num_tokens": 2},
    "token": {"rule": "fixed", "num_tokens": 2, "verification": "token"},
    "threshold": {"rule": "threshold", "threshold": 0.6, "max_tokens": 2},
    "throughput": {"rule": "throughput", "max_tokens": 2, "costs": {"draft": 0.05, "verify": [1.0]}},
}
TREES: dict[str, dict[str, Any]] = {
    "dyspec, block": {"tree": "dyspec", "tree_budget": 3, "tree_depth": 2},
    "dyspec, token": {"tree": "dyspec", "tree_budget": 3, "tree_depth": 2, "verification": "token"},
    "static, block": {"tree": "static", "tree_shape": [2, 1]},
}
TARGETS = {"one layer": ("glm4_moe", 1), "two layers": ("glm4_moe", 2), "hybrid": ("qwen3_5_text", 1)}
NEW_TOKENS = 4  # the prompt's own, a round of up to two candidates, and more rounds where they are rejected


@cache
def loaded(name: str) -> tuple[CausalLM, Any]:
    """A target, and its assistant's config and layers."""
    with TemporaryDirectory() as folder:
        target = Files(*TARGETS[name], seed=3, overrides={"vocab_size": VOCAB}).load(Path(folder))
        return target, SpecDecPPAssistant.from_mtp(target)


def pair(name: str, **speculation: Any) -> tuple[CausalLM, SpecDecPPAssistant]:
    target, assistant = loaded(name)
    assistant.speculation = SpeculationConfig(**speculation)
    return target, assistant


def generations(
    target: CausalLM, assistant: SpecDecPPAssistant, use: Callable[[Replay], None], count: int = NEW_TOKENS
) -> tuple[Probs, int]:
    """What `generate()` emits, and how many ways there are to it."""
    paths = 0

    def program(replay: Replay) -> Tokens:
        nonlocal paths
        paths += 1
        use(replay)
        assistant.memory.clear()  # every path begins alike
        options: Any = {"temperature": 0.8, "top_k": 2, "do_sample": True, "max_new_tokens": count}
        output = target.generate(PROMPT, assistant_model=assistant, **options)
        return tuple(output[0, PROMPT.shape[1] :].tolist())

    return exact_distribution(program), paths


def check(target: CausalLM, distribution: Probs, paths: int, count: int = NEW_TOKENS) -> None:
    p = target_distribution(target, 0.8, 2)
    assert worst_error(distribution, p, VOCAB) < TOLERANCE
    for tokens, weight in distribution.items():
        joint = torch.stack([p(tokens[:place])[token] for place, token in enumerate(tokens)]).prod()
        assert weight == pytest.approx(float(joint), abs=TOLERANCE)
    assert {len(tokens) for tokens in distribution} == {count}
    assert paths > len(distribution), "no candidate was rejected"


@pytest.mark.every(3)
@pytest.mark.parametrize("shape", CHAINS)
@pytest.mark.parametrize("name", TARGETS)
def test_chains_emit_exactly_p(name: str, shape: str, enumerate_torch: Callable[[Replay], None]) -> None:
    target, assistant = pair(name, **CHAINS[shape])
    check(target, *generations(target, assistant, enumerate_torch))


@pytest.mark.every(2)
@pytest.mark.parametrize("shape", TREES)
def test_trees_emit_exactly_p(shape: str, enumerate_torch: Callable[[Replay], None]) -> None:
    target, assistant = pair("one layer", **TREES[shape])
    check(target, *generations(target, assistant, enumerate_torch))


@pytest.mark.slow
def test_two_layers_go_on_by_themselves(enumerate_torch: Callable[[Replay], None]) -> None:
    """A third candidate, which the second layer drafts of what it has just returned."""
    target, assistant = pair("two layers", rule="fixed", num_tokens=3)
    check(target, *generations(target, assistant, enumerate_torch, NEW_TOKENS + 1), NEW_TOKENS + 1)


# Mutants. -------------------------------------------------------------------------------------------------------------


def hotter(chain: Any) -> None:
    chain.q[:] = [(row * 0.7).softmax(-1) for row in chain.scores]


def of_the_next(chain: Any) -> None:
    chain.q[:] = [row.softmax(-1) for row in [*chain.scores[1:], *chain.scores[:1]]]


def unlikely(chain: Any) -> None:
    """Dropped because of its own value: the less likely one of the two that may come."""
    if len(chain.tokens) > 1 and float(chain.q[-1].flatten()[int(chain.tokens[-1])]) < 0.5:
        del chain.tokens[-1], chain.q[-1], chain.scores[-1]
        chain.drawn = None


@pytest.mark.every(4)
@pytest.mark.parametrize("mutate", [hotter, of_the_next, unlikely])
@pytest.mark.parametrize("name", TARGETS)
def test_mutants_are_caught(
    name: str, mutate: Any, enumerate_torch: Callable[[Replay], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = SpecDecPPCandidateGenerator.draft

    def wrong(self: SpecDecPPCandidateGenerator, *args: Any, **kwargs: Any) -> Any:
        chain = draft(self, *args, **kwargs)
        mutate(chain)
        return chain

    monkeypatch.setattr(SpecDecPPCandidateGenerator, "draft", wrong)
    target, assistant = pair(name, **CHAINS["token"])
    distribution, _ = generations(target, assistant, enumerate_torch)
    assert worst_error(distribution, target_distribution(target, 0.8, 2), VOCAB) > VISIBLE


def test_a_mutant_of_trees_is_caught(
    enumerate_torch: Callable[[Replay], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_tree = SpecDecPPCandidateGenerator.draft_tree

    def wrong(self: SpecDecPPCandidateGenerator, *args: Any, **kwargs: Any) -> Any:
        tree = draft_tree(self, *args, **kwargs)
        for node in tree.scores:
            tree.scores[node] = tree.scores[node] * 0.7
        return tree

    monkeypatch.setattr(SpecDecPPCandidateGenerator, "draft_tree", wrong)
    target, assistant = pair("one layer", **TREES["dyspec, block"])
    distribution, _ = generations(target, assistant, enumerate_torch)
    assert worst_error(distribution, target_distribution(target, 0.8, 2), VOCAB) > VISIBLE
