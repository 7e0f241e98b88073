"""Costs of rounds on this machine: assumed at first (`Rounds`), then corrected (`KnownCosts`) by the timed rounds of
this process (`RoundTimes`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_specdecpp.caches.cached_context import width_of
from hf_specdecpp.clocks import typical
from hf_specdecpp.config.costs import Costs, DraftWork
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.estimation.estimators import Estimator
from hf_specdecpp.models.causal_lm import CausalLM, num_bytes, parameters_of
from hf_specdecpp.models.checks import keeps_recurrent_state
from hf_specdecpp.models.cpu.products import ProductTimes

FEW = 5  # sequences generated before the first trials of chain lengths
# Assumed costs, in passes over one token: each further token, on a CPU and elsewhere; large layers whose matrix
# multiplications were measured, and each further token without these layers; a draft step, apart from the draft's share
# of the target's weights. In passes of the draft: a token that it reads among many, or a further node of its pass.
WIDER_ON_CPU, WIDER, LAYERS, BESIDE, LEAST_STEP, AMONG_MANY = 0.1, 0.03, 0.8, 0.015, 0.03, 0.1
TRUST = 3.0  # rounds of a sequence with the weight of all earlier ones
MOST_CHANGE = 2.0  # largest factor per sequence, because a time may include a capture or a sleep of the machine
MOST_READ = 32  # tokens that the draft reads first; after more of them, the time of a draft is that of reading
EXPECTED = 0.1  # largest relative difference of a time that confirms a cost (of the logarithms)
SHORT = 7  # bits of the largest short sequence length, 127 tokens

# Costs in this process, by `Rounds.key`.
_known: dict[tuple[Any, ...], KnownCosts] = {}


class KnownCosts:
    """Costs of rounds, by sequence length, corrected after each sequence.

    A length class without timed sequences has the costs of the nearest class with some.

    Args:
        first: costs before any round was timed.
        form: makes the costs by which a plan decides from those of passes (`Rounds.formed`).
        is_assumed: whether `first` is assumed, in passes over one token. After the first sequence costs are in seconds.
        follows: whether rounds correct the costs; `False` for given ones.
    """

    def __init__(
        self,
        first: Costs,
        form: Callable[[Costs], Costs] = lambda costs: costs,
        is_assumed: bool = False,
        follows: bool = True,
    ) -> None:
        self.first, self.is_assumed, self.follows = first, is_assumed, follows
        self._form = form
        self._texts = 0 if is_assumed else FEW  # sequences that have corrected the costs
        self._by_length: dict[int, Costs] = {}  # corrected costs, by `length_class`
        self._formed: dict[int, Costs] = {}  # results of `form`, by length class

    @property
    def are_settled(self) -> bool:
        """Whether costs follow the rounds, and assumed ones were corrected by at least five sequences."""
        return self.follows and self._texts >= FEW

    def at(self, length: int) -> Costs:
        """Return the costs by which a plan decides at this length: one object per length class until `update`."""
        kind = self._nearest(length_class(length))
        if kind not in self._formed:
            self._formed[kind] = self._form(self._by_length.get(kind, self.first))
        return self._formed[kind]

    def update(self, times: RoundTimes) -> list[tuple[int, int]]:
        """Correct the costs after a sequence. Returns (length class, tokens) of passes within 10 % of their cost."""
        confirmed: list[tuple[int, int]] = []
        if not times.passes or not self.follows:
            return confirmed
        if self.is_assumed:
            seconds = in_seconds(self.first, times)
            if seconds is None:  # shorter than the clock's resolution
                return confirmed
            self.first, self.is_assumed = seconds, False
        self._texts += 1
        for kind, passes in times.passes.items():
            known = self._by_length.get(self._nearest(kind), self.first)
            self._by_length[kind] = corrected(known, passes, times.drafts.get(kind, ()))
            ratios = relative_times(known, passes)
            confirmed += [(kind, width) for width, ratio in ratios.items() if abs(math.log(ratio)) < EXPECTED]
        self._formed.clear()
        return confirmed

    def _nearest(self, kind: int) -> int:
        """The nearest length class with corrected costs; `kind` if there is none."""
        return min(self._by_length, key=lambda known: (abs(known - kind), known), default=kind)


@dataclass(frozen=True)
class Rounds:
    """A kind of rounds, all of which have the same costs: the models, and the settings that change costs."""

    target: CausalLM
    drafter: Draft
    estimator: Estimator
    most: int  # the most candidates of a round
    trees: bool = False  # otherwise chains
    rows: int = 1  # of the batch
    captures: bool = False  # whether the target's passes may be captured, and then padded to certain widths
    mixes: bool = False  # whether the draft's logits are mixed with the target's latest choices
    products: str = "own"  # allowed kinds of matrix multiplication (`DraftSetup.described_products`)
    times: ProductTimes | None = None  # measured seconds of the target's large layers, if any

    def formed(self) -> Callable[[Costs], Costs]:
        """Return a function from costs of passes to a plan's costs of rounds: in batches, one row's share of them."""
        # Read here, because the function must not keep the target alive.
        is_recurrent, captures = keeps_recurrent_state(self.target), self.captures
        most, rows = self.most, self.rows

        def form(costs: Costs) -> Costs:
            # No pass is cheaper than one over one token: otherwise rounds could draft for a cheaper pass alone,
            # without any candidate being accepted.
            costs = replace(costs, verify=tuple(max(seconds, costs.verify[0]) for seconds in costs.verify))
            if is_recurrent:
                # After a rejection the accepted tokens are read again, each about once.
                costs = costs.reading(range(1, 2 * most + 2, 2))
            if captures:
                costs = costs.reading([width_of(tokens) for tokens in range(1, most + 2)])
            return costs if rows == 1 else costs.scaled(1.0 / rows)

        return form

    def key(self) -> tuple[Any, ...]:
        """Everything that the costs depend on, as a key of a dictionary."""
        head = [self.estimator] if isinstance(self.estimator, nn.Module) else []
        models = [
            (type(each), num_bytes(each), frozenset((part.dtype, part.device) for part in parameters_of(each)))
            for each in (self.target, *self.drafter.parts, *head)
        ]
        attention = self.target.config.get_text_config(decoder=True)._attn_implementation
        rounds = self.most, self.trees, self.rows, self.captures, self.mixes, self.products
        return *models, attention, self.drafter.block, *rounds, torch.get_num_threads()

    def assumed(self) -> Costs:
        """Assumed costs before the first timed round, in passes of the target over one token.

        Measuring before the first sequence would take as long as many rounds, and be wrong on a busy machine."""
        verify = tuple(self._assumed_pass(1 + further) for further in range(self.most + 1))
        if not self.drafter.places:
            return Costs(0.0, verify)
        parts, all_weights = self.drafter.parts, max(_num_multiplied([self.target]), 1)
        draft = _num_multiplied(parts) / all_weights + LEAST_STEP
        # The LM head, a linear layer of its own among the parts, reads the last token only.
        read = _num_multiplied([part for part in parts if type(part) is not nn.Linear]) / all_weights
        read *= AMONG_MANY if self.times is None else self.times.among_many
        return Costs(draft, verify, read=read, branch=AMONG_MANY * draft, block=self.drafter.block)

    def _assumed_pass(self, tokens: int) -> float:
        """The assumed cost of a pass over `tokens` tokens of each row, in passes over one token of each row.

        Example: matrix multiplications of large layers take 100 ns for 1 row and 125 ns for 4. A pass over 4 tokens of
        one row is assumed to cost 1 + LAYERS * 0.25 + 3 * BESIDE = 1 + 0.8 * 0.25 + 3 * 0.015 = 1.245 passes over one
        token. Without measured times each further token costs `WIDER_ON_CPU`, elsewhere `WIDER`."""
        further = self.rows * (tokens - 1)
        if self.times is None:
            return 1.0 + (WIDER_ON_CPU if self.target.device.type == "cpu" else WIDER) * further
        one, many = (self.times.seconds(rows, with_copy=True) for rows in (self.rows, self.rows + further))
        return 1.0 + LAYERS * (many / one - 1.0) + BESIDE * further


def costs_of(rounds: Rounds) -> KnownCosts:
    """Return this process's costs of a kind of rounds, which are assumed before its first sequence."""
    if (key := rounds.key()) not in _known:
        _known[key] = KnownCosts(rounds.assumed(), rounds.formed(), is_assumed=True)
    return _known[key]


def forget_costs() -> None:
    """Delete all measured costs; the next sequence begins with assumed ones."""
    _known.clear()


@contextmanager
def without_known_costs() -> Iterator[None]:
    """Context that begins without measured costs; at the end the earlier costs are restored."""
    before = dict(_known)
    _known.clear()
    try:
        yield
    finally:
        _known.clear()
        _known.update(before)


def _num_multiplied(models: Sequence[nn.Module]) -> int:
    """Total number of weights in linear layers, without biases."""
    layers = {layer for model in models for layer in model.modules() if isinstance(layer, nn.Linear)}
    return sum(layer.weight.numel() for layer in layers)


def length_class(length: int) -> int:
    """Class of sequence lengths with common costs: 7 up to 127 tokens, 8 up to 255, 9 up to 511, ..."""
    return max(length.bit_length(), SHORT)


@dataclass
class RoundTimes:
    """Times of the rounds of one sequence, each in two parts: drafting, and the rest, which counts as the cost of the
    target's pass. So the cost of a pass includes verification. The width of a pass is its number of tokens."""

    clock: Callable[[], float]  # returns seconds (`clocks.computing_clock`)
    # By length class and width, seconds of the rest of each round; by length class, the draft's work and its seconds.
    passes: dict[int, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(partial(defaultdict, list)))
    drafts: dict[int, list[tuple[DraftWork, float]]] = field(default_factory=partial(defaultdict, list))

    def begin_round(self) -> None:
        """Called at the beginning of a round, before drafting."""
        self._begin = self._drafted = self.clock()
        self._drafting: DraftWork | None = None

    def drafted(self, drafting: DraftWork | None) -> None:
        """Called after drafting, with its work; `None` if its time is not typical and must not be used."""
        self._drafted = self.clock()
        self._drafting = drafting

    def end(self, length: int, width: int) -> None:
        """Record the times of the round that ends here. `length`: of the sequence before it; `width`: of its pass."""
        kind = length_class(length)
        self.passes[kind][width].append(self.clock() - self._drafted)
        if self._drafting is not None and self._drafting.steps:
            self.drafts[kind].append((self._drafting, self._drafted - self._begin))


def relative_times(costs: Costs, passes: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return typical seconds (`clocks.typical`) of passes divided by their cost, by width, without widths whose times
    the clock cannot resolve. `passes`: as in `corrected`."""
    verify = costs.verify_seconds(max(passes, default=1) - 1)
    times = {width: typical(each) for width, each in passes.items()}
    return {width: seconds / verify[width - 1] for width, seconds in times.items() if seconds is not None}


def in_seconds(assumed: Costs, times: RoundTimes) -> Costs | None:
    """Convert assumed costs from passes to seconds after the first sequence, with one factor for passes and one for
    drafting. `None` if the clock cannot resolve the times.

    Example: passes over 1 and 3 tokens are assumed to cost 1 and 1.1. The median of rounds over 3 tokens is 22 ms, so a
    pass over 1 token is expected to take 20 ms."""
    verify = assumed.verify_seconds(max(max(widths) for widths in times.passes.values()) - 1)
    timed = [(width, each) for widths in times.passes.values() for width, of in widths.items() for each in of]
    unit = typical([seconds / verify[width - 1] for width, seconds in timed])
    if unit is None:
        return None
    drafts = [(each, seconds) for of in times.drafts.values() for each, seconds in of if each.read <= MOST_READ]
    ratios = [seconds / expected for each, seconds in drafts if (expected := each.seconds(assumed)) > 0.0]
    return assumed.scaled(unit, (typical(ratios) if ratios else None) or unit)


def corrected(costs: Costs, passes: Mapping[int, Sequence[float]], drafts: Sequence[tuple[DraftWork, float]]) -> Costs:
    """Return costs corrected by the times of a sequence.

    With n rounds of a width the new cost is `old * (median / old) ** (n / (n + 3))`, changed by at most a factor of 2.
    Other widths change by the average factor, and so does drafting if there was none: a uniformly slower machine
    changes no decision.

    Example: passes over 1 and 2 tokens cost 10 and 30 ms, and the median of nine rounds over 2 tokens is 20 ms. n / (n
    + 3) is 3/4, so the new cost is 30 * (2/3) ** 0.75 = 22 ms for 2 tokens and 7.4 ms for 1 token.

    Args:
        passes: by width (tokens of the pass), the seconds of each round except those of drafting.
        drafts: for each round with drafting, the draft's work and its seconds.
    """
    counts = {width: len(seconds) for width, seconds in passes.items()}
    changes = {width: _bounded_log(ratio) for width, ratio in relative_times(costs, passes).items()}
    rounds = sum(counts[width] for width in changes)
    usual = sum(change * counts[width] for width, change in changes.items()) / max(rounds, 1) * _share(rounds)
    verify = costs.verify_seconds(max(max(passes, default=0), len(costs.verify)) - 1)
    for width in range(1, len(verify) + 1):
        change = changes[width] * _share(counts[width]) if width in changes else usual
        verify[width - 1] *= math.exp(change)
    few = [(work, seconds) for work, seconds in drafts if work.read <= MOST_READ]
    if not few:
        costs = costs.scaled(1.0, math.exp(usual))
    costs = _corrected_drafting(replace(costs, verify=tuple(verify.tolist())), few)
    return _corrected_reading(costs, [(work, seconds) for work, seconds in drafts if work.read > MOST_READ])


def _corrected_drafting(costs: Costs, drafts: Sequence[tuple[DraftWork, float]]) -> Costs:
    """Costs with drafting corrected: first by a common factor, then divided between `start` and `draft` (a step).

    Example: start and step cost 1 and 2 ms. Drafts of 1 and 3 steps took 4 and 8 ms, each very often. The line through
    these has 2 ms per step, and 2.2 ms are left for the start."""
    known = [(seconds, expected) for each, seconds in drafts if (expected := each.seconds(costs)) > 0.0]
    usual_ratio = typical([seconds / expected for seconds, expected in known]) if known else None
    if usual_ratio is None:
        return costs
    costs = costs.scaled(1.0, math.exp(_bounded_log(usual_ratio) * _share(len(known))))
    by_steps = defaultdict(list)
    for each, seconds in drafts:
        by_steps[each.steps].append(seconds - each.further(costs))
    steps, counts = np.array(list(by_steps)), np.array([len(seconds) for seconds in by_steps.values()])
    taken = np.array([median(seconds) for seconds in by_steps.values()])
    if len(by_steps) == 1 or costs.draft == 0.0 or not 0.0 < taken.min() <= taken.max() < math.inf:
        return costs
    mean = np.average(steps, weights=counts)
    slope = np.average((steps - mean) * taken, weights=counts) / np.average((steps - mean) ** 2, weights=counts)
    usual = costs.start + costs.draft * mean
    step = costs.draft * math.exp(_bounded_log(slope / costs.draft) * _share(counts.sum() - counts.max()))
    step = min(step, usual / mean)
    return replace(costs, draft=float(step), start=max(float(usual - step * mean), 0.0))


def _corrected_reading(costs: Costs, drafts: Sequence[tuple[DraftWork, float]]) -> Costs:
    """Costs with `read` as in these drafts, which began by reading many tokens; changed by at most a factor of 2.

    Example: a step costs 4 ms. Reading 200 tokens and drafting for two steps took 28 ms, so a token costs 0.1 ms."""
    taken = [(seconds - replace(work, read=0).seconds(costs)) / work.read for work, seconds in drafts]
    if not taken or costs.read == 0.0:
        return costs
    return replace(costs, read=costs.read * math.exp(_bounded_log(median(taken) / costs.read)))


def _share(rounds: int) -> float:
    """Weight of a number of new rounds relative to all: 1/2 for 3 (`TRUST`), 3/4 for 9."""
    return rounds / (rounds + TRUST)


def _bounded_log(ratio: float) -> float:
    return math.log(min(max(ratio, 1.0 / MOST_CHANGE), MOST_CHANGE))
