"""Replay a stopping rule along a recorded text, without target and draft.

For greedy generation the rounds equal those of a real run. For sampled generation they are one draw from the exact
distribution of rounds of a real run, given that the run generates this text (`record.py`); the record contains the
random decisions.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from record import Record
from texts import Text
from torch import Tensor

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.chain import StoppingRule
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import MODES, DraftProbability, DraftStep, Estimator
from hf_specdecpp.figures import Floats
from hf_specdecpp.trees.tree import Chain, DraftTree

SVIP_GAMMA = 0.15
ADAEDL_GAMMA = 0.2
NOT_RECORDED = Tensor()  # the logits of a candidate, which rules do not read
MakeRule = Callable[[], StoppingRule]
Round = tuple[int, int, int]  # candidates, accepted candidates, tokens that the draft read first


@dataclass(slots=True)
class Seen:
    """A recorded candidate (`record.KNOWN`); to rules and estimators it looks like a `DraftStep` of plain numbers."""

    token: float
    q_of_token: float
    entropy: float
    label: float
    log_odds: float
    index: int = field(default=0, init=False)


class RecordedHead:
    """The head's verdicts, calibrated for the position at which a replayed round has the candidate."""

    def __init__(self, head: AcceptanceHead, greedy: bool) -> None:
        self.inputs, self.calibration = head.inputs, head.calibration.get(MODES[greedy])
        self.previous = 0.0

    def estimate(self, step: Seen) -> float | None:
        log_odds, position = step.log_odds, step.index
        if self.inputs == "after":  # the estimate for a candidate comes with the next candidate
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
    return TrueAcceptance() if name == "truth" else Probability()  # type: ignore[return-value]


def entropy_of(step: DraftStep | Seen) -> Any:
    """The entropy of q in nats: recorded, or a tensor `[...]`."""
    return step.entropy if isinstance(step, Seen) else torch.special.entr(step.q).sum(-1)


def q_of(step: Any) -> Any:
    """q(y) of a recorded candidate, or of one that is being drafted."""
    return step.q_of_token if isinstance(step, Seen) else DraftProbability().estimate(step)


class Probability(DraftProbability):
    """q(y) as the estimate, also of recorded candidates."""

    def estimate(self, step: Any) -> Any:
        return q_of(step)


class ChainReplay:
    """Chains along one recorded text, as numbers: by place, its tokens as candidates and the chains that leave it."""

    def __init__(self, text: Text, record: Record) -> None:
        self.text = text
        self.on_text = [Seen(*row) for row in record["on_text"]]
        places = (place for place, stands in enumerate(record["stands"]) if not stands)
        chains = ([Seen(*row) for row in chain] for chain in record["off_text"])
        self.off_text = dict(zip(places, chains, strict=True))

    @property
    def generated(self) -> int:
        """Tokens of the text that rounds emit."""
        return len(self.text.ids) - self.text.first

    def rounds(self, rule: StoppingRule) -> list[Round]:
        """What a rule does along the text."""
        rounds, start, unread = [], self.text.first, self.text.first
        while start < len(self.text.ids):
            drafted, accepted = self.round(rule, start, unread)
            rule.record_outcome(Chain([0] * drafted, [NOT_RECORDED] * drafted), range(accepted))
            rounds.append((drafted, accepted, unread))
            unread = 1 + accepted - min(accepted, drafted - 1) if drafted else unread + 1
            start += accepted + 1
        return rounds

    def round(self, rule: StoppingRule, start: int, unread: int) -> tuple[int, int]:
        """A round whose first candidate is for place `start` of the text: candidates, and how many stood."""
        rule.begin_round()
        limit = min(self.text.max_length - start - 1, rule.max_tokens) if rule.should_draft(unread) else 0
        drafted = 0
        for seen in islice(self._candidates(start - self.text.first), limit):
            seen.index, drafted = drafted, drafted + 1
            stops = rule.stops(rule.signal(seen))  # type: ignore[arg-type]
            if seen.token in self.text.eos or (stops and drafted >= rule.min_tokens):
                break
        return drafted, min(drafted, self.run_of(start))

    def _candidates(self, place: int) -> Iterator[Seen]:
        """What the draft says from a place on: along the text, and then out of it."""
        while place not in self.off_text:
            yield self.on_text[place]
            place += 1
        yield from self.off_text[place]

    def run_of(self, start: int) -> int:
        """How many candidates from place `start` on would stand, if a round were to draft as many."""
        place = start - self.text.first
        end = next((p for p in range(place, len(self.on_text)) if p in self.off_text), len(self.on_text))
        return max(min(end - place, self.text.max_length - start - 1), 0)


class Outcomes:
    """What a rule did on many texts: the rounds of each, and the tokens that they generated."""

    def __init__(self, texts: Iterable[list[Round]], generated: Iterable[int]) -> None:
        self.texts, self.generated = [np.array(rounds) for rounds in texts], sum(generated)
        self.rounds = sum(map(len, self.texts))
        self.drafted, self.accepted, _ = (int(total) for total in np.concatenate(self.texts).sum(0))

    def seconds(self, costs: Costs) -> Floats:
        """`[texts]`, the time of the rounds with what the draft reads after a pause, without the prompt's pass."""
        price = costs.round_seconds(max(int(text[:, 0].max()) for text in self.texts))
        resumes = [np.flatnonzero((text[1:, 0] > 0) & (text[:-1, 0] == 0)) + 1 for text in self.texts]
        pairs = zip(self.texts, resumes, strict=True)
        return np.array([price[text[:, 0]].sum() + costs.read * text[late, 2].sum() for text, late in pairs])

    def speed(self, costs: Costs) -> float:
        """Tokens a second."""
        return self.generated / float(self.seconds(costs).sum())

    @property
    def rates(self) -> dict[str, float]:
        """Discarded candidates and target passes a token."""
        discarded = self.drafted - self.accepted
        return {"discard_rate": discarded / self.generated, "verification_rate": self.rounds / self.generated}


def replay_all(replays: list[ChainReplay], make_rule: MakeRule) -> Outcomes:
    """A rule on all texts, made anew for each as for each generation."""
    return Outcomes([replay.rounds(make_rule()) for replay in replays], (replay.generated for replay in replays))


def oracle(replays: list[ChainReplay], costs: Costs) -> Outcomes:
    """The hindsight oracle: it knows what will be accepted, drafts no other candidate, and spends the least time.

    No rule can be faster on these records: any round can be cut back to the candidates that stand without changing what
    it emits. Where a draft step costs less than a target pass and passes cost the same whatever their length, it drafts
    exactly what will be accepted, as in the paper (Lemma 2.1); it is not bound by a rule's most candidates.
    """
    return Outcomes([_fastest(replay, costs) for replay in replays], (replay.generated for replay in replays))


def _fastest(replay: ChainReplay, costs: Costs) -> list[Round]:
    """Rounds of least total time, found from the end of the text backwards."""
    first, end = replay.text.first, len(replay.text.ids)
    runs = {start: replay.run_of(start) for start in range(first, end)}
    seconds = costs.round_seconds(max(runs.values(), default=0)).tolist()
    least: dict[int, float] = {}
    choice: dict[int, int] = {}
    for start in reversed(range(first, end)):
        totals = [seconds[count] + least.get(start + count + 1, 0.0) for count in range(runs[start] + 1)]
        choice[start] = min(range(len(totals)), key=totals.__getitem__)
        least[start] = totals[choice[start]]
    rounds, start = [], first
    while start < end:
        rounds.append((choice[start], choice[start], 1))
        start += choice[start] + 1
    return rounds


# Published rules ------------------------------------------------------------------------------------------------------


class Baseline(StoppingRule):
    """A rule with one bound, between 0 and 1."""

    def __init__(self, bound: float, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.bound = bound


class Confidence(Baseline):
    """Stop after a candidate that the draft itself finds unlikely: q(y) < bound (transformers' dynamic speculation)."""

    def signal(self, step: DraftStep) -> Tensor:
        return q_of(step)

    def stops(self, signal: float | None) -> bool:
        return signal is not None and signal < self.bound


class SVIP(Baseline):
    """Stop when the entropy H of q in nats says that it was a guess: sqrt(0.15 H) > bound (arXiv 2411.18462)."""

    def signal(self, step: DraftStep) -> Tensor:
        return entropy_of(step)

    def stops(self, signal: float | None) -> bool:
        return signal is not None and math.sqrt(SVIP_GAMMA * max(signal, 0.0)) > self.bound


class AdaEDL(Baseline):
    """Stop when 1 - sqrt(0.2 H), a lower bound on the acceptance probability, falls under lambda (arXiv 2410.18351).

    lambda follows the acceptance rate: it falls while more than 90 % of the candidates are accepted and rises otherwise
    (exponential averages with the paper's 0.5 for the rate, 0.9 for lambda, steps of 0.01).
    """

    def __init__(self, bound: float, max_tokens: int) -> None:
        super().__init__(bound, max_tokens)
        self.acceptance_rate = 0.9

    def signal(self, step: DraftStep) -> Tensor:
        return entropy_of(step)

    def stops(self, signal: float | None) -> bool:
        return signal is not None and 1.0 - math.sqrt(ADAEDL_GAMMA * max(signal, 0.0)) < self.bound

    def record_outcome(self, tree: DraftTree, path: Sequence[int]) -> None:
        if tree.num_drawn == 0:
            return
        self.acceptance_rate = 0.5 * self.acceptance_rate + 0.5 * len(path) / tree.num_drawn
        moved = self.bound + (0.01 if self.acceptance_rate < 0.9 else -0.01)
        self.bound = min(max(0.9 * self.bound + 0.1 * moved, 0.0), 1.0)


BASELINES = {"confidence": Confidence, "svip": SVIP, "adaedl": AdaEDL}
