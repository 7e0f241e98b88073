"""What the rounds of a text really took, and what follows from it for the costs that a rule reckons with."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from hf_specdecpp.clocks import are_sensible, typical
from hf_specdecpp.config.costs import Costs

TRUST = 3.0  # rounds of a text that count as much as all that was known of the same costs before
MOST_CHANGE = 2.0  # times, in one text: capturing or a machine that sleeps is no cost of a round
MOST_READ = 32  # tokens that a draft reads first, where its drafting tells what a step costs: more are another pass
EXPECTED = 0.1  # difference from the known cost, as a share of it
SHORT = 7  # bits of the length of a text that counts as short: up to 127 tokens


def length_class(length: int) -> int:
    """Texts of lengths that cost alike: up to 127 tokens, 128 to 255, 256 to 511, ..."""
    return max(length.bit_length(), SHORT)


def alike(kind: int) -> tuple[int, int, int]:
    """A class of lengths and those beside it, whose costs are little different."""
    return kind - 1, kind, kind + 1


@dataclass(frozen=True)
class Drafting:
    """What was drafted in a round.

    Attributes:
        steps: passes of the draft.
        read: tokens that it read first, after a pause, beside the last one.
        branches: in trees: nodes that a pass read beside the first.
    """

    steps: int = 0
    read: int = 0
    branches: int = 0

    def seconds(self, costs: Costs) -> float:
        """What it should take."""
        return costs.start + self.steps * costs.draft + self.further(costs)

    def further(self, costs: Costs) -> float:
        """What it should take beside its steps."""
        return self.read * costs.read + self.branches * costs.branch


@dataclass
class RoundTimes:
    """The rounds of one text, timed.

    A round is divided in two: drafting, and all the rest, which belongs to the pass of its width: so what a width costs
    includes its verification, whatever that is.

    Args:
        clock: reads seconds (`clocks.computing_clock`).

    Attributes:
        passes: by class of length, and there by width: seconds of the rounds without their drafting.
        drafts: by class of length: what was drafted, and seconds.
    """

    clock: Callable[[], float]
    passes: dict[int, dict[int, list[float]]] = field(default_factory=dict)
    drafts: dict[int, list[tuple[Drafting, float]]] = field(default_factory=dict)

    def begin(self) -> None:
        """A round begins: with its drafting."""
        self._begin = self._drafted = self.clock()
        self._drafting: Drafting | None = None

    def drafted(self, drafting: Drafting | None) -> None:
        """The draft is there; `None`: how long that took says nothing of the costs."""
        self._drafted = self.clock()
        self._drafting = drafting if drafting is not None and drafting.read <= MOST_READ else None

    def end(self, length: int, width: int) -> None:
        """The round of a text that had this length is over, whose pass read `width` tokens, dummies included."""
        kind = length_class(length)
        of_width = self.passes.setdefault(kind, defaultdict(list))
        of_width[width].append(self.clock() - self._drafted)
        if self._drafting is not None and self._drafting.steps:
            seconds = self._drafted - self._begin
            self.drafts.setdefault(kind, []).append((self._drafting, seconds))


def as_expected(costs: Costs, passes: Mapping[int, Sequence[float]]) -> list[int]:
    """The widths whose rounds took what they should, in the median."""
    verify, taken = costs.verify_seconds(max(passes, default=1) - 1), taken_by(passes)
    return [width for width, seconds in taken.items() if abs(math.log(seconds / verify[width - 1])) < EXPECTED]


def taken_by(passes: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """What rounds of each width took, as far as the clock can tell (`clocks.typical`)."""
    found = {width: typical(each) for width, each in passes.items()}
    return {width: seconds for width, seconds in found.items() if seconds is not None}


def in_seconds(assumed: Costs, times: RoundTimes) -> Costs | None:
    """Assumed shares of a pass over one token in seconds, by the first text: one factor for passes, one for drafting.
    `None` where the clock cannot tell.

    Example: passes over 1 and 3 tokens are assumed to take 1 and 1.1. Rounds over 3 tokens took 22 ms in the median, so
    passes over 1 token are expected to take 20 ms.
    """
    verify = assumed.verify_seconds(max(max(widths) for widths in times.passes.values()) - 1)
    timed = [(width, each) for widths in times.passes.values() for width, of in widths.items() for each in of]
    unit = typical([seconds / verify[width - 1] for width, seconds in timed])
    if unit is None:
        return None
    drafts = [(seconds, each.seconds(assumed)) for of in times.drafts.values() for each, seconds in of]
    ratios = [seconds / expected for seconds, expected in drafts if expected > 0.0]
    scaled = replace(assumed, verify=tuple(seconds * unit for seconds in assumed.verify))
    return _drafting_scaled(scaled, (typical(ratios) if ratios else None) or unit)


def corrected(costs: Costs, passes: Mapping[int, Sequence[float]], drafts: Sequence[tuple[Drafting, float]]) -> Costs:
    """The costs after a text whose rounds took so long: medians of its rounds, weighed against what was known.

    Logarithms are averaged: the new cost is `old * (median / old) ** (n / (n + 3))` for n rounds. Widths that the text
    had no rounds of change as the others do on average, and so does drafting of which there was none: a machine that
    has become slower changes no decision.

    Example: passes over 1 and 2 tokens were known to take 10 and 30 ms, and nine rounds over 2 tokens took 20 ms, in
    the median. n / (n + 3) is 3/4, so 2 tokens cost 30 * (2/3) ** 0.75 = 22 ms now and 1 token 7.4 ms.

    Args:
        passes: seconds of rounds without their drafting, by width.
        drafts: what was drafted, and seconds.
    """
    if passes:
        costs = costs.known_for(max(passes) - 1)
    changes = {width: _log_ratio(seconds, costs.verify[width - 1]) for width, seconds in taken_by(passes).items()}
    rounds = sum(len(passes[width]) for width in changes)
    usual = sum(change * len(passes[width]) for width, change in changes.items()) / max(rounds, 1) * _share(rounds)
    verify = [seconds * math.exp(usual) for seconds in costs.verify]
    for width, change in changes.items():
        verify[width - 1] = costs.verify[width - 1] * math.exp(change * _share(len(passes[width])))
    if not drafts:
        costs = _drafting_scaled(costs, math.exp(usual))
    return _corrected_drafting(replace(costs, verify=tuple(verify)), drafts)


def _drafting_scaled(costs: Costs, factor: float) -> Costs:
    """With another price of whole drafts."""
    return replace(costs, **{name: getattr(costs, name) * factor for name in ("start", "draft", "read", "branch")})


def _corrected_drafting(costs: Costs, drafts: Sequence[tuple[Drafting, float]]) -> Costs:
    """The price of drafts after a text: first as a whole, then that of a step against that of starting.

    Example: starting and a step were known to take 1 and 2 ms. Drafts of 1 and 3 steps took 4 and 8 ms, very often. A
    line through these has 2 ms a step, and 2 ms for starting.
    """
    known = [(seconds, expected) for each, seconds in drafts if (expected := each.seconds(costs)) > 0.0]
    usual_ratio = typical([seconds / expected for seconds, expected in known]) if known else None
    if usual_ratio is None:
        return costs
    costs = _drafting_scaled(costs, math.exp(_log_ratio(usual_ratio, 1.0) * _share(len(known))))
    by_steps = defaultdict(list)
    for each, seconds in drafts:
        by_steps[each.steps].append(seconds - each.further(costs))
    if len(by_steps) == 1 or costs.draft == 0.0 or not are_sensible(map(median, by_steps.values())):
        return costs
    steps, counts = np.array(list(by_steps)), np.array([len(seconds) for seconds in by_steps.values()])
    taken = np.array([median(seconds) for seconds in by_steps.values()])
    mean = np.average(steps, weights=counts)
    slope = np.average((steps - mean) * taken, weights=counts) / np.average((steps - mean) ** 2, weights=counts)
    usual = costs.start + costs.draft * mean
    step = costs.draft * math.exp(_log_ratio(slope, costs.draft) * _share(counts.sum() - counts.max()))
    step = min(step, usual / mean)
    return replace(costs, draft=float(step), start=max(float(usual - step * mean), 0.0))


def _share(rounds: int) -> float:
    """Of the new in what is known then."""
    return rounds / (rounds + TRUST)


def _log_ratio(new: float, old: float) -> float:
    bound = math.log(MOST_CHANGE)
    return min(max(math.log(max(new, 1e-9) / old), -bound), bound)
