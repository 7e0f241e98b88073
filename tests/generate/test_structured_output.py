"""Grammars that now and then allow only tokens that the draft cannot say: the target decides alone there."""

from typing import Any

import pytest
import torch
from support.targets.models import VOCAB_SIZE, assistant_for, partly_agreeing, prompt, tiny
from support.targets.tree_generation import PROMPT, sharp
from torch import Tensor
from transformers import LogitsProcessor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM

COMMON, RARE = list(range(36)), list(range(36, VOCAB_SIZE))
COSTS = {"draft": 0.05, "verify": [1.0, 1.0, 1.1, 1.2]}
WAYS: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold"},
    "throughput": {"rule": "throughput", "costs": COSTS},
    "dyspec": {"tree": "dyspec", "tree_budget": 12},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 8},
    "static": {"tree": [3, 2, 2, 1, 1]},
    "dyspec throughput": {"tree": "dyspec", "rule": "throughput", "costs": COSTS},
}


def grammar(_batch: int, ids: Tensor) -> list[int]:
    """Every fourth token is a rare one; of the common ones two are left in every second place."""
    if len(ids) % 4 == 3:
        return RARE
    return COMMON[int(ids[-1]) % 30 :][:2] if len(ids) % 2 else COMMON


class Grammar(LogitsProcessor):
    """Masks with -inf, as engines for structured output do (transformers' own processor spares one token)."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.full_like(scores, float("-inf")).index_fill(-1, torch.tensor(grammar(0, input_ids[0])), 0)


@pytest.fixture(scope="module")
def target() -> Any:
    return sharp(tiny("llama"))


def with_small_vocabulary(target: Any, way: str, attached: bool = True) -> SpecDecPPAssistant:
    draft, speculation = partly_agreeing(target, 0.9), SpeculationConfig(**{"rule": "threshold", **WAYS[way]})
    attach = target if attached else None
    return SpecDecPPAssistant.from_draft(draft, attach, draft_vocab=COMMON, speculation=speculation)


@pytest.mark.daily("fixed-greedy", "static-top 1")
@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "top_k": 1}], ids=["greedy", "top 1"])
@pytest.mark.parametrize("way", WAYS)
def test_a_grammar_gives_the_plain_text(target: Any, way: str, arguments: dict[str, Any]) -> None:
    arguments = {**arguments, "max_new_tokens": 32, "logits_processor": [Grammar()]}
    plain, assistant = target.generate(PROMPT, **arguments), with_small_vocabulary(target, way)
    text = target.generate(PROMPT, assistant_model=assistant, **arguments)
    assistant.detach()
    assert torch.equal(text, plain)
    assert int((plain[0, PROMPT.shape[1] :] >= 36).sum()) == 8
    assert assistant.stats.accepted > 3


@pytest.mark.daily("fixed", "static")
@pytest.mark.parametrize("way", ["fixed", "dyspec", "dyspec-exact", "static", "dyspec throughput"])
def test_sampled_texts_follow_the_grammar(target: Any, way: str) -> None:
    assistant = with_small_vocabulary(target, way)
    torch.manual_seed(0)
    text = target.generate(
        PROMPT, assistant_model=assistant, do_sample=True, top_k=0, max_new_tokens=32, logits_processor=[Grammar()]
    )
    assistant.detach()
    for end in range(PROMPT.shape[1], text.shape[1]):
        assert int(text[0, end]) in grammar(0, text[0, :end])
    assert assistant.stats.accepted > 3


def test_tokens_that_are_suppressed_altogether(target: Any) -> None:
    """`suppress_tokens` may take away all that the draft can say, in every place."""
    arguments = {"do_sample": False, "max_new_tokens": 12, "suppress_tokens": COMMON}
    plain = target.generate(PROMPT, **arguments)
    for way in ("threshold", "dyspec", "static"):
        assistant = with_small_vocabulary(target, way)
        assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **arguments), plain)
        assert assistant.stats.drafted == 0
        assistant.detach()


# Logits processors that keep state from call to call, as grammars do, are called as plain `generate()` calls them. ----


IDS, EOS = prompt(12), 7
SHAPES: dict[str, dict[str, Any]] = {"chain": {"rule": "fixed", "num_tokens": 4}, "tree": {"tree": [3, 2, 1]}}


class Matcher(LogitsProcessor):
    """Takes the last token at each call but the first, and says which may follow: what xgrammar's processor does.

    Allowed are a quarter of the tokens, which depend on all tokens so far, and from the 25th token on the end."""

    def __init__(self) -> None:
        self.prefilled = False
        self.taken: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.prefilled:
            self.taken.append(int(input_ids[0, -1]))
        self.prefilled = True
        state = sum((place + 1) * token for place, token in enumerate(self.taken))
        allowed = [token for token in range(VOCAB_SIZE) if (token + state) % 4 == 0]
        if len(self.taken) > 24:
            allowed = [EOS]
        mask = torch.full_like(scores, float("-inf"))
        mask[:, allowed] = 0.0
        return scores + mask


def generate(target: CausalLM, processor: LogitsProcessor, **arguments: Any) -> Any:
    arguments = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0, **arguments}
    arguments |= {"return_dict_in_generate": True, "output_scores": True}
    return target.generate(IDS, logits_processor=[processor], **arguments)


@pytest.mark.daily("chain-greedy", "tree-sampled")
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_call_for_each_token(shape: str, sampling: dict[str, Any]) -> None:
    target = tiny("llama")
    theirs, ours = Matcher(), Matcher()
    plain, assistant = generate(target, theirs, **sampling), assistant_for(target, mix=0.98, **SHAPES[shape])
    text = generate(target, ours, assistant_model=assistant, **sampling)
    assistant.detach()
    assert (plain.sequences.shape[1], plain.sequences[0, -1]) == (IDS.shape[1] + 26, EOS)
    assert torch.equal(text.sequences, plain.sequences)
    torch.testing.assert_close(text.scores, plain.scores)
    assert ours.taken == theirs.taken
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
