"""What makes a graph stale is another identity: whatever a pass reads beside the numbers in shared tensors."""

import gc
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import itemgetter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from support.devices.capturing import CHAIN, generate
from support.devices.pretend_graph import pretend_graphs
from support.targets.models import assistant_of, quiet_later_layers, tiny
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers.generation import logits_process
from transformers.models.gemma3 import modeling_gemma3

from hf_specdecpp.cuda_graphs.captured_draft import RoundRules
from hf_specdecpp.cuda_graphs.identity import identity, tensors_of
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


class Settings(dict[str, Any]):
    """Whose attributes are beside its items."""

    value = 0.0


class Name(str):
    value = 0.0


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Kind(Enum):
    ONE, TWO = 1, 2


def scaled(hidden: Tensor) -> Tensor:
    return hidden * (1.0 + STRENGTH) * scaled.strength  # type: ignore[attr-defined]


scaled.strength = 1.0  # type: ignore[attr-defined]


class Steered(nn.Module):
    """A layer of a user, which reads all kinds of things."""

    __slots__ = ("slot",)
    shared: Any = 0.0

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.slot, self.generation_config, self.number, self.rows, self.places = 0.0, Slots(), 1, slice(0, 4), range(4)
        self.settings, self.name, self.format, self.phase = Settings(), Name("a"), torch.contiguous_format, 0j
        self.pick = itemgetter(0)
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


def moved(layer: nn.Module) -> list[Tensor]:
    """Move the parameters to other addresses. The old memory is kept, or the allocator could give it out again."""
    held = [each.data for each in layer.parameters()]
    layer.double().float()
    return held


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
    "moved": moved,
    "slot of a module": lambda layer: setattr(layer, "slot", 1.0),
    "a user's generation config": lambda layer: setattr(layer.generation_config, "value", 1.0),
    "bool for int": lambda layer: setattr(layer, "number", True),
    "float for int": lambda layer: setattr(layer, "number", 1.0),
    "minus zero": lambda layer: setattr(layer, "plain", -0.0),
    "complex minus zero": lambda layer: setattr(layer, "phase", complex(-0.0, 0.0)),
    "slice": lambda layer: setattr(layer, "rows", slice(0, 3)),
    "range": lambda layer: setattr(layer, "places", range(3)),
    "attribute of a mapping": lambda layer: setattr(layer.settings, "value", 1.0),
    "attribute of a text": lambda layer: setattr(layer.name, "value", 1.0),
    "memory format": lambda layer: setattr(layer, "format", torch.channels_last),
    "getter": lambda layer: setattr(layer, "pick", itemgetter(1)),
    "attribute of a function": lambda _: setattr(scaled, "strength", 2.0),
    "attribute of a tensor": lambda layer: setattr(layer.layer.gate_proj.weight, "scale", 2.0),
    "training": lambda layer: layer.layer.train(),
}


class Scaled(Tensor):
    """A tensor of a class of its own, such as a quantised weight: its `numbers` have the address."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "Scaled":
        made: Scaled = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


def test_parts_of_a_tensor_of_another_class_count() -> None:
    layer, weight = nn.Module(), Scaled(torch.zeros(2, 2))
    layer.weight = weight
    before = identity(layer)
    assert identity(layer) == before
    weight.numbers.fill_(1.0)
    assert identity(layer) == before
    weight.numbers = torch.zeros(2, 2)
    assert identity(layer) != before


def test_a_tensor_of_tensors_can_be_moved() -> None:
    """PyTorch swaps such a tensor, which it refuses if there are weak references to it."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2)), requires_grad=False)
    before = identity(layer)
    assert identity(layer) == before
    layer.double().float()
    assert identity(layer) != before


# What users change on models of transformers and of PEFT, and in PyTorch. ---------------------------------------------


def rotates(x: Tensor) -> Tensor:
    return x


MATMUL = torch.backends.cuda.matmul
PATCHES: dict[str, Callable[[Any, Any], object]] = {
    "a helper's helper": lambda _, patch: patch.setattr(modeling_gemma3, "rotate_half", rotates),
    "a method of a class": lambda _, patch: patch.setattr(modeling_gemma3.Gemma3RMSNorm, "_norm", rotates),
    "a number of a module": lambda _, patch: patch.setattr(modeling_gemma3, "rotate_half", 1.0),
    "scaling": lambda model, _: setattr(model.model.layers[1].self_attn, "scaling", 2.0),
    "softcap": lambda model, _: setattr(model.config, "final_logit_softcapping", 30.0),
    "softcap of a layer": lambda model, _: setattr(model.model.layers[1].self_attn, "attn_logit_softcapping", 30.0),
    "window": lambda model, _: setattr(model.model.layers[1].self_attn, "sliding_window", 9),
    "rope": lambda model, _: model.config.rope_parameters["full_attention"].__setitem__("rope_theta", 9.0),
    "frequencies": lambda model, _: setattr(
        model.model.rotary_emb, "full_attention_inv_freq", model.model.rotary_emb.full_attention_inv_freq.clone()
    ),
    "scale of rope": lambda model, _: setattr(model.model.rotary_emb, "full_attention_attention_scaling", 2.0),
    "eps": lambda model, _: setattr(model.model.layers[1].input_layernorm, "eps", 1e-3),
    "attention": lambda model, _: model.set_attn_implementation("eager"),
    "tf32": lambda *_: torch.set_float32_matmul_precision("high"),
    "sums of halves": lambda *_: setattr(MATMUL, "allow_bf16_reduced_precision_reduction", False),
    "kernels of attention": lambda *_: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "default dtype": lambda *_: torch.set_default_dtype(torch.bfloat16),
    "determined": lambda *_: torch.use_deterministic_algorithms(True),
}


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    kind, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    MATMUL.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.set_default_dtype(kind)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("torch_as_before")
@pytest.mark.parametrize("change", PATCHES)
def test_what_users_change_is_another_identity(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("gemma3_text")
    model.config.final_logit_softcapping = None
    before = identity(model)
    with monkeypatch.context() as patch:
        PATCHES[change](model, patch)
        assert identity(model) != before


def test_how_to_sample_is_no_change() -> None:
    model = tiny("llama", num_hidden_layers=1)
    before = identity(model)
    model.generation_config.temperature = 0.3
    assert identity(model) == before


ADAPTERS: dict[str, Callable[[Any], object]] = {
    "off": lambda model: model.base_model.disable_adapter_layers(),
    "another": lambda model: model.set_adapter("second"),
    "both": lambda model: model.base_model.set_adapter(["default", "second"]),
    "scaled": lambda model: next(each for each in model.modules() if isinstance(each, LoraLayer)).set_scale(
        "default", 2.0
    ),
    "merged": lambda model: model.merge_adapter(),
    "deleted": lambda model: model.delete_adapter("second"),
}


@pytest.mark.parametrize("change", ADAPTERS)
def test_an_adapter_that_is_switched_is_another_identity(change: str) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny("llama", num_hidden_layers=2), config)
    model.add_adapter("second", config)
    before = identity(model.base_model.model)
    assert identity(model.base_model.model) == before
    ADAPTERS[change](model)
    assert identity(model.base_model.model) != before


@pytest.fixture
def steered(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    monkeypatch.setattr(sys.modules[__name__], "STRENGTH", 0.0)
    monkeypatch.setattr(SETTINGS, "strength", 0.0)
    monkeypatch.setattr(scaled, "strength", 1.0)
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
    held = CHANGES[change](steered.model.layers[1].mlp)
    assert identity(steered) != before, held


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
    assistant = assistant_of("early_exit", target, rule="fixed", num_tokens=2 if is_whole else 1)
    how: dict[str, Any] = {"max_new_tokens": 8}
    scored = how if is_whole else {**how, "return_dict_in_generate": True, "output_scores": True}
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
            text = generate(target, assistant, **scored)
            texts.append(text if is_whole else text.sequences)
            assert torch.equal(texts[-1], generate(target, None, **how))
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
        drafter.captured_copy(False)
        before = drafter.captured
        drafter.captured_copy(False)
        assert drafter.captured is before is not None
        moved: Any = getattr(drafter, part)
        if isinstance(moved, Tensor):
            drafter.draft_vocab = moved.clone()
        else:
            for each in moved.parameters():
                each.data = each.data.clone()
        drafter.captured_copy(False)
        assert drafter.captured is not before
