"""Seconds of the parts of a round (`Costs`), given by the user or measured (`throughput.known_costs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round. `ValueError` for values that are negative or not finite, an empty `verify`, a
    target pass of 0 seconds, and a `block` below 1.

    Args:
        draft (seconds): one draft step, including its estimate and draw.
        verify (seconds): target passes over 1, 2, ... tokens; longer passes are extrapolated along a straight line.
        overhead (seconds): everything else in a round.
        read (seconds): the draft's reading of one unread token, after rounds in which it did not draft.
        branch (seconds): each candidate of a draft step after the first, of a tree's level or of a block.
        start (seconds): fixed cost of a round that drafts.
        block (candidates): number of candidates that one draft step proposes."""

    draft: float
    verify: tuple[float, ...]
    overhead: float = 0.0
    read: float = 0.0
    branch: float = 0.0
    start: float = 0.0
    block: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "verify", tuple(self.verify))
        values = (self.draft, *self.verify, self.overhead, self.read, self.branch, self.start)
        are_seconds = all(isinstance(value, int | float) and 0.0 <= value < float("inf") for value in values)
        has_block = isinstance(self.block, int) and self.block >= 1
        if not are_seconds or not self.verify or 0.0 in self.verify or not has_block:
            raise ValueError(
                f"{self}: costs must be finite seconds, none negative. verify must list what target passes over 1, 2, "
                "... tokens take, each positive. block must be a whole number of candidates, at least 1."
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Costs:
        """Costs from a dict of the arguments; `ValueError` for unknown ones, or without `draft` and `verify`."""
        try:
            return cls(**values)
        except TypeError:
            raise ValueError(
                f"costs={values!r} must look like {{'draft': s, 'verify': [s1, s2, ...], 'overhead': s, 'read': s, "
                "'branch': s, 'start': s, 'block': candidates} in seconds; all but the first two may be missing. None "
                "measures them."
            ) from None

    def of_row(self, rows: int, max_tokens: int) -> Costs:
        """Assumed costs for each row of a batch of `rows`, for rounds of up to `max_tokens` candidates in each row.

        A target pass over n tokens of each row is assumed to take as long as one over n * rows tokens of one sequence,
        and a draft pass as long as for one row. All costs are divided by the number of rows.

        Example: passes over 1, 2, 3 and 4 tokens take 10, 10, 12 and 16 ms. For two rows a pass over one token of each
        takes 10 ms, which is 5 ms per row; over two tokens of each 16 ms, which is 8 ms per row."""
        return self.reading(range(rows, rows * (max_tokens + 1) + 1, rows)).scaled(1.0 / rows)

    def reading(self, tokens: Sequence[int]) -> Costs:
        """These costs for a target that reads `tokens[k]` tokens, instead of k + 1, in a round with k candidates.

        Example: passes over 1 to 5 tokens take 10, 11, 12, 13 and 14 ms. With `tokens` [1, 3, 5], the passes of rounds
        with 0, 1 and 2 candidates take 10, 12 and 14 ms."""
        verify = self.verify_seconds(max(tokens) - 1)[np.array(tokens) - 1]
        return replace(self, verify=tuple(verify.tolist()))

    def scaled(self, passes: float, drafting: float | None = None) -> Costs:
        """Costs with the seconds of target passes and overhead multiplied by the factor `passes`, and those of the
        draft by `drafting` (default: `passes`)."""
        drafting = passes if drafting is None else drafting
        factors = {"overhead": passes, **dict.fromkeys(("draft", "read", "branch", "start"), drafting)}
        verify = tuple(seconds * passes for seconds in self.verify)
        return replace(self, verify=verify, **{name: getattr(self, name) * by for name, by in factors.items()})

    def round_seconds(self, max_tokens: int) -> Floats:
        """`[max_tokens + 1]` seconds of whole rounds with 0, 1, ... candidates in a chain.

        Example: a draft step takes 2 ms and proposes a block of 4; each further candidate of the block takes 0.1 ms.
        Drafting 1, 4 and 5 candidates takes 2, 2.3 and 4.3 ms; the target's pass and the overhead are added."""
        candidates = np.arange(max_tokens + 1)
        steps = -(-candidates // self.block)
        drafting = steps * self.draft + (candidates - steps) * self.branch + (steps > 0) * self.start
        return drafting + self.verify_seconds(max_tokens) + self.overhead

    def verify_seconds(self, max_tokens: int) -> Floats:
        """`[max_tokens + 1]` seconds of target passes over one token and 0, 1, ... candidates.

        Example: passes over 1, 2, 3 and 4 tokens take 58, 71, 80 and 52 ms, so three candidates are faster than one.
        Longer passes follow the line through the first and the last value, which never falls: 52 ms."""
        verify: Floats = np.array(self.verify, dtype=np.float64)
        further = np.arange(1, max_tokens + 2 - len(verify))
        slope = max((verify[-1] - verify[0]) / max(len(verify) - 1, 1), 0.0)
        return np.concatenate((verify, verify[-1] + slope * further))[: max_tokens + 1]


@dataclass(frozen=True)
class DraftWork:
    """The work of the draft in a round that drafts."""

    steps: int = 0  # draft passes
    read: int = 0  # unread tokens that the draft read first, after rounds without it, not counting the last token
    branches: int = 0  # distributions that draft passes computed, without the first of each pass

    def seconds(self, costs: Costs) -> float:
        """Expected seconds of all this work."""
        return costs.start + self.steps * costs.draft + self.further(costs)

    def further(self, costs: Costs) -> float:
        """Expected seconds of the part `read` and `branches` of this work."""
        return self.read * costs.read + self.branches * costs.branch
