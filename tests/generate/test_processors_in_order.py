"""Logits processors that keep state from call to call, as grammars do, are called as plain `generate()` calls them."""

from typing import Any

import pytest
import torch
from support.models import VOCAB_SIZE, assistant_for, prompt, tiny
from support.watchers import no_work
from torch import Tensor
from transformers import LogitsProcessor

from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(12)
EOS = 7
SHAPES: dict[str, dict[str, Any]] = {"chain": {"rule": "fixed", "num_tokens": 4}, "tree": {"tree": [3, 2, 1]}}


class Grammar(LogitsProcessor):
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


class Plain(Grammar):
    """The same function of the text, without a state. Says so."""

    reads_prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.taken = input_ids[0, PROMPT.shape[1] :].tolist()
        self.prefilled = False
        return super().__call__(input_ids, scores)


def generate(target: CausalLM, processor: LogitsProcessor, **arguments: Any) -> Any:
    arguments = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0, **arguments}
    return target.generate(
        PROMPT, logits_processor=[processor], return_dict_in_generate=True, output_scores=True, **arguments
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_call_for_each_token(shape: str, sampling: dict[str, Any]) -> None:
    target = tiny("llama")
    theirs, ours = Grammar(), Grammar()
    plain = generate(target, theirs, **sampling)
    assistant = assistant_for(target, mix=0.98, **SHAPES[shape])
    text = generate(target, ours, assistant_model=assistant, **sampling)
    assistant.detach()
    assert plain.sequences.shape[1] == PROMPT.shape[1] + 26
    assert plain.sequences[0, -1] == EOS
    assert torch.equal(text.sequences, plain.sequences)
    torch.testing.assert_close(text.scores, plain.scores)
    assert ours.taken == theirs.taken
    assert 0 < assistant.stats.accepted < assistant.stats.drafted


def test_what_reads_its_arguments_only_guides_the_draft() -> None:
    target = tiny("llama")
    plain = generate(target, Grammar())
    rates = []
    for processor in (Grammar(), Plain()):
        assistant = assistant_for(target, mix=0.98)
        text = generate(target, processor, assistant_model=assistant)
        assistant.detach()
        assert torch.equal(text.sequences, plain.sequences)
        rates.append(assistant.stats.accepted / assistant.stats.rounds)
    assert rates[1] > rates[0]


def test_state_is_noticed_without_attaching() -> None:
    target = tiny("llama", num_hidden_layers=1)
    assistant = assistant_for(target, attached=False)
    with no_work(target), pytest.raises(ValueError, match="Grammar: keeps count of its calls.*Attach"):
        generate(target, Grammar(), assistant_model=assistant)
