"""What a round costs, in seconds: given by the user or as rounds say (`throughput.known_costs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Costs:
    """What a round costs, in seconds; `ValueError` if a value is no number of seconds, or `verify` is empty.

    Args:
        draft (seconds): one draft step, with its estimate and its draw.
        verify (seconds): target passes over 1, 2, ... tokens, of any form; longer ones are extrapolated along a
            straight line.
        overhead (seconds): everything else in a round.
        read (seconds): the draft reads one more token of a text that it has not followed.
        branch (seconds): each further place that a draft step answers for: a node of a tree, a candidate of a block.
        start (seconds): drafting at all, whatever the number of steps.
        block (candidates): the number that one draft step proposes.
    """

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
        if not all(isinstance(value, int | float) and 0.0 <= value < float("inf") for value in values):
            raise ValueError(f"costs={self.to_dict()} must be finite seconds, none negative: the rule compares them.")
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"block={self.block!r} must be a whole number of candidates, at least 1.")
        if not self.verify or min(self.verify) <= 0.0:
            raise ValueError(
                f"costs: verify={list(self.verify)} must list what target passes over 1, 2, ... tokens take, and each "
                "must be positive: the rule divides by them."
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Costs:
        """From `{"draft": s, "verify": [s, ...], "overhead": s, ...}`; all but the first two may miss."""
        required, known = {"draft", "verify"}, {field.name for field in fields(cls)}
        if not (isinstance(values, dict) and required <= set(values) <= known and isinstance(values["verify"], list)):
            raise ValueError(
                f"costs={values!r} must look like {{'draft': s, 'verify': [s1, s2, ...], 'overhead': s, 'read': s, "
                "'branch': s, 'start': s, 'block': candidates} in seconds; all but the first two may be missing. None "
                "measures them."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verify": list(self.verify)}

    def of_row(self, rows: int, max_tokens: int) -> Costs:
        """What a round costs one row of a batch, where that was not measured.

        A pass over n tokens of each row is taken to last as long as one over all of them in one text, and the draft's
        pass as long as for one row.

        Example: passes over 1, 2, 3 and 4 tokens take 10, 10, 12 and 16 ms. With two rows a pass over one token of each
        takes 10 ms, a row's share of which is 5; over two tokens of each 16, so 8.
        """
        return self.reading(range(rows, rows * (max_tokens + 1) + 1, rows)).scaled(1.0 / rows)

    def reading(self, tokens: Sequence[int]) -> Costs:
        """What rounds with 0, 1, ... candidates cost where their passes read so many tokens.

        Example: passes over 1 to 5 tokens take 10, 11, 12, 13 and 14 ms. Rounds with 0, 1 and 2 candidates cost 10, 12
        and 14 ms where they read 1, 3 and 5 tokens.
        """
        verify = self.verify_seconds(max(tokens) - 1)[np.array(tokens) - 1]
        return replace(self, verify=tuple(verify.tolist()))

    def scaled(self, passes: float, drafting: float | None = None) -> Costs:
        """With other prices of the target's passes and of drafting, by default with the same factor for both."""
        drafting = passes if drafting is None else drafting
        factors = {"overhead": passes, **dict.fromkeys(("draft", "read", "branch", "start"), drafting)}
        verify = tuple(seconds * passes for seconds in self.verify)
        return replace(self, verify=verify, **{name: getattr(self, name) * by for name, by in factors.items()})

    @property
    def pass_seconds(self) -> float:
        """Seconds of a round without candidates."""
        return self.verify[0] + self.overhead

    def round_seconds(self, max_tokens: int) -> Floats:
        """`[max_tokens + 1]` seconds of rounds with 0, 1, ... candidates in a chain.

        Example: a step takes 2 ms and proposes a block of 4, each further candidate of which takes 0.1 ms. Drafting 1,
        4 and 5 candidates takes 2, 2.3 and 4.3 ms.
        """
        candidates = np.arange(max_tokens + 1)
        steps = -(-candidates // self.block)
        drafting = steps * self.draft + (candidates - steps) * self.branch + (steps > 0) * self.start
        seconds: Floats = drafting + self.verify_seconds(max_tokens) + self.overhead
        return seconds

    def level_seconds(self, level: int, nodes: int) -> float:
        """Seconds of asking the draft about so many nodes of a tree, after `level` such questions."""
        steps = int(level % self.block == 0)
        return self.draft * steps + self.branch * (nodes - steps)

    def tree_seconds(self, passes: int, num_read: int, verify: float) -> float:
        """Seconds of a round with a tree: `passes` of the draft over `num_read` nodes, and `verify` of the target."""
        return self.start + self.draft * passes + self.branch * (num_read - passes) + verify + self.overhead

    def verify_seconds(self, max_tokens: int) -> Floats:
        """`[max_tokens + 1]` seconds of target passes over 0, 1, ... candidates.

        Example: passes over 1, 2, 3 and 4 tokens take 58, 71, 80 and 52 ms, so that three candidates are cheaper than
        one. Beyond them the line through the first and the last goes on, but never falls: 52 ms.
        """
        verify: Floats = np.array(self.verify, dtype=np.float64)
        further = np.arange(1, max_tokens + 2 - len(verify))
        slope = max((verify[-1] - verify[0]) / max(len(verify) - 1, 1), 0.0)
        return np.concatenate((verify, verify[-1] + slope * further))[: max_tokens + 1]
