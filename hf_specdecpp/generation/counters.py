"""Counts and seconds of a generation: `Counters`."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import or_
from typing import Any

from hf_specdecpp.trees.drawing import DrawnTree
from hf_specdecpp.trees.tree import DraftTree

OF_TWO = "of two"  # metadata key: a function of two calls' values that gives the field of their sum; default: `add`
EITHER = {OF_TWO: lambda own, other: own or other}
LATEST = {OF_TWO: lambda own, other: other or own}


def branching(drawn: DrawnTree) -> tuple[int, int]:
    """The number of nodes with several children, and of candidates, in a tree."""
    return drawn.tree.ranks.count(1), len(drawn.tree)


MOST_BRANCHED = {OF_TWO: lambda *two: max(filter(None, two), key=branching, default=None)}


@dataclass
class Counters:
    """Counts and seconds of one `generate()` call.

    Attributes:
        rounds: rounds, each with one target pass.
        idle_rounds: rounds without candidates.
        rounds_at_change: rounds that could have no candidates because the target's rotary frequencies change at their
            length (`models.checks.FrequencyChange`).
        plain_passes: target passes outside of rounds: the prompt's, which gives the first token.
        drafted, accepted: candidates. `discarded` counts the others.
        looked_up, accepted_lookups: candidates that were found in earlier text (`SpeculationConfig.lookup`).
        lookup_rounds: rounds with looked-up candidates only.
        generated: emitted tokens. (`generated + discarded = drafted + rounds + plain_passes`, unless a stopping
            criterion cut the last round.)
        drafted_at, accepted_at: candidates by position in the round, in trees by depth; index 0 is the first.
        tree_depths, tree_widths: number of trees by depth and by size of the widest level, with empty trees at index 0.
        draft_passes: forward passes of the draft in rounds.
        tested_by_rank, accepted_by_rank: over the root and the accepted nodes of trees, how often there was a first,
            second, ... child, and how often that child was accepted.
        draft_seconds: drafting, including the draft's pass over the prompt; of captured rounds only the launch.
        target_seconds: target passes without the prompt's (`prompt_seconds`). On a GPU this includes waiting for the
            pass during verification, and all work of captured rounds.
        overhead_seconds: all other time of rounds: verification, processors, streaming, drafting that gave nothing.
        plain_pass_seconds: estimated seconds of a plain pass over one token, in a batch divided by the rows, or `None`.
        same_pass_seconds: seconds of such a pass with the CPU matrix multiplications of this call.
        compared_passes: additional target passes over one token, if their time cannot be derived from the rounds: on a
            GPU, and on a CPU without large layers.
        preparing_seconds: seconds of `compared_passes`, and of making or checking copies of weights.
        state_bytes: memory for recurrent states, which are restored after a rejection.
        graphs, graph_seconds, graph_bytes: number of CUDA graphs of the target's passes and rounds, captured in this
            call or before; seconds of all captures; memory of the graphs, with their caches and q.
        uncaptured: why passes or rounds were not captured as CUDA graphs; `None` if they were, or if graphs are off.
        last_tree: the latest verified tree with candidates; `str()` draws it. `None` for chains.
        branched_tree: the tree with the most nodes that have several children; if equal, the largest.
        rows: statistics of each sequence of a batch, whose counts and seconds are the sums over them.
        agreement: for a published draft, the share of first, second and third candidates that equal the target's
            choice in a few short texts, measured at attach; empty without a tokenizer in the target's repository.
        suspect: name of a published draft, which may be for another target or be read wrongly; else `None`.
        refusal: why this call fell back to plain `generate()` or stopped drafting; else `None`.
        remedies: unused ways to be faster, as in `DraftSetup.remedies`.
        decided: decisions by name: `{"rule": "throughput", "costs": "followed", "estimates": "q", "verification":
            "block", "products": "float16, draft in int8", "corrections": "off", "tree": "chains: tree=False",
            "rounds": "step by step", "attached": "by a call"}`. Here rounds run without CUDA graphs; a `generate()`
            call attached the assistant, not `attach` ("before"); the target multiplies with float16 copies of its
            weights, the draft in int8; "estimates" of acceptance are the draft's probabilities q, those of its own
            "confidence head", or of an "acceptance head".
        has_products: whether any layer of the target computes differently than in plain `generate()`.
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
    state_bytes: int = field(default=0, metadata={OF_TWO: max})  # current memory
    graphs: int = field(default=0, metadata={OF_TWO: max})
    graph_seconds: float = field(default=0.0, metadata={OF_TWO: max})
    graph_bytes: int = field(default=0, metadata={OF_TWO: max})
    last_tree: DrawnTree | None = field(default=None, compare=False, repr=False, metadata=LATEST)
    branched_tree: DrawnTree | None = field(default=None, compare=False, repr=False, metadata=MOST_BRANCHED)
    rows: list[Any] = field(default_factory=list, compare=False, repr=False, metadata={OF_TWO: lambda *_: []})
    agreement: list[float] = field(default_factory=list, metadata=EITHER)
    suspect: str | None = field(default=None, metadata=EITHER)
    refusal: str | None = field(default=None, metadata=EITHER)
    uncaptured: str | None = field(default=None, metadata=EITHER)
    remedies: frozenset[str] = field(default=frozenset(), metadata={OF_TWO: lambda _, other: other})
    decided: dict[str, str] = field(default_factory=dict, compare=False, metadata={OF_TWO: or_})
    has_products: bool = field(default=True, metadata={OF_TWO: max})

    def record_outcome(self, tree: DraftTree, path: list[int]) -> None:
        """Called after each round, with its tree and the accepted nodes `path`."""
        candidates, widths = len(tree), tree.widths
        self.rounds += 1
        self.draft_passes += tree.passes
        self.idle_rounds += candidates == 0
        if not candidates and widths is None:  # no other counts for empty chains
            return
        drawn = tree.drawn(path) if tree.looked_up else path
        self.drafted += candidates
        self.accepted += len(path)
        self.looked_up += len(tree.looked_up)
        self.accepted_lookups += len(path) - len(drawn)
        self.lookup_rounds += candidates > 0 and candidates == len(tree.looked_up)
        self.drafted_at = add(self.drafted_at, [1] * candidates if widths is None else widths)
        self.accepted_at = add(self.accepted_at, [1] * len(path))
        self.accepted_at += [0] * (len(self.drafted_at) - len(self.accepted_at))
        if widths is None:
            return
        self.tree_depths = add(self.tree_depths, [0] * len(widths) + [1])
        self.tree_widths = add(self.tree_widths, [0] * max(widths, default=0) + [1])
        for node in (0, *drawn):
            self.tested_by_rank = add(self.tested_by_rank, [1] * len(tree.children[node]))
        self.accepted_by_rank += [0] * (len(self.tested_by_rank) - len(self.accepted_by_rank))
        for node in drawn:
            self.accepted_by_rank[tree.ranks[node]] += 1
        if candidates:  # the last rounds may have no candidates
            self.last_tree, best = DrawnTree(tree, path), self.branched_tree
            if best is None or (tree.ranks.count(1), candidates) > (best.tree.ranks.count(1), len(best.tree)):
                self.branched_tree = self.last_tree

    @property
    def discarded(self) -> int:
        return self.drafted - self.accepted

    @property
    def target_passes(self) -> int:
        return self.rounds + self.plain_passes

    @property
    def is_unused(self) -> bool:
        """Whether no forward pass was counted yet."""
        return self.target_passes == 0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass; 1 in plain decoding."""
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
        """Accepted share of the candidates at each position of a round, in trees at each depth."""
        return [ratio(a, d) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def acceptance_by_rank(self) -> list[float]:
        """In trees: how often the first, second, ... child was accepted, if its parent was and the child existed.

        Input of `trees.shapes.best_shape` for the best static tree.
        """
        return [ratio(a, t) for a, t in zip(self.accepted_by_rank, self.tested_by_rank, strict=True)]

    @property
    def speedup(self) -> float | None:
        """Estimated speed relative to plain `generate()`: the prompt's pass and one plain pass for each later token,
        divided by the seconds of this call; `None` if unknown.

        The call's seconds include one-time preparation (`preparing_seconds`). The overhead of plain decoding is
        neglected, so the speedup is rather underestimated.

        Example: 31 tokens with a prompt pass of 0.2 s and plain passes of 0.1 s take 3.2 s. If the call takes 0.2 s for
        the prompt, 1.4 s for rounds and 0.4 s for preparing, the speedup is 1.6.
        """
        return self._speed_over(self.plain_pass_seconds)

    @property
    def same_pass_speedup(self) -> float | None:
        """Speed relative to plain `generate()` with the same matrix multiplications: the gain by speculation alone."""
        return self._speed_over(self.same_pass_seconds if self.has_products else self.plain_pass_seconds)

    @property
    def call_seconds(self) -> float:
        """Seconds of prompt, preparation and rounds together."""
        rounds = self.draft_seconds + self.target_seconds + self.overhead_seconds
        return self.prompt_seconds + self.preparing_seconds + rounds

    def _speed_over(self, pass_seconds: float | None) -> float | None:
        plain_tokens, prompt = self.generated - self.plain_passes, self.prompt_seconds
        if pass_seconds is None or plain_tokens <= 0 or self.call_seconds <= prompt:
            return None
        return (prompt + plain_tokens * pass_seconds) / self.call_seconds


def ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def add(a: Any, b: Any) -> Any:
    if isinstance(a, list):
        longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
        return [x + (shorter[i] if i < len(shorter) else 0) for i, x in enumerate(longer)]
    return a + b if a is not None and b is not None else None
