"""What `rule="throughput"` knows of one target and one draft (`Plan`), for chains and for trees.

It learns from the rounds themselves: what rounds cost (`KnownCosts`), how often estimates come true
(`AcceptanceRates`), and what rounds with candidates have brought (`Ledger`). Costs change between texts only, so within
a text no decision depends on a clock. Derived in `docs/throughput.md`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.estimation.acceptance_rates import FIRST_FITS, AcceptanceRates
from hf_specdecpp.estimation.estimators import Estimator
from hf_specdecpp.estimation.ledger import LASTING, LEAST_GAIN, Ledger
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.round_times import RoundTimes, length_class

PROBE_SHARE = 0.005  # of the time without candidates that probes may lose
MOST_CREDIT = 5.0  # plain passes that probes may lose in a row
FOLLOWED = 1.5  # plain passes of credit, beside what a probe costs, for which a draft follows a text at all
LONGEST_PROMISE = 20  # candidates of the longest chain that the first promise is computed for


class Plan:
    """What the rule knows, and what follows from it. Chains and trees differ in how far a round goes.

    Example of the credit: a plain pass takes 40 ms, so credit begins at 200 ms. Ten probes that lose 20 ms each use it
    up; then 100 rounds without candidates earn 0.2 ms each, enough for another one.

    Args:
        known: what rounds cost.
        most: candidates of the largest round.
        rates: what is known of the estimates.

    Attributes:
        costs: at the length of the text now; `verify`: `[most + 1]` seconds of its passes over 0, 1, ... candidates.
        credit (plain passes): what probes, rounds with candidates while speculation does not pay, may cost now;
            negative after a probe that cost more than there was.
        earned: of the rounds with candidates.
        rounds: with candidates, so far.
        rate: tokens a second of rounds with candidates.
        asked: lengths of chains that the next text tries, one a round, whatever is known of them.
    """

    least_gain = LEAST_GAIN

    def __init__(self, known: KnownCosts, most: int, rates: AcceptanceRates | None = None) -> None:
        self.known, self.most, self.rates = known, most, rates or AcceptanceRates()
        self.credit, self.earned, self.rounds = MOST_CREDIT, Ledger(LASTING), 0
        self._kind = 0  # the class of the length of the text
        self.asked: list[int] = []
        self._is_stale = True  # whether there is something new to `_fit`
        self._reckon_with(known.at(0))
        self._catch_up()

    def _reckon_with(self, costs: Costs) -> None:
        self.costs, self.verify = costs, costs.verify_seconds(self.most)
        self.plain = self.earned.plain = costs.pass_seconds
        self.earned.prices = np.append(self.verify + costs.overhead + costs.start, [costs.draft, costs.branch])
        self.rate = 0.0
        self._is_stale = True

    def rule(self, estimator: Estimator) -> Any:
        """What decides the rounds of one text."""
        raise NotImplementedError

    def begin_text(self) -> None:
        """The rounds that follow are of another text."""

    def begin_batch(self, unread: int) -> None:
        """A round of several rows begins, of which the one with most to read has so many tokens for the draft."""

    def follow(self, length: int) -> None:
        """Reckon with what rounds cost at this length of the text, where that is known."""
        if (kind := length_class(length)) != self._kind:
            self._kind = kind
        if (costs := self.known.at(length)) is not self.costs:
            self._reckon_with(costs)
        self._catch_up()  # now, and not when the round is timed: it takes a while

    def learn(self, times: RoundTimes) -> list[tuple[int, int]]:
        """Let the costs follow the rounds of a text that is over; returns what `KnownCosts.learn` does."""
        was_assumed, as_expected = self.known.is_assumed, self.known.learn(times)
        if was_assumed:  # what was reckoned with passes is seconds now
            self._reckon_with(self.known.at(0))
        return as_expected

    @property
    def price(self) -> float:
        """Of a second, in tokens."""
        return max(self.rate, 1.0 / self.plain)

    @property
    def pays(self) -> bool:
        """Whether speculating beats plain decoding."""
        return self.rate * self.plain >= self.least_gain

    @property
    def learns(self) -> bool:
        """Whether a round is to teach something: it is a probe, or what speculation promises has hardly been seen."""
        return not self.pays or self.rounds <= FIRST_FITS[-1]

    def rests(self, length: int) -> bool:
        """Whether a text of this length, which the draft has not read, is left to the target."""
        self.follow(length)
        is_worth_probing = self.credit * self.plain >= self._price(length) + FOLLOWED * self.plain
        return not (self.pays or is_worth_probing)

    def starts(self, unread: int) -> bool:
        """Whether a round drafts at all. `unread`: tokens that the draft has to read first."""
        self._catch_up()
        return self.most > 0 and (self.pays or self.credit * self.plain >= self._price(unread))

    def _price(self, unread: int) -> float:
        """Of the next probe."""
        return (
            self.costs.read * unread + self.costs.tree_seconds(1, 1, float(self.verify[min(1, self.most)])) - self.plain
        )

    def pause(self) -> None:
        """A round without candidates adds to the credit. There is no upper bound here, so dear probes happen too."""
        self.credit += PROBE_SHARE

    def _settle(self, tokens: int, candidates: int, passes: int, read: int, unread: int) -> None:
        """Take note of a round: `read` nodes or places were answered for by passes, after `unread` tokens were read."""
        seconds = self.costs.tree_seconds(passes, read, float(self.verify[candidates])) + self.costs.read * unread
        if self.known.is_assumed:  # and may be far more: a probe is charged a whole pass
            seconds = max(seconds, 2.0 * self.plain)
        saved = PROBE_SHARE if self.pays else tokens / self.least_gain - seconds / self.plain
        self.credit = min(self.credit + saved, MOST_CREDIT)
        taken = np.zeros(self.most + 3)
        taken[[candidates, -2, -1]] = 1.0, passes, read - passes
        self.earned.note(tokens, taken)
        self.rate = max(self.earned.rate, self.earned.promise)
        self.rounds += 1

    def _catch_up(self) -> None:
        if self._is_stale:
            self._fit()
            self._is_stale = False

    def _fit(self) -> None:
        """Bring what follows from rates and costs up to date."""
        self.earned.promise = self._promise()
        self.rate = max(self.earned.rate, self.earned.promise)

    def _promise(self) -> float:
        """Tokens a second that the best constant length of chains promises."""
        raise NotImplementedError
