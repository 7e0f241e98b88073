"""What a generation did and whether it paid: counters, time split, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hf_specdecpp.trees.drawing import DrawnTree
from hf_specdecpp.trees.tree import DraftTree

PAYS, LOSES = 1.03, 0.97  # between them speeds count as equal
# First candidates that a draft for this very target would hardly ever miss: too small a share of many, or all of a few,
# since a rule may stop drafting soon.
TOO_FEW, OF_MANY, OF_NONE = 0.15, 30, 6
FEWER = "SpeculationConfig(rule='throughput') drafts only as far as that pays"
# Of two calls the larger, since they count what there is by now; and the first that is given.
LATEST, REASONS = ("state_bytes", "graphs", "graph_seconds", "graph_bytes"), ("suspect", "refusal", "uncaptured")


@dataclass
class SpeculationStats:
    """Counts and seconds of one `generate()` call. `a + b` sums two calls; `str()` is a small table.

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
        plain_pass_seconds: one target pass over a single token as plain `generate()` makes it, measured; `None` if it
            was not.
        same_pass_seconds: the same pass on the CPU products and packed weights that the assistant's passes run on.
        compared_passes: target passes beside those of the rounds, over one token, to know what these take and which CPU
            products are faster. The first texts of a process make most of them.
        preparing_seconds: these, and making or checking packed and int8 copies of weights.
        state_bytes: memory of the copies that a target with recurrent layers goes back to after a rejection.
        graphs, graph_seconds, graph_bytes: CUDA graphs of the target's passes up to now, seconds that capturing them
            took, and the memory of the caches that they work in.
        uncaptured: why the target's passes were not captured; `None` where they were, or should not be.
        last_tree: the latest tree with candidates that was verified; `str()` draws it. `None` for chains.
        rows: of a batch, each sequence's; everything else here is their sum.
        suspect: a draft that others trained, by its name: it may be for another target, or read in a wrong way.
        complete: False on an unattached target, where transformers does not report the last round and the
            target's times.
        refusal: why a target's default assistant was left out of a call, which was a plain one.
        remedies: what could still be done for its speed, of `DraftSetup.remedies`.
        decided: what the package decided, by name: `{"rule": "throughput", "costs": "followed", "verification":
            "block", "products": "packed int8", "corrections": "off"}`, where oneDNN with packed weights is compared
            with PyTorch's own products, and the draft reads in int8.
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
    state_bytes: int = 0
    graphs: int = 0
    graph_seconds: float = 0.0
    graph_bytes: int = 0
    last_tree: DrawnTree | None = field(default=None, compare=False, repr=False)
    rows: list[SpeculationStats] = field(default_factory=list, compare=False, repr=False)
    complete: bool = True
    suspect: str | None = None
    refusal: str | None = None
    uncaptured: str | None = None
    remedies: frozenset[str] = frozenset()
    decided: dict[str, str] = field(default_factory=dict, compare=False)
    has_products: bool = True

    @classmethod
    def of_batch(cls, rows: list[SpeculationStats]) -> SpeculationStats:
        """The sum over the sequences of a batch, whose shares of common passes they have."""
        total = sum(rows[1:], rows[0])
        total.rows = rows
        return total

    def record(self, tree: DraftTree, path: list[int]) -> None:
        """Count one verified round; `path`: the accepted nodes."""
        widths, drawn = tree.widths, tree.drawn(path)
        self.rounds += 1
        self.idle_rounds += len(tree) == 0
        self.drafted += len(tree)
        self.accepted += len(path)
        self.looked_up += len(tree.looked_up)
        self.accepted_lookups += len(path) - len(drawn)
        self.lookup_rounds += bool(tree.looked_up) and not tree.num_drawn
        self.drafted_at = _add(self.drafted_at, widths)
        self.accepted_at = _add(self.accepted_at, [int(depth < len(path)) for depth in range(len(widths))])
        if not tree.is_chain:
            self._record_shape(tree, widths, drawn)
            if len(tree):  # a rule may leave the last rounds of an answer to the target
                self.last_tree = DrawnTree(tree, path)

    def _record_shape(self, tree: DraftTree, widths: list[int], drawn: Sequence[int]) -> None:
        """Count depth and width of a tree, and the ranks of what was drawn and accepted."""
        self.tree_depths = _add(self.tree_depths, _one_at(len(widths)))
        self.tree_widths = _add(self.tree_widths, _one_at(max(widths, default=0)))
        for node in (0, *drawn):
            if children := len(tree.children[node]):
                self.tested_by_rank = _add(self.tested_by_rank, [1] * children)
                self.accepted_by_rank = _add(self.accepted_by_rank, [0] * children)
        for node in drawn:
            self.accepted_by_rank[tree.ranks[node]] += 1

    @property
    def discarded(self) -> int:
        return self.drafted - self.accepted

    @property
    def target_passes(self) -> int:
        return self.rounds + self.plain_passes

    @property
    def _is_unused(self) -> bool:
        """Whether no call with the assistant is behind them; an unattached target reports no last round."""
        return self.target_passes == 0 and self.complete

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass; 1 is plain decoding."""
        return _ratio(self.generated, self.target_passes)

    @property
    def discard_rate(self) -> float:
        """Discarded candidates per generated token."""
        return _ratio(self.discarded, self.generated)

    @property
    def verification_rate(self) -> float:
        """Target passes per generated token."""
        return _ratio(self.target_passes, self.generated)

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all candidates."""
        return _ratio(self.accepted, self.drafted)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted share of the candidates drafted at each position of a round, first candidate first."""
        return [_ratio(a, d) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def acceptance_by_rank(self) -> list[float]:
        """In trees: how often the first, second, ... child was the accepted one where the target could choose it.

        `tree_shapes.best_shape` makes the best static tree of it.
        """
        return [_ratio(a, t) for a, t in zip(self.accepted_by_rank, self.tested_by_rank, strict=True)]

    @property
    def speedup(self) -> float | None:
        """Estimated speed relative to plain `generate()`, the pass over the prompt left out of both; `None` if unknown.

        The estimate takes the measured time of a plain pass for every token and nothing for plain decoding's own
        overhead, so it errs against the assistant.
        """
        return self._speed_over(self.plain_pass_seconds)

    @property
    def same_pass_speedup(self) -> float | None:
        """The same relative to plain `generate()` on the assistant's own passes: what speculation itself gains."""
        return self._speed_over(self.same_pass_seconds if self.has_products else self.plain_pass_seconds)

    def _speed_over(self, pass_seconds: float | None) -> float | None:
        spent = self.draft_seconds + self.target_seconds + self.overhead_seconds
        plain_tokens = self.generated - self.plain_passes
        if pass_seconds is None or plain_tokens <= 0 or spent <= 0:
            return None
        return plain_tokens * pass_seconds / spent

    @property
    def verdict(self) -> str:
        """A few sentences: did speculation pay, and if not, why not; and what faster passes alone give."""
        return " ".join(filter(None, (self._outcome, self._suspicion)))

    @property
    def _suspicion(self) -> str:
        """Of a draft that others trained: whether it seems to be for another target."""
        rounds = self.rounds - self.idle_rounds - self.lookup_rounds
        accepted = sum(self.accepted_at[:1])
        is_low = accepted < TOO_FEW * rounds if rounds >= OF_MANY else rounds >= OF_NONE and not accepted
        if self.suspect is None or not is_low:
            return ""
        return (
            f"Only {accepted} of {rounds} first candidates were accepted, so {self.suspect} may be for another target, "
            "or be read wrongly. Find out: specdecpp inspect REPO --target ID, with its repository and this target."
        )

    @property
    def _outcome(self) -> str:
        """Did speculation pay, and if not, why not."""
        if self.refusal is not None:
            return f"The call was a plain one, without the default assistant: {self.refusal}"
        if self._is_unused:
            return "Nothing was generated with this assistant yet: model.generate(**inputs, assistant_model=assistant)."
        if self.rounds == 0:
            return "Nothing was drafted: the answer was too short, so no speed was gained or lost."
        if 2 * self.rounds_at_change > self.rounds:
            return (
                f"Nothing could be drafted in {self.rounds_at_change} of {self.rounds} rounds: the target's rotary "
                "frequencies change there with the length of the text (rope_type='dynamic' or 'longrope'), and a pass "
                "over several tokens would alter the text."
            )
        if self.speedup is None or self.same_pass_speedup is None:
            attach = "" if self.complete else ": attach the assistant to the target (assistant.attach(model))"
            return (
                f"{self.tokens_per_pass:.2f} tokens per target pass. The speed relative to plain generate() was not "
                f"measured{attach}."
            )
        # A round takes at least a pass, so what was counted bounds what was timed, which varies on a busy machine.
        gain = min(self.same_pass_speedup, _ratio(self.generated - self.plain_passes, self.rounds))
        return self._judged(gain, self.speedup / self.same_pass_speedup)

    def _judged(self, gain: float, passes: float) -> str:
        """What speculation gains, relative to plain `generate()` with the same passes, and what these passes do."""
        speed, differ = gain * passes, not LOSES < passes < PAYS
        products = f" {_of_products(gain, passes)}" if differ else ""
        if differ and not gain >= PAYS > speed:
            ratio, plain = gain, "plain generate() with the same passes"
        else:  # also where slower products take back what speculation gains
            ratio, plain = speed, "plain generate()"
        if min(gain, speed, ratio) >= PAYS:
            tokens = f"{self.tokens_per_pass:.2f} tokens per target pass"
            return f"It pays: about {ratio:.2f} times the speed of {plain}, {tokens}.{products}"
        how = f"about as fast as {plain}" if ratio > LOSES else f"about {ratio:.2f} times the speed of {plain}"
        if 2 * self.idle_rounds > self.rounds:
            by_rule = not {"throughput", "draft"} & self.remedies
            why = "Speculating does not pay here, so rule='throughput' stopped" if by_rule else "Little was drafted"
            return f"{why}: {self.idle_rounds} of {self.rounds} passes without candidates, {how}.{products}"
        if not self.accepted:  # whatever the times say
            none = "the only candidate was not" if self.drafted == 1 else f"none of {self.drafted} candidates was"
            return f"It does not pay: {none} accepted.{products} {self._better_draft()}"
        if gain >= PAYS:
            return f"It does not pay: {how}.{products}"
        return f"It does not pay: {how}.{products} {self._why_not()}"

    def _why_not(self) -> str:
        """What a round costs and gives, and what to do about what costs most."""
        unit = self.rounds * ((self.same_pass_seconds if self.has_products else self.plain_pass_seconds) or 1.0)
        draft, verify, overhead = (
            seconds / unit for seconds in (self.draft_seconds, self.target_seconds, self.overhead_seconds)
        )
        reason = (
            f"A round costs {draft + verify + overhead:.2f} passes over one token (drafting {draft:.2f}, verifying "
            f"{verify:.2f}, overhead {overhead:.2f}) and yields {1 + self.accepted / self.rounds:.2f} tokens: "
            f"{self.acceptance_rate:.0%} of the candidates are accepted."
        )
        # Most nodes of a tree are discarded however good the draft is: there the first level counts.
        first = _ratio(sum(self.accepted_at[:1]), self.rounds - self.idle_rounds)
        if (first if self.tree_depths else self.acceptance_rate) < 0.5:
            return f"{reason} {self._better_draft()}"
        dearest = max(draft, verify - 1.0, overhead)
        if dearest == overhead:
            return f"{reason} The target is too fast for the overhead of a round: assistants pay with larger targets."
        if dearest == draft:
            slow = f"one of its tokens costs {draft * self.rounds / self.drafted:.2f} target passes"
            return f"{reason} The draft is too slow: {slow}."
        ways = self._told(throughput=FEWER)
        return f"{reason} Verifying several tokens at once is expensive on this device.{ways}"

    def _better_draft(self) -> str:
        """That the draft is not good enough, and what the assistant does not do about it yet."""
        parts = [what for name, what in (("training", "it"), ("head", "a head")) if name in self.remedies]
        train = f" Train {' and '.join(parts)}: specdecpp train." if parts else ""
        others = self._told(throughput=FEWER, draft="A draft proposes candidates where nothing is found")
        other = train + others or " Another one may be, or one that is trained on texts like these."
        return f"The {'text' if 'draft' in self.remedies else 'draft'} is not good enough for this target.{other}"

    def _told(self, **ways: str) -> str:
        """Sentences on the remedies that the assistant does not use yet."""
        return "".join(f" {way}." for name, way in ways.items() if name in self.remedies)

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        if not isinstance(other, SpeculationStats):
            return NotImplemented
        total = SpeculationStats()
        for item in fields(self):
            if item.name not in ("last_tree", "rows", "remedies", "decided", "has_products", *LATEST, *REASONS):
                setattr(total, item.name, _add(getattr(self, item.name), getattr(other, item.name)))
        total.last_tree = other.last_tree or self.last_tree
        total.decided = other.decided or self.decided
        for name in LATEST:
            setattr(total, name, max(getattr(self, name), getattr(other, name)))
        total.complete = self.complete and other.complete
        for name in REASONS:
            setattr(total, name, getattr(self, name) or getattr(other, name))
        total.remedies, total.has_products = other.remedies, self.has_products or other.has_products
        for name in ("plain_pass_seconds", "same_pass_seconds"):
            setattr(total, name, self._mean_with(other, getattr(self, name), getattr(other, name)))
        return total

    def _mean_with(self, other: SpeculationStats, own: float | None, others: float | None) -> float | None:
        """The mean by tokens of a time that both calls may know."""
        if own is None or others is None:
            return None
        weighted = self.generated * own + other.generated * others
        return _ratio(weighted, self.generated + other.generated) or own

    def __str__(self) -> str:
        if self._is_unused:
            return self.verdict
        rows = [
            ("tokens generated", f"{self.generated} in {self.target_passes} target passes"),
            ("tokens per pass", f"{self.tokens_per_pass:.2f}"),
            ("candidates", f"{self.drafted} drafted, {self.accepted} accepted ({self.acceptance_rate:.0%})"),
            ("discard rate", f"{self.discard_rate:.2f} candidates per token"),
            ("verification rate", f"{self.verification_rate:.2f} target passes per token"),
        ]
        if self.acceptance_by_position:
            shares = " ".join(f"{share:.0%}" for share in self.acceptance_by_position[:8])
            rows.append(("accepted by position", shares + (" ..." if len(self.drafted_at) > 8 else "")))
        if num_trees := sum(self.tree_depths):
            means = [
                sum(value * count for value, count in enumerate(counts)) / num_trees
                for counts in (self.tree_depths, self.tree_widths)
            ]
            sizes = f"{self.drafted / num_trees:.1f} nodes, depth {means[0]:.1f}, width {means[1]:.1f}"
            rows.append(("trees", f"{sizes} on average"))
            shares = " ".join(f"{share:.0%}" for share in self.acceptance_by_rank[:8]) or "none were drawn"
            rows.append(("accepted by sibling", shares + (" ..." if len(self.tested_by_rank) > 8 else "")))
        if self.looked_up:
            share = _ratio(self.accepted_lookups, self.looked_up)
            counts = f"{self.looked_up} of the candidates, {self.accepted_lookups} accepted ({share:.0%})"
            rows.append(("looked up", f"{counts}; {self.lookup_rounds} of {self.rounds} rounds drafted no others"))
        rows.append(("time", self._time_split()))
        if not self.complete:
            rows.append(("note", "unattached target: the last round and the target's time are not reported"))
        rows.append(("verdict", self.verdict))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _time_split(self) -> str:
        if not self.complete:
            return f"draft {self.draft_seconds:.2f} s"
        beside = f" ({self.compared_passes} passes compared)" if self.compared_passes else ""
        preparing = f"preparing {self.preparing_seconds:.2f} s{beside}, " if self.preparing_seconds >= 0.005 else ""
        return (
            f"{preparing}prompt {self.prompt_seconds:.2f} s, draft {self.draft_seconds:.2f} s, "
            f"target {self.target_seconds:.2f} s, overhead {self.overhead_seconds:.2f} s"
        )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _of_products(gain: float, passes: float) -> str:
    """What the CPU products alone give, and whether that is most of the speed of products and speculation together."""
    most = ", most of which comes from the products" if passes >= PAYS and 1.0 < gain < passes else ""
    return (
        f"The CPU products alone run at {passes:.2f} times the speed of plain generate() as it is, with speculation "
        f"it is {gain * passes:.2f} times{most}."
    )


def _one_at(index: int) -> list[int]:
    return [0] * index + [1]


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, list):
        longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
        return [x + (shorter[i] if i < len(shorter) else 0) for i, x in enumerate(longer)]
    return a + b if a is not None and b is not None else None
