"""What may be expected of the slots of a tree: how many candidates will be drawn there, and how many accepted.

The recursion is derived in `docs/throughput.md`.
"""

from __future__ import annotations

import math

import numpy as np

from hf_specdecpp.config.costs import Floats
from hf_specdecpp.throughput.acceptance_rates import CENTRES, NO_VERDICT, AcceptanceRates, bin_of
from hf_specdecpp.trees.slots import SMALLEST, Growth

BINS = len(CENTRES)
RATIO, PLACES = 0.18, 48  # a slot of value v has the place log(v / t) / RATIO; thresholds go down to 2e-4
LEVELS = 6  # looked ahead; every level is planned anew
TURNS = 24  # of the recursion at a fit, which starts from the last fit's tables
DRAWS, TOKENS, READS = range(3)


class SlotExpectations:
    """What is expected at a slot and below it if all slots above a threshold t are drawn at.

    A draw splits a slot of value v into v * a and v * (1 - a). Under the law of a that the rounds have shown, the
    draws, the accepted tokens over t and the nodes that the draft reads depend on v / t and on how many levels it
    reads.

    Args:
        greedy: whether what would be drawn is known before it is decided.

    Attributes:
        below: `[levels + 1, 3, places]` for first children of leaves.
        beside: `[levels + 1, 3, bins + 1, places]` for open slots, by the bin of the last sibling's estimate.
        known: `[levels + 1, 3, places]` for a candidate that is known and what is below it, by the value of both.
        usual: for each of the bins + 1, the mean a of the next sibling.
    """

    def __init__(self, greedy: bool) -> None:
        self.greedy = greedy
        self.below = np.zeros((LEVELS + 1, 3, PLACES))
        self.beside = np.zeros((LEVELS + 1, 3, BINS + 1, PLACES))

    def fit(self, law: AcceptanceRates) -> None:
        """Follow the law as it is known now (milliseconds)."""
        a, usual = law.acceptance, law.law @ law.acceptance
        worth = np.exp(RATIO * np.arange(PLACES))  # v / t
        draw = np.zeros((3, BINS, PLACES))
        draw[DRAWS], draw[TOKENS] = 1.0, np.outer(a, worth)
        everywhere = np.ones((1, PLACES))
        is_drawn = _Scale(a if self.greedy else usual)(everywhere)
        is_read = _Scale(usual[NO_VERDICT:])(everywhere)[0]
        child, sibling = _Scale(a), _Scale(1.0 - a)
        for _ in range(TURNS):
            self.below[1:] = self.beside[:-1, :, NO_VERDICT]
            self.below[1:, READS] += 1.0
            self.below *= is_read
            after = draw + child(self.below[:, :, None]) + sibling(self.beside[:, :, :BINS])
            self.beside = law.law @ (after * is_drawn) if self.greedy else (law.law @ after) * is_drawn
        self.known = self.below + np.stack((np.ones(PLACES), worth, np.zeros(PLACES)))
        self.usual: list[float] = usual.tolist()

    @property
    def root(self) -> Floats:
        """What the tree of a round holds, before anything is drafted; as `of`."""
        whole, totals = _empty()
        _add(totals, self.below, 1.0)
        return _finish(whole)

    def of(self, growth: Growth, law: AcceptanceRates) -> Floats:
        """What the slots of a tree hold together: draws, tokens and reads, `[3, levels + 1, places + 1]`.

        The threshold is exp(-RATIO * k) at place k + 1. At place 0 there is nothing.
        """
        tree = growth.tree
        whole, totals = _empty()
        for node, v in growth.leaves.items():
            if tree.depths[node] == tree.passes:
                _add(totals, self.below, v)
        for node, v, estimate in growth.slots():
            # Children that come when their level has been read get no children.
            levels = slice(None) if tree.depths[node] == tree.passes - 1 else slice(0, 1)
            if estimate is None:
                _add(totals, self.beside[levels, :, row_of(growth.last_estimate(node))], v)
            else:
                a = law.calibrated(estimate)
                _add(totals, self.known[levels], v * a)
                _add(totals, self.beside[levels, :, bin_of(estimate)], v * (1.0 - a))
        return _finish(whole)


class _Scale:
    """Tables `[..., bins, places]` of slots whose values are multiplied by `factors` `[bins]`, a bin by its own."""

    def __init__(self, factors: Floats) -> None:
        places = np.arange(PLACES) + np.log(factors.clip(1e-9, 1.0))[:, None] / RATIO
        self.share = places - np.floor(places)
        self.low = np.maximum(np.floor(places) + 1, 0).astype(int)  # in tables with a place for "below t" before them
        self.high = np.minimum(self.low + (places >= 0.0), PLACES)

    def __call__(self, tables: Floats) -> Floats:
        padded = np.concatenate((np.zeros((*tables.shape[:-1], 1)), tables), axis=-1)
        rows = np.arange(len(self.share))[:, None] if tables.shape[-2] > 1 else 0
        low, high = padded[..., rows, self.low], padded[..., rows, self.high]
        scaled: Floats = low + self.share * (high - low)
        return scaled


def row_of(last: float | None) -> int:
    """Of `AcceptanceRates.law`, given the estimate of the last sibling."""
    return NO_VERDICT if last is None else bin_of(last)


def _add(totals: Floats, tables: Floats, v: float) -> None:
    """Add the tables of a slot of value v, as they are seen from every threshold."""
    place = round(-math.log(max(v, SMALLEST)) / RATIO)
    if place < PLACES:
        totals[..., place:] += tables[..., : PLACES - place]


def _empty() -> tuple[Floats, Floats]:
    """Zeros as `SlotExpectations.of` returns them, and a view of them as of its tables."""
    whole = np.zeros((3, LEVELS + 1, PLACES + 1))
    return whole, whole[:, :, 1:].swapaxes(0, 1)


def _finish(whole: Floats) -> Floats:
    whole[TOKENS, :, 1:] *= np.exp(-RATIO * np.arange(PLACES))
    return np.maximum.accumulate(whole, axis=-1)
