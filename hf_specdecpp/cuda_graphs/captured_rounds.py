"""Rounds as one launch of a CUDA graph and one read of the result (`CapturedRounds`), for chains, trees and batches.

The graph contains the draft's steps, the target's pass, the verification and the input of the next round. If logits
processors of the target cannot be captured, the verification is a graph of its own, and the host calls the processors
in between. Decisions of the host in other rounds, such as where the stopping rule ends the draft, are computed on the
device (`on_device`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.caches.masks import Nodes, kept_chain_nodes, span
from hf_specdecpp.cuda_graphs import on_device
from hf_specdecpp.cuda_graphs.captured_draft import CapturedDraft, RoundRules, RoundShape, depths_of, with_paths
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.cuda_graphs.fixed_cache import with_rows
from hf_specdecpp.cuda_graphs.graphs import MOST_GRAPHS, Graphs, lasting, write_lasting
from hf_specdecpp.sampling.processors import Warpers
from hf_specdecpp.sampling.randomness import NothingToDrawError
from hf_specdecpp.trees.tree import Chain, DraftTree
from hf_specdecpp.trees.verification import outcomes

TIMED_ROUNDS = 3  # of a shape; the fastest one counts
HEADER = 4  # numbers in a report before the candidates
# Processes the scores `[n + 1, vocab]` float32 of a sequence, after the root and after the n candidates of a tree.
Process: TypeAlias = Callable[[int, DraftTree, Tensor], Tensor]


class Accepted(NamedTuple):
    """A verification's result: number `accepted` `[texts]`, next `token` `[texts]` (-1: none can be drawn), `last`
    accepted node `[texts]` (0: the root), in trees `path` `[texts, levels]` (accepted candidates, from 0, then any
    others)."""

    accepted: Tensor
    token: Tensor
    last: Tensor
    path: Tensor | None = None


class RoundReport(NamedTuple):
    """A sequence's round, as read by the host: submitted candidates, accepted nodes, next token, estimates."""

    tree: DraftTree
    path: list[int]
    token: int
    estimates: list[float]


class CapturedRounds:
    """The rounds of one target and one draft, for one sequence at a time or for the rows of one batch.

    Example: the sequence ends with 6. The graph drafts 7 8 9 and submits all three. The target reads 6 7 8 9,
    accepts 7 and 8, draws 4, and prepares both models for the next round, which begins with 4. The host reads the
    report (2 accepted, next token 4, last node 2, 3 submitted, 7 8 9) and emits 7 8 4.
    """

    def __init__(self, passes: CapturedTarget, draft: CapturedDraft) -> None:
        self.passes, self.draft = passes, draft
        self.graphs = Graphs(passes.device, beside=passes.graphs)
        texts = len(draft.last)
        with lasting():
            self.token = torch.zeros((texts, 1), dtype=torch.long, device=passes.device)
            # Accepted, the next token, the last candidate; submitted, candidates, their parents, bits of estimates.
            self.report = torch.zeros((texts, HEADER + 3 * draft.nodes), dtype=torch.long, device=passes.device)
            self.read = torch.zeros_like(self.report, device="cpu")
            if passes.device.type == "cuda":
                self.read = self.read.pin_memory()
        self._outputs: dict[RoundShape, list[Tensor]] = {}  # scores and states of passes in separate graphs
        self._texts: dict[int, Tensor] = {}  # by cache size: prefixes, for processors that read them
        self._numbers: list[Tensor] = []  # of `Warpers`
        self._rules: dict[Hashable, int] = {}  # numbers of keys, which would take long to compare in each round

    @property
    def changes(self) -> list[Tensor]:
        return [self.token, self._text, self.passes.context.cache.length, *self.draft.changes]

    def begin_texts(self, texts: Tensor, tokens: Tensor, states: Tensor | None, padding: Tensor) -> None:
        """Begin other sequences. `texts`: `[texts, length]`, prefixes for processors; the target has not read the last
        tokens. Other arguments as in `CapturedDraft.begin_texts`."""
        self.graphs.begin_text()
        self._active = list(range(len(texts)))
        texts, tokens, padding = map(with_rows, (texts, tokens, padding))
        states = None if states is None else with_rows(states)
        self.token.copy_(texts[:, -1:])
        self._text, self._has_begun = texts, False
        # Number of tokens in the target's cache, and number of further ones in the prefixes for processors.
        self._num_cached, self._ahead = (cached := self.passes.context.num_tokens), texts.shape[1] - cached
        self.draft.begin_texts(tokens, states, padding, self.passes.context)
        if len(self._active) < len(texts):
            self.draft.continue_with(self._active)

    def take_numbers(self, rules: RoundRules) -> None:
        """Called before a sequence: `Warpers` of its rules read their numbers where graphs do."""
        if (key := rules.key) not in self._rules and len(self._rules) >= MOST_GRAPHS:
            self.graphs.family.clear()
            self._rules.clear()
        self._number = self._rules.setdefault(key, len(self._rules))
        both = (*rules.draft_processing.processors, *rules.processing.processors)
        for place, each in enumerate(own for own in both if isinstance(own, Warpers)):
            if place == len(self._numbers):
                with lasting():
                    numbers = torch.empty((len(self.token), 4), dtype=torch.float32, device=self.token.device)
                self._numbers.append(numbers)
            each.numbers = self._numbers[place].copy_(each.numbers)

    def continue_with(self, active: Sequence[int]) -> None:
        """Continue with these sequences only; the others no longer change."""
        if list(active) != self._active:
            self._active = list(active)
            self.draft.continue_with(self._active)

    def propose(self, shape: RoundShape, rules: RoundRules, length: int, process: Process | None = None) -> None:
        """Launch the round. `length`: tokens of the longest sequence; `process`: processors of the target that are not
        captured in `rules`."""
        self._num_cached = length - self._ahead
        self._grow_caches(shape, rules)
        self._launch(shape, rules, process)
        self._has_begun = True

    def verify(self, shape: RoundShape, rules: RoundRules) -> list[RoundReport]:
        """Wait for the round. Returns a report for each active sequence, in the order of `continue_with`."""
        rows = self._read_report()
        reports = [self._report_of(rows[text], shape, rules) for text in self._active]
        self.draft.record_lengths(max(len(report.path) for report in reports) + 1, drafted=shape.levels > 0)
        return reports

    def _read_report(self) -> list[list[Any]]:
        self.read.copy_(self.report, non_blocking=True)
        self._wait()
        first = HEADER + 2 * self.draft.nodes
        estimates = self.read[:, first:].view(torch.float64).tolist()
        return [row + further for row, further in zip(self.read[:, :first].tolist(), estimates, strict=True)]

    def time(self, shape: RoundShape, rules: RoundRules, process: Process | None = None) -> float:
        """Seconds of a round, which is rolled back."""
        self._grow_caches(shape, rules)
        before, taken = [each.clone() for each in self.changes], []

        def forget() -> None:
            for each, old in zip(self.changes, before, strict=True):
                each.copy_(old)
            self._wait()

        for _ in range(TIMED_ROUNDS):
            begin = time.perf_counter()
            self._launch(shape, rules, process)
            self._wait()
            taken.append(time.perf_counter() - begin)
            forget()
        return min(taken)

    def _grow_caches(self, shape: RoundShape, rules: RoundRules) -> None:
        most = self._num_cached + max(shape.nodes + 1, self._ahead + self.draft.most_rows)
        capacity = self.passes.context.with_capacity(most).capacity
        self.draft.context.with_capacity(capacity)  # equal sizes: otherwise each pair of sizes needs graphs
        if rules.asks_for_text and self._text is not self._texts.get(capacity):
            known = self._text
            if capacity not in self._texts:
                with lasting():
                    self._texts[capacity] = known.new_zeros((len(known), capacity + self.draft.nodes + 2))
            self._text = self._texts[capacity]
            self._text[:, : known.shape[1]] = known
            self._text[:, known.shape[1] :] = known[:, -1:]  # a token that is in the prefix anyway

    def _launch(self, shape: RoundShape, rules: RoundRules, process: Process | None) -> None:
        key, text = (*self.passes.context.key, shape, self._number), self._text if rules.asks_for_text else None

        def propose() -> None:
            if shape.levels:
                self.draft.propose(shape, rules, text)

        def whole() -> None:
            propose()
            self._settle(self._pass(shape), shape, rules, text)

        def read() -> None:
            propose()
            write_lasting(found, self._pass(shape))
            self._tell()

        if process is None:
            return self._run(("round", *key), whole)
        found = self._outputs.setdefault(shape, [])
        self._run(("pass", *key), read)
        rows = self._read_report()
        for each in self._active:
            tree = self._tree(rows[each], shape)
            scores = found[0][each, : len(tree) + 1]
            scores.copy_(process(each, tree, scores))
        return self._run(("settle", *key), lambda: self._settle(found, shape, rules, text))

    def _run(self, key: tuple[Any, ...], function: Callable[[], None]) -> None:
        """Run a function by its graph; without one, after a sequence's first round, directly."""
        changes = [] if key in self.graphs else self.changes
        if changes and key[0] == "settle":  # rows of a tree, which warm-ups would move several times
            changes += self.passes.context.cache.rows(self._num_cached, self._num_cached + self.draft.nodes + 1)
        self.graphs.run(key, function, changes, falls_back=self._has_begun)

    def _wait(self) -> None:
        if self.passes.device.type == "cuda":
            torch.cuda.current_stream(self.passes.device).synchronize()

    # The captured functions ------------------------------------------------------------------------------------------

    def _pass(self, shape: RoundShape) -> list[Tensor]:
        """The target's pass: logits `[texts, nodes + 1, vocab]`, then the watched states."""
        draft, passes, nodes = self.draft, self.passes, shape.nodes
        if shape.width == 1:
            of_pass = kept_chain_nodes(nodes + 1, passes.device)
        else:
            depths = depths_of(shape, passes.device)
            of_pass = Nodes(draft.ancestors[:, : nodes + 1, : nodes + 1], depths, depths)
        tokens = torch.cat((self.token, draft.candidates[:, :nodes]), dim=1)
        logits, *states = passes.forward(passes.context.cache, tokens, of_pass)
        return [logits.float(), *states]

    def _tell(self, verified: Accepted | None = None) -> None:
        """Fill the report."""
        draft = self.draft
        parts = (
            [draft.count] * 4 if verified is None else [verified.accepted, verified.token, verified.last, draft.count]
        )
        estimates = draft.estimates.view(torch.int64)
        columns = [part[:, None] for part in parts]
        self.report.copy_(torch.cat((*columns, draft.candidates, draft.parents, estimates), dim=1))

    def _settle(self, found: list[Tensor], shape: RoundShape, rules: RoundRules, text: Tensor | None) -> None:
        """Verify by the outputs of `_pass`, and prepare the next round."""
        draft, passes, nodes = self.draft, self.passes, shape.nodes
        scores, *states = found
        candidates, known = draft.candidates[:, :nodes], None
        if text is not None:
            known = with_paths(text, candidates, self._seen(shape)[:, :, 1:])
        verified = self._accept(rules.processing.of_nodes(scores, known), shape, rules)
        together = torch.cat(states, dim=-1) if states else None
        if verified.path is not None:
            rows = functional.pad(verified.path + 1, (1, 0))
            passes.context.cache.move(rows)
            candidates = candidates.gather(1, verified.path)
            if together is not None:
                together = together.gather(1, rows[..., None].expand(-1, -1, together.shape[2]))
        self._tell(verified)
        # A sequence without a next token ends, but its row of the batch remains.
        token, places = verified.token.clamp_min(0)[:, None], span(candidates.shape[1] + 1, passes.device)
        new = torch.where(places < verified.accepted[:, None], functional.pad(candidates, (0, 1)), token)
        length = passes.context.cache.length
        if text is not None:
            text.scatter_(1, length[:, None] + 1 + places, new)
        draft.settle(verified.accepted, new, together, drafted=nodes > 0)
        self.token.copy_(token)
        length.addcmul_(verified.accepted + 1, draft.alive)

    def _seen(self, shape: RoundShape) -> Tensor:
        """`[texts, nodes + 1, nodes + 1]`, the ancestors of each node, itself included."""
        size = shape.nodes + 1
        if shape.width > 1:
            return self.draft.ancestors[:, :size, :size]
        return kept_chain_nodes(size, self.passes.device).seen.expand(len(self.token), -1, -1)

    def _accept(self, scores: Tensor, shape: RoundShape, rules: RoundRules) -> Accepted:
        """Verify by the target's processed scores `[texts, nodes + 1, vocab]`."""
        draft, (levels, width), nodes = self.draft, shape, shape.nodes
        candidates, parents = draft.candidates[:, :nodes], draft.parents[:, :nodes]
        if draft.q is None:
            choices = scores.argmax(-1)
            if width == 1:
                drawn = span(nodes, scores.device) < draft.count[:, None]
                last = ((candidates == choices[:, :nodes]) & drawn).cumprod(-1).sum(-1)
                return Accepted(last, choices.gather(1, last[:, None])[:, 0], last)
            last = on_device.last_on_path(candidates == choices.gather(1, parents), self._seen(shape))
        else:
            p = scores.softmax(-1)
            if width == 1:
                tests, weights = outcomes(candidates, draft.count, p, draft.q[:, :nodes], rules.verification)
                last = on_device.first_passing(tests, torch.rand_like(tests))
                return Accepted(last, on_device.draw_next(weights, last), last)
            tests, weights = on_device.tree_tests(candidates, parents, p, draft.q, width, rules.verification)
            last = on_device.accepted_node(parents, self._seen(shape), tests, torch.rand_like(tests), width)
        on_path = self._seen(shape).gather(1, last[:, None, None].expand(-1, -1, nodes + 1))[:, 0]
        steps = span(levels, scores.device)
        path = on_path[:, 1:].unflatten(1, (levels, width)).long().argmax(-1) + steps * width
        token = choices.gather(1, last[:, None])[:, 0] if draft.q is None else on_device.draw_next(weights, last)
        return Accepted(on_path.sum(-1) - 1, token, last, path)

    # On the host -----------------------------------------------------------------------------------------------------

    def _tree(self, row: list[Any], shape: RoundShape) -> DraftTree:
        """The submitted candidates in a sequence's row of the report."""
        nodes, count = self.draft.nodes, min(row[HEADER - 1], shape.nodes)
        parts = [row[first : first + count] for first in range(HEADER, HEADER + 3 * nodes, nodes)]
        candidates, parents, estimates = parts
        tree: DraftTree
        if shape.width == 1:  # scores stay on the device and are not needed
            tree = Chain(candidates, [NO_SCORES] * count)
        else:
            tree = DraftTree.of(parents, candidates, estimates)
        tree.passes = shape.levels
        return tree

    def _report_of(self, row: list[Any], shape: RoundShape, rules: RoundRules) -> RoundReport:
        tree = self._tree(row, shape)
        accepted, token, last = row[: HEADER - 1]
        if token < 0:
            raise NothingToDrawError
        path = list(range(1, accepted + 1)) if shape.width == 1 else tree.nodes_to(last)
        judged = rules.num_judged(len(tree)) if shape.width == 1 else 0
        return RoundReport(tree, path, token, row[HEADER + 2 * self.draft.nodes :][:judged])


NO_SCORES = torch.empty(0)
