"""What is counted and timed in a generation: `Counters`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import or_
from typing import Any

from hf_specdecpp.trees.drawing import DrawnTree
from hf_specdecpp.trees.tree import DraftTree

OF_TWO = "of two"  # how a field of the sum of two calls follows from theirs, where they are not added
EITHER = {OF_TWO: lambda own, other: own or other}
LATEST = {OF_TWO: lambda own, other: other or own}


def branching(drawn: DrawnTree) -> tuple[int, int]:
    """How many nodes of a tree have several children, and how many candidates there are."""
    return drawn.tree.ranks.count(1), len(drawn.tree)


MOST_BRANCHED = {OF_TWO: lambda *two: max(filter(None, two), key=branching, default=None)}


@dataclass
class Counters:
    """Counts and seconds of one `generate()` call.

    Attributes:
        rounds: drafting rounds, each followed by one target pass.
        idle_rounds: those of them that drafted nothing.
        rounds_at_change: those of them that could have no candidates, since the target's rotary frequencies change
            there with the length of the text (`models.checks.FrequencyChange`).
        plain_passes: target passes without candidates (the first token comes from the prompt's pass).
        drafted, accepted: candidates. `discarded` is the rest.
        looked_up, accepted_lookups: candidates among these that were found in the text (`SpeculationConfig.lookup`).
        lookup_rounds: rounds that had only such candidates.
        generated: tokens emitted. (`generated + discarded = drafted + rounds + plain_passes`, unless the last round was
            cut short by a stopping criterion.)
        drafted_at, accepted_at: the same by position in the round, first candidate first; in trees by depth.
        tree_depths, tree_widths: number of trees by depth and by the size of their widest level; index 0 counts those
            without candidates.
        tree_passes: draft passes for trees.
        tested_by_rank, accepted_by_rank: at nodes that the target got to, how often there was a first, second, ...
            child, and how often it was the accepted one.
        draft_seconds: drafting, the draft's pass over the prompt included.
        target_seconds: target passes, the one over the prompt excluded (`prompt_seconds`). On an accelerator the
            verification that waits for them is part of it.
        overhead_seconds: everything else between the first token and the last: verification, processors, streaming.
        plain_pass_seconds: one target pass over a single token as plain `generate()` makes it, by what was measured;
            `None` if nothing was.
        same_pass_seconds: the same pass on the CPU products that the passes of the call ran on.
        compared_passes: target passes over one token beside those of the rounds, where nothing else says what such a
            pass takes: on a GPU, and on a CPU without large layers.
        preparing_seconds: these, and making or checking copies of weights.
        state_bytes: memory of the copies that a target with recurrent layers goes back to after a rejection.
        graphs, graph_seconds, graph_bytes: CUDA graphs of these passes and rounds up to now, seconds that they took,
            and the memory of graphs and of the caches, target's and draft's, that they work in.
        uncaptured: why the target's passes were not captured; `None` where they were, or should not be.
        last_tree: the latest tree with candidates that was verified; `str()` draws it. `None` for chains.
        branched_tree: of these trees the one with the most nodes that have several children, and of such the largest.
        rows: of a batch, each sequence's; everything else here is their sum.
        agreement: of a published draft, the share of first, second and third candidates that were the target's choice
            in a few short texts, when it was attached; empty where no tokenizer was found beside the target.
        suspect: a draft that others trained, by its name: it may be for another target, or read in a wrong way.
        refusal: why a target's default assistant was left out of a call, which was a plain one.
        remedies: what could still be done for its speed, of `DraftSetup.remedies`.
        decided: what the package decided, by name: `{"rule": "throughput", "costs": "followed", "verification":
            "block", "products": "float16, draft in int8", "corrections": "off", "attached": "by a call"}`, where the
            call attached the assistant, or one before it, and not `attach` ("before"); the target multiplies with
            float16 copies of its weights, and the draft reads in int8.
        has_products: whether any layer computes otherwise than in plain `generate()`.
    """

    rounds: int = 0
    idle_rounds: int = 0
    rounds_at_change: int = 0
    plain_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    looked_up: int = 0
    accepted_lookups: int = 0
    lookup_rounds: int = 0
    generated: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    tree_depths: list[int] = field(default_factory=list)
    tree_widths: list[int] = field(default_factory=list)
    draft_passes: int = 0
    tested_by_rank: list[int] = field(default_factory=list)
    accepted_by_rank: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    prompt_seconds: float = 0.0
    overhead_seconds: float = 0.0
    compared_passes: int = 0
    preparing_seconds: float = 0.0
    plain_pass_seconds: float | None = None
    same_pass_seconds: float | None = None
    state_bytes: int = field(default=0, metadata={OF_TWO: max})  # what there is by now
    graphs: int = field(default=0, metadata={OF_TWO: max})
    graph_seconds: float = field(default=0.0, metadata={OF_TWO: max})
    graph_bytes: int = field(default=0, metadata={OF_TWO: max})
    last_tree: DrawnTree | None = field(default=None, compare=False, repr=False, metadata=LATEST)
    branched_tree: DrawnTree | None = field(
        default=None,
        compare=False,
        repr=False,
        metadata=MOST_BRANCHED,
    )
    rows: list[Any] = field(default_factory=list, compare=False, repr=False, metadata={OF_TWO: lambda *_: []})
    agreement: list[float] = field(default_factory=list, metadata=EITHER)
    suspect: str | None = field(default=None, metadata=EITHER)
    refusal: str | None = field(default=None, metadata=EITHER)
    uncaptured: str | None = field(default=None, metadata=EITHER)
    remedies: frozenset[str] = field(default=frozenset(), metadata={OF_TWO: lambda _, other: other})
    decided: dict[str, str] = field(default_factory=dict, compare=False, metadata={OF_TWO: or_})
    has_products: bool = field(default=True, metadata={OF_TWO: max})

    def saw(self, tree: DraftTree, path: list[int]) -> None:
        """Count one verified round; `path`: the accepted nodes."""
        candidates, widths = len(tree), tree.widths
        self.rounds += 1
        self.draft_passes += tree.passes
        self.idle_rounds += candidates == 0
        if not candidates and widths is None:  # of which nothing else is counted
            return
        drawn = tree.drawn(path) if tree.looked_up else path
        self.drafted += candidates
        self.accepted += len(path)
        self.looked_up += len(tree.looked_up)
        self.accepted_lookups += len(path) - len(drawn)
        self.lookup_rounds += candidates > 0 and candidates == len(tree.looked_up)
        tally(self.drafted_at, range(candidates) if widths is None else [depth - 1 for depth in tree.depths[1:]])
        tally(self.accepted_at, range(len(path)))
        self.accepted_at += [0] * (len(self.drafted_at) - len(self.accepted_at))
        if widths is None:
            return
        tally(self.tree_depths, [len(widths)])
        tally(self.tree_widths, [max(widths, default=0)])
        for node in (0, *drawn):
            tally(self.tested_by_rank, range(len(tree.children[node])))
        self.accepted_by_rank += [0] * (len(self.tested_by_rank) - len(self.accepted_by_rank))
        tally(self.accepted_by_rank, [tree.ranks[node] for node in drawn])
        if candidates:  # a rule may leave the last rounds of an answer to the target
            self.last_tree, best = DrawnTree(tree, path), self.branched_tree
            if best is None or (tree.ranks.count(1), candidates) > branching(best):
                self.branched_tree = self.last_tree

    @property
    def discarded(self) -> int:
        return self.drafted - self.accepted

    @property
    def target_passes(self) -> int:
        return self.rounds + self.plain_passes

    @property
    def is_unused(self) -> bool:
        """Whether no call with the assistant is behind them."""
        return self.target_passes == 0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass; 1 is plain decoding."""
        return ratio(self.generated, self.target_passes)

    @property
    def discard_rate(self) -> float:
        """Discarded candidates per generated token."""
        return ratio(self.discarded, self.generated)

    @property
    def verification_rate(self) -> float:
        """Target passes per generated token."""
        return ratio(self.target_passes, self.generated)

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all candidates."""
        return ratio(self.accepted, self.drafted)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted share of the candidates drafted at each position of a round, first candidate first."""
        return [ratio(a, d) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def acceptance_by_rank(self) -> list[float]:
        """In trees: how often the first, second, ... child was the accepted one where the target could choose it.

        `trees.shapes.best_shape` makes the best static tree of it.
        """
        return [ratio(a, t) for a, t in zip(self.accepted_by_rank, self.tested_by_rank, strict=True)]

    @property
    def speedup(self) -> float | None:
        """Estimated speed relative to plain `generate()`, whose seconds are the pass over the prompt, as it was here,
        and a measured plain pass for every later token; `None` if unknown.

        All seconds of the call count, also those of what is prepared once (`preparing_seconds`). Plain decoding's own
        overhead counts as nothing, so the estimate errs against the assistant.

        Example: 31 tokens, the first from a prompt of 0.2 s, at 0.1 s a plain pass: 3.2 s. With 1.4 s of rounds and
        0.4 s of preparing beside the prompt the call is 1.6 times as fast.
        """
        return self._speed_over(self.plain_pass_seconds)

    @property
    def same_pass_speedup(self) -> float | None:
        """The same relative to plain `generate()` on the assistant's own passes: what speculation itself gains."""
        return self._speed_over(self.same_pass_seconds if self.has_products else self.plain_pass_seconds)

    @property
    def call_seconds(self) -> float:
        """All that was timed of the call."""
        rounds = self.draft_seconds + self.target_seconds + self.overhead_seconds
        return self.prompt_seconds + self.preparing_seconds + rounds

    def _speed_over(self, pass_seconds: float | None) -> float | None:
        plain_tokens, prompt = self.generated - self.plain_passes, self.prompt_seconds
        if pass_seconds is None or plain_tokens <= 0 or self.call_seconds <= prompt:
            return None
        return (prompt + plain_tokens * pass_seconds) / self.call_seconds


def ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def tally(counts: list[int], places: Sequence[int]) -> None:
    """Count one at each of the places."""
    if places:
        counts += [0] * (max(places) + 1 - len(counts))
    for place in places:
        counts[place] += 1


def add(a: Any, b: Any) -> Any:
    if isinstance(a, list):
        longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
        return [x + (shorter[i] if i < len(shorter) else 0) for i, x in enumerate(longer)]
    return a + b if a is not None and b is not None else None
