"""What rounds cost on this machine: assumed at first (`Rounds`), then as the rounds of this process are timed
(`RoundTimes`) and say (`KnownCosts`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_specdecpp.caches.text import width_of
from hf_specdecpp.clocks import are_sensible, typical
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.estimation.estimators import Estimator
from hf_specdecpp.models.causal_lm import CausalLM, num_bytes, parameters_of
from hf_specdecpp.models.checks import keeps_recurrent_state
from hf_specdecpp.models.cpu.products import ProductTimes

FEW = 5  # texts that are drafted with what follows from an assumption, without trials of its details
# Assumed, in passes over one token: each further token, on a CPU and elsewhere; the large layers, where their products
# were measured for several tokens, and what a further token adds beside them; a draft's step beside its share of the
# target's weights. In steps of the draft: a token that it reads among many, or a further place of its pass.
WIDER_ON_CPU, WIDER, LAYERS, BESIDE, LEAST_STEP, AMONG_MANY = 0.1, 0.03, 0.8, 0.015, 0.03, 0.1
TRUST = 3.0  # rounds of a text that count as much as all that was known of the same costs before
MOST_CHANGE = 2.0  # times, in one text: capturing or a machine that sleeps is no cost of a round
MOST_READ = 32  # tokens that a draft reads first, where its drafting tells what a step costs: more are another pass
EXPECTED = 0.1  # difference from the known cost, as a share of it
SHORT = 7  # bits of the length of a text that counts as short: up to 127 tokens

# In this process, by what they depend on.
_known: dict[tuple[Any, ...], KnownCosts] = {}


class KnownCosts:
    """What rounds cost here.

    A length of text that has not been met costs what the nearest one that has does, until its first text is over.

    Args:
        first: before any round was timed.
        form: what a rule reckons with, made of the costs of passes by the tokens that they read: a row's share of a
            batch, widths of passes that are filled up.
        is_assumed: nothing was timed: until the first text is over `first` are shares of a pass over one token.
        follows: whether they follow the rounds.
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
        self._texts = 0 if is_assumed else FEW  # that have corrected them
        self._by_length: dict[int, Costs] = {}  # what rounds have made of them (`length_class`)
        self._formed: dict[int, Costs] = {}  # by class of length, too

    @classmethod
    def given(cls, costs: dict[str, Any] | None) -> KnownCosts:
        """Those of `SpeculationConfig.costs`, which stay; `ValueError` if there are none, or they are no costs."""
        if costs is None:
            raise ValueError(
                "rule='throughput' has to know what a round costs, and there is no target here whose rounds could say. "
                "Give SpeculationConfig(costs=...)."
            )
        return cls(Costs.from_dict(costs), follows=False)

    @property
    def are_new(self) -> bool:
        """Whether few texts have corrected what was assumed."""
        return self._texts < FEW

    def at(self, length: int) -> Costs:
        """What a rule reckons with at this length of the text: the same object until the next text."""
        kind = self._nearest(length_class(length))
        if kind not in self._formed:
            self._formed[kind] = self._form(self._by_length.get(kind, self.first))
        return self._formed[kind]

    def learn(self, times: RoundTimes) -> list[tuple[int, int]]:
        """Follow the rounds of a text: by class of length and width the passes that took what was known of them."""
        taken: list[tuple[int, int]] = []
        if not times.passes or not self.follows:
            return taken
        if self.is_assumed:
            seconds = in_seconds(self.first, times)
            if seconds is None:  # the clock cannot tell
                return taken
            self.first, self.is_assumed = seconds, False
        self._texts += 1
        for kind, passes in times.passes.items():
            known = self._by_length.get(self._nearest(kind), self.first)
            self._by_length[kind] = corrected(known, passes, times.drafts.get(kind, ()))
            taken += [(kind, width) for width in as_expected(known, passes)]
        self._formed.clear()
        return taken

    def _nearest(self, kind: int) -> int:
        """The class of length that there were texts of; the same where there were none at all."""
        return min(self._by_length, key=lambda known: (abs(known - kind), known), default=kind)


@dataclass(frozen=True)
class Rounds:
    """Rounds whose costs are asked for.

    Attributes:
        most: candidates of the largest.
        trees: whether these are trees, or chains.
        rows: of a batch.
        passes: how the target's are made: `"growing"`, or with widths that are filled up, `"captured"`.
        mixes: whether the draft's logits are mixed with the target's successors (`Decisions.draft_successors`).
        products: which matrix products they may take (`DraftSetup.described_products`).
        times: what the products of the target's large layers take, if that was measured.
    """

    target: CausalLM
    drafter: Draft
    estimator: Estimator
    most: int
    trees: bool = False
    rows: int = 1
    passes: str = "growing"
    mixes: bool = False
    products: str = "own"
    times: ProductTimes | None = None

    def formed(self) -> Callable[[Costs], Costs]:
        """Makes costs of passes those that a rule reckons with: of a batch one row's share of passes over all rows."""
        # Read before: what is known of costs must not keep a target alive.
        is_recurrent, is_filled_up = keeps_recurrent_state(self.target), self.passes != "growing"
        most, rows = self.most, self.rows

        def form(costs: Costs) -> Costs:
            # What seems cheaper than a pass over one token was timed in a better moment, or gains little: drafting
            # that follows from that alone has nothing accepted in it.
            costs = replace(costs, verify=tuple(max(seconds, costs.verify[0]) for seconds in costs.verify))
            if is_recurrent:
                # A token that stands is read again after a rejection, which happens to about each token once.
                costs = costs.reading(range(1, 2 * most + 2, 2))
            if is_filled_up:  # with dummies
                costs = costs.reading([width_of(tokens) for tokens in range(1, most + 2)])
            return costs if rows == 1 else costs.scaled(1.0 / rows)

        return form

    def key(self) -> tuple[Any, ...]:
        """All that their costs depend on."""
        head = [self.estimator] if isinstance(self.estimator, nn.Module) else []
        models = [
            (type(each), num_bytes(each), frozenset((part.dtype, part.device) for part in parameters_of(each)))
            for each in (self.target, *self.drafter.parts, *head)
        ]
        attention = self.target.config.get_text_config(decoder=True)._attn_implementation
        rounds = self.most, self.trees, self.rows, self.passes, self.mixes, self.products
        return *models, attention, self.drafter.block, *rounds, torch.get_num_threads()

    def assumed(self) -> Costs:
        """What they cost before any was timed, in passes of the target over one token.

        A measurement before the first text would take as long as many rounds, and on a busy machine be wrong.
        """
        verify = tuple(self._assumed_pass(1 + further) for further in range(self.most + 1))
        if not self.drafter.places:
            return Costs(0.0, verify)
        draft = _num_multiplied(self.drafter.parts) / max(_num_multiplied([self.target]), 1) + LEAST_STEP
        return Costs(draft, verify, read=AMONG_MANY * draft, branch=AMONG_MANY * draft, block=self.drafter.block)

    def _assumed_pass(self, tokens: int) -> float:
        """A pass over so many tokens of each row, in passes over one.

        Example: products of 1 and 4 rows of a large layer take 100 and 125 ns, so a pass over 4 tokens is assumed to
        take 1 + 0.8 * 0.25 + 3 * 0.015 = 1.245 passes over one token.
        """
        further = self.rows * (tokens - 1)
        if self.times is None:
            return 1.0 + (WIDER_ON_CPU if self.target.device.type == "cpu" else WIDER) * further
        one, many = (self.times.seconds(rows, with_copy=True) for rows in (self.rows, self.rows + further))
        return 1.0 + LAYERS * (many / one - 1.0) + BESIDE * further


def costs_of(rounds: Rounds) -> KnownCosts:
    """What is known in this process of the costs of rounds; assumed until the first text has shown it."""
    if (key := rounds.key()) not in _known:
        _known[key] = KnownCosts(rounds.assumed(), rounds.formed(), is_assumed=True)
    return _known[key]


def forget_costs() -> None:
    """Forget all costs: rounds say them again."""
    _known.clear()


@contextmanager
def without_known_costs() -> Iterator[None]:
    """Within, nothing is known of costs; afterwards what was known before."""
    before = dict(_known)
    _known.clear()
    try:
        yield
    finally:
        _known.clear()
        _known.update(before)


def _num_multiplied(models: Sequence[nn.Module]) -> int:
    """Numbers in the weights of linear layers."""
    layers = {layer for model in models for layer in model.modules() if isinstance(layer, nn.Linear)}
    return sum(layer.weight.numel() for layer in layers)


def length_class(length: int) -> int:
    """Texts of lengths that cost alike: up to 127 tokens, 128 to 255, 256 to 511, ..."""
    return max(length.bit_length(), SHORT)


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
    return assumed.scaled(unit, (typical(ratios) if ratios else None) or unit)


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
    verify = costs.verify_seconds(max(max(passes, default=0), len(costs.verify)) - 1).tolist()
    changes = {width: _log_ratio(seconds, verify[width - 1]) for width, seconds in taken_by(passes).items()}
    rounds = sum(len(passes[width]) for width in changes)
    usual = sum(change * len(passes[width]) for width, change in changes.items()) / max(rounds, 1) * _share(rounds)
    by = [changes[w] * _share(len(passes[w])) if w in changes else usual for w in range(1, len(verify) + 1)]
    verify = [seconds * math.exp(change) for seconds, change in zip(verify, by, strict=True)]
    if not drafts:
        costs = costs.scaled(1.0, math.exp(usual))
    return _corrected_drafting(replace(costs, verify=tuple(verify)), drafts)


def _corrected_drafting(costs: Costs, drafts: Sequence[tuple[Drafting, float]]) -> Costs:
    """The price of drafts after a text: first as a whole, then that of a step against that of starting.

    Example: starting and a step were known to take 1 and 2 ms. Drafts of 1 and 3 steps took 4 and 8 ms, very often. A
    line through these has 2 ms a step, and 2 ms for starting.
    """
    known = [(seconds, expected) for each, seconds in drafts if (expected := each.seconds(costs)) > 0.0]
    usual_ratio = typical([seconds / expected for seconds, expected in known]) if known else None
    if usual_ratio is None:
        return costs
    costs = costs.scaled(1.0, math.exp(_log_ratio(usual_ratio, 1.0) * _share(len(known))))
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
