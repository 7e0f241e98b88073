"""Rotary frequencies that depend on the length of the text: which passes compute what plain decoding computes.

transformers rotates all tokens of a pass by the frequencies that belong to the last of them. With
`rope_type="longrope"` these are short ones up to `original_max_position_embeddings` tokens and long ones from there on;
with `"dynamic"` they change with every token beyond `max_position_embeddings`. Candidates beyond a change would alter
the keys of the tokens before it, which stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FrequencyChange:
    """Where the frequencies of a model change.

    Example: with `length` 4096 a text of 4094 tokens, the last of them unread, has room for 2 candidates. Texts of 4096
    and 4097 have room for none: the last pass before the change, and the first one after it, for which Phi-3 reads the
    whole text anew. After it there is room for any number, unless the frequencies change with `every_token`.

    Attributes:
        length: tokens of the longest text before it.
        every_token: whether they change again with every further token.
    """

    length: int
    every_token: bool

    def room(self, length: int) -> int | None:
        """How many candidates a pass over the last of `length` tokens may have; `None`: any number."""
        if length <= self.length:
            return self.length - length
        return 0 if self.every_token or length == self.length + 1 else None


def frequency_changes(config: Any) -> list[FrequencyChange]:
    """Those of a model with this text config: at most one for each kind of its layers, mostly none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [each for each in parameters.values() if each]
    changes = set()
    for kind in kinds:
        if "dynamic" in kind["rope_type"]:
            changes.add(FrequencyChange(config.max_position_embeddings, every_token=True))
        elif kind["rope_type"] == "longrope":
            changes.add(FrequencyChange(kind["original_max_position_embeddings"], every_token=False))
    return sorted(changes, key=lambda change: change.length)
