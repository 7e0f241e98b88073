"""A text's own passes, where those that its rounds make are not the target's usual ones: captured, or over a static
cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class OwnPasses:
    """Passes of the widths that a text's rounds have, for costs to be measured (`throughput.measuring`).

    They are filled up with dummies, so they take other times than passes over a cache that grows, even in relation to
    one another; captured ones take far less.

    Args:
        make: makes a pass over the last token of the text and so many candidates, and forgets it; returns the logits
            `[1 + candidates, vocab]`.
        room: candidates that there is room for.
        how: what the times of passes depend on beside the target; JSON-able.
    """

    make: Callable[[int], Tensor]
    room: int
    how: dict[str, Any]

    def counts(self, most: int) -> list[int]:
        """Candidates that fill the widths up to that of `most`, as far as there is room.

        Example: 0, 1, 3 and 7 for at most 5 candidates.
        """
        counts = [0]
        while counts[-1] < most and 2 * counts[-1] + 1 <= self.room:
            counts.append(2 * counts[-1] + 1)
        return counts

    def settle(self, most: int) -> None:
        """Make a pass of each width, so that all of them are captured."""
        for count in self.counts(most):
            self.make(count)
