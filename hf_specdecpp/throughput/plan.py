"""What `rule="throughput"` knows of one target and one draft (`Plan`), for chains and for trees.

It learns from the rounds themselves: what rounds cost (`KnownCosts`), how often estimates come true
(`AcceptanceRates`), and what rounds with candidates have brought (`Earned`). Costs change between texts only, so within
a text no decision depends on a clock. Derived in `docs/throughput.md`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_specdecpp.config.costs import Costs, Floats
from hf_specdecpp.estimation.acceptance_rates import FIRST_FITS, AcceptanceRates
from hf_specdecpp.estimation.estimators import Estimator
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.round_times import RoundTimes, length_class

LEAST_GAIN = 1.02  # over plain decoding that speculation must promise: measured costs are not more exact
PROBE_SHARE = 0.005  # of the time without candidates that probes may lose
MOST_CREDIT = 5.0  # plain passes that probes may lose in a row
FOLLOWED = 1.5  # plain passes of credit, beside what a probe costs, for which a draft follows a text at all
RATE_MEMORY = 0.995  # what is left of a round's tokens and seconds a round later
TRUSTED = 8.0  # plain rounds that a promised rate counts for, before it has been seen
LONGEST_PROMISE = 20  # candidates of the longest chain that the first promise is computed for


class ExplorationBudget:
    """What probes may cost now. A probe is a round with candidates while speculation does not pay.

    Example: a plain pass takes 40 ms. The budget begins at 200 ms. Ten probes that lose 20 ms each use it up; then 100
    rounds without candidates earn 0.2 ms each, enough for another one.

    Args:
        plain: seconds of a round without candidates, as they are known now.

    Attributes:
        passes: the credit in such rounds, negative after a probe that cost more than there was.
    """

    def __init__(self, plain: float) -> None:
        self.plain, self.passes = plain, MOST_CREDIT

    @property
    def seconds(self) -> float:
        return self.passes * self.plain

    def rest(self) -> None:
        """A round without candidates adds its share. There is no upper bound here, so dear probes happen too."""
        self.passes += PROBE_SHARE

    def settle(self, pays: bool, saved: float) -> None:
        """A round with candidates, which `saved` seconds beside plain ones; if speculation does not pay, a probe."""
        self.passes = min(self.passes + (PROBE_SHARE if pays else saved / self.plain), MOST_CREDIT)


class Earned:
    """What the rounds with candidates have brought and what they consisted of, later ones counting more. Their seconds
    are those that such rounds cost by the costs as they are known now."""

    def __init__(self, most: int) -> None:
        self._tokens, self._promised, self._promise = 0.0, TRUSTED, 0.0  # plain rounds, and tokens in the time of each
        self._passes = self._branches = 0.0  # of the draft, and places that these answered for beside the first
        self._widths = np.zeros(most + 1)  # how many of the rounds had so many candidates

    def promise(self, tokens: float) -> None:
        """So many tokens are expected in the time of a plain round, as if they had been seen for a few rounds."""
        self._promise = tokens

    def add(self, tokens: int, candidates: int, passes: int, branches: int) -> None:
        self._tokens = RATE_MEMORY * self._tokens + tokens
        self._promised *= RATE_MEMORY
        self._passes = RATE_MEMORY * self._passes + passes
        self._branches = RATE_MEMORY * self._branches + branches
        self._widths *= RATE_MEMORY
        self._widths[candidates] += 1.0

    def rate(self, costs: Costs, verify: Floats) -> float:
        """Tokens a second."""
        drafting = self._passes * costs.draft + self._branches * costs.branch
        rounds = float(self._widths @ verify) + self._widths.sum() * (costs.overhead + costs.start)
        tokens = self._tokens + self._promised * self._promise
        return tokens / (self._promised * costs.pass_seconds + drafting + rounds)


class Plan:
    """What the rule knows, and what follows from it. Chains and trees differ in how far a round goes.

    Args:
        known: what rounds cost.
        most: candidates of the largest round.
        rates: what is known of the estimates.

    Attributes:
        costs: at the length of the text now; `verify`: `[most + 1]` seconds of its passes over 0, 1, ... candidates.
        credit: for probes, while speculation does not pay.
        rounds: with candidates, so far.
        rate: tokens a second of rounds with candidates.
        asked: lengths of chains that the next text tries, one a round, whatever is known of them.
    """

    least_gain = LEAST_GAIN

    def __init__(self, known: KnownCosts, most: int, rates: AcceptanceRates | None = None) -> None:
        self.known, self.most, self.rates = known, most, rates or AcceptanceRates()
        self.credit, self.earned, self.rounds = ExplorationBudget(1.0), Earned(most), 0
        self._kind = 0  # the class of the length of the text
        self.asked: list[int] = []
        self._is_stale = True  # whether there is something new to `_fit`
        self._reckon_with(known.at(0))
        self._catch_up()

    def _reckon_with(self, costs: Costs) -> None:
        self.costs, self.verify = costs, costs.verify_seconds(self.most)
        self.plain = self.credit.plain = costs.pass_seconds
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
        is_worth_probing = self.credit.seconds >= self._price(length) + FOLLOWED * self.credit.plain
        return not (self.pays or is_worth_probing)

    def starts(self, unread: int) -> bool:
        """Whether a round drafts at all. `unread`: tokens that the draft has to read first."""
        self._catch_up()
        return self.most > 0 and (self.pays or self.credit.seconds >= self._price(unread))

    def _price(self, unread: int) -> float:
        """Of the next probe."""
        return (
            self.costs.read * unread + self.costs.tree_seconds(1, 1, float(self.verify[min(1, self.most)])) - self.plain
        )

    def _settle(self, tokens: int, candidates: int, passes: int, read: int, unread: int) -> None:
        """Take note of a round: `read` nodes or places were answered for by passes, after `unread` tokens were read."""
        seconds = self.costs.tree_seconds(passes, read, float(self.verify[candidates])) + self.costs.read * unread
        if self.known.is_assumed:  # and may be far more: a probe is charged a whole pass
            seconds = max(seconds, 2.0 * self.plain)
        self.credit.settle(self.pays, tokens * self.plain / self.least_gain - seconds)
        self.earned.add(tokens, candidates, passes, read - passes)
        self.rate = max(self.earned.rate(self.costs, self.verify), self._promised)
        self.rounds += 1

    def _catch_up(self) -> None:
        if self._is_stale:
            self._fit()
            self._is_stale = False

    def _fit(self) -> None:
        """Bring what follows from rates and costs up to date."""
        self._promised = self._promise()
        self.earned.promise(self._promised * self.plain)
        self.rate = max(self.earned.rate(self.costs, self.verify), self._promised)

    def _promise(self) -> float:
        """Tokens a second that the best constant length of chains promises."""
        raise NotImplementedError
