"""What settings are checked with: names that a YAML file may have, and ranges."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any


def build(cls: Any, values: dict[str, Any], path: str) -> Any:
    """A dataclass of nested dicts, as read from YAML; an unknown name is an error with its `path`."""
    refuse_unknown(cls, values, path)
    built = dict(values)
    for name, value in values.items():
        default = getattr(cls(), name)
        if is_dataclass(default) and isinstance(value, dict):
            built[name] = build(type(default), value, f"{path}{name}.")
        if isinstance(default, float) and isinstance(value, str):
            built[name] = _number(value)
    return cls(**built)


def refuse_unknown(cls: Any, values: dict[str, Any], path: str) -> None:
    """Raise `ValueError` for a name that is no field."""
    known = [item.name for item in fields(cls)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(
            f"Unknown setting {path}{unknown[0]}. {path.rstrip('.') or 'A training run'} takes {', '.join(known)}."
        )


def _number(text: str) -> float | str:
    """YAML reads 2e-4, which has no point, as text."""
    try:
        return float(text)
    except ValueError:
        return text


def at_least(least: int, name: str, value: int | None) -> None:
    """Raise `ValueError` for a smaller number; `None` is none."""
    if value is not None and value < least:
        raise ValueError(f"{name}={value} must be a whole number of at least {least}.")


def above_zero(name: str, value: float) -> None:
    """Raise `ValueError` for a number that is not above 0."""
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name}={value} must be above 0.")


def a_share(name: str, value: float) -> None:
    """Raise `ValueError` for a number that is no share below 1."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}={value} must be at least 0 and under 1: it is a share.")
