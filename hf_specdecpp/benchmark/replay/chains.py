"""What a stopping rule does along a recorded text, without either model.

In greedy decoding the rounds are those of a live run. When sampling they are one draw of the rounds of a live run that
comes out with this text, from their exact distribution (`record.py`): the draw in which the live run's random
decisions fall as the record's coins and tokens say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hf_specdecpp.benchmark.replay.record import Candidates, Record
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.estimation.estimators import MODES, DraftProbability, Estimator
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.intervals import Floats


@dataclass(slots=True)
class Seen:
    """A recorded candidate; to rules and estimators it looks like a `DraftStep`, with plain numbers."""

    token: int
    q_of_token: float
    entropy: float
    label: float
    log_odds: float
    index: int = 0


@dataclass(slots=True)
class Drawn:
    """A round's candidates, of which only the number is recorded."""

    num_drawn: int


class RecordedHead:
    """The head's verdicts, calibrated for the position at which a replayed round has the candidate."""

    def __init__(self, head: AcceptanceHead, greedy: bool) -> None:
        self.inputs, self.calibration = head.inputs, head.calibration.get(MODES[greedy])
        self.previous = 0.0

    def estimate(self, step: Seen) -> float | None:
        log_odds, position = step.log_odds, step.index
        if self.inputs == "after":  # the verdict on a candidate comes with the next one
            log_odds, self.previous, position = self.previous, log_odds, position - 1
            if position < 0:
                return None
        if self.calibration is not None:
            log_odds = self.calibration.apply(log_odds, position)  # type: ignore[arg-type,assignment]
        return 0.5 * (1.0 + math.tanh(0.5 * log_odds))


class TrueAcceptance:
    """The informed bound's estimator: what no head can know better."""

    inputs = "before"

    def estimate(self, step: Seen) -> float:
        return step.label


def recorded_estimator(name: str, head: AcceptanceHead | None, greedy: bool) -> Estimator:
    """The estimator `"head"`, `"q"` or `"truth"` of a replay."""
    if name == "head" and head is not None:
        return RecordedHead(head, greedy)  # type: ignore[return-value]
    return TrueAcceptance() if name == "truth" else DraftProbability()  # type: ignore[return-value]


class ChainReplay:
    """Chains along one recorded text, unpacked for speed: what a rule sees at each place, as numbers.

    Attributes:
        on_text: the candidates that are the text's tokens, a place each.
        off_text: by place (0 is `text.first`), the chain out of the text where the candidate does not stand.
    """

    def __init__(self, record: Record) -> None:
        self.text, self.greedy = record.text, record.greedy
        self.on_text = _seen(record.on_text)
        places = (~record.stands).nonzero()[:, 0].tolist()
        self.off_text = dict(zip(places, _chains(record.off_text), strict=True))

    def rounds(self, rule: StoppingRule) -> list[tuple[int, int, int]]:
        """The rounds: candidates, how many stood, and how many tokens the draft had to read before."""
        rounds, start, unread = [], self.text.first, self.text.first
        while start < len(self.text.ids):
            drafted, accepted = self.round(rule, start, unread)
            rule.saw(Drawn(drafted), range(accepted))
            rounds.append((drafted, accepted, unread))
            unread = 1 + accepted - min(accepted, drafted - 1) if drafted else unread + 1
            start += accepted + 1
        return rounds

    def round(self, rule: StoppingRule, start: int, unread: int) -> tuple[int, int]:
        """A round whose first candidate is for place `start` of the text: candidates, and how many stood."""
        rule.begin_round()
        limit = min(self.text.max_length - start - 1, rule.max_tokens) if rule.starts(unread) else 0
        chain: list[Seen] | None = None
        left = start
        for index in range(limit):
            place = start + index - self.text.first
            if chain is None and place in self.off_text:
                chain, left = self.off_text[place], place
            seen = self.on_text[place] if chain is None else chain[place - left]
            seen.index = index
            signal = rule.signal(seen)  # type: ignore[arg-type]
            stops = rule.stops(signal)  # type: ignore[arg-type]
            if seen.token in self.text.eos or (stops and index + 1 >= rule.min_tokens):
                limit = index + 1
                break
        return limit, limit if chain is None else left - (start - self.text.first)

    def run_of(self, start: int) -> int:
        """How many candidates from place `start` on would stand, if a round were to draft as many."""
        place = start - self.text.first
        end = next((p for p in range(place, len(self.on_text)) if p in self.off_text), len(self.on_text))
        return max(min(end - place, self.text.max_length - start - 1), 0)


@dataclass
class Outcomes:
    """What a rule did on many texts.

    Attributes:
        lengths: for each text, how many rounds had 0, 1, 2, ... candidates.
        accepted, generated, read: for each text: candidates that stood, tokens, and tokens that the draft caught up on
            after pauses.
    """

    lengths: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)

    def add(self, rounds: list[tuple[int, int, int]], generated: int) -> None:
        """Count a text."""
        lengths = [0] * (max((drafted for drafted, _, _ in rounds), default=0) + 1)
        for drafted, _, _ in rounds:
            lengths[drafted] += 1
        self.lengths.append(lengths)
        self.accepted.append(sum(accepted for _, accepted, _ in rounds))
        self.generated.append(generated)
        # The prompt has to be read in any case, and two tokens are new after a round that stood as a whole.
        late = [
            unread
            for before, (drafted, _, unread) in zip(rounds, rounds[1:], strict=False)
            if drafted and not before[0]
        ]
        self.read.append(sum(late))

    def seconds(self, costs: Costs) -> Floats:
        """`[texts]`, the time of the rounds; the pass over the prompt is left out."""
        longest = max(map(len, self.lengths), default=1)
        counts = np.array([lengths + [0] * (longest - len(lengths)) for lengths in self.lengths], dtype=float)
        return counts @ costs.round_seconds(longest - 1) + costs.read * np.array(self.read, dtype=float)

    @property
    def rounds(self) -> int:
        return sum(map(sum, self.lengths))

    @property
    def drafted(self) -> int:
        return sum(length * count for lengths in self.lengths for length, count in enumerate(lengths))

    @property
    def discard_rate(self) -> float:
        return (self.drafted - sum(self.accepted)) / max(sum(self.generated), 1)

    @property
    def verification_rate(self) -> float:
        return self.rounds / max(sum(self.generated), 1)

    def speed(self, costs: Costs) -> float:
        """Tokens a second."""
        return sum(self.generated) / float(self.seconds(costs).sum())


def replay_all(replays: list[ChainReplay], make_rule: Callable[[], StoppingRule]) -> Outcomes:
    """A rule on all texts, made anew for each as for each generation."""
    outcomes = Outcomes()
    for replay in replays:
        outcomes.add(replay.rounds(make_rule()), len(replay.text.ids) - replay.text.first)
    return outcomes


def _seen(candidates: Candidates) -> list[Seen]:
    columns = (
        candidates.tokens,
        candidates.scalars[..., 0].double().exp(),
        candidates.scalars[..., 1].double(),
        candidates.label,
        candidates.log_odds.double(),
    )
    return [Seen(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def _chains(candidates: Candidates) -> list[list[Seen]]:
    count, length = candidates.tokens.shape
    flat = Candidates(**{name: value.flatten(0, 1) for name, value in vars(candidates).items()})
    seen = _seen(flat)
    return [seen[i * length : (i + 1) * length] for i in range(count)]
