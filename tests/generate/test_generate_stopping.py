"""Where a text ends: criteria, end-of-sequence ids, lengths."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from support.targets.models import assistant_for, partly_agreeing, prompt, tiny
from support.targets.watchers import Recorder
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(10)
LENGTH = PROMPT.shape[1]


@lru_cache
def target() -> CausalLM:
    return tiny("llama", seed=3, num_hidden_layers=2)


@lru_cache
def greedy() -> list[int]:
    """60 tokens of the greedy continuation."""
    return generate(max_new_tokens=60)[0, LENGTH:].tolist()


def generate(**arguments: Any) -> Tensor:
    return target().generate(PROMPT, **{"do_sample": False, **arguments})


@pytest.fixture
def assistant() -> Any:
    assistant = assistant_for(target())
    yield assistant
    assistant.detach()


@pytest.mark.parametrize("scores", [False, True])
def test_criteria_are_asked_token_by_token(assistant: Any, scores: bool) -> None:
    arguments = {"max_new_tokens": 30, "return_dict_in_generate": scores, "output_scores": scores}
    plain, ours = Recorder(), Recorder()
    generate(stopping_criteria=StoppingCriteriaList([plain]), **arguments)
    generate(stopping_criteria=StoppingCriteriaList([ours]), assistant_model=assistant, **arguments)
    assert (len(ours.asked), ours.asked) == (30, plain.asked)
    assert ours.scores == plain.scores


@pytest.mark.daily("1", "4", "7", "10")
@pytest.mark.parametrize("index", range(1, 12))
def test_a_criterion_stops_anywhere_in_a_block(assistant: Any, index: int) -> None:
    """A user's, and transformers' own that a user passes."""
    token = greedy()[index]
    for criterion in (Recorder(token), EosTokenCriteria(token), MaxLengthCriteria(LENGTH + index + 1)):
        criteria = StoppingCriteriaList([criterion])
        plain = generate(stopping_criteria=criteria, max_new_tokens=60, pad_token_id=0)
        ours = generate(stopping_criteria=criteria, assistant_model=assistant, max_new_tokens=60, pad_token_id=0)
        assert torch.equal(ours, plain)
        assert plain.shape[1] <= LENGTH + index + 1


def test_a_criterion_that_returns_numbers(assistant: Any) -> None:
    """Plain generation looks at the last bit, so that a text with two of these tokens goes on."""
    new = greedy()
    token = next(each for each in new if 1 < new.count(each) < 20)

    def count(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (ids[:, LENGTH:] == token).sum(-1) // 2 * 2

    arguments: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([count]), "max_new_tokens": 40}
    plain = generate(**arguments)
    assert plain.shape[1] == LENGTH + 40
    assert torch.equal(generate(assistant_model=assistant, **arguments), plain)


DRAFTS: dict[str, Any] = {
    "chain": assistant_for,
    "tree": lambda target: assistant_for(target, tree="dyspec", tree_budget=8),
    "lookup": lambda target: assist(target, "lookup", default=False),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("family", "positions"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
def test_a_text_that_ends_at_the_last_position(family: str, positions: str, draft: str) -> None:
    """Candidates after it have no positions: plain generation, which may go on, never reads them."""
    changes: dict[str, Any] = {positions: 24}
    target = tiny(family, num_hidden_layers=2, **changes)
    criteria = StoppingCriteriaList([MaxLengthCriteria(25)])
    arguments: dict[str, Any] = {"stopping_criteria": criteria, "max_new_tokens": 100, "do_sample": False}
    plain, assistant = target.generate(PROMPT, **arguments), DRAFTS[draft](target)
    assert plain.shape[1] == 25
    assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **arguments), plain)


def test_max_time(assistant: Any) -> None:
    text = generate(assistant_model=assistant, max_new_tokens=1000, max_time=0.05)
    assert LENGTH < text.shape[1] < LENGTH + 1000
    assert text[0, LENGTH:].tolist()[:60] == greedy()[: text.shape[1] - LENGTH]
    assert generate(assistant_model=assistant, max_new_tokens=1000, max_time=0.0).shape[1] == LENGTH + 1


# End of sequence and lengths ------------------------------------------------------------------------------------------


def test_ids_of_another_type(assistant: Any) -> None:
    plain = target().generate(PROMPT.int(), max_new_tokens=10, do_sample=False)
    text = target().generate(PROMPT.int(), assistant_model=assistant, max_new_tokens=10, do_sample=False)
    assert text.dtype == plain.dtype
    assert torch.equal(text, plain)


@pytest.mark.daily("gpt2")
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_up_to_the_end_of_position_tables(family: str) -> None:
    """The target's, and the draft's own: where that is shorter, the target goes on alone."""
    table = "n_positions" if family == "gpt2" else "max_position_embeddings"
    tables: list[dict[str, Any]] = [{table: 40}, {table: 24}]
    model, shorter = tiny(family, **tables[0]), tiny(family, seed=1, **tables[1])
    longest = 41  # the last token is read by nobody
    for draft, length in ((partly_agreeing(model), 10), (shorter, 10), (shorter, 30)):
        speculation, text = SpeculationConfig("fixed", num_tokens=4), prompt(length)
        plain = model.generate(text, max_length=longest, do_sample=False)
        assert plain.shape[1] == longest
        assistant = SpecDecPPAssistant.from_draft(draft, model, speculation=speculation)
        ours = model.generate(text, assistant_model=assistant, max_length=longest, do_sample=False)
        assert torch.equal(ours, plain)
        assert (assistant.stats.drafted > 0) == (length == 10)
