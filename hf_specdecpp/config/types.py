"""Whether the fields of a dataclass that was filled from YAML or JSON hold what their annotations say."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

UNIONS = (Union, UnionType)  # of `Literal[...] | None` and of `int | None`
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check_types(settings: Any, path: str = "") -> None:
    """Raise `ValueError` naming the first field, in nested dataclasses too, whose value is of another type.

    Args:
        settings: a dataclass.
        path: what its fields are called before their names, such as `"head."`.
    """
    hints = _hints(settings.__class__)
    for field in fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if not _is(value, hint):
            raise ValueError(f"{path}{field.name}={value!r} must be {_name(hint)}.")
        if is_dataclass(value):
            check_types(value, f"{path}{field.name}.")


@cache
def _hints(cls: Any) -> dict[str, Any]:  # kept, since a generation checks its settings
    return get_type_hints(cls)


def _is(value: Any, hint: Any) -> bool:
    if get_origin(hint) in UNIONS:
        return any(_is(value, one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, list | tuple) and all(_is(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, Real if hint is float else hint)


def _name(hint: Any) -> str:
    """Such as "a list, each item a whole number or left out" for `list[int] | None`."""
    if get_origin(hint) in UNIONS:
        return " or ".join(_name(one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is list:
        return f"a list, each item {_name(get_args(hint)[0])}"
    if hint is type(None):
        return "left out"
    return NAMES.get(hint, "a mapping")
