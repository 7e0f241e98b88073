"""What several commands make of the text of an option."""

from __future__ import annotations


def parse_layers(layers: str) -> int | list[int]:
    """`"4"` as 4, `"0,1,2,29"` as a list; `ValueError` if it is neither."""
    try:
        numbers = [int(part) for part in layers.split(",")]
    except ValueError:
        raise ValueError(f"--layers {layers!r} must be a number such as 4 or a list such as 0,1,2,29.") from None
    return numbers if "," in layers else numbers[0]
