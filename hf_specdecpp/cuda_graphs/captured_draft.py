"""The draft in captured rounds (`CapturedDraft`): draws the candidates of all levels in one function of tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.cuda_graphs.draft_steps import DrawnLevel, RoundSteps, Window
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCaches, FixedContext
from hf_specdecpp.cuda_graphs.graphs import lasting
from hf_specdecpp.cuda_graphs.identity import identity
from hf_specdecpp.cuda_graphs.on_device import best_slots, count_until, exponential, race, remaining, slot_values
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import EDGES, AcceptanceRates, DraftStep, Estimator, lag_of
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.trees.verification import Verification

READ_AT_ONCE = 2048  # tokens of a prompt per pass: the mask is quadratic


class RoundShape(NamedTuple):
    """Shape of a round's candidates: `levels` of `width` nodes each. Chains have width 1."""

    levels: int
    width: int = 1

    @property
    def nodes(self) -> int:
        return self.levels * self.width


@dataclass(frozen=True)
class RoundRules:
    """How candidates of a sequence are drawn, estimated and verified.

    Attributes:
        greedy: whether draft and target choose their likeliest tokens.
        draft_processing, processing: compute q and p from logits.
        estimator: estimates acceptance; `None` if estimates are not used.
        threshold, min_tokens: of SpecDec++'s stopping rule; threshold `None` if all candidates are submitted.
        verification: method for sampled candidates.
    """

    greedy: bool
    draft_processing: Processing
    processing: Processing
    estimator: Estimator | None
    threshold: float | None
    min_tokens: int
    verification: Verification

    @property
    def asks_for_text(self) -> bool:
        """Whether a processor depends on the prefix."""
        return not (self.draft_processing.prefix_free and self.processing.prefix_free)

    @property
    def head_of_slots(self) -> AcceptanceHead | None:
        """The head that values slots of trees; `None` if q does."""
        return self.estimator if isinstance(self.estimator, AcceptanceHead) and lag_of(self.estimator) < 1 else None

    def num_judged(self, count: int) -> int:
        """Number of estimates of a chain of `count` candidates; with `inputs="after"` the last has none."""
        return 0 if self.estimator is None else max(count - max(lag_of(self.estimator), 0), 0)

    @cached_property  # needed in every round, and computing it reads numbers from the device
    def key(self) -> Hashable:
        """Everything here that a graph depends on."""
        processors = self.draft_processing.processors, self.processing.processors
        described = (*identity(*processors, by_value=True), *identity(self.estimator))
        return self.greedy, described, self.threshold, self.min_tokens, self.verification


class Drawn(NamedTuple):
    """A level of candidates.

    Attributes:
        tokens, parents: `[texts, width]`, the latter as indices in the level above.
        values: `[texts, width]`, estimated survival; in chains 1, or 0 if no token could be drawn.
        q: `[texts, m, vocab]`, the distributions of the first children of the m nodes above; `None` if greedy.
        judged: `[texts, width]`, uncalibrated estimates; `None` if not used.
    """

    tokens: Tensor
    parents: Tensor
    values: Tensor
    q: Tensor | None
    judged: Tensor | None


class CapturedDraft:
    """The draft in the rounds of one sequence, or of the rows of a batch, with all draft steps in one graph.

    At the beginning of a round the draft reads a window of `width` tokens: the first `last + 1` of `tokens`, with the
    target's states for drafts that read them, then dummies. These are the tokens emitted by the last round, and
    `steps.again` tokens before them. Candidates in the draft's cache are dropped.

    Example: the sequence ends with 6, and a round of three candidates 7 8 9 emits 7 8 4. The next window is 7 8 4 and
    a dummy, and the target's states in it are those at 6, 7, 8 and 9.

    Args:
        steps: the draft's steps.
        shapes: all shapes that rounds may have.
        texts: number of rows of the batch.
        greedy: if true, q is not stored.
        spare: room in the window for tokens of rounds without candidates.

    Attributes:
        candidates, parents: `[texts, nodes]`, of the latest round; the root is node 0, the first candidate node 1.
        ancestors: `[texts, nodes + 1, nodes + 1]` bool, ancestors of each node, itself included.
        q: `[texts, nodes, vocab]`, distributions of the first child of the root and of each node above the last level:
            in chains, of each candidate; `None` if greedy.
        count: `[texts]`, number of submitted candidates.
        estimates: `[texts, nodes]`, uncalibrated.
        shift: `[bins]`, the numbers that calibration adds to log-odds.
        alive: `[texts]` int64, 0 for sequences that have ended.
        pending: the largest `last + 1`, on the host; the window is full at `width`.
        most_rows: the most rows of the cache that a round writes.
        caches: the draft's caches.
        source: the sequence that the steps read: the draft's, or the target's if the draft shares its cache.
    """

    def __init__(self, steps: RoundSteps, shapes: Sequence[RoundShape], texts: int, greedy: bool, spare: int) -> None:
        self.steps, self.device = steps, steps.device
        self.nodes = max(each.nodes for each in shapes)
        self.width = max(each.levels for each in shapes) + 1 + steps.again + spare
        self.most_rows = self.width + max(self.nodes, steps.behind)
        zeros, size = partial(torch.zeros, dtype=torch.long, device=self.device), self.nodes + 1
        with lasting():
            self.tokens, self.last, self.count = zeros((texts, self.width)), zeros(texts), zeros(texts)
            self.candidates, self.parents = zeros((texts, self.nodes)), zeros((texts, self.nodes))
            self.ancestors = torch.ones((texts, size, size), dtype=torch.bool, device=self.device)
            self.alive = torch.ones_like(self.last)
            self.estimates = torch.zeros((texts, self.nodes), device=self.device)
            self.states: Tensor | None = None
            if steps.size is not None:
                self.states = torch.zeros((texts, self.width, steps.size), dtype=steps.dtype, device=self.device)
            self.q = None if greedy else torch.zeros((texts, self.nodes, steps.vocab_size), device=self.device)
            self.shift = torch.zeros(len(EDGES) + 1, device=self.device)
            self.edges = torch.tensor(EDGES, device=self.device)
        # Kept between sequences, because graphs read and write these caches.
        self.caches = FixedCaches(steps.num_layers, self.device)
        self._positions = torch.Size((texts, 1)) if texts > 1 else None
        self.context = self.source = FixedContext(self.caches, self._positions)
        self.pending = 0
        self._shift: list[float] | None = None  # on the host

    @property
    def changes(self) -> list[Tensor]:
        """Tensors that a round first reads and then changes."""
        found = [self.tokens, self.last, self.context.cache.length]
        return found if self.states is None else [*found, self.states]

    def begin_texts(self, tokens: Tensor, states: Tensor | None, padding: Tensor, of_target: FixedContext) -> None:
        """Read new sequences except their last tokens, which remain for the first window.

        `tokens`: `[texts, n]`, the first `padding` `[texts]` of them hidden; `states`: `[texts, n, size]`, the target's
        before each token; `of_target`: the sequences in the target's cache."""
        count, again = tokens.shape[1], self.steps.again
        self.context = FixedContext(self.caches, self._positions)
        self.source = of_target if self.steps.shares_cache else self.context
        self.alive.fill_(1)
        cache, end = self.context.with_capacity(count + self.most_rows), max(count - 1 - again, 0)
        if cache.prompt is not None:
            cache.prompt.shown.copy_(torch.arange(cache.capacity, device=self.device) >= padding[:, None])
            cache.prompt.offset.copy_(-padding[:, None])
        first = 0
        while first < end:
            piece = slice(first, min(first + READ_AT_ONCE, end + again))
            read = piece.stop - first
            known = None if states is None else states[:, piece].to(self.steps.dtype)
            self.steps.read(cache, Window(tokens[:, piece], known, self.last.new_full((len(tokens),), read - 1)))
            first += read - again
        self.tokens[:, : count - end] = tokens[:, end:]
        if self.states is not None and states is not None:
            self.states[:, : count - end] = states[:, end:]
        self.last.fill_(count - end - 1)
        self.pending = count - end

    def close(self) -> None:
        """Free the caches, including that of the current sequence."""
        self.caches.clear()
        self.context = self.source = FixedContext(self.caches, self._positions)

    def record_lengths(self, emitted: int, drafted: bool) -> None:
        """Update `pending` after a round with at most `emitted` tokens. `drafted`: whether the window was read."""
        self.pending = emitted + (min(self.pending, self.steps.again) if drafted else self.pending)

    def continue_with(self, active: Sequence[int]) -> None:
        """Mark all other sequences as ended."""
        self.alive.copy_(torch.tensor([int(text in active) for text in range(len(self.alive))]))

    def calibrate(self, rates: AcceptanceRates | None) -> None:
        """Calibrate estimates by these rates; `None`: not at all."""
        shift = None if rates is None else rates.shift
        if shift is not self._shift:
            self._shift = shift
            self.shift.copy_(torch.zeros(len(self.shift)) if shift is None else torch.tensor(shift))

    # The captured functions ------------------------------------------------------------------------------------------

    def propose(self, shape: RoundShape, rules: RoundRules, text: Tensor | None) -> None:
        """Draw all levels, and find where the rule stops. `text`: `[texts, n]`, the prefixes for processors."""
        cache, nodes, width = self.context.cache, shape.nodes, shape.width
        before, span = cache.length.clone(), torch.arange(nodes, device=self.device)
        steps = self.steps.unroll(self.source.cache, Window(self.tokens, self.states, self.last), span // width)
        logits, hidden = next(steps)
        # Of the level above: the nodes' numbers and values.
        above, values = torch.zeros_like(self.last)[:, None], torch.ones_like(self.estimates[:, :1])
        seen, levels = self.ancestors.new_zeros((len(self.last), 1, nodes)), []
        for place in range(num_steps := max(shape.levels, self.steps.least)):
            known = None if text is None else with_paths(text, self.candidates[:, :nodes], seen)
            scores = rules.draft_processing.of_nodes(logits, known)
            drawn = self._draw(DraftStep(place, scores, hidden, self.steps.embed, rules.greedy), values, rules, width)
            own = slice(place * width, (place + 1) * width)
            if place < shape.levels:
                levels.append(drawn)
                self.candidates[:, own], self.parents[:, own] = drawn.tokens, above.gather(1, drawn.parents)
                if self.q is not None and drawn.q is not None:
                    self.q[:, max(own.start - width + 1, 0) : own.start + 1] = drawn.q
                seen = seen.gather(1, drawn.parents[..., None].expand(-1, -1, nodes)) | (span == span[own, None])
                self.ancestors[:, own.start + 1 : own.stop + 1, 1 : nodes + 1] = seen
            above, values = (1 + span[own]).expand(len(self.last), -1), drawn.values
            if place + 1 < num_steps:
                logits, hidden = steps.send(DrawnLevel(drawn.tokens, drawn.parents, seen))
        self.ancestors[:, 0, 1:] = False
        cache.length.copy_(before)
        self.count.copy_(self._count(shape, levels, rules))

    def _draw(self, step: DraftStep, values: Tensor, rules: RoundRules, width: int) -> Drawn:
        """Draw the level below m nodes, with `DraftStep.scores` `[texts, m, vocab]` and `values` `[texts, m]`."""
        q = step.scores if rules.greedy else step.q
        times = None if rules.greedy else exponential(*q.shape, device=self.device)
        if width == 1:
            step.token = q.argmax(-1) if times is None else race(q, times)
            judged = None if rules.estimator is None else rules.estimator.estimate(step)
            # Value 0 if q is NaN or all tokens are excluded.
            values = values * (q.gather(-1, step.token[..., None])[..., 0] > (-math.inf if rules.greedy else 0.0))
            return Drawn(step.token, torch.zeros_like(step.token), values, None if times is None else q, judged)
        tokens = (q if times is None else q / times).topk(width).indices  # [texts, m, width], in order
        head = rules.head_of_slots
        probs = step.q.gather(-1, tokens)
        mass = functional.pad(probs[..., :-1].cumsum(-1), (1, 0))  # total q of earlier siblings
        if head is None:
            chances = (probs / (1.0 - mass).clamp_min(torch.finfo(probs.dtype).tiny)).clamp_max(1.0)
        else:
            chances = head.estimate_siblings(step, tokens, remaining(step.q, tokens), mass)
        chances = chances.nan_to_num(0.0)
        judged, chances = chances, self._calibrated(chances)
        chosen = best_slots(values, chances, width, rules.greedy)
        values = (slot_values(values, chances) * chances).flatten(1).gather(1, chosen)
        tokens, judged = (each.flatten(1).gather(1, chosen) for each in (tokens, judged))
        return Drawn(tokens, chosen // width, values, None if times is None else q, judged)

    def _count(self, shape: RoundShape, levels: list[Drawn], rules: RoundRules) -> Tensor:
        """`[texts]`, number of submitted candidates, including the one at which the rule stops, unless its estimate was
        known before the draw."""
        known = [each.judged for each in levels if each.judged is not None]
        if known:
            together = torch.cat(known, dim=1)
            self.estimates[:, : together.shape[1]] = together
        if shape.width > 1:
            return torch.full_like(self.count, shape.nodes)
        drawn = (torch.cat([each.values for each in levels], dim=1) > 0.0).sum(-1)
        if rules.threshold is None:
            return drawn
        survival = self._calibrated(self.estimates[:, : len(known)]).cumprod(-1)
        lag = 0 if rules.estimator is None else lag_of(rules.estimator)  # estimates may be one candidate late or early
        survival = functional.pad(survival, (lag, shape.levels - len(known) - lag), value=1.0)
        places = torch.arange(1, shape.levels + 1, device=self.device)
        return count_until((1.0 - survival > rules.threshold) & (places >= rules.min_tokens)).minimum(drawn)

    def _calibrated(self, estimates: Tensor) -> Tensor:
        """`AcceptanceRates.calibrated` for tensors."""
        shift = self.shift[torch.bucketize(estimates.contiguous(), self.edges, right=True)]
        return (estimates.clamp(1e-4, 1.0 - 1e-4).logit() + shift).sigmoid()

    def settle(self, accepted: Tensor, token: Tensor, candidates: Tensor, states: Tensor | None, drafted: bool) -> None:
        """Add emitted tokens to the window, and drop the tokens that the draft has read. Called after verification.

        Args:
            accepted, token: `[texts]`, the number of accepted candidates, and the next token.
            candidates: `[texts, k]`, accepted candidates first.
            states: `[texts, k + 1, size]`, the target's at the sequence's last token and at the candidates, for a draft
                that reads them.
            drafted: whether the draft has read the window.
        """
        new = functional.pad(candidates, (0, 1)).scatter(1, accepted[:, None], token[:, None])
        places = self.last[:, None] + 1 + torch.arange(new.shape[1], device=self.device)
        tokens, known = functional.pad(self.tokens, (0, new.shape[1])).scatter(1, places, new), self.states
        if known is not None and states is not None:
            index = places[..., None].expand(-1, -1, known.shape[2])
            known = functional.pad(known, (0, 0, 0, new.shape[1])).scatter(1, index, states.to(known))
        read = (self.last + 1 - self.steps.again).clamp_min(0) if drafted else torch.zeros_like(self.last)
        self._drop(read, tokens, known)
        self.context.cache.length.add_(read * self.alive)
        self.last.add_((accepted + 1) * self.alive)

    def _drop(self, read: Tensor, tokens: Tensor, states: Tensor | None) -> None:
        """Drop the first `read` `[texts]` tokens of the window, in sequences that have not ended."""
        read = read * self.alive
        places = torch.arange(self.width, device=self.device) + read[:, None]
        places = places.clamp_max(tokens.shape[1] - 1)  # the rest are dummies
        self.tokens.copy_(tokens.gather(1, places))
        if self.states is not None and states is not None:
            self.states.copy_(states.gather(1, places[..., None].expand(-1, -1, states.shape[2])))
        self.last.sub_(read)


def with_paths(text: Tensor, candidates: Tensor, seen: Tensor) -> Tensor:
    """Prefixes `[texts, m, length + n]` of m nodes, for processors: `text` `[texts, length]`, then the candidates
    `[texts, n]` that a node has `seen` `[texts, m, n]`, and the last token of `text` instead of all others."""
    count = seen.shape[1]
    path = torch.where(seen, candidates[:, None], text[:, -1:, None])
    return torch.cat((text[:, None].expand(-1, count, -1), path), dim=2)
