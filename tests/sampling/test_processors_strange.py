"""Processors and criteria of transformers whose class somebody has changed, and scores of another precision."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.devices.pretend_graph import pretend_graphs
from support.targets.models import VOCAB_SIZE, assistant_of, prompt, quiet_later_layers, tiny
from support.targets.outputs import assert_same
from support.targets.questions import CAPTURED, PAD, WAYS
from torch import Tensor
from torch.nn import functional
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation import EosTokenCriteria, logits_process

from hf_specdecpp.generation.entry import calls
from hf_specdecpp.sampling.processors import in_order
from hf_specdecpp.trees.verification import as_float32


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


class Adjusts(StoppingCriteria):
    """Never ends a text, and after each token gives a processor of transformers another value."""

    def __init__(self, processor: Any, name: str, values: list[Any]) -> None:
        self.processor, self.name, self.values = processor, name, values

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        setattr(self.processor, self.name, self.values[int(input_ids[0, -1]) % len(self.values)])
        return torch.zeros(len(input_ids), dtype=torch.bool)


ADJUSTED: dict[str, tuple[Callable[[], Any], str, list[Any]]] = {
    "penalty": (lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.1), "penalty", [0.4, 1.0, 3.0]),
    "n-grams": (lambda: logits_process.NoRepeatNGramLogitsProcessor(9), "ngram_size", [1, 2, 9]),
    "suppressed": (
        lambda: logits_process.SuppressTokensLogitsProcessor([1]),
        "suppress_tokens",
        [torch.arange(each, VOCAB_SIZE, 2) for each in (0, 1)],
    ),
}


def adjusted(target: Any, way: str, name: str) -> tuple[Tensor, Tensor]:
    """Ours and the plain text of a call with a criterion that changes a processor."""
    make, attribute, values = ADJUSTED[name]
    made_for, found = assistant_of("independent", target, **{**WAYS, **CAPTURED}[way]), []
    for each in (made_for, None):
        how: dict[str, Any] = {"logits_processor": [processor := make()], "max_new_tokens": 24, "do_sample": False}
        how["stopping_criteria"] = [Adjusts(processor, attribute, values)]
        with graphs_of(way):
            found.append(target.generate(prompt(), assistant_model=each, pad_token_id=PAD, **how))
        assert each is None or each.stats.accepted > 0
    made_for.detach()
    return found[0], found[1]


@pytest.mark.daily("n-grams", takes=3)
@pytest.mark.parametrize("name", ADJUSTED)
def test_a_criterion_that_changes_a_processor(name: str) -> None:
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
    for way in ("chain", "tree", "lookup", "captured chain", "captured tree"):
        assert torch.equal(*adjusted(target, way, name)), way


def test_a_change_that_comes_too_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "in_order", lambda processors, _: in_order(processors))
    assert not torch.equal(*adjusted(quiet_later_layers(tiny("llama", num_hidden_layers=2)), "chain", "penalty"))


class Narrow(LogitsProcessor):
    """Returns numbers of another precision, in which neighbours are equal."""

    def __init__(self, dtype: torch.dtype, is_free: bool) -> None:
        self.dtype, self.reads_prefix_only = dtype, is_free

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.to(self.dtype)


RECORDED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}


@pytest.mark.daily("in order-torch.float64", takes=3)
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
