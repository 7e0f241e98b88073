"""Rounds as one launch of a CUDA graph and one read of the result (`CapturedRounds`), for chains, trees and batches.

The graph contains the draft's steps and the target's pass (`_pass`), and verification, commit and the input of the next
round (`_settle`). If logits processors of the target cannot be captured, these are two graphs, and the host calls the
processors in between. The device also decides where the stopping rule ends a chain (`on_device`)."""

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
from hf_specdecpp.cuda_graphs.graphs import MOST_GRAPHS, host_zeros, lasting, restoring, write_lasting
from hf_specdecpp.sampling.processors import Warpers
from hf_specdecpp.sampling.randomness import NothingToDrawError
from hf_specdecpp.trees.tree import Chain, DraftTree
from hf_specdecpp.trees.verification import outcomes

TIMED_ROUNDS = 3  # of a shape; the fastest one counts
HEADER = 4  # numbers in a report before the candidates
# Runs the target's processors: (a sequence's index, its tree of n candidates, scores `[n + 1, vocab]` float32 after the
# root and each candidate) -> processed scores.
Process: TypeAlias = Callable[[int, DraftTree, Tensor], Tensor]


class Accepted(NamedTuple):
    """A verification's result: `[texts]` each, the number of `accepted` candidates, the next `token` (-1: none can be
    drawn) and the `last` accepted node (0: the root, 1: the first candidate). In trees also `path` `[texts, levels]`:
    indices of the accepted candidates, 0 for the first candidate of the round, then arbitrary ones."""

    accepted: Tensor
    token: Tensor
    last: Tensor
    path: Tensor | None = None


class RoundReport(NamedTuple):
    """The result of a sequence's round on the host: `tree` of submitted candidates, `path` of accepted nodes without
    the root (1: the first candidate), next `token`, and for chains uncalibrated `estimates` (of trees in `tree`)."""

    tree: DraftTree
    path: list[int]
    token: int
    estimates: list[float]


class CapturedRounds:
    """The rounds of one target and one draft, for one sequence at a time or for the rows of one batch. For each call
    `begin_texts`, then for each round `launch` and `read_reports`.

    Example: the sequence ends with 6. The graph drafts 7 8 9 and submits all three. The target reads 6 7 8 9,
    accepts 7 and 8, draws 4, and prepares both models for the next round, which begins with 4. The host reads the
    report (2 accepted, next token 4, last node 2, 3 submitted, 7 8 9) and emits 7 8 4."""

    def __init__(self, passes: CapturedTarget, draft: CapturedDraft) -> None:
        self.passes, self.draft = passes, draft
        self.graphs = passes.graphs
        texts = len(draft.last)
        with lasting():
            self.token = torch.zeros((texts, 1), dtype=torch.long, device=passes.device)
            # Number accepted, next token, last accepted node, number submitted; candidates, parents, bits of estimates.
            self.report = torch.zeros((texts, HEADER + 3 * draft.nodes), dtype=torch.long, device=passes.device)
            self.host_report = host_zeros(self.report)
        self._outputs: dict[RoundShape, list[Tensor]] = {}  # of `_pass`, if the verification is another graph
        self._texts: dict[int, list[Tensor]] = {}  # by cache size: prefixes, for processors that read them
        self._numbers: dict[int, list[Tensor]] = {}  # by number of `Warpers`, their numbers at fixed addresses
        self._rules: dict[Hashable, object] = {}  # a mark for each key of rules: comparing keys takes long

    @property
    def changes(self) -> list[Tensor]:
        """The tensors that a round reads before it changes them, so that a capture has to restore them."""
        return [self.token, self._text, self.passes.context.cache.length, *self.draft.changes]

    def begin_texts(
        self, rules: RoundRules, texts: Tensor, tokens: Tensor, states: Tensor | None, padding: Tensor
    ) -> None:
        """Begin a call's sequences, after `CapturedTarget.begin_texts`. `texts`: `[texts, length]`, as processors get
        them; the target has not read the last tokens. Other arguments as in `CapturedDraft.begin_texts`."""
        self._fix_warpers(rules)
        self.rules = rules
        self._active = list(range(len(texts)))
        texts, tokens, padding = map(with_rows, (texts, tokens, padding))
        self.token.copy_(texts[:, -1:])
        self._text = texts
        # Tokens of the sequences minus rows of the target's cache: 1, unless the cache has rows of another kind.
        self.ahead = texts.shape[1] - self.passes.context.num_tokens
        self.draft.begin_texts(tokens, None if states is None else with_rows(states), padding)
        self.draft.continue_with(self._active)

    def _fix_warpers(self, rules: RoundRules) -> None:
        """Copy `Warpers.numbers` (temperature, top-p, ...) to tensors that graphs read, and let `Warpers` use these.
        Also set `_rules_mark`, one object for all rules of equal `key`, for the keys of graphs."""
        if len(self._rules) >= MOST_GRAPHS:
            self._rules.clear()
        self._rules_mark = self._rules.setdefault(rules.key, object())
        both = (*rules.draft_processing.processors, *rules.processing.processors)
        warpers = [own for own in both if isinstance(own, Warpers)]
        fixed = self._numbers.setdefault(len(warpers), [])
        write_lasting(fixed, [each.numbers.to(self.token.device).expand(len(self.token), -1) for each in warpers])
        for each, numbers in zip(warpers, fixed, strict=True):
            each.numbers = numbers

    def launch(self, shape: RoundShape, active: Sequence[int], process: Process | None) -> None:
        """Launch a round, from draft to commit, of the sequences with the indices `active`. The others have ended and
        no longer change. `process`: runs the target's processors on the host, if these cannot be captured; not stored,
        because it refers to the target."""
        if list(active) != self._active:
            self._active = list(active)
            self.draft.continue_with(self._active)
        self.shape, self._captured, self._launched = shape, len(self.graphs), time.perf_counter()
        self._grow_caches(shape)
        self._run_graphs(shape, process)

    def read_reports(self) -> list[RoundReport]:
        """Wait for the launched round: a report for each active sequence, in the order of `launch`. Sets
        `seconds`, from the launch on; `None` if a graph was captured in this round."""
        reports = [self._report_of(row, self.shape) for row in self._read_rows().values()]
        is_typical = len(self.graphs) == self._captured
        self.seconds = time.perf_counter() - self._launched if is_typical else None
        self.draft.record_lengths(max(len(report.path) for report in reports) + 1, drafted=self.shape.levels > 0)
        return reports

    def _read_rows(self) -> dict[int, list[Any]]:
        """Wait for the device: the row of `report` of each active sequence, by the sequence's index."""
        self.host_report.copy_(self.report, non_blocking=True)
        self._wait()
        first = HEADER + 2 * self.draft.nodes
        rows, estimates = self.host_report[:, :first].tolist(), self.host_report[:, first:].view(torch.float64).tolist()
        return {text: rows[text] + estimates[text] for text in self._active}

    def time(self, shape: RoundShape, process: Process | None) -> float:
        """Run three rounds (`TIMED_ROUNDS`) of a shape and roll all back. Returns the seconds of the shortest."""
        self._grow_caches(shape)
        restore, taken = restoring(self.changes), []
        for _ in range(TIMED_ROUNDS):
            begin = time.perf_counter()
            self._run_graphs(shape, process)
            self._wait()
            taken.append(time.perf_counter() - begin)
            restore()
            self._wait()
        return min(taken)

    def _grow_caches(self, shape: RoundShape) -> None:
        """Make room for the rows of a round in both caches, and in the sequences for processors."""
        most = self.passes.context.num_tokens + max(shape.nodes + 1, self.ahead + self.draft.most_rows)
        capacity = self.passes.context.with_capacity(most).capacity
        self.draft.context.with_capacity(capacity)  # equal sizes: otherwise each pair of sizes needs graphs
        known, room = self._text, capacity + self.draft.nodes + 2
        if self.rules.asks_for_text and known.shape[1] < room:
            further = known[:, -1:].expand(-1, room - known.shape[1])  # a token that is in the prefix anyway
            write_lasting(self._texts.setdefault(capacity, []), [torch.cat((known, further), dim=1)])
            (self._text,) = self._texts[capacity]

    def _run_graphs(self, shape: RoundShape, process: Process | None) -> None:
        """Run the graph of a round; with `process` the graph of its pass, the processors, and the graph of the rest."""
        rules = self.rules  # which the graphs keep alive
        key = self, *self.passes.context.key, shape, self._rules_mark
        text = self._text if rules.asks_for_text else None
        if process is None:
            return self._run(("round", *key), lambda: self._settle(self._pass(shape, rules, text), shape, rules, text))
        found = self._outputs.setdefault(shape, [])

        def run_pass() -> None:
            write_lasting(found, self._pass(shape, rules, text))
            self._fill_report([self.draft.count] * 3)  # for the candidates only: nothing is verified yet

        self._run(("pass", *key), run_pass)
        for each, row in self._read_rows().items():
            tree = self._tree(row, shape)
            scores = found[0][each, : len(tree) + 1]
            scores.copy_(process(each, tree, scores))
        return self._run(("settle", *key), lambda: self._settle(found, shape, rules, text))

    def _run(self, key: tuple[Any, ...], function: Callable[[], None]) -> None:
        """Run a part of a round by its graph. A new graph is captured first, and `changes` restored after that."""
        changes = [] if key in self.graphs else self.changes
        if changes and key[0] == "settle":  # rows of a tree, which warm-ups would move several times
            first = self.passes.context.num_tokens
            changes += self.passes.context.cache.rows(first, first + self.draft.nodes + 1)
        self.graphs.run(key, function, changes)

    def _wait(self) -> None:
        if self.passes.device.type == "cuda":
            torch.cuda.current_stream(self.passes.device).synchronize()

    # The captured functions ------------------------------------------------------------------------------------------

    def _pass(self, shape: RoundShape, rules: RoundRules, text: Tensor | None) -> list[Tensor]:
        """Draft, or take looked-up candidates, and run the target's pass over the last token and all candidates: logits
        `[texts, nodes + 1, vocab]`, then the watched states."""
        draft, passes, nodes = self.draft, self.passes, shape.nodes
        if shape.levels:
            draft.propose(shape, rules, text)
        elif shape.given:
            draft.take_given(shape.given)
        tokens = torch.cat((self.token, draft.candidates[:, :nodes]), dim=1)
        logits, *states = passes.forward(passes.context.cache, tokens, self._nodes(shape))
        return [logits.float(), *states]

    def _nodes(self, shape: RoundShape) -> Nodes:
        """The root and the candidates, as the target's pass reads them: in trees by level."""
        size, device = shape.nodes + 1, self.passes.device
        if shape.width == 1:
            return kept_chain_nodes(size, device)
        depths = depths_of(shape, device)
        return Nodes(self.draft.ancestors[:, :size, :size], depths, depths)

    def _fill_report(self, verified: Sequence[Tensor]) -> None:
        """Fill `report` for the host. `verified`: `[texts]` each, the first three fields of `Accepted`."""
        draft = self.draft
        columns, estimates = [each[:, None] for each in (*verified, draft.count)], draft.estimates.view(torch.int64)
        self.report.copy_(torch.cat((*columns, draft.candidates, draft.parents, estimates), dim=1))

    def _settle(self, found: list[Tensor], shape: RoundShape, rules: RoundRules, text: Tensor | None) -> None:
        """Verify by the outputs `found` of `_pass`, fill the report, commit accepted tokens to the target's cache, and
        prepare the next round: `token`, `text` and the draft's window."""
        draft, passes, nodes = self.draft, self.passes, shape.nodes
        scores, *states = found
        candidates, known = draft.candidates[:, :nodes], None
        if text is not None:
            seen = self._nodes(shape).seen.expand(len(text), -1, -1)
            known = with_paths(text, candidates, seen[:, :, 1:])
        verified = self._accept(rules.processing.of_nodes(scores, known), shape, rules)
        together = torch.cat(states, dim=-1) if states else None
        if verified.path is not None:
            rows = functional.pad(verified.path + 1, (1, 0))  # in the pass: the root's and the accepted nodes'
            passes.context.cache.move(rows)
            candidates = candidates.gather(1, verified.path)
            if together is not None:
                together = on_device.rows_at(together, rows)
        self._fill_report(verified[:3])
        # Token 0 for a sequence without a next token, whose row of the batch remains.
        token, places = verified.token.clamp_min(0)[:, None], span(candidates.shape[1] + 1, passes.device)
        new = torch.where(places < verified.accepted[:, None], functional.pad(candidates, (0, 1)), token)
        length = passes.context.cache.length
        if text is not None:
            text.scatter_(1, length[:, None] + 1 + places, new)
        # A draft without steps, for lookups only, counts as reading, so that its window does not fill.
        draft.settle(verified.accepted, new, together, drafted=shape.levels > 0 or not draft.steps.most)
        self.token.copy_(token)
        length.addcmul_(verified.accepted + 1, draft.alive)

    def _accept(self, scores: Tensor, shape: RoundShape, rules: RoundRules) -> Accepted:
        """Verify by `scores` `[texts, nodes + 1, vocab]`, the target's processed logits after root and candidates."""
        draft, (levels, width, _), nodes, seen = self.draft, shape, shape.nodes, self._nodes(shape).seen
        candidates, parents = draft.candidates[:, :nodes], draft.parents[:, :nodes]
        if draft.q is None:
            choices = scores.argmax(-1)
            if width == 1:
                drawn = span(nodes, scores.device) < draft.count[:, None]
                last = ((candidates == choices[:, :nodes]) & drawn).cumprod(-1).sum(-1)
                return Accepted(last, choices.gather(1, last[:, None])[:, 0], last)
            last = on_device.last_on_path(candidates == choices.gather(1, parents), seen)
        else:
            p = scores.softmax(-1)
            if width == 1:
                tests, weights = outcomes(candidates, draft.count, p, draft.q[:, :nodes], rules.verification)
                last = on_device.last_passing(tests, torch.rand_like(tests))
                return Accepted(last, on_device.draw_next(weights, last), last)
            tests, weights = on_device.tree_tests(candidates, parents, p, draft.q, width, rules.verification)
            last = on_device.accepted_node(parents, seen, tests, torch.rand_like(tests), width)
        on_path = on_device.rows_at(seen, last[:, None])[:, 0]
        steps = span(levels, scores.device)
        path = on_path[:, 1:].unflatten(1, (levels, width)).long().argmax(-1) + steps * width
        token = choices.gather(1, last[:, None])[:, 0] if draft.q is None else on_device.draw_next(weights, last)
        return Accepted(on_path.sum(-1) - 1, token, last, path)

    # On the host -----------------------------------------------------------------------------------------------------

    def _tree(self, row: list[Any], shape: RoundShape) -> DraftTree:
        """The submitted candidates, from a sequence's row of the report. Their logits stay on the device."""
        nodes, count = self.draft.nodes, min(row[HEADER - 1], shape.nodes)
        candidates, parents, estimates = (row[HEADER + part * nodes :][:count] for part in range(3))
        none = [NO_SCORES] * count * (not shape.given)  # for each drawn candidate; looked-up ones have no scores
        tree = Chain(candidates, none) if shape.width == 1 else DraftTree.of(parents, candidates, estimates)
        tree.passes = shape.levels
        return tree

    def _report_of(self, row: list[Any], shape: RoundShape) -> RoundReport:
        tree = self._tree(row, shape)
        accepted, token, last = row[: HEADER - 1]
        if token < 0:
            raise NothingToDrawError
        path = list(range(1, accepted + 1)) if shape.width == 1 else tree.nodes_to(last)
        judged = self.rules.num_judged(len(tree)) if shape.width == 1 and shape.levels else 0
        return RoundReport(tree, path, token, row[HEADER + 2 * self.draft.nodes :][:judged])


NO_SCORES = torch.empty(0)
