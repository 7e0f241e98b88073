"""All steps of a chain as one function of tensors (`CapturedChain`), for rounds that a GPU runs as two launches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from hf_specdecpp.captured.graphs import lasting
from hf_specdecpp.captured.rooms import RoomCache, Rooms, RoomText
from hf_specdecpp.drafting.captured import SEVERAL, CapturedSession, read
from hf_specdecpp.estimation.acceptance_rates import EDGES, AcceptanceRates
from hf_specdecpp.estimation.estimators import DraftStep, Estimator
from hf_specdecpp.sampling.on_device import count_until, exponential, race
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.verification import Verification

READ_AT_ONCE = 2048  # tokens of a prompt, whose mask is a matrix


@dataclass(frozen=True)
class RoundRules:
    """How candidates are drawn, judged and verified in the rounds of a text.

    Attributes:
        greedy: whether likeliest tokens are taken.
        draft_processing, processing: what makes q and p of logits; neither looks at the tokens.
        estimator: judges candidates, if anything looks at that.
        threshold, min_tokens: of SpecDec++'s rule; `None` where all candidates are submitted.
        verification: of sampled candidates.
    """

    greedy: bool
    draft_processing: Processing
    processing: Processing
    estimator: Estimator | None
    threshold: float | None
    min_tokens: int
    verification: Verification

    @cached_property  # asked for in every round, and numbers that lie on the device are read for it
    def key(self) -> Hashable:
        """All of this that a graph has in it."""
        processors = [*self.draft_processing.processors, None, *self.processing.processors]
        described = tuple(
            (type(each).__name__, repr(sorted(vars(each).items())) if each else "") for each in processors
        )
        judge = id(self.estimator) if isinstance(self.estimator, nn.Module) else type(self.estimator)
        return self.greedy, described, judge, self.threshold, self.min_tokens, self.verification


class CapturedChain:
    """A draft's side of the rounds of one text, where all steps of a round are taken at once.

    At the beginning of a round the draft reads `last + 1` of the `tokens`, with what it is told of the target's states
    there; the others are dummies. A draft of its own embeddings reads the last two tokens of the text, the former of
    which may have been read before. A draft that reads states reads all that the last round emitted.

    Example: the text ends with 5 6, and a round of three candidates 7 8 9 emits 7 8 4. A draft of its own embeddings
    then reads 8 4 after 5 6 7. One that reads states reads 7 8 4 and a dummy with the target's states at 6, 7, 8 and 9.

    Args:
        session: which has not read the prompt yet.
        most: candidates in a round.
        greedy: whether no q is needed.

    Attributes:
        candidates, estimates: `[most]`, of the latest round.
        q: `[most, vocab]`, that they were drawn from, where they were drawn.
        count: 0-d, how many of them are submitted.
        shift: `[bins]`, what calibration adds to the log-odds of estimates.
    """

    def __init__(self, session: CapturedSession, most: int, greedy: bool) -> None:
        self.session, self.most, self.vocab_size = session, most, session.vocab_size
        self.device, self.reads_states = session.device, session.reads_states
        steps = session.steps.drafter
        with lasting():
            width = most + 1 if self.reads_states else 2
            self.tokens = torch.zeros((1, width), dtype=torch.long, device=self.device)
            self.last = torch.zeros(1, dtype=torch.long, device=self.device)
            self.states: Tensor | None = None
            if self.reads_states:
                self.states = torch.zeros((1, width, steps.fusion.width), dtype=steps.dtype, device=self.device)
            self.candidates = torch.zeros(most, dtype=torch.long, device=self.device)
            self.count = torch.zeros((), dtype=torch.long, device=self.device)
            self.estimates = torch.zeros(most, device=self.device)
            self.q = None if greedy else torch.zeros((most, self.vocab_size), device=self.device)
            self.shift = torch.zeros(len(EDGES) + 1, device=self.device)
            self.edges = torch.tensor(EDGES, device=self.device)
        # Graphs read and write its caches, so they are kept from text to text.
        self._rooms = Rooms(session.steps.num_layers or 0, self.device)
        self.text = RoomText(self._rooms.empty)
        self.pending = 0  # `last + 1`, on the host

    def make_room(self) -> RoomCache:
        """For a round."""
        return self.text.with_room(self.text.held + self.tokens.shape[1] + self.most)

    @property
    def changes(self) -> list[Tensor]:
        """Tensors that a round reads and then changes."""
        found = [self.tokens, self.last, self.text.cache.length]
        return found if self.states is None else [*found, self.states]

    def begin(self, session: CapturedSession) -> None:
        """Nothing of a new text has been read."""
        self.session, self.text, self.pending = session, RoomText(self._rooms.empty), 0

    def append(self, tokens: Tensor, states: Tensor | None) -> None:
        """Go on with `tokens` `[1, n]` that were emitted without the draft, the prompt first of all: read all of the
        text but for what the next round reads."""
        if self.pending:
            tokens = torch.cat((self.tokens[:, : self.pending], tokens), dim=1)
            if self.states is not None and states is not None:
                states = torch.cat((self.states[:, : self.pending], states), dim=1)
        now = 1 if self.reads_states else min(2, tokens.shape[1])
        before = tokens.shape[1] - now
        cache = self.text.with_room(self.text.held + before + max(self.tokens.shape[1] + self.most, SEVERAL))
        at_once = SEVERAL if self.text.held else READ_AT_ONCE  # the former are captured
        for start in range(0, before, at_once):
            piece = slice(start, min(start + at_once, before))
            known = None if states is None else states[:, piece]
            if self.text.held:
                self.session.steps.read(cache, tokens[:, piece], known, self.vocab_size)
            else:
                last = self.last.new_full((1,), piece.stop - piece.start - 1)
                read(self.session.steps.drafter, cache, [tokens[:, piece], known, last], self.vocab_size)
        self.tokens[:, :now] = tokens[:, before:]
        if self.states is not None and states is not None:
            self.states[:, :now] = states[:, before:]
        self.text.held += before
        self.pending = now
        self.last.fill_(now - 1)

    def note(self, accepted: int) -> None:
        """On the host, what `take` did."""
        if self.reads_states:
            self.text.held += self.pending
            self.pending = accepted + 1
        else:
            self.text.held += self.pending - 1 + accepted
            self.pending = 2

    def calibrate(self, rates: AcceptanceRates) -> None:
        """Judge by what rounds have said of estimates."""
        self.shift.copy_(torch.tensor(rates.shift))

    def propose(self, k: int, rules: RoundRules) -> None:
        """What is captured first: k steps, each of which draws a candidate, and the place at which the rule stops."""
        drafter, cache = self.session.steps.drafter, self.text.cache
        before = cache.length.clone()
        logits, hidden = read(drafter, cache, [self.tokens, self.states, self.last], self.vocab_size)
        alone = torch.zeros_like(self.last)
        judged: list[Tensor | None] = []
        for index in range(k):
            step = self._draw(index, logits, hidden, rules)
            judged.append(None if rules.estimator is None else rules.estimator.estimate(step))
            self.candidates[index] = step.token
            if index + 1 < k:
                own = hidden[None, None] if self.reads_states else None
                logits, hidden = read(drafter, cache, [step.token.view(1, 1), own, alone], self.vocab_size)
        cache.length.copy_(before)
        self.count.copy_(self._count(k, judged, rules))

    def _draw(self, index: int, logits: Tensor, hidden: Tensor, rules: RoundRules) -> DraftStep:
        scores = rules.draft_processing.alone(logits)
        step = DraftStep(index, scores, hidden, self.session.embed, rules.greedy)
        if self.q is None:
            step.token = scores.argmax()
        else:
            step.token = race(step.q, exponential(self.vocab_size, device=self.device))
            self.q[index] = step.q
        return step

    def _count(self, k: int, judged: list[Tensor | None], rules: RoundRules) -> Tensor:
        """How many of k candidates are submitted: the one at which the rule stops is."""
        known = [each for each in judged if each is not None]
        if known:
            self.estimates[: len(known)] = torch.stack(known).to(self.estimates)
        if rules.threshold is None:
            return torch.full_like(self.count, k)
        survival = self._calibrated(self.estimates[: len(known)]).cumprod(0)
        if len(known) < k:  # verdicts come one candidate late, so there is none on the first
            survival = torch.cat((survival.new_ones(1), survival))
        places = torch.arange(1, k + 1, device=self.device)
        return count_until((1.0 - survival > rules.threshold) & (places >= rules.min_tokens))

    def _calibrated(self, estimates: Tensor) -> Tensor:
        """As `AcceptanceRates.calibrated`."""
        shift = self.shift[torch.bucketize(estimates, self.edges, right=True)]
        return (estimates.clamp(1e-4, 1.0 - 1e-4).logit() + shift).sigmoid()

    def take(self, k: int, accepted: Tensor, token: Tensor, states: Tensor | None) -> None:
        """The end of what is captured second: what the next round reads, once the target has read k candidates.

        Args:
            accepted, token: 0-d, how many stand and what follows them.
            states: `[1, k + 1, width]` of the target, for a draft that reads them: from the text's last token on.
        """
        if self.states is None or states is None:
            # The token before the new last one: the last candidate that stands, or what was the last token.
            before = torch.cat((self.tokens.gather(1, self.last[None]), self.candidates[None, :k]), dim=1)
            self.tokens[:, 0] = before.gather(1, accepted[None, None])[0]
            self.tokens[:, 1] = token
            self.text.cache.length.add_(accepted + self.last[0])
            self.last.fill_(1)
            return
        self.text.cache.length.add_(self.last[0] + 1)
        self.tokens[:, :k] = self.candidates[:k]
        self.tokens.scatter_(1, accepted[None, None], token[None, None])
        self.states[:, : k + 1] = states.to(self.states)
        self.last.copy_(accepted[None])
