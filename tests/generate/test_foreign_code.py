"""Hooks, patched forwards and replaced layers on a target: honoured with candidates, or the call is a plain one."""

import contextlib
import functools
import importlib
import itertools
import re
import types
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.devices.pretend_graph import pretend_graphs
from support.targets.families import informed_draft
from support.targets.models import assistant_for, configured, partly_agreeing, prompt, quiet_later_layers, tiny
from support.targets.watchers import Collector
from support.targets.zoo import tiny_of
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as every_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.generation.entry import attached
from hf_specdecpp.models import foreign
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.foreign import foreign_passes

PROMPT = prompt(12)
BATCH = torch.cat((PROMPT, prompt(12, seed=5)))
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}
STEER = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

# What users put on a target, by name; each returns what takes it off ------------------------------------------------


def steered(output: Any, rows: Any, by: Any = 2.0) -> Any:
    states = output if torch.is_tensor(output) else output[0]
    states = states.clone()
    states[:, rows] += by * STEER[: states.shape[-1]]
    return states if torch.is_tensor(output) else (states, *output[1:])


def hook(part: str, change: Callable[[Any], Any]) -> Callable[[CausalLM], Any]:
    return lambda target: target.get_submodule(part).register_forward_hook(lambda *args: change(args[-1])).remove


def count_of(output: Any) -> int:
    states = output if torch.is_tensor(output) else output[0]
    return int(states.shape[1])


def only_alone(output: Any) -> Any:
    return steered(output, slice(None)) if count_of(output) == 1 else None


def only_several(least: int) -> Callable[[Any], Any]:
    """As a hook of the prompt alone may be written."""
    return lambda output: steered(output, slice(None)) if count_of(output) >= least else None


def favourite(output: Any) -> Any:
    """Of the last row's logits."""
    output = output.clone()
    output[:, -1, 7] += 6.0
    return output


def patched_forward(target: CausalLM) -> Any:
    layer = target.model.layers[1]
    original = layer.forward

    @functools.wraps(original)  # under the name of transformers' own
    def forward(*args: Any, **kwargs: Any) -> Any:
        return steered(original(*args, **kwargs), -1)

    layer.forward = forward
    return lambda: vars(layer).pop("forward")


def patched_class(target: CausalLM) -> Any:
    kind = type(target.model.layers[0].mlp)
    original = kind.forward
    kind.forward = lambda self, states: steered(original(self, states), -1)
    return lambda: setattr(kind, "forward", original)


def subclass(change: Callable[[Any], Any]) -> Callable[[CausalLM], Any]:
    """A user's class of a model, which changes the logits."""

    def put_on(target: CausalLM) -> Any:
        base = type(target)

        def forward(self: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            output = base.forward(self, input_ids, position_ids=position_ids, **kwargs)
            output.logits = change(output.logits)
            return output

        target.__class__ = type("Own", (base,), {"forward": forward})
        return lambda: setattr(target, "__class__", base)

    return put_on


class Steered(nn.Module):
    def __init__(self, layer: nn.Module, rows: Any = -1) -> None:
        super().__init__()
        self.layer, self.rows = layer, rows

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return steered(self.layer(*args, **kwargs), self.rows)


def replaced_layer(target: CausalLM) -> Any:
    layers = target.model.layers
    original, layers[1] = layers[1], Steered(layers[1])
    return lambda: layers.__setitem__(1, original)


def changed_arguments(target: CausalLM) -> Any:
    """A pre-hook that moves the last position."""

    def later(_: Any, args: Any, kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        cos = cos.clone()
        cos[:, -1] *= 0.5
        return args, {**kwargs, "position_embeddings": (cos, sin)}

    return target.model.layers[1].self_attn.register_forward_pre_hook(later, with_kwargs=True).remove


def everywhere(target: CausalLM) -> Any:
    """A hook of all modules, as debuggers register them."""
    norm = target.model.norm
    return every_module.register_module_forward_hook(
        lambda module, _, output: steered(output, -1) if module is norm else None
    ).remove


def evicting(most: int, keep: int, layers: slice = slice(None)) -> Callable[[CausalLM], Any]:
    """Leaves the last rows of a cache once there are too many, also while a text is generated."""

    def evict(module: Any, _args: Any, kwargs: Any, _output: Any) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values")).layers[module.layer_idx]
        if cache.keys.shape[-2] > most:
            cache.keys, cache.values = cache.keys[..., -keep:, :], cache.values[..., -keep:, :]

    def put_on(target: CausalLM) -> Any:
        chosen = list(target.model.layers)[layers]
        handles = [each.self_attn.register_forward_hook(evict, with_kwargs=True) for each in chosen]
        return lambda: [handle.remove() for handle in handles]

    return put_on


def scaling_the_cache(target: CausalLM) -> Any:
    """Once a pass: shapes stay as they are."""

    def scale(module: Any, _args: Any, kwargs: Any, _output: Any) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values")).layers[module.layer_idx]
        cache.values = 0.9 * cache.values

    return target.model.layers[1].self_attn.register_forward_hook(scale, with_kwargs=True).remove


class EvictingLayer(DynamicLayer):
    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        both = super().update(*args, **kwargs)
        if both[0].shape[-2] > 18:
            self.keys, self.values = both[0][..., -9:, :], both[1][..., -9:, :]
        return both


def replaced_function(home: Any, name: str, by: float = 1.4) -> Callable[[CausalLM], Any]:
    """In the module that layers call it from, as libraries of faster kernels do: it scales its first argument where a
    pass has one token (`[..., tokens, size]`), or by 1.0 everywhere."""
    original = getattr(home, name)

    def scaled(states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(states * (by if states.shape[-2] == 1 else 1.0), *args, **kwargs)

    def put_on(_: CausalLM) -> Any:
        setattr(home, name, functools.wraps(original)(scaled))
        return lambda: setattr(home, name, original)

    return put_on


def moved(arguments: dict[str, Any]) -> dict[str, Any]:
    """With another position of the last token."""
    if (positions := arguments.get("position_ids")) is None:
        return arguments
    return {**arguments, "position_ids": torch.cat((positions[..., :-1], positions[..., -1:] + 2), dim=-1)}


def preparing(method: str) -> Callable[[CausalLM], Any]:
    """A method of a model that makes the arguments of its passes, replaced by one that changes them."""

    def put_on(target: CausalLM) -> Any:
        original = getattr(target, method)
        setattr(target, method, lambda *args, **kwargs: moved(original(*args, **kwargs)))
        return lambda: delattr(target, method)

    return put_on


def registered_mask(_: CausalLM) -> Any:
    """In transformers' registry: hides a token before from passes over one token."""
    original = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def mask(*args: Any, **kwargs: Any) -> Tensor:
        shown: Tensor = original(*args, **{**kwargs, "allow_is_causal_skip": False})
        *_, width, length = shown.shape
        return shown if width > 1 or length == 1 else shown.index_fill(-1, torch.tensor([length // 2]), False)

    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = mask
    return lambda: ALL_MASK_ATTENTION_FUNCTIONS.__delitem__("sdpa")


OTHERWISE: dict[str, Callable[[CausalLM], Any]] = {
    "last row": hook("model.layers.1", lambda output: steered(output, -1)),
    "first row": hook("model.layers.0.mlp", lambda output: steered(output, 0)),
    "only passes of one token": hook("model.layers.1", only_alone),
    "only passes of several": hook("model.embed_tokens", only_several(2)),
    "only passes of four or more": hook("model.norm", only_several(4)),
    "lm_head": hook("lm_head", favourite),
    "mean over the rows": hook("model.layers.1", lambda output: output + output.mean(1, keepdim=True)),
    "pre-hook": changed_arguments,
    "forward": patched_forward,
    "class": patched_class,
    "layer": replaced_layer,
    "subclass": subclass(favourite),
    "all modules": everywhere,
    "evicting": evicting(16, 12),
    "evicting later": evicting(29, 3),
    "evicting in one layer": evicting(20, 19, slice(1, 2)),
    "evicting from the prompt on": evicting(6, 5),
    "scaling the cache": scaling_the_cache,
    "function of transformers": replaced_function(modeling_llama, "apply_rotary_pos_emb"),
    "function of PyTorch": replaced_function(functional, "scaled_dot_product_attention"),
    "operation": replaced_function(torch, "rsqrt"),
    "method of tensors": replaced_function(Tensor, "pow"),
    "inputs": preparing("prepare_inputs_for_generation"),
    "arguments after each token": preparing("_update_model_kwargs_for_generation"),
    "mask": registered_mask,
}  # fmt: skip
ALIKE: dict[str, Callable[[CausalLM], Any]] = {
    "every row": hook("model.layers.1", lambda output: steered(output, slice(None), 0.2)),
    "nothing": hook("model.layers.0", lambda _: None),
    "masked logits": hook("lm_head", lambda output: output.index_fill(-1, torch.arange(3, 9), -torch.inf)),
    "only many rows": hook("model.layers.1", only_several(70)),
    "function": replaced_function(functional, "scaled_dot_product_attention", by=1.0),
    "subclass of alike": subclass(lambda logits: logits.index_fill(-1, torch.arange(3, 9), -torch.inf)),
}
DRAFTS: dict[str, Callable[[CausalLM], SpecDecPPAssistant]] = {
    "chain": assistant_for,
    "tree": lambda target: configured(assistant_for(target), tree="dyspec", tree_budget=9),
    "lookup": lambda target: assist(target, "lookup", default=False),
    "early exit": lambda target: configured(SpecDecPPAssistant.from_early_exit(target, 2), rule="fixed", num_tokens=3),
}


def made(name: str, draft: str) -> tuple[CausalLM, SpecDecPPAssistant, Any]:
    """A target with this code on it, its assistant, and what takes the code off."""
    target = tiny("llama")
    if draft == "early exit":
        quiet_later_layers(target)
    is_later = draft == "early exit" and name not in ("layer", "subclass")  # is made of what it finds
    assistant = None if is_later else DRAFTS[draft](target)
    take_off = {**OTHERWISE, **ALIKE}[name](target)
    return target, assistant or DRAFTS[draft](target), take_off


REPLACED: list[Any] = [
    (modeling_llama, "apply_rotary_pos_emb"), (functional, "scaled_dot_product_attention"), (torch, "rsqrt"),
    (Tensor, "pow"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _classes_are_as_before() -> Any:
    forward = type(tiny("llama").model.layers[0].mlp).forward
    functions = [(home, name, getattr(home, name)) for home, name in REPLACED]
    yield
    for home, name, function in functions:
        setattr(home, name, function)
    type(tiny("llama").model.layers[0].mlp).forward = forward
    every_module._global_forward_hooks.clear()
    ALL_MASK_ATTENTION_FUNCTIONS._local_mapping.clear()


@pytest.mark.daily(
    "last row-chain", "first row-lookup", "only passes of one token-tree", "only passes of several-early exit",
    "pre-hook-lookup", "forward-tree", "class-early exit", "subclass-chain", "evicting-chain", "evicting later-lookup",
    "evicting from the prompt on-early exit", "scaling the cache-lookup", "function of transformers-tree",
    "function of PyTorch-chain", "inputs-chain", "arguments after each token-tree", "mask-tree",
)  # fmt: skip
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_treats_several_tokens_otherwise(name: str, draft: str) -> None:
    """The texts are plain ones, the first, too, in which that is found out."""
    target, assistant, take_off = made(name, draft)
    first = Collector()
    for ids in (PROMPT, prompt(9, seed=4)):
        plain = target.generate(ids, **GREEDY)
        assert torch.equal(target.generate(ids, **GREEDY, assistant_model=assistant, streamer=first), plain)
        assert sum(first.puts, []) == plain[0].tolist()
        first.puts.clear()
    assert assistant.stats.refusal is not None
    assert re.search("(LlamaForCausalLM|Own) runs", str(assistant.stats))
    take_off()
    plain = target.generate(PROMPT, **GREEDY)
    assert torch.equal(target.generate(PROMPT, **GREEDY, assistant_model=assistant), plain)
    assert assistant.stats.refusal is None
    assert assistant.stats.rounds > 0


@pytest.mark.daily(
    "every row-lookup", "nothing-chain", "masked logits-lookup", "only many rows-chain", "function-tree",
    "subclass of alike-chain",
)  # fmt: skip
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", ALIKE)
def test_what_treats_every_token_alike(name: str, draft: str) -> None:
    target, assistant, _ = made(name, draft)
    for _ in range(2):
        plain = target.generate(PROMPT, **GREEDY)
        assert torch.equal(target.generate(PROMPT, **GREEDY, assistant_model=assistant), plain)
        assert assistant.stats.refusal is None
    assert assistant.stats.accepted > 0


@pytest.mark.daily("last row", "mean over the rows", "evicting", "function of PyTorch")
@pytest.mark.parametrize("name", OTHERWISE)
def test_without_looking_at_it_the_text_is_another_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: these tests can fail."""
    target, _, _ = made(name, "lookup")
    plain = target.generate(PROMPT, **GREEDY)
    draft = informed_draft(plain)
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig("fixed", num_tokens=4))
    monkeypatch.setattr(foreign, "is_foreign", lambda *_: False)
    monkeypatch.setattr(foreign, "_replaced_functions", lambda _: ())
    try:
        ours = target.generate(PROMPT, **GREEDY, assistant_model=assistant)
    except (RuntimeError, ValueError, IndexError):
        return
    assert not torch.equal(ours, plain)


class Unseen:
    """Notes calls where nobody looks."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: list[int] = []


@pytest.mark.parametrize("sampled", [False, True])
def test_its_calls_are_few(sampled: bool) -> None:
    """A pass more at 2, 4 and 5 tokens, once; none in the next text."""
    target, passes = quiet_later_layers(tiny("llama")), Unseen()
    assistant = assistant_for(target)
    target.lm_head.register_forward_hook(lambda _, args, __: passes.calls.append(args[0].shape[1]))
    how: dict[str, Any] = {**GREEDY, "do_sample": sampled}
    target.generate(PROMPT, **how, assistant_model=assistant)
    assert len(passes.calls) == assistant.stats.target_passes + 3
    assert max(passes.calls) == 5
    passes.calls.clear()
    target.generate(PROMPT, **how, assistant_model=assistant)
    assert len(passes.calls) == assistant.stats.target_passes


# Code that remembers its calls: the text is that of plain `generate()`, and so are the calls. -----------------------

COUNTED = 0


def after_calls(counts: Callable[[Any], int]) -> Callable[[CausalLM], Any]:
    """Steers from the tenth call on; `counts` says how many there were, given the module."""

    def put_on(target: CausalLM) -> Any:
        def steer(module: Any, _args: Any, output: Any) -> Any:
            return steered(output, slice(None), 3.0) if counts(module) >= 10 else None

        return target.model.layers[1].register_forward_hook(steer)

    return put_on


def in_a_cell() -> Callable[[Any], int]:
    calls = 0

    def count(_: Any) -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def in_a_global() -> Callable[[Any], int]:
    global COUNTED
    COUNTED = 0

    def count(_: Any) -> int:
        global COUNTED
        COUNTED += 1
        return COUNTED

    return count


def in_a_list() -> Callable[[Any], int]:
    calls: list[Any] = []
    return lambda module: calls.append(module) or len(calls)  # type: ignore[func-returns-value]


def in_an_iterator() -> Callable[[Any], int]:
    return functools.partial(lambda count, _: next(count), itertools.count(1))


def on_the_module() -> Callable[[Any], int]:
    def count(module: Any) -> int:
        module.calls = getattr(module, "calls", 0) + 1
        return int(module.calls)

    return count


class OnAnObject:
    def __init__(self) -> None:
        self.kept = {"calls": torch.zeros(1)}

    def __call__(self, _: Any) -> int:
        self.kept["calls"] += 1
        return int(self.kept["calls"])


REMEMBERING = [in_a_cell, in_a_global, in_a_list, in_an_iterator, on_the_module, OnAnObject]


@pytest.mark.daily(
    "in_a_cell-chain", "in_a_global-lookup", "in_a_list-chain", "in_an_iterator-lookup", "on_the_module-chain",
    "OnAnObject-lookup",
)  # fmt: skip
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("kept", REMEMBERING)
def test_what_counts_its_calls(kept: Any, draft: str) -> None:
    texts = []
    for is_ours in (False, True):
        target = quiet_later_layers(tiny("llama"))
        chosen = {"assistant_model": DRAFTS[draft](target)} if is_ours else {}
        after_calls(kept())(target)
        texts.append(
            [target.generate(prompt(12, seed), **{**GREEDY, "max_new_tokens": 9}, **chosen) for seed in (0, 1)]
        )
    assert all(map(torch.equal, *texts))
    assert "calls leave something behind" in str(chosen["assistant_model"].stats)


def test_random_numbers_of_a_hook_are_put_back() -> None:
    """In a text that they make plain the same are drawn as by plain `generate()`."""
    target = tiny("llama")

    def noise(_module: Any, _args: Any, output: Any) -> Any:
        return output + 0.3 * torch.rand_like(output)

    assistant, texts = assistant_for(target), []
    target.model.layers[1].register_forward_hook(noise)
    for arguments in ({}, {"assistant_model": assistant}):
        torch.manual_seed(0)
        texts.append(target.generate(PROMPT, **GREEDY, **arguments))
    assert torch.equal(*texts)


@pytest.mark.daily("False-last row", "True-evicting")
@pytest.mark.parametrize("name", ["last row", "every row", "evicting"])
@pytest.mark.parametrize("default", [False, True])
def test_batches_are_plain(name: str, default: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, assistant, _ = made(name, "chain")
    said: list[str] = []
    monkeypatch.setattr(attached.logger, "warning_once", said.append)
    with assistant.paused():
        plain = target.generate(BATCH, **GREEDY, pad_token_id=0)
    assistant.attach(target, default=default)
    chosen = {} if default else {"assistant_model": assistant}
    assert torch.equal(target.generate(BATCH, **GREEDY, pad_token_id=0, **chosen), plain)
    assert "Passes of a batch of 2 are not compared" in str(assistant.stats.refusal)
    assert len(said) == 1


def test_a_cache_whose_layers_evict() -> None:
    target = tiny("llama")
    assistant = assistant_for(target)

    def cache() -> DynamicCache:
        made = DynamicCache()
        made.layer_class_to_replicate = EvictingLayer
        return made

    plain = target.generate(PROMPT, **GREEDY, past_key_values=cache())
    for _ in range(2):
        ours = cache()
        assert torch.equal(target.generate(PROMPT, **GREEDY, past_key_values=ours, assistant_model=assistant), plain)
    assert target.generate(PROMPT, **GREEDY, assistant_model=assistant) is not None
    assert assistant.stats.refusal is None


class LayerWithoutCrop(DynamicLayer):
    def crop(self, max_length: int) -> None:
        raise NotImplementedError


class CacheWithoutCrop(DynamicCache):
    def crop(self, max_length: int) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("layers", [False, True])
def test_a_cache_with_a_crop_of_its_own(layers: bool) -> None:
    """Which plain generation does not call."""
    target = tiny("llama")

    def cache() -> DynamicCache:
        made = DynamicCache() if layers else CacheWithoutCrop()
        made.layer_class_to_replicate = LayerWithoutCrop if layers else made.layer_class_to_replicate
        return made

    plain = target.generate(PROMPT, **GREEDY, past_key_values=cache())
    for draft in ("chain", "tree", "lookup"):
        assistant = DRAFTS[draft](target)
        found = target.generate(PROMPT, **GREEDY, past_key_values=cache(), assistant_model=assistant)
        assert torch.equal(found, plain)
        assert "has a crop of its own" in str(assistant.stats.refusal)


@pytest.mark.parametrize("name", ["last row", "evicting later"])
def test_a_cache_can_be_carried_on(name: str) -> None:
    target, assistant, _ = made(name, "chain")
    how: dict[str, Any] = {**GREEDY, "return_dict_in_generate": True}
    ends = []
    for arguments in ({}, {"assistant_model": assistant}):
        first = target.generate(PROMPT, **how, **arguments)
        cache = first.past_key_values
        ends.append((target.generate(first.sequences, **how, past_key_values=cache).sequences, cache.layers[0].keys))
    (plain, keys), (ours, our_keys) = ends
    assert torch.equal(ours, plain)
    torch.testing.assert_close(our_keys, keys)


def test_graphs_are_not_made_of_it() -> None:
    """A replay would not call a hook: the strength of this one is a number of Python's."""
    target, strength = quiet_later_layers(tiny("llama")), Unseen()
    assistant = assistant_for(target)
    strength.calls = [0]
    target.model.layers[1].register_forward_hook(
        lambda _, __, output: steered(output, slice(None), float(strength.calls[0]))
    )
    with pretend_graphs():
        for number in range(4):
            strength.calls = [number]
            plain = target.generate(PROMPT, **GREEDY)
            assert torch.equal(target.generate(PROMPT, **GREEDY, assistant_model=assistant), plain)
            assert "runs a hook of LlamaDecoderLayer" in str(assistant.stats.uncaptured)
    assert assistant.stats.drafted > 0


class Functions(TorchFunctionMode):
    """Scales what linear layers make; of some passes alone, where it is asked to."""

    def __init__(self, only_alone: bool = False) -> None:
        super().__init__()
        self.only_alone = only_alone

    def change(self, func: Any, found: Any) -> Any:
        is_one = not self.only_alone or isinstance(found, Tensor) and found.shape[-2:-1] == (1,)
        return found * STRENGTH[0] if is_one and func in (functional.linear, torch.ops.aten.mm.default) else found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.change(func, func(*args, **(kwargs or {})))


class Operations(TorchDispatchMode):
    """The same of matrix products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * STRENGTH[0] if func is torch.ops.aten.mm.default else found


STRENGTH = [1.0]


@pytest.mark.daily("functions", "counter", "device")
@pytest.mark.takes(2)
@pytest.mark.parametrize(
    ("mode", "says"),
    [(Functions, ".*runs in a mode of PyTorch, Functions.*"), (Operations, ".*runs in a mode of PyTorch, Operations.*"),
     (lambda: FlopCounterMode(display=False), ".*made in a mode of PyTorch, .*FlopCounterMode.*"),
     (lambda: torch.device("cpu"), None)],
    ids=["functions", "operations", "counter", "device"],
)  # fmt: skip
def test_graphs_are_not_made_in_modes(
    mode: Callable[[], Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay would not go through a user's; a default device is one of PyTorch's."""
    target, how = quiet_later_layers(tiny("llama")), {"do_sample": False, "max_new_tokens": 16}
    assistant = assistant_for(target)
    with pretend_graphs():
        target.generate(PROMPT, **how, assistant_model=assistant)
        assert assistant.stats.uncaptured is None
        for strength in (1.1, 1.4):
            monkeypatch.setattr(f"{__name__}.STRENGTH", [strength])
            with mode():
                plain = target.generate(PROMPT, **how)
                assert torch.equal(target.generate(PROMPT, **how, assistant_model=assistant), plain)
            assert re.fullmatch(says or "None", str(assistant.stats.uncaptured))
    assert assistant.stats.drafted > 0


def test_a_mode_that_looks_at_the_tokens_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_for(target)
    monkeypatch.setattr(f"{__name__}.STRENGTH", [1.7])
    with Functions(only_alone=True):
        plain = target.generate(PROMPT, **GREEDY)
        assert torch.equal(target.generate(PROMPT, **GREEDY, assistant_model=assistant), plain)
    assert "runs in a mode of PyTorch, Functions" in str(assistant.stats.refusal)
    target.generate(PROMPT, **GREEDY, assistant_model=assistant)
    assert assistant.stats.refusal is None


def test_where_passes_are_not_compared() -> None:
    target = tiny_of("granitemoehybrid")
    assistant = assistant_for(target)
    target.model.layers[0].register_forward_hook(lambda *_: None)
    how = {**GREEDY, "assistant_model": assistant}
    assert torch.equal(target.generate(PROMPT, **how), target.generate(PROMPT, **{**how, "assistant_model": None}))
    assert "are not compared with passes over one token" in str(assistant.stats.refusal)


# What counts as code of others --------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["gpt2", "gemma3", "jamba", pytest.param("*", marks=pytest.mark.slow)])
def test_functions_that_transformers_imports_are_its_own(names: str) -> None:
    for path in Path(transformers.__file__).parent.glob(f"models/{names}/modeling_*.py"):
        home = f"transformers.models.{path.parent.name}.{path.stem}"
        with contextlib.suppress(ImportError):  # of packages that are not installed
            importlib.import_module(home)
            assert not list(foreign._replaced_functions({type("Layer", (), {"__module__": home})}))


def test_another_set_of_hooks_is_compared_again() -> None:
    target, assistant, take_off = made("every row", "chain")
    target.generate(PROMPT, **GREEDY, assistant_model=assistant)
    known = foreign_passes(target)
    assert known is not None
    assert known.width >= 5
    assert foreign_passes(target) is known
    second = OTHERWISE["last row"](target)
    assert torch.equal(target.generate(PROMPT, **GREEDY, assistant_model=assistant), target.generate(PROMPT, **GREEDY))
    assert assistant.stats.refusal is not None
    second()
    take_off()
    assert foreign_passes(target) is None


def test_forwards_that_come_and_go_at_one_address() -> None:
    target = tiny("llama")
    layer, seen = target.model.layers[1], set()
    for _ in range(5):
        layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
        seen.add(id(foreign_passes(target)))
        foreign_passes(target).width = 99  # type: ignore[union-attr]
        del layer.forward
        layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
        assert foreign_passes(target).width == 1  # type: ignore[union-attr]
        del layer.forward


def test_what_libraries_put_on_a_model_is_known() -> None:
    import accelerate
    from accelerate.hooks import ModelHook, add_hook_to_module
    from peft import LoraConfig, get_peft_model

    target = tiny("llama")
    assert foreign_passes(target) is None
    accelerate.dispatch_model(target, {"": "cpu"}, force_hooks=True)
    get_peft_model(target, LoraConfig(target_modules=["q_proj"]))
    target.generate(PROMPT, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    target.model.norm.forward = torch.no_grad()(target.model.norm.forward)
    target.lm_head.forward = torch.compile(target.lm_head.forward, backend="eager")
    assert foreign_passes(target) is None

    class Own(ModelHook):
        pass

    add_hook_to_module(target.model.norm, Own(), append=True)
    assert foreign_passes(target) is not None


@pytest.mark.parametrize("wrap", [
    torch.no_grad(), functools.partial, lambda f: types.MethodType(lambda _, *args: f(*args), 1),
    functools.partial(torch.compile, backend="eager"),
])  # fmt: skip
def test_what_libraries_wrap_is_looked_into(wrap: Any) -> None:
    target = tiny("llama")
    target.model.norm.register_forward_hook(wrap(lambda *_: None))
    assert foreign_passes(target) is not None


def test_an_activated_adapter() -> None:
    """A hook of PEFT adapts the last tokens of each pass: as many as follow the adapter's invocation in the prompt."""
    target = tiny("llama")
    assistant = assistant_for(target)
    invocation = PROMPT[0, -3:-1].tolist()
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], alora_invocation_tokens=invocation,
        init_lora_weights=False,
    )  # fmt: skip
    model = get_peft_model(target, config)
    plain = model.generate(input_ids=PROMPT, **GREEDY)
    for _ in range(2):
        assert torch.equal(model.generate(input_ids=PROMPT, assistant_model=assistant, **GREEDY), plain)
        assert "_alora_offsets_pre_forward_hook" in str(assistant.stats.refusal)


def test_kernels_of_the_hub_are_known() -> None:
    target = tiny("llama")
    for folder, is_known in ((foreign.KERNELS, True), ("/elsewhere", False)):
        found: dict[str, Any] = {"__name__": "norms_1a2b"}
        exec(compile("def forward(self, x): return x", f"{folder}/kernels--org--norms/norms.py", "exec"), found)  # noqa: S102 - the test's own code
        target.model.norm.forward = types.MethodType(found["forward"], target.model.norm)
        assert (foreign_passes(target) is None) == is_known


def test_the_code_of_a_repository_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a class of another package overrides is compared."""
    target, sources = tiny("llama"), "transformers_modules.org.repo"
    (subclass(lambda logits: logits))(target)
    assert foreign_passes(target) is not None

    class Norm(nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            return states

    class Llama(PreTrainedModel, GenerationMixin):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    for kind in (Norm, Llama):
        monkeypatch.setattr(kind, "__module__", sources)
        monkeypatch.setitem(kind.forward.__globals__, "__name__", sources)
    target.__class__, target.model.norm = Llama, Norm()
    assert foreign_passes(target) is None
    target.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert foreign_passes(target) is not None


def test_an_early_exit_leaves_hooks_to_its_target() -> None:
    """Which it would call with each of its own steps."""
    target, calls = quiet_later_layers(tiny("llama")), []
    target.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    target.model.layers[1].register_forward_hook(functools.partial(lambda _log, *_: None, Lock()))  # cannot be copied
    patched_forward(target)
    assistant = DRAFTS["early exit"](target)
    assert not any(each._forward_hooks for each in assistant.drafter.model.modules())
    assert not any("forward" in vars(each) for each in assistant.drafter.model.modules())
    assert calls == []


def test_partly_agreeing_drafts_may_be_hooked_themselves() -> None:
    """p alone decides."""
    target = tiny("llama")
    draft = partly_agreeing(target)
    draft.model.layers[1].register_forward_hook(lambda *args: steered(args[-1], -1, 0.1))
    assistant = SpecDecPPAssistant.from_draft(draft, target)
    assert torch.equal(target.generate(PROMPT, **GREEDY, assistant_model=assistant), target.generate(PROMPT, **GREEDY))
    assert assistant.stats.refusal is None
