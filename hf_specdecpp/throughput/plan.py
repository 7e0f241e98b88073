"""What `rule="throughput"` knows of one target and one draft (`Plan`), and how far it drafts chains (`ChainPlan`, and
the rule that follows it, `Throughput`).

A plan learns from the rounds themselves: what rounds cost (`KnownCosts`), how often estimates come true
(`AcceptanceRates`), and what rounds with candidates have brought (`Ledger`). Costs change between texts only, so within
a text no decision depends on a clock. Drafting goes on while the tokens that are expected of a further candidate exceed
the rate, in tokens a second, times the seconds that it adds. Derived in `docs/throughput.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hf_specdecpp.config.costs import Costs, Floats
from hf_specdecpp.config.speculation import MOST_CANDIDATES
from hf_specdecpp.drafting.chain import StoppingRule
from hf_specdecpp.estimation.estimators import FIRST_FITS, NO_VERDICT, AcceptanceRates, DraftStep, Estimator, bin_of
from hf_specdecpp.estimation.ledger import LASTING, LEAST_GAIN, Ledger
from hf_specdecpp.throughput.known_costs import KnownCosts, RoundTimes, length_class
from hf_specdecpp.trees.tree import DraftTree

PROBE_SHARE = 0.005  # of the time without candidates that probes may lose
MOST_CREDIT = 5.0  # plain passes that probes may lose in a row
FOLLOWED = 1.5  # plain passes of credit, beside what a probe costs, for which a draft follows a text at all
TRIED, TRIALS = 2, 2  # lengths of chains that a text tries at most, and rounds of each
CLEAR_GAIN = 1.3  # over plain decoding, for which it matters little what passes over one token cost
TRIED_AGAIN = 16  # texts for which costs that rounds have confirmed are not tried
LEAST_GAIN_IN_BATCHES = 1.1  # there rows end one by one, and those that are left pay for passes alone
LEAST_CRITICAL = 1e-9
ROUNDS_AHEAD = 64  # of a batch, which have to bring what it takes the draft to read the texts of all rows


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
        kinds = range(self._kind - 1, self._kind + 2)  # of lengths of texts, whose costs are little different
        latest = [max(self._confirmed.get((kind, k + 1), -TRIED_AGAIN) for kind in kinds) for k in lengths]
        due = [k for k in lengths if promise[k] > least and self._texts - latest[k] >= TRIED_AGAIN]
        return sorted(due, key=lambda k: -promise[k])[:TRIED] * TRIALS

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
        if self.pays and (tokens > 1 or not self.known.is_assumed):
            saved = MOST_CREDIT if self.known.is_assumed else PROBE_SHARE
        else:  # in the first text, whether drafting pays is a guess until a candidate has stood
            saved = tokens / self.least_gain - seconds / self.plain
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


class ChainPlan(Plan):
    """What the rule knows of one draft and target in chains.

    Args:
        lag: 1 if verdicts come one candidate late (`Estimator.inputs == "after"`).
    """

    def __init__(self, known: KnownCosts, most: int, lag: int, rates: AcceptanceRates | None = None) -> None:
        self.lag = lag
        super().__init__(known, most, rates)

    def rule(self, estimator: Estimator) -> Throughput:
        return Throughput(estimator, self)

    def _fit(self) -> None:
        self._ahead = seconds_ahead(self.rates, self.seconds, self.lag)
        super()._fit()

    def tokens(self) -> Floats:
        return self.rates.expected_tokens(self.most)

    def critical(self, drafted: int, last: int) -> float:
        """The survival at which candidates after so many no longer pay; `last`: bin of the last estimate."""
        return self.price * self._ahead[drafted][last]

    def observe(self, estimates: list[float], unread: int, num_drafted: int, num_accepted: int) -> None:
        if num_drafted == 0:
            self.pause()
            return
        passes = -(-num_drafted // self.costs.block)
        self._settle(num_accepted + 1, num_drafted, passes, num_drafted, unread)
        self._is_stale |= self.rates.observe(estimates, num_drafted, num_accepted)


class BatchPlan(ChainPlan):
    """The same for the rows of a batch, which begin together or not at all, since the draft's pass is as wide as the
    row with most to read.

    Attributes:
        unread, begins, trial: of the round now: tokens that the draft reads first in that row, whether the rows draft,
            and how many candidates the round tries out, if any.
    """

    least_gain = LEAST_GAIN_IN_BATCHES
    tries_to = 0  # a draft has to read all rows' texts first, and wider passes cost far more

    def __init__(self, known: KnownCosts, most: int, lag: int, rates: AcceptanceRates | None = None) -> None:
        super().__init__(known, most, lag, rates)
        self.unread, self.begins = 0, True
        self.trial: int | None = None

    def rule(self, estimator: Estimator) -> BatchThroughput:
        return BatchThroughput(estimator, self)

    def begin_batch(self, unread: int) -> None:
        """Decide whether the rows draft in the round that begins."""
        self.trial, self.unread = self.next_trial(), unread
        gain = self.rate * self.plain**2 - self.plain
        pays = not self.pays or self.costs.read * unread <= ROUNDS_AHEAD * gain
        self.begins = self.trial > 0 if self.trial is not None else pays and self.starts(unread)


def seconds_ahead(rates: AcceptanceRates, seconds: Floats, lag: int) -> list[list[float]]:
    """`[k][b]`: seconds for a token that is expected of drafting on after k candidates that are sure to stand, the last
    of them in bin b (the last b: no estimate is known yet). Of all numbers of further candidates the best counts, so
    that a step of the costs is gone beyond where that pays, and a dip is made use of.

    Example: each candidate is accepted with 0.5 whatever its estimate says. After none a further one takes 0.1 s, two
    take 0.5 s: 0.1 / 0.5 = 0.2 s a token for one, 0.5 / 0.75 = 0.67 s for both.

    Args:
        seconds: `[n + 1]` of rounds with 0, 1, ... candidates.
        lag: 1 if the last candidate's estimate is not known, where there is one.
    """
    most = len(seconds) - 1
    survives = rates.following * rates.acceptance  # [bins + 1, bins]: the next candidate is in a bin, and stands
    tokens = [np.zeros(len(survives))]
    for _ in range(most + lag):
        tokens.append(tokens[-1] + survives.sum(axis=1))
        survives = survives @ (rates.following[:NO_VERDICT] * rates.acceptance)
    expected = np.array(tokens).T  # [bins + 1, further candidates]
    found = []
    for k in range(most + 1):
        late = lag if k else 0
        further = expected[:, 1 + late : 1 + late + most - k] - expected[:, late : late + 1]
        added = seconds[k + 1 :] - seconds[k]
        per_token = added / np.maximum(further, 1e-12)
        found.append(per_token.min(axis=1, initial=math.inf).tolist())
    return found


class Throughput(StoppingRule):
    """Draft on while that raises the expected tokens a second."""

    min_tokens = 0

    def __init__(self, estimator: Estimator, plan: ChainPlan) -> None:
        super().__init__(plan.most)
        self.estimator, self.plan = estimator, plan
        self.unread = 0
        self.begin_round()

    def begin_round(self) -> None:
        self.stands, self.last, self.num_drafted = 1.0, NO_VERDICT, 0
        self.estimates: list[float] = []
        self.trial: int | None = None

    def starts(self, unread: int) -> bool:
        self.unread, self.trial = unread, self.plan.next_trial()
        return self.plan.starts(unread) if self.trial is None else self.trial > 0

    def signal(self, step: DraftStep) -> Tensor | None:
        return self.estimator.estimate(step)

    def stops(self, signal: float | None) -> bool:
        self.num_drafted += 1
        if signal is not None:
            self.estimates.append(signal)
            self.stands *= self.plan.rates.calibrated(signal)
            self.last = bin_of(signal)
        return self.stands <= self.critical if self.trial is None else self.num_drafted >= self.trial

    @property
    def critical(self) -> float:
        """The survival at which another candidate no longer pays."""
        return self.plan.critical(self.num_drafted, self.last)

    @property
    def survival(self) -> float | None:
        return self.stands if self.trial is None else None

    def saw(self, tree: DraftTree, path: Sequence[int]) -> None:
        self.plan.observe(self.estimates, self.unread, (drawn := tree.num_drawn), min(len(path), drawn))


class BatchThroughput(Throughput):
    """The rule for a row of a batch. Rows share passes, so they go on together or not at all (`pays_to_go_on`), and
    begin together or not at all (`BatchPlan.begin_batch`)."""

    plan: BatchPlan

    def starts(self, unread: int) -> bool:
        self.unread, self.trial = max(unread, self.plan.unread), self.plan.trial
        return self.plan.begins

    def stops(self, signal: float | None) -> bool:
        super().stops(signal)
        return False

    @property
    def worth(self) -> float:
        """A row alone goes on while its chance S that everything so far is accepted lies above a critical one, c:
        another candidate is then worth S / c times its price."""
        if self.trial is not None:
            return math.inf if self.num_drafted < self.trial else 0.0
        return self.stands / max(self.critical, LEAST_CRITICAL)
