"""The draft in captured rounds (`CapturedDraft`): draws a round's candidates on the device, and keeps its own cache."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.caches.masks import span
from hf_specdecpp.cuda_graphs import on_device
from hf_specdecpp.cuda_graphs.draft_steps import DrawnLevel, RoundSteps, Unrolled, Window
from hf_specdecpp.cuda_graphs.fixed_cache import FixedContext
from hf_specdecpp.cuda_graphs.graphs import host_zeros, lasting
from hf_specdecpp.cuda_graphs.identity import identity
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import EDGES, AcceptanceRates, DraftStep, Estimator, lag_of
from hf_specdecpp.sampling.processors import Processing, Warpers
from hf_specdecpp.sampling.randomness import exponential
from hf_specdecpp.trees.verification import Verification

READ_AT_ONCE = 2048  # tokens of a prompt per pass: the mask is quadratic


class RoundShape(NamedTuple):
    """Shape of a captured round's candidates: `levels` of `width` nodes, 1 in chains, that the draft draws, or 0 levels
    and a chain of at most `given` candidates that the host has looked up. Example: (5, 3) is a tree of 15 candidates,
    (7, 1) a chain of 7, (0, 1, 7) one of up to 7 looked-up candidates, and (0, 1) a round without candidates."""

    levels: int
    width: int = 1
    given: int = 0

    @property
    def nodes(self) -> int:
        return self.levels * self.width + self.given


@dataclass(frozen=True)
class RoundRules:
    """How the candidates of a call are drawn, estimated and verified in captured rounds.

    Attributes:
        greedy: whether draft and target choose their likeliest tokens.
        draft_processing, processing: compute q from the draft's logits, and p from the target's; `processing` does
            nothing if graphs cannot run the target's processors, so that the host runs them (`Process`).
        estimator: estimates acceptance; `None` if estimates are not used.
        threshold, min_tokens: of SpecDec++'s stopping rule; `threshold` is `None` if all candidates are submitted.
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
        """Whether any processor depends on the tokens of the sequence."""
        return not (self.draft_processing.prefix_free and self.processing.prefix_free)

    @property
    def head_of_slots(self) -> AcceptanceHead | None:
        """The acceptance head that estimates the acceptance of siblings in trees; `None` if q estimates it."""
        return self.estimator if isinstance(self.estimator, AcceptanceHead) and lag_of(self.estimator) < 1 else None

    def num_judged(self, count: int) -> int:
        """Number of estimates for a chain of `count` candidates: with `inputs="after"` there is none for the last."""
        return 0 if self.estimator is None else max(count - max(lag_of(self.estimator), 0), 0)

    @property
    def key(self) -> Hashable:
        """A key that is equal for two rules if a graph captured with one is valid for the other."""
        both = self.draft_processing.processors, self.processing.processors
        processors = [[each.kind if isinstance(each, Warpers) else each for each in own] for own in both]
        described = (*identity(*processors, by_value=True), *identity(self.estimator))
        return self.greedy, described, self.threshold, self.min_tokens, self.verification


@cache  # because graphs contain the address of the tensor
def depths_of(shape: RoundShape, device: torch.device) -> Tensor:
    """`[nodes + 1]`, the depths of the root (0) and of each candidate: 0, 1, 1, 2, 2 for two levels of two nodes."""
    with lasting():
        return (span(shape.nodes + 1, device) + shape.width - 1) // shape.width


class Drawn(NamedTuple):
    """A level of a tree, `[texts, width]` each: tokens, `parents` (indices in the level above), `values` (estimated
    survival), `judged` (uncalibrated estimates); and `q` `[texts, m, vocab]`, after the m nodes of the level above."""

    tokens: Tensor
    parents: Tensor
    values: Tensor
    q: Tensor
    judged: Tensor


class CapturedDraft:
    """The draft in the captured rounds of one sequence, or of the rows of a batch.

    `take_given`, `propose` and `settle` are parts of a round's graph; the host calls the other methods between rounds.
    At the beginning of a round the draft reads its window of `width` tokens: `steps.again` tokens that it has read
    before, the tokens emitted since, the latest of which has index `last`, then dummies. With each token a draft that
    reads states gets the target's state at the token before. After a round the draft's cache drops all candidates.

    Example: the sequence ends with 6, and a round of three candidates 7 8 9 emits 7 8 4. The next window is 7 8 4 and
    a dummy, and the target's states in it are those at 6, 7, 8 and 9.

    Args:
        steps: the draft's steps.
        shapes: all shapes that rounds may have; `nodes` is the largest number of candidates.
        rows: number of rows of the batch, `texts` below.
        spare: room in the window for tokens of rounds in which the draft does not read.
        target: the sequences in the target's cache.
        greedy: whether the likeliest tokens are chosen, so that `q` is not needed.

    Attributes:
        candidates, parents: `[texts, nodes]`, of the latest round. `parents`, unused for chains, are 0 for the root, 1
            for the first candidate, ...
        ancestors: `[texts, nodes + 1, nodes + 1]` bool, in trees the ancestors of each node, itself included.
        q: `[texts, nodes, vocab]`, distributions of the first child of the root and of each node above the last level:
            in chains, of each candidate; `None` if greedy.
        count: `[texts]`, number of submitted candidates.
        estimates: `[texts, nodes]` float64, uncalibrated estimates of the candidates' acceptance.
        shift: `[bins]`, the numbers that calibration adds to log-odds.
        alive: `[texts]` int64, 0 for sequences that have ended.
        pending: the host's copy of the largest `last + 1`; the window is full if it is `width`.
        most_rows: the most rows of the cache that a round writes.
        context: the sequences in the draft's cache.
    """

    def __init__(
        self, steps: RoundSteps, shapes: Sequence[RoundShape], rows: int, spare: int, target: FixedContext, greedy: bool
    ) -> None:
        self.steps, self.device, self.target = steps, target.device, target
        self.nodes = max(each.nodes for each in shapes)
        self.width = max(each.levels for each in shapes) + 1 + steps.again + spare
        self.most_rows = self.width + max(self.nodes, steps.behind)
        zeros, size = partial(torch.zeros, dtype=torch.long, device=self.device), self.nodes + 1
        with lasting():
            self.tokens, self.last, self.count = zeros((rows, self.width)), zeros(rows), zeros(rows)
            self.candidates, self.parents = zeros((rows, self.nodes)), zeros((rows, self.nodes))
            self.given = zeros((rows, 1 + max(each.given for each in shapes)))  # numbers of looked-up candidates, these
            self.host_given = host_zeros(self.given)
            self.ancestors = torch.ones((rows, size, size), dtype=torch.bool, device=self.device)
            self.alive = torch.ones_like(self.last)
            self.estimates = zeros((rows, self.nodes), dtype=torch.float64)
            self.states: Any = None
            if steps.size is not None:
                self.states = zeros((rows, self.width, steps.size), dtype=steps.dtype)
            self.q = None if greedy else zeros((rows, self.nodes, steps.vocab_size), dtype=torch.float32)
            self.shift = zeros(len(EDGES) + 1, dtype=torch.float32)
            self.edges = torch.tensor(EDGES, dtype=torch.float32, device=self.device)
        self.context = FixedContext([inf] * steps.num_layers, self.device, target.budget)
        self.pending = 0
        self._shift: list[float] | None = None  # on the host

    @property
    def changes(self) -> list[Tensor]:
        """The tensors that a round reads before it changes them, so that they are restored after a capture."""
        found = [self.tokens, self.last, self.context.cache.length]
        return found if self.states is None else [*found, self.states]

    def begin_texts(self, tokens: Tensor, states: Tensor | None, padding: Tensor) -> None:
        """Begin new sequences: read their tokens except the last ones, which are the first round's window.

        `tokens`: `[texts, n]`, the first `padding` `[texts]` of them hidden; `states`: `[texts, n, size]`, for each
        token the target's state at the token before, or `None` if the draft reads none."""
        (texts, count), again = tokens.shape, self.steps.again
        self.context.begin_text(torch.Size((texts, 1)) if texts > 1 else None)
        # Not smaller than the target's, which would grow it in the first round.
        most, end = max(count + self.most_rows, self.target.cache.capacity), max(count - 1 - again, 0)
        cache = self.context.with_capacity(most)
        if cache.prompt is not None:
            cache.prompt.shown.copy_(torch.arange(cache.capacity, device=self.device) >= padding[:, None])
            cache.prompt.offset.copy_(-padding[:, None])
        first = 0
        while first < end:
            piece = slice(first, min(first + READ_AT_ONCE, end + again))
            read = piece.stop - first
            known = None if states is None else states[:, piece].to(self.steps.dtype)
            self.steps.read(cache, Window(tokens[:, piece], known, self.last.new_full((texts,), read - 1)))
            first += read - again
        self.tokens[:, : count - end] = tokens[:, end:]
        if states is not None:
            self.states[:, : count - end] = states[:, end:]
        self.last.fill_(count - end - 1)
        self.pending = count - end

    def record_lengths(self, emitted: int, drafted: bool) -> None:
        """Update `pending` after a round. `emitted`: the most tokens of any sequence; `drafted`: as in `settle`."""
        self.pending = emitted + (min(self.pending, self.steps.again) if drafted else self.pending)

    def continue_with(self, active: Sequence[int]) -> None:
        """Mark all sequences as ended but those with the indices `active`. Their rows no longer advance."""
        self.alive.copy_(torch.tensor([int(text in active) for text in range(len(self.alive))]))

    def calibrate(self, rates: AcceptanceRates | None) -> None:
        """Called before rounds with drafts: calibrate estimates by what `rates` have learned; `None`: not at all."""
        shift = None if rates is None else rates.shift
        if shift is not self._shift:
            self._shift = shift
            self.shift.copy_(torch.tensor([0.0] * len(self.shift) if shift is None else shift, dtype=torch.float32))

    def give(self, chains: Mapping[int, Sequence[int]]) -> None:
        """Upload looked-up candidates for a round with `RoundShape.given`: a chain for each active sequence's index."""
        self.host_given.zero_()
        for place, tokens in chains.items():
            self.host_given[place, : 1 + len(tokens)] = torch.tensor([len(tokens), *tokens])
        self.given.copy_(self.host_given, non_blocking=True)

    # The captured functions ------------------------------------------------------------------------------------------

    def take_given(self, most: int) -> None:
        """Make the candidates of `give`, at most `most` of each sequence, those of the round. Their q is 1."""
        self.count.copy_(self.given[:, 0])
        self.candidates[:, :most] = self.given[:, 1 : 1 + most]
        if self.q is not None:
            self.q[:, :most].zero_().scatter_(2, self.candidates[:, :most, None], 1.0)

    def propose(self, shape: RoundShape, rules: RoundRules, text: Tensor | None) -> None:
        """Read the window and draw a round's candidates: sets `candidates` and `count`, in trees also `parents` and
        `ancestors`. `text`: `[texts, n]`, the sequences, if a processor depends on them."""
        cache = self.context.cache
        before = cache.length.clone()
        depths = depths_of(shape, self.device)[1:] - 1
        source = self.target.cache if self.steps.drafter.shares_cache else cache
        steps = self.steps.unroll(source, Window(self.tokens, self.states, self.last), depths)
        (self._draw_chain if shape.width == 1 else self._draw_tree)(steps, shape, rules, text)
        cache.length.copy_(before)

    def _draw_chain(self, steps: Unrolled, shape: RoundShape, rules: RoundRules, text: Tensor | None) -> None:
        """Draw a whole chain, and count the candidates up to the stop of the rule (`RoundRules.threshold`): including
        the candidate at which it stops, but excluding this one if its estimate is known before the draw."""
        levels, places = shape.levels, span(shape.levels, self.device)
        (logits, hidden), drawn, judged = next(steps), [], []
        for place in range(taken := max(levels, self.steps.least)):
            known = None
            if text is not None:
                seen = (places < place).expand(len(self.last), 1, -1)
                known = with_paths(text, self.candidates[:, :levels], seen)
            scores = rules.draft_processing.of_nodes(logits, known)
            step = DraftStep(place, scores, hidden, self.steps.embed, rules.greedy)
            weights = step.scores if rules.greedy else step.q / exponential(*step.q.shape, device=step.q.device)
            most, step.token = weights.max(-1)
            if place < levels:
                drawn.append(most)
                self.candidates[:, place : place + 1] = step.token
                if self.q is not None:
                    self.q[:, place : place + 1] = step.q
                if rules.estimator is not None and (found := rules.estimator.estimate(step)) is not None:
                    judged.append(found)
            if place + 1 < taken:
                logits, hidden = steps.send(DrawnLevel(step.token))
        self.count.copy_(on_device.num_drawn(torch.cat(drawn, dim=1), rules.greedy))
        if judged and rules.estimator is not None:
            together, lag = torch.cat(judged, dim=1), lag_of(rules.estimator)
            self.estimates[:, : len(judged)] = together
            if rules.threshold is not None:
                # Estimates may be one candidate late or early.
                survival = functional.pad(
                    self._calibrated(together).cumprod(-1), (lag, levels - len(judged) - lag), value=1.0
                )
                may_stop = span(levels + 1, self.device)[1:] >= rules.min_tokens
                until_stop = on_device.count_until((1.0 - survival > rules.threshold) & may_stop)
                self.count.copy_(until_stop.minimum(self.count))

    def _draw_tree(self, steps: Unrolled, shape: RoundShape, rules: RoundRules, text: Tensor | None) -> None:
        """Draw a tree level by level. All nodes are submitted."""
        nodes, width, places = shape.nodes, shape.width, span(shape.nodes + 1, self.device)
        (logits, hidden), judged, itself = next(steps), [], places[1:] == places[1:, None]
        # Of the level above, at first the root: numbers as in `parents`, survival, and candidates on the path.
        numbers, values = places[:1].expand(len(self.last), 1), self.shift.new_ones((len(self.last), 1))
        seen = self.ancestors.new_zeros((len(self.last), 1, nodes))
        for place in range(shape.levels):
            known = None if text is None else with_paths(text, self.candidates[:, :nodes], seen)
            scores = rules.draft_processing.of_nodes(logits, known)
            step = DraftStep(place, scores, hidden, self.steps.embed, rules.greedy)
            drawn = self._draw(step, values, rules, width)
            own = slice(place * width, (place + 1) * width)
            self.candidates[:, own], self.parents[:, own] = drawn.tokens, numbers.gather(1, drawn.parents)
            if self.q is not None:
                self.q[:, max(own.start - width + 1, 0) : own.start + 1] = drawn.q  # by number of the node above
            seen = on_device.rows_at(seen, drawn.parents) | itself[own]
            self.ancestors[:, own.start + 1 : own.stop + 1, 1 : nodes + 1] = seen
            judged.append(drawn.judged)
            numbers, values = places[1:][own].expand(len(self.last), -1), drawn.values
            if place + 1 < shape.levels:
                logits, hidden = steps.send(DrawnLevel(drawn.tokens, drawn.parents, seen))
        self.ancestors[:, 0, 1:] = False
        self.estimates[:, :nodes] = torch.cat(judged, dim=1)
        self.count.fill_(nodes)

    def _draw(self, step: DraftStep, values: Tensor, rules: RoundRules, width: int) -> Drawn:
        """Draw the next level: `width` nodes, in the best slots below m nodes of a level, by the draft's scores after
        these. `values`: `[texts, m]`, estimated survival of the m nodes."""
        q = step.scores if rules.greedy else step.q
        # [texts, m, width], in order
        tokens = (q if rules.greedy else q / exponential(*q.shape, device=q.device)).topk(width).indices
        head = rules.head_of_slots
        probs = step.q.gather(-1, tokens)
        mass = functional.pad(probs[..., :-1].cumsum(-1), (1, 0))  # total q of earlier siblings
        if head is None:
            chances = (probs / (1.0 - mass).clamp_min(torch.finfo(probs.dtype).tiny)).clamp_max(1.0)
        else:
            chances = head.estimate_siblings(step, tokens, on_device.remaining(step.q, tokens), mass)
        chances = chances.nan_to_num(0.0)
        judged, chances = chances, self._calibrated(chances)
        chosen = on_device.best_slots(values, chances, width, rules.greedy)
        values = (on_device.slot_values(values, chances) * chances).flatten(1).gather(1, chosen)
        tokens, judged = (each.flatten(1).gather(1, chosen) for each in (tokens, judged))
        return Drawn(tokens, chosen // width, values, q, judged)

    def _calibrated(self, estimates: Tensor) -> Tensor:
        """`AcceptanceRates.calibrated` for a tensor of estimates, by the rates of `calibrate`."""
        shift = self.shift[torch.bucketize(estimates.contiguous(), self.edges, right=True)]
        return (estimates.clamp(1e-4, 1.0 - 1e-4).logit() + shift).sigmoid()

    def settle(self, accepted: Tensor, new: Tensor, states: Tensor | None, drafted: bool) -> None:
        """Make the next round's window: drop the tokens that the draft has read, and append the emitted tokens.

        Args:
            accepted: `[texts]`, the number of accepted candidates.
            new: `[texts, k + 1]`, the accepted candidates, then the next token, then arbitrary tokens.
            states: `[texts, k + 1, size]`, the target's states at the last token before the round and at the candidates
                of `new`; `None` if the draft reads none.
            drafted: whether the draft has read the window in this round.
        """
        count, last = new.shape[1], self.last
        if drafted and not self.steps.again:  # the draft has read all; what ended sequences would read does not matter
            self.tokens[:, :count] = new
            if states is not None:
                self.states[:, :count] = states
            self.context.cache.length.addcmul_(last + 1, self.alive)
            last.copy_(accepted)
            return
        places = last[:, None] + 1 + span(count, self.device)
        tokens, known = functional.pad(self.tokens, (0, count)).scatter(1, places, new), self.states
        if states is not None:
            places = places[..., None].expand(-1, -1, known.shape[2])
            known = functional.pad(known, (0, 0, 0, count)).scatter(1, places, states.to(known))
        read = (last + 1 - self.steps.again).clamp_min(0) * self.alive if drafted else torch.zeros_like(last)
        places = span(self.width, self.device) + read[:, None]
        places = places.clamp_max(tokens.shape[1] - 1)  # the rest are dummies
        self.tokens.copy_(tokens.gather(1, places))
        if states is not None:
            self.states.copy_(on_device.rows_at(known, places))
        self.context.cache.length.add_(read)
        last.addcmul_(accepted + 1, self.alive).sub_(read)


def with_paths(text: Tensor, candidates: Tensor, seen: Tensor) -> Tensor:
    """`[texts, m, length + n]`, the tokens up to each of m nodes: the sequences `text` `[texts, length]`, then those of
    the `candidates` `[texts, n]` that the node has `seen` `[texts, m, n]`. The last token of `text` replaces others:
    captured processors depend on the set of tokens only."""
    count = seen.shape[1]
    path = torch.where(seen, candidates[:, None], text[:, -1:, None])
    return torch.cat((text[:, None].expand(-1, count, -1), path), dim=2)
