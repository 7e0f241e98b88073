"""Statistics of a `generate()` call (`SpeculationStats`), and the sentences of its verdict: was speculation faster than
plain decoding, and if not, why (`outcome`); may the draft be for another target (`suspicion`)?"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest
from operator import or_
from typing import Any

from hf_specdecpp.estimation.ledger import LOSES, PAYS, Speed, effect, verdict
from hf_specdecpp.trees.drawing import DrawnTree
from hf_specdecpp.trees.tree import DraftTree

PREPARING_SHARE = 0.05  # share of a call's seconds, above which preparing is reported separately
# A draft is suspect if less than this share of 30 or more first candidates is accepted, or none of 6 or more: rules may
# soon stop drafting.
TOO_FEW, OF_MANY, OF_NONE = 0.15, 30, 6
FEWER = " SpeculationConfig(rule='throughput') drafts only as many tokens as make generation faster."
OF_TWO = "of two"  # metadata key: a function of two calls' values that gives the field of their sum; default: `add`
EITHER = {OF_TWO: lambda own, other: own or other}
LATEST = {OF_TWO: lambda own, other: other or own}


def branching(drawn: DrawnTree) -> tuple[int, int]:
    """The number of nodes with several children in a tree, and the number of its candidates."""
    return drawn.tree.ranks.count(1), len(drawn.tree)


MOST_BRANCHED = {OF_TWO: lambda *two: max(filter(None, two), key=branching, default=None)}


@dataclass
class SpeculationStats:
    """Counts and seconds of one `generate()` call. `a + b` sums two calls; `str()` is a small table.

    Attributes:
        rounds: rounds, each with one target pass.
        idle_rounds: rounds without candidates.
        rounds_at_change: rounds that could have no candidates because the target's rotary frequencies change at their
            length (`models.checks.FrequencyChange`).
        plain_passes: target passes outside of rounds: the prompt's, which gives the first token.
        drafted, accepted: all candidates, including looked-up ones; and accepted ones. `discarded` is the difference.
        looked_up, accepted_lookups: candidates found in earlier text (`SpeculationConfig.lookup`); and accepted ones.
        lookup_rounds: rounds with looked-up candidates only.
        generated: emitted tokens. (`generated + discarded = drafted + rounds + plain_passes`, unless a stopping
            criterion cut the last round.)
        drafted_at, accepted_at: `drafted` and `accepted` by position in the chain or depth in the tree, first at 0.
        tree_depths, tree_widths: number of trees by depth and by size of the widest level, with empty trees at index 0.
        draft_passes: forward passes of the draft in rounds.
        tested_by_rank, accepted_by_rank: how often the root or an accepted node of a tree had a first, second, ...
            child, and how often that child was accepted.
        draft_seconds: drafting, including the draft's pass over the prompt and the decision not to draft; of captured
            rounds only the launch.
        target_seconds: target passes without the prompt's (`prompt_seconds`). On a GPU this includes waiting for the
            pass during verification, and all work of captured rounds.
        overhead_seconds: all other time of rounds: verification, processors, streaming.
        plain_pass_seconds: estimated seconds of a plain pass over one token, in a batch divided by the rows, or `None`.
        same_pass_seconds: estimated seconds of such a pass with the CPU matrix multiplications of this call.
        compared_passes: additional target passes over one token, to measure plain decoding where the rounds do not show
            its speed: on a GPU, and on a CPU without large layers.
        preparing_seconds: seconds of `compared_passes`, and of making or checking copies of weights.
        state_bytes: memory for recurrent states, which are restored after a rejection.
        graphs, graph_seconds, graph_bytes: number of CUDA graphs of the target's passes and rounds, captured in this
            call or before; seconds of all captures; memory of the graphs, with their caches and q.
        uncaptured: why passes or rounds were not captured as CUDA graphs; `None` if they were, or if graphs are off.
        last_tree: the latest verified tree with candidates; `str()` draws it. `None` for chains.
        branched_tree: the tree with the most nodes that have several children; if equal, the largest.
        rows: in a batch the statistics of each sequence. The counts and seconds of this object are their sums.
        agreement: for a published draft, the share of first, second and third candidates that equal the target's
            choice in a few short texts, measured at attach; empty without a tokenizer in the target's repository.
        suspect: name of a published draft that may be for another target or be read wrongly, for a warning; or `None`.
        refusal: why this call fell back to plain `generate()` or stopped drafting; else `None`.
        remedies: unused ways to be faster, as in `DraftSetup.remedies`.
        decided: decisions by name: `{"rule": "throughput", "costs": "followed", "estimates": "q", "verification":
            "block", "products": "float16, draft in int8", "corrections": "off", "tree": "chains: tree=False",
            "rounds": "step by step", "attached": "by a call"}`. Here rounds run without CUDA graphs; a `generate()`
            call attached the assistant, not `attach` ("before"); the target multiplies with float16 copies of its
            weights, the draft in int8; "estimates" of acceptance are the draft's probabilities q, those of its own
            "confidence head", or of an "acceptance head".
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

    def record_outcome(self, tree: DraftTree, path: list[int]) -> None:
        """Called after each round: counts its `tree`, of which the nodes `path` were accepted."""
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
            if best is None or branching(self.last_tree) > branching(best):
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
        """Generated tokens per target pass; 1 in plain decoding."""
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
        """Accepted share of the candidates at each position of chains, or depth of trees; index 0 is the first."""
        return [ratio(a, d) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def acceptance_by_rank(self) -> list[float]:
        """In trees, the accepted share of the first, second, ... children of the root and of accepted nodes."""
        return [ratio(a, t) for a, t in zip(self.accepted_by_rank, self.tested_by_rank, strict=True)]

    @property
    def speedup(self) -> float | None:
        """Estimated speed relative to plain `generate()`: the prompt's pass and one plain pass for each later token,
        divided by the seconds of this call; `None` if unknown.

        The call's seconds include one-time preparation (`preparing_seconds`). The overhead of plain decoding is
        neglected, so the speedup is rather underestimated.

        Example: 31 tokens with a prompt pass of 0.2 s and plain passes of 0.1 s take 3.2 s. If the call takes 0.2 s for
        the prompt, 1.4 s for rounds and 0.4 s for preparing, the speedup is 1.6."""
        return self._speed_over(self.plain_pass_seconds)

    @property
    def same_pass_speedup(self) -> float | None:
        """Speed relative to plain `generate()` with the same matrix multiplications: the gain by speculation alone."""
        return self._speed_over(self.same_pass_seconds)

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

    @classmethod
    def of_batch(cls, rows: list[SpeculationStats]) -> SpeculationStats:
        """The sum of the statistics of a batch's sequences (`rows`), each with an equal share of the call's seconds."""
        total = sum(rows[1:], rows[0])
        total.rows = rows
        return total

    @property
    def verdict(self) -> str:
        """Sentences: was speculation faster, and if not, why; and the gain by faster matrix multiplications."""
        return " ".join(filter(None, (outcome(self), suspicion(self))))

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        if not isinstance(other, SpeculationStats):
            return NotImplemented
        total = SpeculationStats()
        for item in fields(self):
            of_two = item.metadata.get(OF_TWO, add)
            setattr(total, item.name, of_two(getattr(self, item.name), getattr(other, item.name)))
        tokens = self.generated + other.generated
        for name in ("plain_pass_seconds", "same_pass_seconds"):  # means weighted by tokens, if both are known
            own, others = getattr(self, name), getattr(other, name)
            if own is not None and others is not None:
                own = ratio(self.generated * own + other.generated * others, tokens) or own
            setattr(total, name, None if others is None else own)
        return total

    def __str__(self) -> str:
        if self.is_unused:
            return self.verdict
        rows = [
            ("tokens generated", f"{self.generated} in {self.target_passes} target passes"),
            ("tokens per pass", f"{self.tokens_per_pass:.2f}"),
            ("candidates", f"{self.drafted} drafted, {self.accepted} accepted ({self.acceptance_rate:.0%})"),
            ("discard rate", f"{self.discard_rate:.2f} candidates per token"),
            ("verification rate", f"{self.verification_rate:.2f} target passes per token"),
        ]
        if self.acceptance_by_position:
            rows.append(("accepted by position", _shares(self.acceptance_by_position)))
        if num_trees := sum(self.tree_depths):
            counted = self.tree_depths, self.tree_widths
            depth, width = (sum(at * count for at, count in enumerate(counts)) / num_trees for counts in counted)
            sizes = f"{self.drafted / num_trees:.1f} nodes, depth {depth:.1f}, width {width:.1f}"
            rows.append(("trees", f"{sizes} on average"))
            rows.append(("accepted by sibling", _shares(self.acceptance_by_rank) or "none were drawn"))
        if self.looked_up and self.looked_up == self.drafted:
            rows.append(("looked up", f"all candidates, in {self.lookup_rounds} of {self.rounds} rounds"))
        elif self.looked_up:
            share = ratio(self.accepted_lookups, self.looked_up)
            counts = f"{self.looked_up} of the candidates, {self.accepted_lookups} accepted ({share:.0%})"
            rows.append(("looked up", f"{counts}; {self.lookup_rounds} of {self.rounds} rounds drafted no others"))
        beside = f" ({self.compared_passes} passes compared)" if self.compared_passes else ""
        preparing = f"preparing {self.preparing_seconds:.2f} s{beside}, " if self.preparing_seconds >= 0.005 else ""
        split = f"prompt {self.prompt_seconds:.2f} s, draft {self.draft_seconds:.2f} s, "
        split += f"target {self.target_seconds:.2f} s, overhead {self.overhead_seconds:.2f} s"
        rows.append(("time", preparing + split))
        rows.append(("verdict", self.verdict))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


# The verdict. --------------------------------------------------------------------------------------------------------


def suspicion(stats: SpeculationStats) -> str:
    """A warning if `stats.suspect` is set and too few first candidates were accepted; else an empty string."""
    rounds = stats.rounds - stats.idle_rounds - stats.lookup_rounds
    accepted = sum(stats.accepted_at[:1])
    is_low = accepted < TOO_FEW * rounds if rounds >= OF_MANY else rounds >= OF_NONE and not accepted
    if stats.suspect is None or not is_low:
        return ""
    return (
        f"Only {accepted} of {rounds} first candidates were accepted, so {stats.suspect} may be for another target, "
        "or be read wrongly. Find out: specdecpp inspect REPO --target ID, with its repository and this target."
    )


def outcome(stats: SpeculationStats) -> str:
    """Sentences on the speed relative to plain `generate()`, with the reason if speculation was not faster."""
    if stats.refusal is not None:
        how = "Drafting was given up" if stats.drafted else "The call was a plain one, without its assistant"
        return f"{how}: {stats.refusal}"
    if stats.is_unused:
        return "Nothing was generated with this assistant yet: model.generate(**inputs, assistant_model=assistant)."
    if stats.rounds == 0:
        return "Nothing was drafted: the answer was too short, so no speed was gained or lost."
    if 2 * stats.rounds_at_change > stats.rounds:
        return (
            f"Nothing could be drafted in {stats.rounds_at_change} of {stats.rounds} rounds: the target's rotary "
            "frequencies change there with the length of the text (rope_type='dynamic' or 'longrope'), and a pass "
            "over several tokens would alter the text."
        )
    if stats.speedup is None or stats.same_pass_speedup is None:
        return (
            f"{stats.tokens_per_pass:.2f} tokens per target pass. The speed relative to plain generate() was not "
            "measured."
        )
    prepares = stats.preparing_seconds > PREPARING_SHARE * stats.call_seconds
    faster = stats.call_seconds / (stats.call_seconds - stats.preparing_seconds) if prepares else 1.0
    passes = stats.speedup / stats.same_pass_speedup
    # A round takes at least one pass, so counts bound the gain; timings vary on a busy machine.
    gain = min(faster * stats.same_pass_speedup, ratio(stats.generated - stats.plain_passes, stats.rounds))
    plain, same, of_passes = (Speed(each, each, each) for each in (gain * passes, gain, passes))
    pays = effect(plain, same) == "gain"
    why = f"{stats.tokens_per_pass:.2f} tokens per target pass." if pays else _reason(stats, gain)
    later = (
        f"This call took {stats.preparing_seconds:.2f} s longer to compare passes and copy weights: it ran at "
        f"{stats.speedup:.2f} times the speed of plain generate()."
    )
    parts = verdict(plain, same, None if LOSES < passes < PAYS else of_passes), why, later if prepares else ""
    return " ".join(filter(None, parts))


def _reason(stats: SpeculationStats, gain: float) -> str:
    """Why speculation is not faster; "" if it is. `gain`: its speed relative to plain decoding with equal passes."""
    if 2 * stats.idle_rounds > stats.rounds:
        by_rule = not {"throughput", "draft"} & stats.remedies
        why = "rule='throughput' stopped" if by_rule else "Little was drafted"
        return f"{why}: {stats.idle_rounds} of {stats.rounds} passes without candidates."
    if not stats.accepted:  # for any times
        none = "The only candidate was not" if stats.drafted == 1 else f"None of {stats.drafted} candidates was"
        return f"{none} accepted. {_better_draft(stats)}"
    return "" if gain >= PAYS else _why_not(stats)


def _why_not(stats: SpeculationStats) -> str:
    """Sentences with the average costs and tokens of a round, and a remedy for the largest cost."""
    unit = stats.rounds * (stats.same_pass_seconds or 1.0)
    seconds = stats.draft_seconds, stats.target_seconds, stats.overhead_seconds
    draft, verify, overhead = (each / unit for each in seconds)
    reason = (
        f"A round costs {draft + verify + overhead:.2f} passes over one token (drafting {draft:.2f}, verifying "
        f"{verify:.2f}, overhead {overhead:.2f}) and yields {1 + stats.accepted / stats.rounds:.2f} tokens: "
        f"{stats.acceptance_rate:.0%} of the candidates are accepted."
    )
    # Most nodes of a tree are discarded, however good the draft is, so trees are judged by their first level.
    first = ratio(sum(stats.accepted_at[:1]), stats.rounds - stats.idle_rounds)
    if (first if stats.tree_depths else stats.acceptance_rate) < 0.5:
        return f"{reason} {_better_draft(stats)}"
    dearest = max(draft, verify - 1.0, overhead)
    if dearest == overhead:
        return f"{reason} The target is too fast for the overhead of a round: speculation helps with larger targets."
    if dearest == draft:
        slow = f"one of its tokens costs {draft * stats.rounds / stats.drafted:.2f} target passes"
        return f"{reason} The draft is too slow: {slow}."
    fewer = FEWER if "throughput" in stats.remedies else ""
    return f"{reason} Verifying several tokens at once is expensive on this device.{fewer}"


def _better_draft(stats: SpeculationStats) -> str:
    """Sentences: the draft is not good enough, and which remedies the assistant does not use yet."""
    parts = [what for name, what in (("training", "it"), ("head", "a head")) if name in stats.remedies]
    train = f" Train {' and '.join(parts)}: specdecpp train." if parts else ""
    fewer = FEWER if "throughput" in stats.remedies else ""
    is_text = "draft" in stats.remedies
    other = train + fewer + (" A draft proposes candidates where nothing is found." if is_text else "")
    other = other or " Another one may be, or one that is trained on texts like these."
    return f"The {'text' if is_text else 'draft'} is not good enough for this target.{other}"


def _shares(values: list[float]) -> str:
    """The first eight shares as text, such as "80% 50%"."""
    return " ".join(f"{share:.0%}" for share in values[:8]) + (" ..." if len(values) > 8 else "")


def ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def add(a: Any, b: Any) -> Any:
    if isinstance(a, list):
        return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
    return a + b if a is not None and b is not None else None
