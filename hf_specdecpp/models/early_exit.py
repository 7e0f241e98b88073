"""Drafts made of the target's own layers: copies of its modules that share its tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import index
from types import MethodType
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from hf_specdecpp.models.causal_lm import CausalLM, has_compiled_forward, inner_decoder
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.foreign import is_foreign
from hf_specdecpp.models.quantised import states_of

# Attributes with the index of the cache layer that attention writes to (`layer_id` in GPT-Neo).
LAYER_NUMBERS = ("layer_idx", "layer_id")
# Config fields that count first layers (all below `first_k_dense_replace` are dense), and that list layer indices.
# The draft's modules exist already, so these fields matter only if the draft is saved and loaded from files.
COUNTS = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
NUMBERS = ("mlp_only_layers", "moe_layers")


def early_exit(target: CausalLM, layers: int | Sequence[int]) -> CausalLM:
    """A draft made of some of the target's layers, its embeddings, final norm and LM head; `ValueError` if the target
    cannot be assisted, `layers` is invalid, the layers cannot be separated, or no chosen layer has attention.

    The modules are copies that share all parameters and buffers with the target: the draft takes hardly any memory,
    follows the target to another device, and can have a LoRA adapter without changing the target.

    Args:
        layers: the number n of layers to take, which are the first n, or ascending layer indices.
    """
    check_target(target, recurrent=True)
    decoder = inner_decoder(target)
    kept = check_layers(layers, len(layer_stack(decoder, target)[1]))
    if (reason := why_no_early_exit(target, decoder.config)) is not None:
        raise ValueError(f"{type(target).__name__} {reason}. Use an independent draft.")
    draft = with_layers(target, kept)
    cache = DynamicCache(config=draft.config.get_text_config(decoder=True))
    if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        raise ValueError(
            f"layers={layers!r} of {type(target).__name__} have no attention, so their cache cannot tell how much text "
            "it holds. Choose layers with attention among them."
        )
    return draft


def why_no_early_exit(target: CausalLM, config: Any) -> str | None:
    """Why a subset of the target's layers cannot draft; `None` if it can. `config` is that of the target's decoder."""
    if getattr(config, "num_kv_shared_layers", 0):
        return "shares keys and values between layers, so a subset of its layers is not a model"
    if getattr(config, "hidden_size_per_layer_input", 0):
        return "has embeddings for each of its layers in one table, so a subset of its layers is not a model"
    if target.device.type == "meta" and getattr(target, "_hf_hook", None) is not None:  # else a model without weights
        return "is offloaded, so each layer of a draft made of its layers would be loaded for each drafted token"
    return None


def with_layers(model: CausalLM, chosen: Sequence[int]) -> CausalLM:
    """A copy of the model, in eval mode and sharing its tensors, whose decoder has the layers with the indices `chosen`
    in this order; an index may be repeated. `ValueError` if the model's layers are not found."""
    copied = copy_sharing(model)
    # Trainers (TRL's, accelerate's mixed precision) set bound methods that call the original model's forward.
    if isinstance(vars(copied).get("forward"), MethodType):
        del copied.forward
    decoder = inner_decoder(copied)
    name, stack = layer_stack(decoder, model)
    layers = [copy_sharing(stack[own]) if own in chosen[:place] else stack[own] for place, own in enumerate(chosen)]
    setattr(decoder, name, nn.ModuleList(layers))
    for place, layer in enumerate(layers):
        for module in layer.modules():
            for attribute in LAYER_NUMBERS:
                if isinstance(getattr(module, attribute, None), int):
                    setattr(module, attribute, place)
    found = [m.config for m in copied.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)]
    both = (*found, *(config.get_text_config(decoder=True) for config in found))
    for config in {id(each): each for each in both}.values():  # modules of one model share them
        _choose_layers(config, chosen, len(stack))
    return copied.eval()


def copy_sharing(module: Any, *others: Any, tensors: Iterable[object] = ()) -> Any:
    """A deep copy of `module` that refers to the same tensors as `module` instead of copies: to its parameters and
    buffers, to those of the modules `others`, and to the objects `tensors`. The copy has no foreign hooks and forwards
    (`models.foreign`), because a draft would call them more often than its target does."""
    kept = [each for part in (module, *others) for each in (*part.parameters(), *part.buffers(), *states_of(part))]
    shared: dict[int, object] = {id(each): each for each in (*kept, *tensors)}
    for part in module.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            if any(map(is_foreign, hooks.values())):
                shared[id(hooks)] = OrderedDict(item for item in hooks.items() if not is_foreign(item[1]))
    copied = copy.deepcopy(module, shared)
    for part in copied.modules():
        # A compiled forward runs the original, and a foreign one may; with accelerate's hooks forwards are kept.
        if has_compiled_forward(part) or (
            "forward" in vars(part) and "_hf_hook" not in vars(part) and is_foreign(part.forward)
        ):
            del part.forward
    return copied


def check_layers(layers: Any, num_layers: int) -> list[int]:
    """Indices of the layers that `layers` means: 3 becomes [0, 1, 2], a sequence of indices a list. `ValueError` unless
    they ascend, exist, and are at least one but not all of a target's `num_layers` layers."""
    try:
        kept = list(range(min(layers, num_layers + 1))) if type(layers) is int else [index(each) for each in layers]
    except TypeError:  # of a string or another type
        kept = []
    if not kept or kept != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= num_layers:
        raise ValueError(
            f"layers={layers!r} must be a number from 1 to {num_layers - 1}, or ascending layer indices from 0 to "
            f"{num_layers - 1}: the target has {num_layers} layers."
        )
    if len(kept) == num_layers:
        raise ValueError(f"layers={layers!r} keeps all {num_layers} layers: that draft is as slow as the target.")
    return kept


def layer_stack(decoder: CausalLM, target: CausalLM) -> tuple[str, nn.ModuleList]:
    """Attribute name and list of the layers in a target's `decoder`; `ValueError` if they are not found."""
    depth = decoder.config.num_hidden_layers
    for name, module in decoder.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    raise ValueError(
        f"hf_specdecpp does not find the {depth} layers of {type(target).__name__}, so it cannot exit early from it. "
        "Use an independent draft."
    )


def per_layer(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """The fields of a config that are lists with an entry for each layer, by name: `layer_types`, and the like."""
    depth = getattr(config, "num_hidden_layers", None)
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and "layer" in name}
    return {name: value for name, value in lists.items() if len(value) == depth and name not in NUMBERS}


def _choose_layers(config: PreTrainedConfig, chosen: Sequence[int], depth: int) -> None:
    """Change `config`, in place, to describe the chosen layers only, if it describes `depth` layers.

    Example: `first_k_dense_replace` 3 becomes 2 for the layers 0, 2 and 5, because the first two of them are dense."""
    if getattr(config, "num_hidden_layers", None) != depth:
        return
    for name, value in per_layer(config).items():
        setattr(config, name, [value[i] for i in chosen])
    for name in COUNTS:
        if type(count := getattr(config, name, None)) is int:
            setattr(config, name, sum(own < count for own in chosen))
    for name in NUMBERS:
        if isinstance(numbers := getattr(config, name, None), list):
            setattr(config, name, [place for place, own in enumerate(chosen) if own in numbers])
    # Fields of single layers that replace the config's, such as other numbers of heads.
    differing = {int(layer): own for layer, own in (config.to_dict().get("per_layer_config") or {}).items()}
    config.num_hidden_layers = len(chosen)
    if differing:
        config.per_layer_config = {place: differing[own] for place, own in enumerate(chosen) if own in differing}
