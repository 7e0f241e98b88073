"""The meanings of settings, read from docstrings."""

from dataclasses import MISSING, dataclass, field
from typing import Literal

import pytest

from hf_specdecpp.cli_options import Setting, describe


@dataclass
class Inner:
    """Inside.

    Args:
        kind: which of
            the two.
        low, high (tokens): bounds.
    """

    kind: Literal["a", "b"] | None = None
    low: int = 1
    high: int = 2


@dataclass
class Outer:
    """Outside.

    Args:
        name: of it: anything.
        sizes (seconds per token): a list.

    Raises:
        ValueError: never.
    """

    name: str
    sizes: list[float] = field(default_factory=lambda: [0.5])
    inner: Inner = field(default_factory=Inner)


def test_fields_with_type_default_unit_and_meaning() -> None:
    assert list(describe(Outer)) == [
        Setting("name", MISSING, "str", "", "of it: anything."),
        Setting("sizes", [0.5], "list[float]", "seconds per token", "a list."),
        Setting("inner.kind", None, '"a" | "b" | None', "", "which of the two."),
        Setting("inner.low", 1, "int", "tokens", "bounds."),
        Setting("inner.high", 2, "int", "tokens", "bounds."),
    ]


def test_a_field_without_a_meaning_is_an_error() -> None:
    @dataclass
    class Mute:
        """Says nothing.

        Args:
            told: is described.
        """

        told: int = 0
        untold: int = 0

    with pytest.raises(ValueError, match=r"Mute\.untold"):
        list(describe(Mute))
