"""A text's own passes, where those that its rounds make are not the target's usual ones: over a static cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

ROUNDS = 3  # of each width or step: on CUDA the first compiles, the second records a graph, the third replays it


@dataclass(frozen=True)
class OwnPasses:
    """Passes of the widths that a text's rounds have, for costs to be measured (`throughput.measuring`).

    Over a static cache they are filled up with dummies, and often compiled, so they take other times than passes over
    a cache that grows, even in relation to one another.

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
        """Make passes of each width until all that is compiled for them is compiled."""
        for _ in range(ROUNDS):
            for count in self.counts(most):
                self.make(count)
