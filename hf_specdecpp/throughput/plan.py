"""`rule="throughput"` for one target and one draft (`Plan`), and the length of its chains (`ChainPlan` with the
stopping rule `Throughput`).

A plan learns from rounds: their costs (`KnownCosts`), how often candidates are accepted (`AcceptanceRates`), and tokens
per second of rounds with candidates (`Ledger`). Costs change between sequences only, so within a sequence no decision
depends on a clock. Drafting continues while the expected tokens of a further candidate exceed the rate, in tokens per
second, times its seconds. Derived in `docs/throughput.md`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_specdecpp.config.costs import Costs, DraftWork, Floats
from hf_specdecpp.config.speculation import MOST_CANDIDATES
from hf_specdecpp.drafting.chain import StoppingRule
from hf_specdecpp.estimation.estimators import FIRST_FITS, NO_VERDICT, AcceptanceRates, Estimator, bin_of
from hf_specdecpp.estimation.ledger import LASTING, LEAST_GAIN, Ledger
from hf_specdecpp.throughput.known_costs import MOST_READ, KnownCosts, RoundTimes, length_class
from hf_specdecpp.trees.tree import DraftTree

PROBE_SHARE = 0.005  # of the time of rounds without candidates, for probes
MOST_CREDIT = 5.0  # plain passes, the largest credit for probes
READ_CREDIT = 1.5  # plain passes: credit, above the price of a probe, with which a draft reads a sequence
SECOND_CREDIT = 2.0  # plain passes: the credit to which a refund may raise it after the first sequence
TRIED, TRIALS = 2, 2  # lengths of chains that a sequence tries at most, and rounds of each
CLEAR_GAIN = 1.3  # over plain decoding; above it the cost of a pass over one token matters little
TRIED_AGAIN = 16  # sequences during which a confirmed cost is not tried
LEAST_GAIN_IN_BATCHES = 1.1  # larger: rows end one by one, and the remaining rows bear the cost of passes
LEAST_CRITICAL = 1e-99  # a pass may cost less than a narrower one, so the critical survival may be negative
USUAL_TOKENS, LATEST = 64.0, 0.1  # assumed tokens of a sequence without lookups; share of the latest in their mean


class Plan:
    """Costs, acceptance and rate of the rounds of one target and draft, for chains (`ChainPlan`) or trees (`TreePlan`).

    Probes are rounds with candidates while plain decoding is faster. Example of their credit: a plain pass takes 40 ms,
    so the credit begins at 200 ms. Ten probes that lose 20 ms each use it up; then 100 rounds without candidates earn
    0.2 ms each, enough for another probe.

    Args:
        known: costs of rounds.
        most: the most candidates of a round.
        lag: by how many candidates estimates are late, -1 to 1 (`lag_of`).
        rates: how often candidates are accepted, by their estimates.

    Attributes:
        costs: costs at the current sequence length; `verify`: `[most + 1]` seconds of passes over 0, 1, ... candidates.
        seconds: `[most + 1]`, of rounds with chains of 0, 1, ... candidates.
        credit: time that probes may lose now, in plain passes; negative after a probe that lost more.
        ledger: tokens and time of rounds with candidates.
        rounds: number of rounds with candidates.
        rate: tokens per second of rounds with candidates.
        trials: chain lengths that the next rounds of the sequence try.
        unread, trial: in this round: tokens that the draft reads first, and the chain length to try, if any.
        waits: whether the round does not use the draft, whose unread tokens would take too long (`weigh_reading`).
        num_tokens: number of tokens that this sequence has got in rounds without lookups alone.
    """

    least_gain, tries_to = LEAST_GAIN, MOST_CANDIDATES
    unread = num_tokens = 0
    trial: int | None = None
    waits = False
    _usual_tokens = USUAL_TOKENS  # mean of `num_tokens` at the end of a sequence
    _missed, _patience = 0.0, 1.0  # plain passes that waiting has missed; their divisor, doubled if they made it end

    def __init__(self, known: KnownCosts, most: int, lag: int = 0, rates: AcceptanceRates | None = None) -> None:
        self.known, self.most, self.lag, self.rates = known, most, lag, rates or AcceptanceRates()
        self.credit, self.ledger, self.rounds = MOST_CREDIT, Ledger(LASTING), 0
        self.trials = list[int]()
        self._texts = 0  # number of sequences
        self._kind: int | None = None  # length class of the current one, `None` before its first round
        self._confirmed: dict[tuple[int, int], int] = {}  # by (length class, width): number of the latest such sequence
        self._use_costs(known.at(0))

    def _use_costs(self, costs: Costs) -> None:
        self.costs, self.verify = costs, costs.verify_seconds(self.most)
        self.seconds = costs.round_seconds(self.most)
        self.plain = self.ledger.plain = costs.verify[0] + costs.overhead
        self.ledger.prices = np.append(self.verify + costs.overhead + costs.start, [costs.draft, costs.branch])
        self._fit()

    def tokens(self) -> Floats:
        """`[most + 1]`, expected tokens of rounds with chains of 0, 1, ... candidates."""
        return self.rates.expected_tokens(self.most)

    def begin_text(self) -> None:
        """Called before the first round of a sequence: its trials begin with the next `set_length`."""
        if self._kind is not None:
            self._usual_tokens += LATEST * (self.num_tokens - self._usual_tokens)
        self._texts, self._kind, self.trials, self.num_tokens = self._texts + 1, None, [], 0

    def set_length(self, length: int) -> None:
        """Called before each round: use the costs at this sequence length. A sequence's first round, and the first in
        another length class, may begin trials."""
        if (costs := self.known.at(length)) is not self.costs:
            self._use_costs(costs)
        if (kind := length_class(length)) != self._kind:
            self._kind = kind
            self.trials = self._trial_lengths(kind) if self.known.are_settled else []

    def _trial_lengths(self, kind: int) -> list[int]:
        """Chain lengths to try: not confirmed in the last 16 sequences, and faster than now if their pass took the time
        of the cheapest pass. At most two, the best first, two rounds each. Length 0, to which all are compared, comes
        first unless the gain is clear."""
        promise = self.tokens() / (self.seconds - self.verify + self.verify.min())
        promise[0] = math.inf if self.rate * self.plain < CLEAR_GAIN else 0.0
        lengths, least = range(min(self.most, self.tries_to) + 1), self.least_gain * self.price
        kinds = range(kind - 1, kind + 2)  # neighbouring length classes have similar costs
        latest = [max(self._confirmed.get((each, k + 1), -TRIED_AGAIN) for each in kinds) for k in lengths]
        due = [k for k in lengths if promise[k] > least and self._texts - latest[k] >= TRIED_AGAIN]
        return sorted(due, key=lambda k: -promise[k])[:TRIED] * TRIALS

    def end_text(self, times: RoundTimes) -> None:
        """Update the costs by the timed rounds of a sequence that has ended."""
        was_assumed = self.known.is_assumed
        self._confirmed |= dict.fromkeys(self.known.update(times), self._texts)
        if was_assumed and not self.known.is_assumed:  # costs were in passes and are in seconds now
            self._use_costs(self.known.at(0))
            tokens, seconds = self.ledger.totals  # probes were charged by assumed costs
            true = MOST_CREDIT + tokens / self.least_gain - seconds / self.plain
            self.credit = max(self.credit, min(true, SECOND_CREDIT))

    @property
    def price(self) -> float:
        """The price of a second in tokens: the rate, or that of plain decoding if larger."""
        return max(self.rate, 1.0 / self.plain)

    @property
    def pays(self) -> bool:
        """Whether rounds with candidates are faster than plain decoding, by at least `least_gain`."""
        return self.rate * self.plain >= self.least_gain

    @property
    def learns(self) -> bool:
        """Whether outcomes are needed: while rounds with candidates are probes, and in the first 32 of them."""
        return not self.pays or self.rounds <= FIRST_FITS[-1]

    def leaves_to_target(self, length: int) -> bool:
        """Whether a sequence of `length` tokens, which the draft has not read, is generated without the draft."""
        self.set_length(length)
        return not (self.pays or self._can_probe(length, READ_CREDIT) or any(self.trials))

    def weigh_reading(self, unread: int, left: float) -> None:
        """Called before each round: set `waits`, whether the draft would read its `unread` tokens for longer than
        drafting is expected to save in the rest of the sequence, of at most `left` tokens. Without lookups, that rest
        is expected to be as long as in earlier sequences on average, or as the part so far, whichever is more. What
        waiting has missed in all sequences counts as a saving, too: without reading its cost would never be corrected.

        Example: the draft takes 8 s to read a prompt, a plain pass takes 0.45 s, and drafting generates 3 tokens per
        second, which saves 0.117 s per token. That is 7.5 s in 64 tokens, so the draft waits. It reads after 35 plain
        passes, which have missed 4.1 s, because another 35 tokens are expected then."""
        further = min(max(self._usual_tokens - self.num_tokens, self.num_tokens), left)
        per_token, reading = 1.0 - 1.0 / (self.rate * self.plain), self.costs.read * (unread - 1) / self.plain
        saving = further * per_token
        self.waits = self.pays and saving + self._missed < reading  # without `pays` `should_draft` decides on probes
        if self.waits:
            self._missed += per_token / self._patience
        elif self.pays and saving < reading:
            self._missed, self._patience = 0.0, 2.0 * self._patience

    def should_draft(self, unread: int) -> bool:
        """Begin a round, and return whether it has candidates. `unread`: tokens that the draft has to read first."""
        self.unread, self.trial = unread, self.trials.pop(0) if self.trials else None
        if self.trial is not None:
            return self.trial > 0
        return self.most > 0 and (self.pays or self._can_probe(unread, READ_CREDIT if unread > MOST_READ else 0.0))

    def _can_probe(self, unread: int, reserve: float = 0.0) -> bool:
        """Whether the credit, less `reserve`, covers the loss of a probe whose one candidate is not accepted."""
        loss = self._round_seconds(min(1, self.most), DraftWork(1, unread)) - self.plain
        return (self.credit - reserve) * self.plain >= loss

    def _round_seconds(self, candidates: int, drafting: DraftWork) -> float:
        return drafting.seconds(self.costs) + float(self.verify[candidates]) + self.costs.overhead

    def record_empty_round(self) -> None:
        """Called after a round without drafted candidates: adds `PROBE_SHARE` to the credit, without an upper bound."""
        self.credit += PROBE_SHARE

    def _settle(self, tokens: int, candidates: int, steps: int, branches: int) -> None:
        """Count a round with candidates, which emitted `tokens`, in credit and rate. The rest: as in `DraftWork`."""
        seconds = self._round_seconds(candidates, DraftWork(steps, self.unread, branches))
        if self.known.is_assumed:  # and uncertain: a probe is charged at least a whole pass
            seconds = max(seconds, 2.0 * self.plain)
        if self.pays and (tokens > 1 or not self.known.is_assumed):
            saved = MOST_CREDIT if self.known.is_assumed else PROBE_SHARE
        else:  # a probe, or without an accepted candidate while costs are assumed
            saved = tokens / self.least_gain - seconds / self.plain
        self.credit = min(self.credit + saved, MOST_CREDIT)
        taken = np.zeros(self.most + 3)
        taken[[candidates, -2, -1]] = 1.0, steps, branches
        self.ledger.record_round(tokens, taken)
        self.rate = max(self.ledger.rate, self.ledger.promise)
        self.rounds += 1

    def _fit(self) -> None:
        """Recompute everything that depends on rates and costs."""
        self._ahead = seconds_ahead(self.rates, self.seconds, self.lag)
        self.ledger.promise = float((self.tokens() / self.seconds).max())  # of the best constant chain length
        self.rate = max(self.ledger.rate, self.ledger.promise)


class ChainPlan(Plan):
    """The plan of chains."""

    def critical(self, drafted: int, last: int) -> float:
        """Return the survival, the probability that all `drafted` candidates are accepted, down to which drafting goes
        on. `last`: bin of the last estimate. With lag -1 this is of the next candidate, which the survival includes."""
        return self.price * self._ahead[drafted][last]

    def record_chain(self, estimates: list[float], num_drafted: int, num_accepted: int) -> None:
        if num_drafted == 0:
            self.record_empty_round()
            return
        steps = -(-num_drafted // self.costs.block)
        self._settle(num_accepted + 1, num_drafted, steps, num_drafted - steps)
        if self.rates.record_chain(estimates, num_drafted, num_accepted):
            self._fit()


class BatchPlan(ChainPlan):
    """The plan of chains in a batch: all rows draft in a round or none, because the draft's pass is as wide as the row
    with most unread tokens. `begins`: whether they draft in this round."""

    begins = True
    least_gain = LEAST_GAIN_IN_BATCHES
    tries_to = 0  # the draft would have to read all rows first, and wider passes cost far more

    def __init__(self, known: KnownCosts, most: int, lag: int, rates: AcceptanceRates | None = None) -> None:
        super().__init__(known, most, max(lag, 0), rates)  # all rows continue or none, so no estimate precedes its draw

    def weigh_reading(self, unread: int, left: float = math.inf) -> None:
        """Begin a round: decide whether the rows draft. `unread`, `left`: most unread, and further, tokens of a row."""
        gain = self.rate * self.plain**2 - self.plain
        can_read = not self.pays or self.costs.read * unread <= min(USUAL_TOKENS, left) * gain
        self.begins = super().should_draft(unread) and can_read

    def should_draft(self, unread: int) -> bool:
        return self.begins


def seconds_ahead(rates: AcceptanceRates, seconds: Floats, lag: int) -> list[list[float]]:
    """Table `[k][b]` of the least seconds per expected token of drafting on after k accepted candidates, the last of
    them in bin b (last column: no estimate). The minimum is over all numbers of further candidates, so that rounds may
    cross a step of the costs, or end in a dip. The last row is infinite.

    Example: each candidate is accepted with probability 0.5. A first candidate takes 0.1 s, two take 0.5 s: 0.1 / 0.5 =
    0.2 s per token for one, 0.5 / 0.75 = 0.67 s for two, so [0][b] is 0.2.

    Args:
        seconds: `[n + 1]`, of rounds with 0, 1, ... candidates.
        lag: 1 if the last candidate has no estimate yet; -1 if the next one has, and b is its bin; else 0.
    """
    most = len(seconds) - 1
    survives = rates.following * rates.acceptance  # [bins + 1, bins]: the next candidate is in this bin and accepted
    tokens = [np.full(len(survives), -1.0), np.zeros(len(survives))]
    for _ in range(most + lag):
        tokens.append(tokens[-1] + survives.sum(axis=1))
        survives = survives @ (rates.following[:NO_VERDICT] * rates.acceptance)
    expected = np.array(tokens).T  # [bins + 1, 1 + further candidates]; accepted after the candidate of the bin
    found = []
    for k in range(most + 1):
        late = min(lag, k) + 1
        further = expected[:, late + 1 : late + 1 + most - k] - expected[:, late : late + 1]
        added = seconds[k + 1 :] - seconds[k]
        per_token = added / np.maximum(further, 1e-12)
        found.append(per_token.min(axis=1, initial=math.inf).tolist())
    return found


class Throughput(StoppingRule):
    """The stopping rule of a `ChainPlan`: draft on while that raises the expected tokens per second. Rows of a batch
    share passes, so all continue or none (`should_continue`), and all draft in a round or none (`BatchPlan`)."""

    def __init__(self, estimator: Estimator, plan: ChainPlan) -> None:
        super().__init__(plan.most)
        self.estimator, self.plan = estimator, plan
        self.asks_first, self.stops_alone = plan.lag < 0, not isinstance(plan, BatchPlan)
        self.begin_round()

    def begin_round(self) -> None:
        self._survival, self.last, self.num_drafted = 1.0, NO_VERDICT, -1 if self.asks_first else 0
        self.estimates: list[float] = []

    def should_draft(self, unread: int) -> bool:
        return self.plan.should_draft(unread)

    def stops(self, signal: float | None) -> bool:
        self.num_drafted += 1
        if signal is not None:
            self.estimates.append(signal)
            self._survival *= self.plan.rates.calibrated(signal)
            self.last = bin_of(signal)
        return self.stops_alone and self.worth <= 1.0

    @property
    def worth(self) -> float:
        """S / c, where S is the probability that all candidates so far are accepted, and c the `critical` survival:
        drafting goes on above 1. In a trial it goes on up to the length that is tried."""
        if (trial := self.plan.trial) is not None:
            return math.inf if self.num_drafted < trial else 0.0
        return self._survival / max(self.plan.critical(self.num_drafted, self.last), LEAST_CRITICAL)

    def survival(self, count: int) -> float | None:
        known = map(self.plan.rates.calibrated, self.estimates[:count])
        return math.prod(known) if self.plan.trial is None else None

    def record_outcome(self, tree: DraftTree, path: Sequence[int]) -> None:
        self.plan.record_chain(self.estimates, (drawn := tree.num_drawn), min(len(path), drawn))
