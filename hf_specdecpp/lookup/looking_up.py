"""Lookups in one generation (`LookingUp`), and the choice between looking up, drafting and neither, by expected tokens
per second (`Choice`) or by estimates only (`LookingUp.count_alone`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_specdecpp.config.costs import DraftWork, Floats
from hf_specdecpp.estimation.ledger import LEAST_GAIN, RECENT, Ledger
from hf_specdecpp.lookup.token_index import Continuation, LookupRates, TextLookup, TextRates
from hf_specdecpp.trees.tree import Chain, DraftTree

LEAST_SURVIVAL = 0.3  # without costs: least probability that all looked-up candidates of a round are accepted
USUAL_ACCEPTANCE = 0.7  # assumed acceptance rate of drafted candidates, before any was tested


class Choice(Ledger):
    """Measured rate of drafting, and whether a round should look up instead.

    Whether the text repeats itself changes from passage to passage, so past speed is a poor guide. Each round takes the
    option with the most expected tokens per second: lookups are judged by the estimates of this round, drafting by the
    mean of its rounds.

    Example: a pass over one token takes 10 ms and each further one 1 ms. Drafting has generated 1.8 tokens in 12 ms,
    150 per second. Three candidates have estimates 0.9, 0.8 and 0.7, so looking up is expected to generate 1 + 0.9 +
    0.72 + 0.504 = 3.1 tokens in 13 ms, 240 per second: the round looks up.

    Args:
        seconds: duration of a round without candidates.
        drafting: tokens per second expected of drafting, the prior of its measured rate; `None` without a draft.
    """

    def __init__(self, seconds: float, drafting: float | None) -> None:
        super().__init__(RECENT, max(drafting or 0.0, 1.0 / seconds), seconds)

    def length(
        self, estimates: Sequence[Sequence[float]], seconds: Floats, catching_up: float = 0.0, drafts: bool = True
    ) -> int:
        """Number of candidates that each row looks up in a round; 0 if drafting, or a plain round, is better.

        Args:
            estimates: for each row the acceptance estimates of its candidates, in order.
            seconds: `[n + 1]`, a row's share of a round with 0, 1, ... candidates and without a draft.
            catching_up: seconds that the draft takes later for each token that it has not read.
            drafts: whether there is drafting to compare with.
        """
        rows, most = len(estimates), len(seconds) - 1
        tokens = np.zeros(most + 1)
        for each in estimates:
            tokens[1 : len(each) + 1] += np.cumprod(each)[:most]
        tokens = rows + tokens.cumsum()
        rates = tokens / (rows * seconds + catching_up * tokens)
        best = int(rates.argmax())
        least = max(self.rate if drafts else 0.0, LEAST_GAIN / float(seconds[0]))
        return best if rates[best] > least else 0

    def further(self, survival: float, estimates: Sequence[float], seconds: Floats) -> int:
        """Number of candidates to look up in addition to drafted ones. `survival`: probability that verification
        reaches the first; `estimates`: of the n found; `seconds`: `[n + 1]`, of passes with 0, 1, ... of these."""
        tokens = survival * np.cumsum(np.concatenate(([0.0], np.cumprod(estimates))))
        return int((tokens - self.rate * seconds).argmax())


ASSUMED = 8.0  # weight of `USUAL_ACCEPTANCE`, as a number of tested candidates


class LookingUp:
    """The lookups of one generation. A round looks up its candidates instead of drafting, or adds looked-up candidates
    to drafted ones.

    Each emitted token is compared with the token that would have been looked up there, proposed or not, so that
    learning the estimates costs no candidates.

    Args:
        text: the sequence and other text that is searched; `rates`: how often lookups are right in all sequences.
        most: most candidates in a round; `has_draft`: whether there is also a draft.
        plan: a `throughput.plan.Plan`, with the costs of rounds. Without `"throughput"` it and `choice` are `None`, and
            the estimates alone decide.

    Attributes:
        found: the continuation that the round could propose; `estimates`: the acceptance estimate of each candidate.
    """

    def __init__(
        self,
        text: TextLookup,
        rates: LookupRates,
        most: int,
        has_draft: bool,
        plan: Any = None,
        choice: Choice | None = None,
    ) -> None:
        self.text, self.rates, self.most = text, TextRates(rates), most
        self.plan, self.choice = plan, choice
        self.found = Continuation()
        self.estimates: list[float] = []
        self.has_draft, self._room = has_draft, 0  # the latter: candidates that the round may have
        self._accepted, self._tested = ASSUMED * USUAL_ACCEPTANCE, ASSUMED  # numbers of drafted candidates

    def look_up(self, new_tokens: Sequence[int], room: int) -> None:
        """Set `found` and `estimates` for a round. `new_tokens`: those since the last call, or the prompt; `room`:
        candidates that the round may have."""
        most = self._room = min(room, self.most)
        if not len(self.text):
            self.text.read_prompt(new_tokens)
            self.found = self.text.ahead(most)
        else:
            last = len(new_tokens) - 1
            for place, token in enumerate(new_tokens):
                if len(self.found):
                    self.rates.record(self.found.classes[0], self.found.tokens[0] == token)
                self.text.read(token)
                self.found = self.text.ahead(most if place == last else 1)
        self.estimates = self.rates.estimates(self.found.classes)

    @property
    def verify(self) -> Floats:
        """`[most + 1]` seconds of a row's share of a round with 0, 1, ... candidates, without drafting."""
        seconds: Floats = self.plan.costs.verify_seconds(self.most) + self.plan.costs.overhead
        return seconds

    def count_alone(self) -> int:
        """Number of candidates that the sequence looks up if costs do not decide: 0 unless the first estimate exceeds
        the draft's acceptance rate; then as many as are all accepted with probability `LEAST_SURVIVAL` or more.

        Example: 0.9, 0.8, 0.5, 0.5 against 0.7: the first three, which are all accepted with probability 0.36."""
        drafting = self._accepted / self._tested if self.has_draft else 0.0
        if not self.estimates or self.estimates[0] <= drafting:
            return 0
        return int((np.cumprod(self.estimates) >= LEAST_SURVIVAL).sum())

    def extend(self, chain: DraftTree, survival: float | None) -> DraftTree:
        """The drafted chain, followed by as many looked-up candidates as are worth their cost. `survival`: probability
        that all of the chain is accepted. `chain` unchanged if that is `None`, or without `choice`."""
        drawn, room = len(chain), self._room - len(chain)
        if self.choice is None or survival is None or not drawn or room < 1 or not isinstance(chain, Chain):
            return chain
        found = self.text.ahead(room, chain.candidates)
        if not found.tokens:
            return chain
        seconds = self.verify[drawn : drawn + len(found) + 1]
        count = self.choice.further(survival, self.rates.estimates(found.classes), seconds)
        return chain.followed_by(found.tokens[:count])

    def branch(self, tree: DraftTree, count: int = 0) -> None:
        """Add `found` to a tree as a branch of `count` new nodes; 0 adds as many as are worth their cost.

        The branch follows drawn nodes while they have its tokens, and continues with new nodes below the last of them.
        """
        node, reached, place = 0, 1.0, 0
        for token in self.found.tokens:
            if (child := tree.child(node, token)) is None:
                break
            node, place = child, place + 1
            reached = tree.values[node] * tree.estimates[node]
        for child in tree.children[node]:
            reached *= 1.0 - tree.estimates[child]
        room = max(self._room - len(tree), 0)
        tokens, estimates = self.found.tokens[place : place + room], self.estimates[place : place + room]
        if not count and self.choice is None:
            count = int((reached * np.cumprod(estimates) >= LEAST_SURVIVAL).sum())
        elif not count and self.choice is not None:
            count = self.choice.further(reached, estimates, self.verify[len(tree) : len(tree) + len(tokens) + 1])
        for token, estimate in zip(tokens[:count], estimates, strict=False):
            node, reached = tree.add(node, token, reached, estimate, looked_up=True), reached * estimate

    def record_outcome(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Called after verification of a round, with the accepted nodes (`path`)."""
        drawn, width, kept = min(tree.num_drawn, tree.levels), len(tree), len(path) + 1  # drawn: in trees by depth
        if not drawn:
            return
        accepted = len(tree.drawn(path) if tree.looked_up else path)
        self._accepted += accepted
        self._tested += min(accepted + 1, drawn)
        if self.choice is not None:
            work = DraftWork(tree.passes, branches=len(tree.scores) - tree.passes)
            drafting = work.seconds(self.plan.costs) if tree.passes else 0.0
            self.choice.record_round(kept, float(self.verify[min(width, self.most)]) + drafting)


def counts_of(rows: Sequence[LookingUp]) -> list[int]:
    """The most candidates that each sequence of a batch looks up in this round instead of drafting; 0 leaves the round
    to the draft. By costs all sequences do the same, because they share passes."""
    first = rows[0]
    if first.choice is None:
        return [row.count_alone() for row in rows]
    widest, drafts = max(len(row.found) for row in rows), not first.plan.waits
    reading = first.plan.costs.read if drafts and first.has_draft else 0.0
    estimates = [row.estimates for row in rows]
    count = first.choice.length(estimates, first.verify[: widest + 1], reading, drafts)
    return [count] * len(rows)


def with_lookups(tree: DraftTree, lookup: LookingUp | None, count: int, method: Any, is_alone: bool) -> DraftTree:
    """Called after drafting with `method` (`ChainDrafting` or `TreeDrafting`): the drafted `tree` with looked-up
    candidates, `count` of them if that is not 0; otherwise, if the sequence `is_alone`, as many after or beside the
    drafted ones as are worth their cost. Trees of one branch become chains."""
    if lookup is not None and method.branches:
        lookup.branch(tree, count)
    if method.makes_chains:
        tree = tree.as_chain()
    if lookup is None or method.branches:
        return tree
    if count:
        return Chain(lookup.found.tokens[:count])
    return lookup.extend(tree, method.survival(tree)) if is_alone else tree
