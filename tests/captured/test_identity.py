"""What makes a graph stale is another identity: whatever a pass reads beside the numbers in shared tensors."""

import gc
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.capturing import CHAIN, generate
from support.models import assistant_of, quiet_later_layers, tiny
from support.pretend_graph import pretend_graphs
from torch import Tensor, nn
from transformers.generation import logits_process

from hf_specdecpp.captured.identity import identity, tensors_of
from hf_specdecpp.drafting.captured_draft import RoundRules
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.sampling.processors import Processing

STRENGTH, TABLE, SETTINGS = 0.0, {"a": [0.0]}, ModuleType("settings_of_a_test")
SETTINGS.strength = 0.0  # type: ignore[attr-defined]


@dataclass
class Strength:
    value: float = 0.0
    inner: Any = None
    several: list[Any] = field(default_factory=list)


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Kind(Enum):
    ONE, TWO = 1, 2


def scaled(hidden: Tensor) -> Tensor:
    return hidden * (1.0 + STRENGTH)


class Steered(nn.Module):
    """A layer of a user, which reads all kinds of things."""

    shared: Any = 0.0

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.plain, self.tensor, self.nested = 0.0, torch.zeros(3), Strength(inner=SimpleNamespace(value=0.0))
        self.several, self.by_name, self.slots = [0.0, (1, {"a": 0.0})], {"a": {"b": 0.0}}, Slots()
        self.space, self.array, self.kind, self.none = Namespace(value=0.0), np.zeros(2), Kind.ONE, float("nan")
        self.call: Any = partial(torch.add, alpha=1.0)
        self.unregistered = [nn.Linear(2, 2)]
        self.nested.several.append(self)  # a circle
        closed = [0.0]
        self.closed, self.function = closed, lambda hidden: hidden + closed[0]

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = scaled(self.layer(hidden)) + TABLE["a"][0] + SETTINGS.strength
        return found


def changed_global(name: str, value: Any) -> Callable[[Any], object]:
    return lambda _: sys.modules[__name__].__dict__.__setitem__(name, value)


CHANGES: dict[str, Callable[[Any], object]] = {
    "plain": lambda layer: setattr(layer, "plain", 1.0),
    "int for float": lambda layer: setattr(layer, "plain", 0),
    "tensor": lambda layer: setattr(layer, "tensor", torch.zeros(3)),
    "strides": lambda layer: setattr(layer.layer.gate_proj.weight, "data", layer.layer.gate_proj.weight.data.T),
    "nested": lambda layer: setattr(layer.nested, "value", 1.0),
    "nested twice": lambda layer: setattr(layer.nested.inner, "value", 1.0),
    "list": lambda layer: layer.several.__setitem__(0, 1.0),
    "longer list": lambda layer: layer.several.append(0.0),
    "in a tuple": lambda layer: layer.several[1][1].__setitem__("a", 1.0),
    "mapping": lambda layer: layer.by_name["a"].__setitem__("b", 1.0),
    "slots": lambda layer: setattr(layer.slots, "value", 1.0),
    "namespace": lambda layer: setattr(layer.space, "value", 1.0),
    "array": lambda layer: layer.array.__setitem__(0, 1.0),
    "enum": lambda layer: setattr(layer, "kind", Kind.TWO),
    "partial": lambda layer: setattr(layer, "call", partial(torch.add, alpha=2.0)),
    "unregistered": lambda layer: setattr(layer.unregistered[0], "weight", nn.Parameter(torch.zeros(2, 2))),
    "closure": lambda layer: layer.closed.__setitem__(0, 1.0),
    "class": lambda _: setattr(Steered, "shared", 1.0),
    "method": lambda _: setattr(Steered, "helps", lambda _self: 1.0),
    "global": changed_global("STRENGTH", 1.0),
    "in a global": lambda _: TABLE["a"].__setitem__(0, 1.0),
    "of another module": lambda _: setattr(SETTINGS, "strength", 1.0),
    "moved": lambda layer: layer.double().float(),
}


@pytest.fixture
def steered(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    monkeypatch.setattr(sys.modules[__name__], "STRENGTH", 0.0)
    monkeypatch.setattr(SETTINGS, "strength", 0.0)
    monkeypatch.setitem(TABLE, "a", [0.0])
    monkeypatch.setattr(Steered, "shared", 0.0)
    monkeypatch.setattr(Steered, "helps", None, raising=False)
    target = tiny("llama", num_hidden_layers=2).float()
    target.model.layers[1].mlp = Steered(target.model.layers[1].mlp)
    return target


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_identity(change: str, steered: CausalLM) -> None:
    before = identity(steered)
    assert identity(steered) == before
    CHANGES[change](steered.model.layers[1].mlp)
    assert identity(steered) != before


def test_what_is_written_to_tensors_is_no_change(steered: CausalLM) -> None:
    """Graphs read it where it is: the copy that they run shares all tensors, those in objects, too."""
    layer: Any = steered.model.layers[1].mlp
    before = identity(steered)
    layer.tensor.fill_(1.0)
    layer.unregistered[0].weight.data.fill_(1.0)
    assert identity(steered) == before
    kept = {id(each) for each in tensors_of(steered)}
    assert {id(layer.tensor), id(layer.unregistered[0].weight), id(steered.lm_head.weight)} <= kept


def test_an_identity_keeps_no_model_alive(steered: CausalLM) -> None:
    found, layer = identity(steered), weakref.ref(steered.model.layers[1].mlp.layer)
    steered.model.layers[1].mlp = nn.Identity()
    gc.collect()
    assert layer() is None
    assert found


class Reading(nn.Module):
    """A layer that adds what its attributes say."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.vector, self.config = (
            layer,
            torch.zeros((), dtype=torch.float64),
            SimpleNamespace(strength=0.0),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.layer(hidden) + self.vector + self.config.strength + TABLE["a"][0]
        return found


@pytest.mark.takes(6)
@pytest.mark.parametrize("is_whole", [True, False])
def test_texts_follow_what_a_layer_reads(is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "a", [0.0])
    monkeypatch.setattr("hf_specdecpp.generation.refusals.foreign_passes", lambda *_: None)  # it would not be captured
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
    layer = target.model.layers[1].mlp = Reading(target.model.layers[1].mlp)
    assistant = assistant_of("early_exit", target, rule="fixed", num_tokens=2, lookup=not is_whole)
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: layer.vector.data.fill_(3.0),  # which graphs read where it is
        lambda: setattr(layer, "vector", torch.tensor(-4.0, dtype=torch.float64)),
        lambda: setattr(layer.config, "strength", 2.0),
        lambda: TABLE["a"].__setitem__(0, 5.0),
    ]
    texts = []
    with pretend_graphs() as counts:
        for place, change in enumerate(changes):
            change()
            texts.append(generate(target, assistant, max_new_tokens=8))
            assert torch.equal(texts[-1], generate(target, None, max_new_tokens=8))
            assert assistant.stats.uncaptured is None
            assert bool(counts["captured"]) == (place != 1)
            counts.clear()
    assert len({tuple(each[0].tolist()) for each in texts}) > 2


# Ways of drawing. ----------------------------------------------------------------------------------------------------


def key(*processors: Any, estimator: Any = None) -> Any:
    return RoundRules(False, Processing(processors), Processing(processors), estimator, 0.5, 1, "block").key


CUTOFFS = (1.01e-4, 1.49e-4, 0.06, 0.14, 0.5, 1.0 - 1e-7)


@pytest.mark.parametrize("digits", [4, 1])
def test_numbers_of_processors_are_compared_exactly(digits: int) -> None:
    torch.set_printoptions(precision=digits)
    try:
        eta = [key(logits_process.EtaLogitsWarper(each)) for each in CUTOFFS]
        assert len(set(eta)) == len(CUTOFFS)
        assert eta == [key(logits_process.EtaLogitsWarper(each)) for each in CUTOFFS]
    finally:
        torch.set_printoptions(profile="default")
    kinds = [logits_process.TemperatureLogitsWarper, logits_process.TopPLogitsWarper, logits_process.MinPLogitsWarper]
    keys = {key(kind(each)) for kind in kinds for each in (0.5, 0.5 + 1e-9)}
    assert len(keys | {key(), key(kinds[0](0.5), kinds[1](0.5)), key(kinds[1](0.5), kinds[0](0.5))}) == 9


def test_a_judge_is_known_by_its_tensors() -> None:
    judge: Any = nn.Linear(2, 1)
    judge.inputs = "before"
    before = key(estimator=judge)
    assert key(estimator=judge) == before != key(estimator=DraftProbability()) != key()
    with torch.no_grad():
        judge.weight.fill_(1.0)
    assert key(estimator=judge) == before
    judge.weight = nn.Parameter(judge.weight.detach().clone())
    assert key(estimator=judge) != before


@pytest.mark.parametrize("part", ["fusion", "small_head", "draft_vocab", "model"])
def test_parts_of_a_draft_that_are_moved_are_captured_anew(part: str) -> None:
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
    if part == "fusion":
        drafter = assistant_of("conditioned", target, **CHAIN).ready_drafter()
    else:
        drafter = Drafter(target, None if part == "model" else torch.arange(40))
    with pretend_graphs():
        drafter.capture_steps(True, False)
        before = drafter.captured
        drafter.capture_steps(True, False)
        assert drafter.captured is before is not None
        moved: Any = getattr(drafter, part)
        if isinstance(moved, Tensor):
            drafter.draft_vocab = moved.clone()
        else:
            for each in moved.parameters():
                each.data = each.data.clone()
        drafter.capture_steps(True, False)
        assert drafter.captured is not before
