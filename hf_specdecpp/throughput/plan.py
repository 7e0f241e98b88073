"""What `rule="throughput"` knows of one target and one draft (`Plan`), for chains and for trees.

It learns from the rounds themselves: what rounds cost (`KnownCosts`), how often estimates come true
(`AcceptanceRates`), and what rounds with candidates have brought (`Ledger`). Costs change between texts only, so within
a text no decision depends on a clock. Derived in `docs/throughput.md`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hf_specdecpp.config.costs import Costs, Floats
from hf_specdecpp.config.speculation import MOST_CANDIDATES
from hf_specdecpp.estimation.acceptance_rates import FIRST_FITS, AcceptanceRates
from hf_specdecpp.estimation.estimators import Estimator
from hf_specdecpp.estimation.ledger import LASTING, LEAST_GAIN, Ledger
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.round_times import RoundTimes, alike, length_class

PROBE_SHARE = 0.005  # of the time without candidates that probes may lose
MOST_CREDIT = 5.0  # plain passes that probes may lose in a row
FOLLOWED = 1.5  # plain passes of credit, beside what a probe costs, for which a draft follows a text at all
TRIED, TRIALS = 2, 2  # lengths of chains that a text tries at most, and rounds of each
CLEAR_GAIN = 1.3  # over plain decoding, for which it matters little what passes over one token cost
TRIED_AGAIN = 16  # texts for which costs that rounds have confirmed are not tried


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
        seconds: `[most + 1]` of rounds with chains of 0, 1, ... candidates.
        credit (plain passes): what probes, rounds with candidates while speculation does not pay, may cost now;
            negative after a probe that cost more than there was.
        earned: of the rounds with candidates.
        rounds: with candidates, so far.
        rate: tokens a second of rounds with candidates.
        trials: lengths of chains that the next rounds of the text try out; `asked` for, those of the next text.
    """

    least_gain, tries_to = LEAST_GAIN, MOST_CANDIDATES

    def __init__(self, known: KnownCosts, most: int, rates: AcceptanceRates | None = None) -> None:
        self.known, self.most, self.rates = known, most, rates or AcceptanceRates()
        self.credit, self.earned, self.rounds = MOST_CREDIT, Ledger(LASTING), 0
        self._kind = 0  # the class of the length of the text
        self.asked, self.trials = list[int](), list[int]()
        self._texts, self._is_new = 0, True  # how many there were, and whether nothing of the one now is known yet
        self._confirmed: dict[tuple[int, int], int] = {}  # by class and width of passes: in which text
        self._is_stale = True  # whether there is something new to `_fit`
        self._reckon_with(known.at(0))
        self._catch_up()

    def _reckon_with(self, costs: Costs) -> None:
        self.costs, self.verify = costs, costs.verify_seconds(self.most)
        self.seconds = costs.round_seconds(self.most)
        self.plain = self.earned.plain = costs.pass_seconds
        self.earned.prices = np.append(self.verify + costs.overhead + costs.start, [costs.draft, costs.branch])
        self.rate = 0.0
        self._is_stale = True

    def rule(self, estimator: Estimator) -> Any:
        """What decides the rounds of one text."""
        raise NotImplementedError

    def begin_batch(self, unread: int) -> None:
        """A round of several rows begins, of which the one with most to read has so many tokens for the draft."""

    def tokens(self) -> Floats:
        """`[most + 1]`, expected of chains of 0, 1, ... candidates."""
        raise NotImplementedError

    def begin_text(self) -> None:
        """The rounds that follow are of another text."""
        self._texts, self._is_new, self.trials = self._texts + 1, True, []

    def follow(self, length: int) -> None:
        """Reckon with what rounds cost at this length of the text, where that is known."""
        kind = length_class(length)
        is_new = self._is_new or kind != self._kind
        self._is_new, self._kind = False, kind
        if (costs := self.known.at(length)) is not self.costs:
            self._reckon_with(costs)
        self._catch_up()  # now, and not when the round is timed: it takes a while
        if is_new and self.known.follows:
            self.trials, self.asked = self.asked or self._worth_trying(), []

    def _worth_trying(self) -> list[int]:
        """Lengths whose costs no round has confirmed for long, so that what is known of them may be wrong: none, by
        which all others are judged, and those that would pay most if their passes cost as little as the cheapest. The
        first texts, which have enough to learn, try nothing."""
        if self.known.are_new:
            return []
        promise = self.tokens() / (self.seconds - self.verify + self.verify.min())
        promise[0] = math.inf if self.rate * self.plain < CLEAR_GAIN else 0.0
        lengths, least = range(min(self.most, self.tries_to) + 1), self.least_gain * self.price
        due = [k for k in lengths if promise[k] > least and self._is_due(k)]
        return sorted(due, key=lambda k: -promise[k])[:TRIED] * TRIALS

    def _is_due(self, length: int) -> bool:
        """Whether no round has confirmed for long what a length costs, in texts of about this length."""
        latest = max(self._confirmed.get((kind, length + 1), -TRIED_AGAIN) for kind in alike(self._kind))
        return self._texts - latest >= TRIED_AGAIN

    def next_trial(self) -> int | None:
        """The number of candidates that the next round has to see what that costs; `None` where the rule decides."""
        return self.trials.pop(0) if self.trials else None

    def learn(self, times: RoundTimes) -> None:
        """Let the costs follow the rounds of a text that is over."""
        was_assumed = self.known.is_assumed
        self._confirmed |= dict.fromkeys(self.known.learn(times), self._texts)
        if was_assumed:  # what was reckoned with passes is seconds now
            self._reckon_with(self.known.at(0))

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
        return not (self.pays or is_worth_probing or any(self.trials))

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
        self.earned.promise = float((self.tokens() / self.seconds).max())  # of the best constant length of chains
        self.rate = max(self.earned.rate, self.earned.promise)
