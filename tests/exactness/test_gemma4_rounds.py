"""The exact distribution of whole generations with a Gemma 4 assistant on its target: chains and trees.

Everything is product code and transformers' own classes, from the hooks that catch the target's states and the cache
that the assistant reads to what is rolled back; only the random numbers are replaced by a `Replay`. Mutants: a q of
another temperature, one that also counts tokens outside the likeliest clusters, and candidates that are dropped because
of what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.exact_distribution import Probs, Replay, Tokens, exact_distribution, worst_error
from support.gemma4_files import FULL, SLIDING, Variant, target_for
from support.stock_rounds import PROMPT, VOCAB, target_distribution
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.drafting.chain import Chain
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
}
# With clusters two of the four tokens are drafted.
VARIANTS = {"all": Variant((SLIDING, FULL)), "clusters": Variant((FULL,), clusters=True)}
NEW_TOKENS = 4  # the prompt's own, a round of up to two candidates, and more rounds where they are rejected
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "layer_types": [SLIDING, FULL],
    "sliding_window": 4,
}


def pair(variant: str, **speculation: Any) -> tuple[CausalLM, SpecDecPPAssistant]:
    target = target_for(seed=7, **SMALL)
    draft = VARIANTS[variant].theirs(vocab_size=VOCAB, sliding_window=4)
    assistant = SpecDecPPAssistant.from_draft(draft, target=target, speculation=SpeculationConfig(**speculation))
    return target, assistant


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
@pytest.mark.parametrize("variant", VARIANTS)
def test_generate_emits_exactly_p(variant: str, shape: str, enumerate_torch: Callable[[Replay], None]) -> None:
    target, assistant = pair(variant, **SHAPES[shape])
    distribution, paths = generations(target, assistant, enumerate_torch)
    p = target_distribution(target, 0.8, 2)
    assert worst_error(distribution, p, VOCAB) < TOLERANCE
    for tokens, weight in distribution.items():
        joint = torch.stack([p(tokens[:place])[token] for place, token in enumerate(tokens)]).prod()
        assert weight == pytest.approx(float(joint), abs=TOLERANCE)
    assert {len(tokens) for tokens in distribution} == {NEW_TOKENS}
    assert paths > len(distribution), "no candidate was rejected"


# Mutants. -------------------------------------------------------------------------------------------------------------


def hotter(scores: Tensor) -> Tensor:
    return scores * 0.7


def as_if_of_all(scores: Tensor) -> Tensor:
    return scores.where(scores.isfinite(), scores[scores.isfinite()].mean())


@pytest.mark.parametrize("mutate", [hotter, as_if_of_all])
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
    target, assistant = pair("clusters", **SHAPES[shape])
    distribution, _ = generations(target, assistant, enumerate_torch)
    assert worst_error(distribution, target_distribution(target, 0.8, 2), VOCAB) > VISIBLE


def test_candidates_that_are_dropped_for_what_they_are(
    enumerate_torch: Callable[[Replay], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = SpecDecPPCandidateGenerator.draft

    def wrong(self: SpecDecPPCandidateGenerator, *args: Any, **kwargs: Any) -> Any:
        chain = draft(self, *args, **kwargs)
        if chain.tokens and chain.tokens[-1] != int(chain.scores[-1].argmax()):
            return Chain(chain.tokens[:-1], chain.scores[:-1], q=chain.q[:-1])
        return chain

    monkeypatch.setattr(SpecDecPPCandidateGenerator, "draft", wrong)
    target, assistant = pair("all", **SHAPES["chain, token"])
    distribution, _ = generations(target, assistant, enumerate_torch)
    assert worst_error(distribution, target_distribution(target, 0.8, 2), VOCAB) > VISIBLE
