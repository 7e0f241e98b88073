"""What a repository may say of a draft: known fields within bounds, checked before anything is made of them.

A repository is data of anybody. None of its numbers may decide how long loading takes, and none of its fields may name
code that transformers would fetch and run, as `attn_implementation` can: fields that are not known do not get there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_specdecpp.config.types import shown

# What a field may be: a whole number in a range; a number from the first to the second of a pair; one of some names;
# true or false (`bool`); a list of one of these; a mapping with fields of its own.
Bounds: TypeAlias = "range | tuple[float, float] | frozenset[str] | type[bool] | list[Any] | Mapping[str, Any]"

POSITIVE = (1e-9, 2.0**31)
TOKENS = range(1, 2**22 + 1)
SIZE = range(1, 2**20 + 1)
HEADS = range(1, 2**12 + 1)
HEAD_SIZE = range(2, 2**12 + 1, 2)
PLACES = range(1, 2**31)
BLOCK = range(1, 128 + 1)  # rows of a block, which a pass has in every round; 16 are usual
DEPTH = range(1, 64 + 1)  # layers of a draft; most have one, and none is known with more than ten
OF_TARGET = range(2**10)  # a layer of a target
ACTIVATIONS = frozenset(ACT2FN) - {"prelu", "xielu"}  # which have weights
FULL, SLIDING = "full_attention", "sliding_attention"

ROPE: dict[str, Bounds] = {
    "rope_type": frozenset({"default", *ROPE_INIT_FUNCTIONS}),
    "rope_theta": POSITIVE,
    "partial_rotary_factor": (1e-9, 1.0),
    "mrope_section": [range(2**12)],
    "mrope_interleaved": bool,
    "truncate": bool,
    "original_max_position_embeddings": PLACES,
    **dict.fromkeys(("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"), POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), POSITIVE),
    **dict.fromkeys(("short_factor", "long_factor"), [POSITIVE]),
}
WHOLE_HEADS = (None, "default", "proportional")  # rotate as many numbers as a head has, whatever the share
# Of Llama's and Qwen3's layers, with transformers' names.
LAYER: dict[str, Bounds] = {
    "vocab_size": TOKENS,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "hidden_act": ACTIVATIONS,
    "rms_norm_eps": (0.0, 1.0),
    "max_position_embeddings": PLACES,
    "attention_bias": bool,
    "mlp_bias": bool,
    "layer_types": [frozenset({FULL, SLIDING})],
    "sliding_window": PLACES,
    "use_sliding_window": bool,
    "max_window_layers": range(2**31),
    "rope_parameters": ROPE,
}
KEY_HEADS = ("num_key_value_heads", "num_global_key_value_heads")
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
CURE = "Correct config.json, or download or save the repository again."


def check_fields(values: Any, known: Mapping[str, Bounds], path: str = "", needed: Iterable[str] = ()) -> None:
    """Raise `ValueError` naming the first field that is not known, out of bounds, or needed and missing.

    Args:
        values: by name; `None` is as if left out.
        path: what the fields are called before their names, such as `"layer."`.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{path.rstrip('.')}={shown(values)} must be a mapping. {CURE}")
    if missing := [name for name in needed if values.get(name) is None]:
        raise ValueError(f"{path}{missing[0]} is missing, so the draft's tensors cannot be checked. {CURE}")
    for name, value in values.items():
        if name not in known:
            raise ValueError(
                f"{path}{str(name)[:80]} is not known; it may be of a newer version: pip install -U hf-specdecpp"
            )
        bounds = known[name]
        if value is not None and isinstance(bounds, Mapping):
            check_fields(value, bounds, f"{path}{name}.")
        elif value is not None and not _is_within(value, bounds):
            raise ValueError(f"{path}{name}={shown(value)} must be {_name(bounds)}. {CURE}")


def check_layers(layer: Mapping[str, Any], path: str = "layer.", known: Mapping[str, Bounds] = LAYER) -> None:
    """The same of a draft's layers, whose numbers must also go together."""
    check_fields(layer, known, path, NEEDED)
    heads, differing = layer["num_attention_heads"], layer.get("per_layer_config") or {}
    for name, keys in [(name, each.get(name)) for each in (layer, *differing.values()) for name in KEY_HEADS]:
        if heads % (keys or heads):
            raise ValueError(f"{path}num_attention_heads={heads} must be a multiple of {name}={keys}. {CURE}")
    types, depth = layer.get("layer_types"), layer["num_hidden_layers"]
    if types is not None and len(types) != depth:
        raise ValueError(f"layer_types={shown(types)} must say a type for each of {depth} layers. {CURE}")
    rope = layer.get("rope_parameters") or {}
    if rope.get("partial_rotary_factor") not in (None, 1.0) and rope.get("rope_type") not in WHOLE_HEADS:
        raise ValueError(f"rope_parameters={shown(rope)} rotate a part of each head, which is not supported. {CURE}")


def _is_within(value: Any, bounds: Any) -> bool:
    if isinstance(bounds, range):
        return type(value) is int and value in bounds
    if isinstance(bounds, tuple):
        return type(value) in (int, float) and bounds[0] <= value <= bounds[1]  # NaN is not
    if isinstance(bounds, list):
        return isinstance(value, list) and all(_is_within(each, bounds[0]) for each in value)
    if isinstance(bounds, frozenset):
        return isinstance(value, str) and value in bounds
    return type(value) is bounds


def _name(bounds: Any) -> str:
    """Such as "a whole number from 1 to 64"."""
    if isinstance(bounds, range):
        return f"{'an even' if bounds.step == 2 else 'a whole'} number from {bounds[0]} to {bounds[-1]}"
    if isinstance(bounds, tuple):
        return f"a number from {bounds[0]:g} to {bounds[1]:g}"
    if isinstance(bounds, list):
        return f"a list, each item {_name(bounds[0])}"
    return "true or false" if bounds is bool else f"one of {', '.join(sorted(bounds))}"
