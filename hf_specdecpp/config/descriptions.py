"""What each field of a settings dataclass means, read from the `Args:` of its docstring, the one place that says it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hf_specdecpp.config.types import UNIONS

ENTRY = re.compile(r"(?P<names>\w+(?:, \w+)*)(?: \((?P<unit>[^)]*)\))?: (?P<meaning>.*)")


@dataclass(frozen=True)
class Setting:
    """A field of a settings dataclass.

    Args:
        name: of the field, after the names of the dataclasses around it: `"head.rank"`.
        default: its default, `MISSING` where there is none.
        kind: what it takes, its annotation written out: `"int | None"`, `'"before" | "after"'`.
        unit: what its number counts, such as `"tokens"`; empty for what is no number.
        meaning: a sentence or more, with Markdown's backticks.
    """

    name: str
    default: Any
    kind: str
    unit: str
    meaning: str


def describe(cls: Any, path: str = "") -> Iterator[Setting]:
    """The fields of a dataclass in their order; those of a dataclass within it follow under its name.

    An entry of the docstring is `name (unit): meaning`, or `first, second (unit): meaning` for both. Fields of a base
    class are described by its docstring.

    Raises:
        ValueError: a field has no entry.
    """
    hints = get_type_hints(cls)
    meanings = {name: entry for each in reversed(cls.__mro__) for name, entry in _entries(each)}
    for field in fields(cls):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if is_dataclass(default):
            yield from describe(type(default), f"{path}{field.name}.")
        elif field.name in meanings:
            unit, meaning = meanings[field.name]
            yield Setting(f"{path}{field.name}", default, _kind(hints[field.name]), unit, meaning)
        else:
            raise ValueError(
                f"{cls.__name__}.{field.name} has no entry under Args: of the docstring, so nobody knows it."
            )


def _kind(hint: Any) -> str:
    if get_origin(hint) in UNIONS:
        return " | ".join(_kind(one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return " | ".join(f'"{value}"' for value in get_args(hint))
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _entries(cls: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """`name, (unit, meaning)` of each entry under `Args:`; a deeper indented line goes on with the one before."""
    _, _, rest = (inspect.getdoc(cls) or "").partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", rest)[0]
    for entry in re.split(r"\n(?=    \S)", section):
        if match := ENTRY.fullmatch(" ".join(entry.split())):
            for name in match["names"].split(", "):
                yield name, (match["unit"] or "", match["meaning"])
