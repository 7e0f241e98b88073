"""The exact distribution of whole generations with a draft that has learned between two texts.

The draft learns from one text and drafts the next, and everything is product code; only the random numbers are replaced
by a `Replay`. So is a draft with a temperature of its own. Mutants: of candidates that the learned draft drew, q as it
was before is told; or q without the draft's temperature.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import assistant_of, tiny
from support.stock_rounds import PROMPT, VOCAB
from support.whole_generations import Enumerate, assert_caught, assert_exactly_p, tell_another_q
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.drafting.chain import Chain
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.models.causal_lm import CausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"rule": "fixed", "num_tokens": 2},
    "dyspec": {"tree": "dyspec", "tree_budget": 3, "tree_depth": 2},
}
KINDS = ("independent", "early_exit", "conditioned", "eagle3")


def learned(kind: str, **speculation: Any) -> tuple[CausalLM, SpecDecPPAssistant]:
    """A target, and an assistant whose draft was changed between two texts."""
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=3)
    assistant = assistant_of(kind, target, **speculation, keep_texts=1000)
    for seed in range(4):
        torch.manual_seed(seed)
        target.generate(PROMPT, assistant_model=assistant, max_new_tokens=20, do_sample=True)
    drafter = assistant.drafter
    taught(assistant)
    assert assistant.drafter is not drafter
    return target, assistant


def taught(assistant: SpecDecPPAssistant) -> None:
    """Learn, and draft with what was learned whether it helps on so little text or not."""
    learner, before = assistant._learning()
    for group in learner.optimizer.param_groups:
        group["highest"] = 3e-2
    texts = list(assistant.memory.texts.texts)
    for _ in range(10):
        learner._step(texts)
    assistant._draft_as(assistant.kind.taught(before, learner.student))


@pytest.mark.every(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_generate_emits_exactly_p_after_learning(kind: str, shape: str, enumerate_torch: Enumerate) -> None:
    target, assistant = learned(kind, **SHAPES[shape])
    assert_exactly_p(target, assistant, enumerate_torch)


@pytest.mark.every(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_generate_emits_exactly_p_whatever_the_draft_s_temperature(
    shape: str, temperature: float, enumerate_torch: Enumerate
) -> None:
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=3)
    assistant = assistant_of("early_exit", target, **SHAPES[shape], draft_temperature=temperature)
    assert_exactly_p(target, assistant, enumerate_torch)


# Mutants. -------------------------------------------------------------------------------------------------------------


def test_a_draft_temperature_that_is_not_told_is_caught(
    enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=3)
    assistant = assistant_of("early_exit", target, **SHAPES["chain"], draft_temperature=0.6)
    tell_another_q(monkeypatch, lambda scores: scores * 0.6)
    assert_caught(target, assistant, enumerate_torch)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["independent", "early_exit"])
def test_a_q_that_is_stale_is_caught(kind: str, enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are drawn by the learned draft, and the q that is told is that of the draft before it learned."""
    target, assistant = learned(kind, **SHAPES["chain"])
    before = assistant._learning()[1].drafter
    draft = SpecDecPPCandidateGenerator.draft

    def stale(self: SpecDecPPCandidateGenerator, input_ids: Tensor, *args: Any, **kwargs: Any) -> Chain:
        chain = draft(self, input_ids, *args, **kwargs)
        for place in range(len(chain.tokens)):
            text = torch.cat((input_ids, torch.tensor([chain.tokens[:place]], dtype=torch.long)), dim=1)
            scores = before.logits(before.hidden_states(text)[0, -1], VOCAB) / 0.8
            chain.q[place] = scores.masked_fill(scores < scores.topk(2).values[-1], -torch.inf).softmax(-1)
        return chain

    monkeypatch.setattr(SpecDecPPCandidateGenerator, "draft", stale)
    assert_caught(target, assistant, enumerate_torch)
    assistant._draft_as(assistant._learning()[1])  # with the draft that it was, it would be the right one
    assert_exactly_p(target, assistant, enumerate_torch)
