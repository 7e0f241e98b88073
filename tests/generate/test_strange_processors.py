"""Processors and criteria of transformers whose class somebody has changed, and scores of another precision."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.models import VOCAB_SIZE, assistant_of, prompt, quiet_later_layers, tiny
from support.outputs import assert_same
from support.pretend_graph import pretend_graphs
from support.questions import CAPTURED, PAD, WAYS
from torch import Tensor
from torch.nn import functional
from transformers import LogitsProcessor
from transformers.generation import EosTokenCriteria, logits_process

from hf_specdecpp.sampling.verification import as_float32


def graphs_of(way: str) -> AbstractContextManager[Any]:
    return pretend_graphs() if way in CAPTURED else nullcontext()


@pytest.mark.takes(3)
def test_a_class_of_transformers_with_code_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a processor, and of a criterion, which count their calls."""
    target, calls = quiet_later_layers(tiny("llama", num_hidden_layers=2)), [0]
    penalise, ends = logits_process.RepetitionPenaltyLogitsProcessor.__call__, EosTokenCriteria.__call__

    @functools.wraps(penalise)
    def biased(self: Any, input_ids: Any, scores: Any) -> Any:
        calls[0] += 1
        return functional.one_hot(torch.tensor(calls[0] % VOCAB_SIZE), VOCAB_SIZE) * -9.0 + penalise(
            self, input_ids, scores
        )

    def ending(self: Any, input_ids: Any, scores: Any, **_: Any) -> Any:
        return ends(self, input_ids, scores) & torch.tensor(input_ids.shape[1] > 24)

    monkeypatch.setattr(logits_process.RepetitionPenaltyLogitsProcessor, "__call__", biased)
    monkeypatch.setattr(EosTokenCriteria, "__call__", ending)
    how: dict[str, Any] = {"repetition_penalty": 1.3, "max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}
    for way in ("chain", "tree", "captured chain"):
        made_for = assistant_of("independent", target, **{**WAYS, **CAPTURED}[way])
        found = []
        for each in (None, made_for):
            calls[0] = 0
            with graphs_of(way):
                found.append(target.generate(prompt(), assistant_model=each, eos_token_id=[3, 9, 12, 30, 41], **how))
        made_for.detach()
        assert torch.equal(*found)


class Narrow(LogitsProcessor):
    """Returns numbers of another precision, in which neighbours are equal."""

    def __init__(self, dtype: torch.dtype, is_free: bool) -> None:
        self.dtype, self.reads_prefix_only = dtype, is_free

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.to(self.dtype)


RECORDED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}


@pytest.mark.takes(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("is_free", [False, True], ids=["in order", "free"])
def test_processors_that_return_another_precision(is_free: bool, dtype: torch.dtype) -> None:
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
    how: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": PAD, "logits_processor": [Narrow(dtype, is_free)]}
    how |= {"do_sample": False}
    for way in ("chain", "tree", "captured chain", "captured tree"):
        made_for = assistant_of("independent", target, **{**WAYS, **CAPTURED}[way])
        with graphs_of(way):
            both = [target.generate(prompt(), assistant_model=each, **how) for each in (made_for, None)]
            recorded = [target.generate(prompt(), assistant_model=each, **how, **RECORDED) for each in (made_for, None)]
            target.generate(prompt(), assistant_model=made_for, **{**how, "do_sample": True})
        made_for.detach()
        assert torch.equal(*both)
        assert_same(recorded[0].scores, recorded[1].scores)


def test_a_softmax_is_rounded_as_plain_generation_rounds_it() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        scores = (3.0 * torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))).to(dtype)
        drawn_from = scores.softmax(-1).float()
        torch.testing.assert_close(as_float32(scores).softmax(-1), drawn_from / drawn_from.sum(-1, keepdim=True))
        assert not torch.allclose(scores.float().softmax(-1), as_float32(scores).softmax(-1), atol=1e-5)
        assert torch.equal(as_float32(scores, greedy=True).argmax(-1), scores.argmax(-1))
