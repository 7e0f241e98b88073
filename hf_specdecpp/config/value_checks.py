"""Checks of types and bounds of values from users and files, before they are used.

Repositories are not trusted. Their numbers must not determine how long loading takes, and their fields must not name
code that transformers would download and run, as `attn_implementation` can. Only listed fields reach transformers,
whose own configs check their types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hf_specdecpp.models.causal_lm import article

Settings = TypeVar("Settings")
UNIONS = (Union, UnionType)  # `get_origin` of `Literal[...] | None` and of `int | None`
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "left out"}
LARGEST = 2**63  # integers must be smaller, as those of tensors are; JSON has integers of any length


def check_values(
    values: Mapping[str, Any], hints: Mapping[str, Any], path: str = "", error: type[Exception] = ValueError
) -> None:
    """Raise `error` naming the first of `values` that has no hint with its name, or does not match it: a type, a
    `range` of whole numbers, or the least and greatest number. `path`: prefix of names in messages, as `"head."`."""
    for name, value in values.items():
        if name not in hints:
            raise error(f"{path}{name[:80]} is not known; it may be of a newer version: pip install -U hf-specdecpp")
        if not _is(value, hints[name]):
            near = did_you_mean(value, _words(hints[name]))
            raise error(f"{path}{name}={shown(value)} must be {_name(hints[name])}.{near}")


def check_options(options: Mapping[str, Any], hints: Mapping[str, Any], others: Sequence[str], where: str = "") -> None:
    """Raise `TypeError` if the keyword arguments `options` of a function have a name that is not in `hints`, or a value
    that does not match its hint. For the message: `others`, names of further arguments, and `where` there is no such
    option, as " for draft='lookup'"."""
    known = [*others, *hints]
    for unknown in sorted(options.keys() - hints.keys()):
        near = did_you_mean(unknown, known)
        raise TypeError(f"There is no option {unknown}{where}.{near} There are {', '.join(known)}.")
    check_values(options, hints, error=TypeError)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A question for the end of a message, such as " Did you mean threshold?", with the word of `known` that is most
    similar to `word`; empty if none is."""
    near = get_close_matches(word.lower(), known, 1) if isinstance(word, str) else []
    return f" Did you mean {near[0]}?" if near else ""


def with_checked_names(cls: type[Settings]) -> type[Settings]:
    """Decorate a dataclass so that its constructor first passes the names of its keyword arguments to
    `cls.check_names`. The signature that `help` and editors show is unchanged."""
    construct: Any = cls.__init__

    @wraps(construct)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        cls.check_names(given)  # type: ignore[attr-defined]
        construct(self, *args, **given)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


# Cached, since every generation checks its settings.
hints_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _is(value: Any, rule: Any) -> bool:
    """Whether `value` matches `rule`: an annotated type, a `range`, or a tuple of the least and greatest number."""
    kind, inner = get_origin(rule), get_args(rule)
    if kind in UNIONS:
        return any(_is(value, one) for one in inner)
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if kind in (list, Sequence):
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_is(each, inner[0]) for each in value)
    if kind is dict:
        return isinstance(value, dict) and all(_is(each, inner[1]) for each in value.values())
    if isinstance(rule, range):
        return type(value) is int and value in rule
    if isinstance(rule, tuple):
        return isinstance(value, Real) and not isinstance(value, bool) and rule[0] <= value <= rule[1]  # excludes NaN
    if rule is Any:
        return True
    if isinstance(value, bool):
        return rule is bool
    if isinstance(value, int) and not -LARGEST < value < LARGEST:
        return False
    if rule is float:
        return isinstance(value, Real) and math.isfinite(value)
    if not isinstance(kind or rule, type):  # an alias, such as NumPy's NDArray in Python 3.14
        return _is(value, (kind or rule).__value__)
    return isinstance(value, kind or rule)


def _name(rule: Any) -> str:
    """A rule of `_is` in words, such as "a list, each item a whole number or left out" for `list[int] | None`."""
    kind, inner = get_origin(rule), get_args(rule)
    if kind in UNIONS:
        return " or ".join(_name(one) for one in inner)
    if kind is Literal:
        return f"one of {', '.join(inner)}" if len(inner) > 1 else repr(inner[0])
    if kind in (list, Sequence):
        return f"a list, each item {_name(inner[0])}"
    if kind is dict and inner[1] is not Any:
        return f"a mapping, each value {_name(inner[1])}"
    if isinstance(rule, range):
        return f"a whole number from {rule[0]} to {rule[-1]}"
    if isinstance(rule, tuple):
        return f"a number from {rule[0]:g} to {rule[1]:g}"
    if kind is dict or rule is dict:
        return "a mapping"
    if (known := NAMES.get(rule)) is not None:
        return known
    first = next(iter(fields(rule)), None) if is_dataclass(rule) else None
    example = f", such as {rule.__name__}({first.name}={first.default!r})" if first is not None else ""
    return f"{article(rule.__name__)}{example}"


def _words(rule: Any) -> list[str]:
    """The strings that a rule allows, such as ["auto", "off"] for `Literal["auto", "off"]`; `[]` for other rules."""
    if get_origin(rule) is Literal:
        return list(get_args(rule))
    return [word for one in get_args(rule) for word in _words(one)] if get_origin(rule) in UNIONS else []


def shown(value: Any) -> str:
    """The `repr` of a value, for a message; truncated to 200 characters."""
    text = repr(value) if not isinstance(value, int) or abs(value) < LARGEST else "a number of more than 63 bits"
    return text if len(text) <= 200 else f"{text[:200]}..."


# Configs of downloaded drafts. ----------------------------------------------------------------------------------------

COUNT = range(1, 2**31)
LISTS = ("reads", "layer_ids", "target_layer_ids")  # fields that list indices of a target's layers
# Bounds of the numbers in a config, by name. A number outside its bounds would take too much memory or time, or make
# the draft compute NaN. Numbers without bounds determine shapes only, which are compared with the tensors' shapes.
BOUNDS: dict[str, range | tuple[float, float]] = {
    **dict.fromkeys(("vocab_size", "draft_vocab_size"), range(1, 2**22 + 1)),
    "num_hidden_layers": range(1, 64 + 1),  # of a draft; most drafts have one layer, none has more than ten
    "num_target_layers": range(1, 2**10 + 1),
    **dict.fromkeys(LISTS, range(2**10 + 1)),
    **dict.fromkeys(("hidden_size", "state_size"), range(1, 2**20 + 1)),
    **dict.fromkeys(("num_reads", "num_kv_shared_layers"), range(64 + 1)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"), range(1, 2**12 + 1)),
    **dict.fromkeys(("num_centroids", "centroid_intermediate_top_k", "sliding_window", "swa_window_size"), COUNT),
    "max_position_embeddings": COUNT,
    "mask_token_id": range(2**22 + 1),
    "block_size": range(1, 128 + 1),  # rows of a block, in every draft pass; usually 16
    **dict.fromkeys(("rms_norm_eps", "partial_rotary_factor"), (0.0, 1.0)),
    "logit_cap": (1e-9, 2.0**31),
}
FULL, SLIDING = "full_attention", "sliding_attention"
WHOLE_HEADS = (None, "default", "proportional")  # rope types that rotate whole heads for any `partial_rotary_factor`
# Fields of Llama's and Qwen3's layers, with transformers' names.
LAYER = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "mlp_bias", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "rope_parameters",
)  # fmt: skip
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
CURE = "Correct config.json, or download or save the repository again."


def check_numbers(values: Mapping[str, Any], path: str = "") -> None:
    """Raise `ValueError` naming the first field of a config, or of a mapping in it at any depth, with a number outside
    the `BOUNDS` of its name or not finite. Fields that are `None` count as missing.

    `path`: prefix of field names in the message, such as `"layer."`."""
    for name, value in values.items():
        bounds = BOUNDS.get(name)
        for each in value if isinstance(value, list) and (bounds is None or name in LISTS) else [value]:
            if bounds is not None and each is not None and not _is(each, bounds):
                raise ValueError(f"{path}{name}={shown(value)} must be {_name(bounds)}. {CURE}")
            if isinstance(each, Mapping):
                check_numbers(each, f"{path}{name}.")
            elif type(each) in (int, float) and not -LARGEST < each < LARGEST:  # also NaN
                raise ValueError(f"{path}{name}={shown(value)} must be a finite number below 2**63. {CURE}")


def check_layers(layer: Mapping[str, Any], path: str = "layer.", known: Iterable[str] = LAYER) -> None:
    """Raise `ValueError` for a config of a draft's layers with a number outside `BOUNDS`, a missing field of `NEEDED`,
    a field not in `known`, a number of attention heads that is no multiple of the number of key-value heads, or a
    rotary embedding that rotates only a part of each head. `path` as in `check_numbers`."""
    if not isinstance(layer, Mapping):
        raise ValueError(f"{path.rstrip('.')}={shown(layer)} must be a mapping. {CURE}")
    if missing := [name for name in NEEDED if layer.get(name) is None]:
        raise ValueError(f"{path}{missing[0]} is missing, so the draft's tensors cannot be checked. {CURE}")
    check_values(layer, dict.fromkeys(known, Any), path)
    check_numbers(layer, path)
    heads, own = layer["num_attention_heads"], (layer.get("per_layer_config") or {}).values()
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if wrong := [each[name] for each in (layer, *own) if heads % (each.get(name) or heads)]:
            raise ValueError(f"{path}num_attention_heads={heads} must be a multiple of {name}={wrong[0]}. {CURE}")
    rope = layer.get("rope_parameters")
    kinds = [rope, *rope.values()] if isinstance(rope, Mapping) else []  # for all layers, or by kind of layer
    for each in (kind for kind in kinds if isinstance(kind, Mapping)):
        if each.get("partial_rotary_factor") not in (None, 1.0) and each.get("rope_type") not in WHOLE_HEADS:
            raise ValueError(f"{path}rope_parameters={shown(each)} rotate a part of each head: not supported. {CURE}")
