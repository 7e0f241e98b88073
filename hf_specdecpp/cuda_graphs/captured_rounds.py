"""Rounds that a GPU runs as two launches and one read (`CapturedRounds`): the draft's steps, and the target's pass with
acceptance, the next token and all that the next round reads; for chains and trees, one text or the rows of a batch.
Where logits processors cannot be captured, pass and acceptance are a launch each, and the host calls them in between.

The functions are those that every round consists of, on tensors alone; what decides a round on the host elsewhere, such
as where the stopping rule ends the draft, is computed on the device (`on_device`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.cuda_graphs import on_device
from hf_specdecpp.cuda_graphs.captured_draft import CapturedDraft, RoundRules, RoundShape, with_paths
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.cuda_graphs.graphs import Graphs, lasting, write_lasting
from hf_specdecpp.sampling.randomness import NothingToDrawError
from hf_specdecpp.trees.tree import Chain, DraftTree
from hf_specdecpp.trees.verification import outcomes

TIMED_ROUNDS = 3  # of a shape, of which the fastest counts
TOLD = 4  # numbers of a report before the candidates
# Processes a text's scores `[n + 1, vocab]` float32 after the root and after the n candidates of a tree.
Process: TypeAlias = Callable[[int, DraftTree, Tensor], Tensor]


class Accepted(NamedTuple):
    """What stands of the candidates, by text: how many, which `token` follows (-1: none can be drawn), the `last` one
    (0 is the root), and `path` `[texts, levels]`: those that stand, counted from 0, and any others behind them."""

    accepted: Tensor
    token: Tensor
    last: Tensor
    path: Tensor


class Report(NamedTuple):
    """What the host reads of a round of a text: what was submitted, what stands and follows, and estimates."""

    tree: DraftTree
    path: list[int]
    token: int
    estimates: list[float]


class CapturedRounds:
    """The rounds of one target and one draft, for one text at a time or for the rows of one batch.

    Example: the text ends with 6. The first graph drafts 7 8 9 and says that all three are submitted; the second reads
    6 7 8 9, finds that 7 and 8 stand and that 4 follows, and leaves both models where 4 is the text's last token. The
    host reads 2, 3, 4 and 7 8 9, and emits 7 8 4.
    """

    def __init__(self, passes: CapturedTarget, draft: CapturedDraft) -> None:
        self.passes, self.draft = passes, draft
        self.graphs = Graphs(passes.device, beside=passes.graphs)
        texts = len(draft.last)
        with lasting():
            self.token = torch.zeros((texts, 1), dtype=torch.long, device=passes.device)
            # Accepted, the next token, the last candidate; submitted, candidates, their parents, estimates.
            self.report = torch.zeros((texts, TOLD + 3 * draft.nodes), dtype=torch.float64, device=passes.device)
            self.read = torch.zeros_like(self.report, device="cpu")
            if passes.device.type == "cuda":
                self.read = self.read.pin_memory()
        self._outputs: dict[RoundShape, list[Tensor]] = {}  # scores and states of passes that are graphs of their own
        self._texts: dict[int, Tensor] = {}  # by room: all tokens of each, for processors that ask which there were

    @property
    def changes(self) -> list[Tensor]:
        return [self.token, self._text, self.passes.text.cache.length, *self.draft.changes]

    def begin(self, texts: Tensor, tokens: Tensor, states: Tensor | None, padding: Tensor) -> None:
        """The rounds that follow are of other texts `[texts, length]`, as processors see them, whose last tokens the
        target has not read; the rest is as `CapturedDraft.begin` takes it."""
        self.graphs.begin_text()
        self.token.copy_(texts[:, -1:])
        self._text, self._has_begun, self._active = texts, False, list(range(len(texts)))
        # Tokens of the longest text that the target has read, and how many more there are.
        self._held, self._ahead = (held := self.passes.text.held), texts.shape[1] - held
        self.draft.begin(tokens, states, padding, self.passes.text)

    def keep(self, active: Sequence[int]) -> None:
        """Only these texts go on: of the others nothing changes any more."""
        if list(active) != self._active:
            self._active = list(active)
            self.draft.keep(self._active)

    def propose(self, shape: RoundShape, rules: RoundRules, length: int) -> None:
        """Launch the draft, if there are to be candidates, of texts whose longest has so many tokens."""
        self._held = length - self._ahead
        self._make_room(shape, rules)
        self._launch_draft(shape, rules)

    def verify(self, shape: RoundShape, rules: RoundRules, process: Process | None = None) -> list[Report]:
        """Launch the target's pass and its acceptance: the report of each text that goes on, in the order of `keep`.
        `process`: what processors of the target do that the `rules` leave out."""
        self._launch_target(shape, rules, process)
        self._has_begun = True
        rows = self._read_report()
        reports = [self._told(rows[text], shape, rules) for text in self._active]
        self.draft.note(max(len(report.path) for report in reports) + 1, drafted=shape.levels > 0)
        return reports

    def _read_report(self) -> list[list[float]]:
        self.read.copy_(self.report, non_blocking=True)
        self._wait()
        found: list[list[float]] = self.read.tolist()
        return found

    def time(self, shape: RoundShape, rules: RoundRules, process: Process | None = None) -> float:
        """Seconds of a round, which is forgotten."""
        self._make_room(shape, rules)
        before, taken = [each.clone() for each in self.changes], []

        def forget() -> None:
            for each, old in zip(self.changes, before, strict=True):
                each.copy_(old)
            self._wait()

        for _ in range(TIMED_ROUNDS):
            begin = time.perf_counter()
            self._launch_draft(shape, rules)
            self._launch_target(shape, rules, process)
            self._wait()
            taken.append(time.perf_counter() - begin)
            forget()
        return min(taken)

    def _make_room(self, shape: RoundShape, rules: RoundRules) -> None:
        most = self._held + max(shape.nodes + 1, self._ahead + self.draft.width + self.draft.nodes)
        room = self.passes.text.with_room(most).room
        self.draft.text.with_room(room)  # the same: otherwise there would be graphs for each pair of rooms
        if rules.asks_for_text and self._text is not self._texts.get(room):
            known = self._text
            if room not in self._texts:
                with lasting():
                    self._texts[room] = known.new_zeros((len(known), room + self.draft.nodes + 2))
            self._text = self._texts[room]
            self._text[:, : known.shape[1]] = known
            self._text[:, known.shape[1] :] = known[:, -1:]  # which is in each text anyway

    def _launch_draft(self, shape: RoundShape, rules: RoundRules) -> None:
        self._place = *self.passes.text.place, shape, rules.key
        text = self._text if rules.asks_for_text else None
        if shape.levels:
            self._run(("draft", *self._place), lambda: self.draft.propose(shape, rules, text))

    def _launch_target(self, shape: RoundShape, rules: RoundRules, process: Process | None) -> None:
        place, text = self._place, self._text if rules.asks_for_text else None
        if process is None:
            self._run(("verify", *place), lambda: self._settle(self._pass(shape), shape, rules, text))
            return
        found = self._outputs.setdefault(shape, [])
        self._run(("pass", *place), lambda: write_lasting(found, self._pass(shape)))
        rows = self._read_report()
        for each in self._active:
            tree = self._tree(rows[each], shape)
            scores = found[0][each, : len(tree) + 1]
            scores.copy_(process(each, tree, scores))
        self._run(("settle", *place), lambda: self._settle(found, shape, rules, text))

    def _run(self, key: tuple[Any, ...], function: Callable[[], None]) -> None:
        """Run a function by its graph; in the middle of a text one that cannot be captured runs as it is."""
        changes = [] if key in self.graphs else self.changes
        if changes and key[0] == "settle":  # rows of a tree, which each run before a capture moves
            changes += self.passes.text.cache.rows(self._held, self._held + self.draft.nodes + 1)
        self.graphs.run(key, function, changes, falls_back=self._has_begun)

    def _wait(self) -> None:
        if self.passes.device.type == "cuda":
            torch.cuda.current_stream(self.passes.device).synchronize()

    # What is captured ------------------------------------------------------------------------------------------------

    def _pass(self, shape: RoundShape) -> list[Tensor]:
        """The target's pass: scores `[texts, nodes + 1, vocab]`, then the states that are watched."""
        draft, passes, nodes = self.draft, self.passes, shape.nodes
        seen = draft.ancestors[:, : nodes + 1, : nodes + 1]
        depths = functional.pad(torch.arange(nodes, device=passes.device) // shape.width + 1, (1, 0))
        tokens = torch.cat((self.token, draft.candidates[:, :nodes]), dim=1)
        logits, *states = passes.forward(passes.text.cache, tokens, seen, depths)
        parts = [draft.count[:, None], draft.candidates, draft.parents, draft.estimates]
        self.report[:, TOLD - 1 :] = torch.cat([part.to(self.report) for part in parts], dim=1)
        return [logits.float(), *states]

    def _settle(self, found: list[Tensor], shape: RoundShape, rules: RoundRules, text: Tensor | None) -> None:
        """Acceptance, by what `_pass` found, and all that the next round reads."""
        draft, passes, nodes = self.draft, self.passes, shape.nodes
        scores, *states = found
        candidates, seen = draft.candidates[:, :nodes], draft.ancestors[:, : nodes + 1, 1 : nodes + 1]
        known = None if text is None else with_paths(text, candidates, seen)
        stands = self._accept(rules.processing.of_nodes(scores, known), shape, rules)
        rows = functional.pad(stands.path + 1, (1, 0))
        if shape.width > 1:
            passes.text.cache.move(rows)
        together = torch.cat(states, dim=-1) if states else None
        if together is not None:
            together = together.gather(1, rows[..., None].expand(-1, -1, together.shape[2]))
        chosen = candidates.gather(1, stands.path)
        told = torch.stack((stands.accepted, stands.token, stands.last), dim=1)
        self.report[:, : TOLD - 1] = told.to(self.report)
        # A text with no token to draw ends, but its row of a batch is read on.
        stands = stands._replace(token=stands.token.clamp_min(0))
        draft.take(stands.accepted, stands.token, chosen, together, drafted=nodes > 0)
        if text is not None:
            self._write(text, chosen, stands)
        self.token.copy_(stands.token[:, None])
        passes.text.cache.length.add_((stands.accepted + 1) * draft.alive)

    def _write(self, text: Tensor, candidates: Tensor, stands: Accepted) -> None:
        """Add what is emitted to a text; behind it stands its last token once more."""
        count, places = stands.accepted[:, None], torch.arange(candidates.shape[1] + 1, device=text.device)
        new = torch.where(places < count, functional.pad(candidates, (0, 1)), stands.token[:, None])
        text.scatter_(1, self.passes.text.cache.length[:, None] + 1 + places, new)

    def _accept(self, scores: Tensor, shape: RoundShape, rules: RoundRules) -> Accepted:
        """What stands, by the target's processed scores `[texts, nodes + 1, vocab]`."""
        draft, (levels, width), nodes = self.draft, shape, shape.nodes
        candidates, parents = draft.candidates[:, :nodes], draft.parents[:, :nodes]
        count, steps = draft.count.clamp_max(nodes), torch.arange(levels, device=scores.device)
        seen = draft.ancestors[:, : nodes + 1, : nodes + 1]
        if draft.q is None:
            choices = scores.argmax(-1)
            drawn = torch.arange(nodes, device=scores.device) < count[:, None]
            last = on_device.last_on_path(on_device.stands_greedily(candidates, parents, drawn, choices), seen)
        else:
            p = scores.softmax(-1)
            if width == 1:
                tests, weights = outcomes(candidates, count, p, draft.q[:, :nodes], rules.verification)
                last = on_device.first_passing(tests, torch.rand_like(tests))
                return Accepted(last, on_device.follows(weights, last), last, steps.expand(len(last), -1))
            tests, weights = on_device.tree_tests(candidates, parents, p, draft.q, width, rules.verification)
            last = on_device.accepted_node(parents, seen, tests, torch.rand_like(tests), width)
        on_path = seen.gather(1, last[:, None, None].expand(-1, -1, nodes + 1))[:, 0]
        path = on_path[:, 1:].unflatten(1, (levels, width)).long().argmax(-1) + steps * width
        token = choices.gather(1, last[:, None])[:, 0] if draft.q is None else on_device.follows(weights, last)
        return Accepted(on_path.sum(-1) - 1, token, last, path)

    # What the host makes of it ---------------------------------------------------------------------------------------

    def _tree(self, row: list[float], shape: RoundShape) -> DraftTree:
        """What is submitted of a text, by its row of the report."""
        nodes, count = self.draft.nodes, min(int(row[TOLD - 1]), shape.nodes)
        candidates = list(map(int, row[TOLD : TOLD + count]))
        tree: DraftTree
        if shape.width == 1:  # their scores stay on the device, where nobody needs them any more
            tree = Chain(candidates, [NO_SCORES] * count)
        else:
            tree = DraftTree()
            for place, token in enumerate(candidates, TOLD):
                tree.add(int(row[place + nodes]), token, estimate=row[place + 2 * nodes])
        tree.passes = shape.levels
        return tree

    def _told(self, row: list[float], shape: RoundShape, rules: RoundRules) -> Report:
        tree = self._tree(row, shape)
        accepted, token, last = map(int, row[: TOLD - 1])
        if token < 0:
            raise NothingToDrawError
        path = list(range(1, accepted + 1)) if shape.width == 1 else tree.nodes_to(last)
        judged = rules.num_judged(len(tree)) if shape.width == 1 else 0
        return Report(tree, path, token, row[TOLD + 2 * self.draft.nodes :][:judged])


NO_SCORES = torch.empty(0)
