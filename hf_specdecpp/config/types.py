"""Whether values that come from YAML or JSON are of the types that annotations promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

UNIONS = (Union, UnionType)  # of `Literal[...] | None` and of `int | None`
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "left out"}
LARGEST = 2**63  # no integer of a tensor is larger, and JSON has integers of any length


def check_types(settings: Any, path: str = "") -> None:
    """Raise `ValueError` naming the first field, in nested dataclasses too, whose value is of another type.

    Args:
        settings: a dataclass.
        path: what its fields are called before their names, such as `"head."`.
    """
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    _check(values, _hints(settings.__class__), path)
    for name, value in values.items():
        if is_dataclass(value):
            check_types(value, f"{path}{name}.")


def check_arguments(function: Callable[..., Any], values: Any, path: str = "") -> None:
    """Raise `ValueError` unless `values` is a mapping of arguments that `function` has, of the types it annotates.

    Args:
        path: what the arguments are called before their names, such as `"head."`.
    """
    hints = _hints(function)
    if not isinstance(values, dict):
        raise ValueError(f"{path.rstrip('.')}={shown(values)} must be a mapping.")
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"{path}{unknown[0]} is not known; it may be of a newer version: pip install -U hf-specdecpp")
    _check(values, hints, path)


def _check(values: dict[str, Any], hints: dict[str, Any], path: str) -> None:
    for name, value in values.items():
        if not _is(value, hints[name]):
            raise ValueError(f"{path}{name}={shown(value)} must be {_name(hints[name])}.")


@cache
def _hints(annotated: Any) -> dict[str, Any]:  # kept, since a generation checks its settings
    return get_type_hints(annotated)


def _is(value: Any, hint: Any) -> bool:
    if get_origin(hint) in UNIONS:
        return any(_is(value, one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, list | tuple) and all(_is(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_is(item, get_args(hint)[1]) for item in value.values())
    if hint is Any:
        return True
    if isinstance(value, bool):
        return hint is bool
    if isinstance(value, int) and not -LARGEST < value < LARGEST:
        return False
    if hint is float:
        return isinstance(value, Real) and math.isfinite(value)
    return isinstance(value, hint)


def shown(value: Any) -> str:
    """A value for a message: the start of a long one."""
    text = repr(value) if not isinstance(value, int) or abs(value) < LARGEST else "a number of more than 63 bits"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _name(hint: Any) -> str:
    """Such as "a list, each item a whole number, or left out" for `list[int] | None`."""
    if get_origin(hint) in UNIONS:
        return " or ".join(_name(one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is list:
        return f"a list, each item {_name(get_args(hint)[0])}"
    if get_origin(hint) is dict and get_args(hint)[1] is not Any:
        return f"a mapping, each value {_name(get_args(hint)[1])}"
    return NAMES.get(hint, "a mapping")
