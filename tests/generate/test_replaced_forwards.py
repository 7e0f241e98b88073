"""A target whose forward somebody has replaced: what is refused names that, and nothing that is untrue."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.targets.models import assistant_for, prompt, tiny
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import why_no_positions

PROMPT = prompt(12)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}


def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))


def partly(forward: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    return replaced


REPLACED: dict[str, Callable[..., Any]] = {
    "a lambda": lambda forward: lambda *args, **kwargs: forward(*args, **kwargs),
    "some names": partly,
    "wrapped": wrapped,
}


@pytest.mark.parametrize("what", ["a tree", "a batch"])
@pytest.mark.parametrize("how", REPLACED)
def test_the_reason_is_the_true_one(how: str, what: str) -> None:
    target = tiny("llama", num_hidden_layers=2)
    assistant = assistant_for(target, rule="threshold", tree="dyspec" if what == "a tree" else None)
    target.forward = REPLACED[how](target.forward)
    ids = PROMPT.repeat(2, 1) if what == "a batch" else PROMPT
    arguments = {"attention_mask": torch.ones_like(ids)}
    plain = target.generate(ids, **arguments, **GREEDY)
    call = functools.partial(target.generate, ids, **arguments, **GREEDY, assistant_model=assistant)
    if how == "wrapped":
        assert torch.equal(call(), plain)
    else:
        says = r"has another forward \(model.forward = ...\), which does not name position_ids among its arguments"
        refusal = refused(call, assistant, plain)
        assert re.search(says, refusal)
        assert "takes no position" not in refusal
        assistant.speculation.tree = None
        assert torch.equal(target.generate(PROMPT, **GREEDY, assistant_model=assistant)[0], plain[0]), "a chain works"
    assistant.detach()


def refused(call: Callable[[], Tensor], assistant: SpecDecPPAssistant, plain: Tensor) -> str:
    """Why a call is plain, or why it raises: a batch with the code of others does."""
    try:
        assert torch.equal(call(), plain)
    except ValueError as error:
        return str(error)
    return str(assistant.stats.refusal)


def test_a_family_without_positions_is_still_called_one() -> None:
    assert why_no_positions(torch.nn.Linear(2, 2)) == "takes no position_ids"
