"""Rounds that a GPU runs as two launches and one read (`CapturedRounds`): the draft's steps, and the target's pass with
acceptance, the next token and all that the next round reads.

The functions are those that every round consists of, on tensors alone; what decides a round on the host elsewhere, such
as where the stopping rule ends the draft, is computed on the device (`sampling.on_device`).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.captured.graphs import Graphs, lasting
from hf_specdecpp.captured.target import CapturedTarget
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.captured import CapturedSession
from hf_specdecpp.drafting.captured_chain import CapturedChain, RoundRules
from hf_specdecpp.estimation.estimators import lag_of
from hf_specdecpp.generation.text import Text, Verdict
from hf_specdecpp.sampling.on_device import accept_greedily, accept_sampled
from hf_specdecpp.throughput.tiers import TIERS, Followed, MostTokens, RoundSeconds

MOST_KEPT = 4  # of a target: drafts and ways of drawing
TIMED_ROUNDS = 3  # of a tier, of which the fastest counts


class CapturedRounds:
    """The rounds of one target and one draft, for one text at a time.

    Example: the text ends with 6. The first graph drafts 7 8 9 and says that all three are submitted; the second reads
    6 7 8 9, finds that 7 and 8 stand and that 4 follows, and leaves both models where 4 is the text's last token. The
    host reads 2, 3, 4 and 7 8 9, and emits 7 8 4.

    Args:
        passes: the target's.
        chain: the draft's side.
    """

    def __init__(self, passes: CapturedTarget, chain: CapturedChain) -> None:
        self.passes, self.chain = passes, chain
        self.graphs, self.seconds = Graphs(passes.device), RoundSeconds()
        most = chain.most
        with lasting():
            self.token = torch.zeros((1, 1), dtype=torch.long, device=passes.device)
            # What the host reads: accepted, submitted, the next token, candidates, estimates.
            self.report = torch.zeros(3 + 2 * most, dtype=torch.float64, device=passes.device)
            self.state: Tensor | None = None  # that the target had at the last token of a round without candidates
            self.read = torch.zeros_like(self.report, device="cpu", pin_memory=passes.device.type == "cuda")

    @property
    def changes(self) -> list[Tensor]:
        return [self.token, self.passes.text.cache.length, *self.chain.changes]

    def begin(self, session: CapturedSession, input_ids: Tensor) -> None:
        """The rounds that follow are of another text, whose last token the target has not read."""
        self.token.copy_(input_ids[:, -1:])
        self.chain.begin(session)

    def run(self, k: int, rules: RoundRules) -> list[float]:
        """One round of k candidates: the report."""
        self._make_room(k)
        self._launch(k, rules)
        self.read.copy_(self.report, non_blocking=True)
        self._wait()
        found: list[float] = self.read.tolist()
        if k:
            self.chain.note(int(found[0]))
        self.passes.text.held += int(found[0]) + 1
        return found

    def time(self, k: int, rules: RoundRules) -> float:
        """Seconds of a round of k candidates, which is forgotten."""
        self._make_room(k)
        before, taken = [each.clone() for each in self.changes], []
        for _ in range(TIMED_ROUNDS):
            begin = time.perf_counter()
            self._launch(k, rules)
            self._wait()
            taken.append(time.perf_counter() - begin)
            for each, old in zip(self.changes, before, strict=True):
                each.copy_(old)
            self._wait()
        return min(taken)

    def _make_room(self, k: int) -> None:
        self.passes.text.with_room(self.passes.text.held + k + 1)
        self.chain.make_room()

    def _launch(self, k: int, rules: RoundRules) -> None:
        place = *self.passes.place, self.chain.text.cache.room, k, rules.key

        def draft() -> None:
            self.chain.propose(k, rules)

        def verify() -> None:
            self._verify(k, rules)

        if k:
            self.graphs.run(("draft", *place), draft, self.changes)
        self.graphs.run(("verify", *place), verify, self.changes)

    def _wait(self) -> None:
        if self.passes.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _verify(self, k: int, rules: RoundRules) -> None:
        """What is captured second."""
        chain, passes = self.chain, self.passes
        candidates = chain.candidates[:k]
        span = torch.arange(k + 1, device=passes.device)
        tokens = torch.cat((self.token, candidates[None]), dim=1)
        logits, *states = passes.forward(passes.text.cache, tokens, span <= span[:, None], span)
        scores = rules.processing.alone(logits[0].float())
        count = chain.count.clamp_max(k)
        if chain.q is None:
            accepted, token = accept_greedily(candidates, count, scores.argmax(-1))
        else:
            accepted, token = accept_sampled(candidates, count, scores.softmax(-1), chain.q[:k], rules.verification)
        together = torch.cat(states, dim=-1) if states else None
        if k:
            chain.take(k, accepted, token, together)
        elif together is not None:
            self._keep_state(together)
        self.token.copy_(token)
        passes.text.cache.length.add_(accepted + 1)
        parts = [torch.stack((accepted, count, token)), chain.candidates, chain.estimates]
        self.report.copy_(torch.cat([part.to(self.report) for part in parts]))

    def _keep_state(self, state: Tensor) -> None:
        """The state `[1, 1, width]` at a token that was emitted without the draft."""
        if self.state is None:
            with lasting():
                self.state = torch.empty_like(state)
        self.state.copy_(state)


class RoundsOfText:
    """The rounds of one text.

    Args:
        side: the target's side of a text that is captured, an `OneTarget`.
        rounds: that no other text is using.
        rules: how candidates are drawn, judged and verified.
        tiers: chooses how many candidates a round has; `None`: always the most.
    """

    def __init__(
        self, side: Any, rounds: CapturedRounds, rules: RoundRules, tiers: Followed | MostTokens | None
    ) -> None:
        self.side, self.rounds, self.rules = side, rounds, rules
        self.rule, self.made = side.generator.rule, 0
        self.tiers = tiers
        self._unread: list[tuple[Tensor, Tensor | None]] = []  # tokens and states of rounds without candidates

    def round(self, text: Text) -> None:
        """A round after a text, which gets what is emitted."""
        stats, rounds = self.side.stats, self.rounds
        begin = time.perf_counter()
        if not self.made:
            self.begin(text.ids)
        k = self._candidates(text.ids)
        if k:
            self._catch_up()
        made, middle = len(rounds.graphs), time.perf_counter()
        found = rounds.run(k, self.rules)
        end = time.perf_counter()
        stats.draft_seconds += middle - begin
        stats.target_seconds += end - middle
        if len(rounds.graphs) == made:
            rounds.seconds.note(k, end - middle)
        accepted, count, token = (int(each) for each in found[:3])
        candidates, judged = [int(each) for each in found[3 : 3 + count]], self._num_judged(count)
        estimates = found[3 + rounds.chain.most :][:judged]
        self.side.generator.note_captured(candidates, estimates, accepted, k)
        if self.tiers is not None:
            self.tiers.note(k, count)
        self._emit(text, [*candidates[:accepted], token])
        if not k and not text.finished:
            self._unread.append((text.ids[:, -1:], None if rounds.state is None else rounds.state.clone()))
        self.made += 1
        stats.overhead_seconds += time.perf_counter() - end

    def _emit(self, text: Text, emitted: list[int]) -> None:
        """Emit what stands of a round of which both models have read everything."""
        nothing = torch.empty(0, 0)  # nobody asks for scores, or rounds would not be captured whole
        kept = text.emit(Verdict([], emitted, nothing, nothing)).kept
        self.side.prefix.forget(len(emitted) - kept)
        text.hand_over(emitted[:kept])

    @property
    def graphs(self) -> Graphs:
        return self.rounds.graphs

    def begin(self, input_ids: Tensor) -> None:
        """The draft reads the prompt; what rounds take is measured where it is not known."""
        generator, rounds = self.side.generator, self.rounds
        session, tokens, states = generator.read_prompt(input_ids, self.side.states.found)
        rounds.begin(session, input_ids)
        rounds.chain.append(tokens, states)
        if isinstance(self.tiers, MostTokens):
            device = rounds.passes.device
            with torch.random.fork_rng([device] if device.type == "cuda" else []):  # a seed is for the text alone
                rounds.seconds.time(self.tiers.tiers, lambda k: rounds.time(k, self.rules))

    def _candidates(self, input_ids: Tensor) -> int:
        """How many the round has. What does not fit under the longest text is cut off when it is emitted."""
        most = self.rounds.chain.most
        k = most if self.tiers is None else self.tiers.next()
        if k and (rates := getattr(self.rule, "rates", None)) is not None:
            self.rounds.chain.calibrate(rates)
        return k if self.side.generator.has_positions(input_ids, most) else 0

    def _catch_up(self) -> None:
        """Let the draft read what was emitted in rounds without candidates."""
        if self._unread:
            tokens, states = zip(*self._unread, strict=True)
            known = [each for each in states if each is not None]
            self.rounds.chain.append(torch.cat(tokens, dim=1), torch.cat(known, dim=1) if known else None)
            self._unread.clear()

    def _num_judged(self, count: int) -> int:
        """Estimates of so many candidates: a head that judges late has none of the last."""
        estimator = self.rules.estimator
        return 0 if estimator is None else max(count - lag_of(estimator), 0)


def rounds_of(side: Any) -> RoundsOfText | None:
    """The rounds of a text whose passes are captured; `None` where they have to be made step by step."""
    generator, text = side.generator, side.prefix
    session, speculation, decisions = generator.session, generator.setup.speculation, generator.setup.decisions
    if not text.is_captured or not isinstance(session, CapturedSession) or not _can_be_whole(side):
        return None
    greedy, most = generator.randomness is None, most_candidates(speculation)
    rules = RoundRules(
        greedy, generator.draft_processing, generator.processing,
        None if speculation.rule == "fixed" else generator.setup.estimator,
        speculation.threshold if speculation.rule == "threshold" else None, decisions.min_tokens,
        decisions.verification,
    )  # fmt: skip
    known = text.passes.rounds
    key = id(session.steps), most, greedy, session.vocab_size
    if key not in known:
        if len(known) >= MOST_KEPT:
            del known[next(iter(known))]
        known[key] = CapturedRounds(text.passes, CapturedChain(session, most, greedy))
    rounds = known[key]
    tiers: Followed | MostTokens | None = None
    if speculation.rule == "threshold":
        tiers = Followed(most)
    elif speculation.rule == "throughput":
        tiers = MostTokens(most, generator.learned_rates(), rounds.seconds)
    return RoundsOfText(side, rounds, rules, tiers)


def most_candidates(speculation: SpeculationConfig) -> int:
    """The most that a captured round has."""
    if speculation.rule == "fixed":
        return speculation.num_tokens
    return min(speculation.max_tokens, TIERS[-1])


def _can_be_whole(side: Any) -> bool:
    """Whether nothing in a round has to be decided on the host: only chains of a draft model, with processors that do
    not look at the tokens."""
    generator, records = side.generator, side.text.records
    speculation = generator.setup.speculation
    own = generator.draws_trees or speculation.lookup or generator.successors is not None
    # Costs that are given or assumed are reckoned with on the host.
    own = own or speculation.costs is not None or (speculation.rule == "throughput" and speculation.reproducible)
    kept = records.logits is not None or records.scores is not None
    processing = generator.processing.prefix_free and generator.draft_processing.prefix_free
    return not own and not kept and processing and not generator.processing.may_forbid_all
