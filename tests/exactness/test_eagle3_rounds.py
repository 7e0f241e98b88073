"""The exact distribution of whole generations with an EAGLE-3 draft: chains and trees, of all tokens or of some.

Everything is product code, from the hooks that catch the target's states to the caches that are rolled back; only the
random numbers are replaced by a `Replay`. Mutants: a q that is told as if the draft could have proposed all tokens, and
one of another temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.exact_distribution import Probs, Replay, Tokens, exact_distribution, worst_error
from support.models import random_layer, tiny
from support.stock_rounds import PROMPT, VOCAB, target_distribution
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.models.causal_lm import CausalLM

TOLERANCE, VISIBLE = 1e-6, 1e-3  # logits become float32 before anything else
SHAPES: dict[str, dict[str, Any]] = {
    "chain, block": {"rule": "fixed", "num_tokens": 2},
    "chain, token": {"rule": "fixed", "num_tokens": 2, "verification": "token"},
    "chain, threshold": {"rule": "threshold", "threshold": 0.6, "max_tokens": 2},
    "dyspec, block": {"tree": "dyspec", "tree_budget": 3, "tree_depth": 2},
    "dyspec, token": {"tree": "dyspec", "tree_budget": 3, "tree_depth": 2, "verification": "token"},
    "static, block": {"tree": "static", "tree_shape": [2, 1]},
    "static, token": {"tree": "static", "tree_shape": [2, 1], "verification": "token"},
}
VOCABS = {"all": None, "some": [1, 3]}
NEW_TOKENS = 4  # the prompt's own, a round of up to two candidates, and more rounds where they are rejected


def pair(vocab: str, **speculation: Any) -> tuple[CausalLM, SpecDecPPAssistant]:
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=2)
    ids = VOCABS[vocab]
    layer = random_layer(target, vocab=None if ids is None else torch.tensor(ids))
    return target, SpecDecPPAssistant.from_eagle3(target, layer, speculation=SpeculationConfig(**speculation))


def generations(target: CausalLM, assistant: SpecDecPPAssistant, use: Callable[[Replay], None]) -> tuple[Probs, int]:
    """What `generate()` emits, and how many ways there are to it."""
    paths = 0

    def program(replay: Replay) -> Tokens:
        nonlocal paths
        paths += 1
        use(replay)
        assistant.memory.clear()  # every path begins alike
        options: Any = {"temperature": 0.8, "top_k": 2, "do_sample": True, "max_new_tokens": NEW_TOKENS}
        output = target.generate(PROMPT, assistant_model=assistant, **options)
        return tuple(output[0, PROMPT.shape[1] :].tolist())

    return exact_distribution(program), paths


@pytest.mark.every(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_generate_emits_exactly_p(shape: str, vocab: str, enumerate_torch: Callable[[Replay], None]) -> None:
    target, assistant = pair(vocab, **SHAPES[shape])
    distribution, paths = generations(target, assistant, enumerate_torch)
    p = target_distribution(target, 0.8, 2)
    assert worst_error(distribution, p, VOCAB) < TOLERANCE
    for tokens, weight in distribution.items():
        joint = torch.stack([p(tokens[:place])[token] for place, token in enumerate(tokens)]).prod()
        assert weight == pytest.approx(float(joint), abs=TOLERANCE)
    assert {len(tokens) for tokens in distribution} == {NEW_TOKENS}
    assert paths > len(distribution), "no candidate was rejected"


# Mutants. -------------------------------------------------------------------------------------------------------------


def as_if_of_all(scores: Tensor) -> Tensor:
    return scores.where(scores.isfinite(), scores[scores.isfinite()].mean())


def hotter(scores: Tensor) -> Tensor:
    return scores * 0.7


@pytest.mark.parametrize("mutate", [as_if_of_all, hotter])
@pytest.mark.parametrize("shape", ["chain, block", "dyspec, block"])
def test_mutants_are_caught(
    shape: str, mutate: Any, enumerate_torch: Callable[[Replay], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They draw from q, and tell another one."""
    draft, draft_tree = SpecDecPPCandidateGenerator.draft, SpecDecPPCandidateGenerator.draft_tree

    def wrong(self: SpecDecPPCandidateGenerator, *args: Any, **kwargs: Any) -> Any:
        chain = draft(self, *args, **kwargs)
        chain.q[:] = [mutate(row).softmax(-1) for row in chain.scores]
        return chain

    def wrong_tree(self: SpecDecPPCandidateGenerator, *args: Any, **kwargs: Any) -> Any:
        tree = draft_tree(self, *args, **kwargs)
        for node in tree.scores:
            tree.scores[node] = mutate(tree.scores[node])
        return tree

    monkeypatch.setattr(SpecDecPPCandidateGenerator, "draft", wrong)
    monkeypatch.setattr(SpecDecPPCandidateGenerator, "draft_tree", wrong_tree)
    target, assistant = pair("some", **SHAPES[shape])
    distribution, _ = generations(target, assistant, enumerate_torch)
    assert worst_error(distribution, target_distribution(target, 0.8, 2), VOCAB) > VISIBLE
