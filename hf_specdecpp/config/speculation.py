"""The settings of a run: `SpeculationConfig`."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.types import check_types
from hf_specdecpp.sampling.verification import Verification
from hf_specdecpp.trees.shapes import make_shape, size

Rule = Literal["threshold", "throughput", "fixed"]
RULES: tuple[str, ...] = get_args(Rule)

CpuProducts = Literal["auto", "off"]
Graphs = Literal["auto", "off"]

Tree = Literal["dyspec", "dyspec-exact", "static"]
TREES: tuple[str, ...] = get_args(Tree)
MOST_CANDIDATES = 1024  # in a round
# Settings and rules of earlier versions, which stored configs have.
REMOVED = {"keep_texts", "confidence_threshold", "svip_threshold", "adaedl_threshold"}
REMOVED_RULES = ("confidence", "svip", "adaedl")


@dataclass
class SpeculationConfig:
    """How far to speculate: the stopping rule of a chain and its parameters.

    Args:
        rule: when a round stops drafting.
            `"threshold"` (SpecDec++, section 3): once the chance that a candidate was rejected passes `threshold`;
            `"throughput"`: where that maximises tokens a second, with nothing to tune (`docs/throughput.md`); also for
            `tree="dyspec"`;
            `"fixed"`: after `num_tokens` candidates, which is classic speculative decoding.
        threshold (probability): SpecDec++'s h for `rule="threshold"`, in [0, 1]. Larger speculates further.
        num_tokens (candidates): in every round of `rule="fixed"`.
        min_tokens (candidates): the fewest that a round drafts under every other rule (paper: 2). `"throughput"` has no
            such number: it drafts nothing where that is fastest.
        max_tokens (candidates): the most that a round drafts under every rule but `"fixed"` (paper: 20).
        costs (seconds): of a round, for `rule="throughput"`, as
            `{"draft": s, "verify": [s1, s2, ...], "overhead": s, "read": s, "branch": s, "start": s, "block": n}`: a
            draft step, target passes over 1, 2, ... tokens, the rest of a round, each token that the draft has yet to
            read after a pause, each further place that a draft step answers for (a node of a tree, a candidate of a
            block), drafting at all, candidates that a step proposes. All but the first two may be missing. `None`
            measures them.
        track_costs: for `rule="throughput"`: measured costs follow what the rounds of each text take, for the texts
            after it. `False` always takes those that were measured before the first text; then, with
            `assistant.memory.clear()`, a seed repeats a sampled text.
        adapt: calibrate the estimates of `"threshold"` and of dynamic trees by what verification said of earlier ones,
            in this text and those before it (`assistant.memory`; `docs/specdecpp.md`). `"throughput"` always does.
            `False` takes a head's and the draft's probabilities as they are; then a seed repeats a sampled text
            whatever was generated before.
        tree: draft a token tree (on a target that the assistant is attached to). `"dyspec"`: DySpec's Algorithm 2, a
            draft pass a level; `"dyspec-exact"`: its Algorithm 1, a draft pass for every node that gets children;
            `"static"`: always `tree_shape`. `None` drafts chains. With trees `rule` and its parameters do not matter,
            but for `rule="throughput"` with `"dyspec"`: the tree then stops growing where a further candidate or level
            no longer raises tokens a second, and nothing is drafted where that is fastest.
        tree_budget (candidates): in a dynamic tree, 2 to 1024. All are used unless `tree_threshold` forbids; with
            `rule="throughput"` a `"dyspec"` tree has this many at most.
        tree_depth (candidates): the longest path, 1 to 1024, which is also the most draft passes of `"dyspec"`.
        tree_threshold (probability): a dynamic tree never draws where the chance of getting there is estimated to be
            lower. In [0, 1); the paper has 1 / budget and less, 0 always uses the whole budget.
        tree_shape: for `"static"`: children by depth, such as `[4, 2, 1, 1]`, or a list of nodes, each the
            ranks of the siblings on the way to it: `[[0], [1], [0, 0]]`. `None` is the best shape of `tree_budget`
            candidates for the rates of acceptance that the assistant's repository has.
        lookup: candidates also come from the text itself, for nothing: where its end stood before, what followed there
            (`docs/lookup.md`). `"throughput"` looks up, drafts or does neither, whatever promises most tokens a second;
            every other rule looks up where what it finds is likelier to be accepted than what the draft proposes.
        lookup_tokens (candidates): the most that a chain looks up; in a tree there are `tree_budget` nodes at most.
        lookup_memory (tokens): of earlier answers that are searched, too, which helps where requests resemble one
            another. 0 remembers none. They are kept in memory only (`assistant.memory.answers`).
        draft_temperature: divides the draft's logits once more, before temperature, top-k and the like and before the
            target's successors are mixed in, where the target samples. Below 1 the draft guesses what is likeliest more
            often, above 1 other tokens. 0.8 is accepted more often than 1 by SmolLM2's published draft
            (`docs/drafts.md`). Greedy decoding does not know it.
        draft_successors: mix the draft's distribution with what an attached target said lately after the same one to
            three tokens, as far as that is the better guess (`docs/drafts.md`). `None` does so in greedy texts, with
            drafts that read the target's states: there it was measured to gain. `True` does so in sampled texts and
            with all drafts, too, `False` nowhere. The table takes 72 bytes a token of the vocabulary and 9.4 MB, in
            memory only, until `assistant.memory.clear()`. After other texts the draft guesses otherwise, so with `True`
            a seed does not repeat a sampled text. Unattached targets go without.
        verification: of candidates that were drawn, on a target that the assistant is attached to; the output has the
            target's distribution either way (`docs/verification.md`). `"block"`: a chain is accepted as a block (arXiv
            2403.10444), a tree from its leaves to its root (arXiv 2505.12398), which on average accepts more;
            `"token"`: one candidate after the other, as in the papers (arXiv 2211.17192 and 2410.11744). Greedy
            decoding has no choice. Unattached targets and logits processors that must be called in order have
            `"token"`.
        cpu_products: on a CPU. `"auto"`: float32 linear layers of an attached target and its draft compute with oneDNN
            for the numbers of tokens for which the target's passes are at least 1.05 times as fast: the first texts
            make them with both products in turns. It rounds the last digits differently. And attention over several
            tokens reads keys and values that heads share without copying them, which computes the same bits. `"off"`:
            always PyTorch's own products, in transformers' attention.
        pack_weights: with `cpu_products="auto"`, oneDNN computes with copies of these weights in its own order, for up
            to twice the memory until `detach`, or until PyTorch's own products were faster for all numbers of tokens
            that were compared. Each `generate()` then first reads the weights to see whether they were changed, which
            takes about as long as one plain token.
        int8_draft: on a CPU, for a float32 draft of an attached target: it reads a few tokens with int8 copies of its
            weights (a quarter of their memory), which takes about a third of the time. Prompts it reads as ever. The
            output is the target's own as before; a few candidates fewer are accepted.
        graphs: on CUDA. `"auto"`: the passes of target and draft are captured as CUDA graphs, which a GPU replays as
            one launch each, where that can be done (`stats.uncaptured` says why not); `"off"`: they run as ever.
        compile: compile small pieces of what is captured (norms, MLPs, rotary embeddings) with `torch.compile`, each
            once for all layers: on an H100 a captured pass took 10 to 28 % less, and the first text some seconds more
            (`docs/gpu.md`).

    Raises:
        ValueError: a value is outside its range.
    """

    rule: Rule = "threshold"
    threshold: float = 0.7
    num_tokens: int = 5
    min_tokens: int = 1
    max_tokens: int = 20
    costs: dict[str, Any] | None = None
    track_costs: bool = True
    adapt: bool = True
    tree: Tree | None = None
    tree_budget: int = 64
    tree_depth: int = 12
    tree_threshold: float = 0.0
    tree_shape: list[int] | list[list[int]] | None = None
    lookup: bool = False
    lookup_tokens: int = 40
    lookup_memory: int = 0
    draft_temperature: float = 1.0
    draft_successors: bool | None = None
    verification: Verification = "block"
    cpu_products: CpuProducts = "auto"
    pack_weights: bool = False
    int8_draft: bool = False
    graphs: Graphs = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `ValueError` naming the first value out of range. Runs again before every generation."""
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} is not a stopping rule. Choose one of {', '.join(RULES)}.")
        if self.tree is not None and self.tree not in TREES:
            raise ValueError(f"tree={self.tree!r} is not a kind of tree. Choose one of {', '.join(TREES)}, or None.")
        check_types(self)
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(
                f"threshold={self.threshold!r} must be between 0 and 1: it is compared with a probability."
            )
        for name in ("num_tokens", "min_tokens", "max_tokens", "lookup_tokens"):
            value = getattr(self, name)
            if not 1 <= value <= MOST_CANDIDATES:
                raise ValueError(
                    f"{name}={value!r} must be a whole number from 1 to {MOST_CANDIDATES}: a round drafts tokens."
                )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}, so no number of candidates "
                "satisfies both. Lower min_tokens or raise max_tokens."
            )
        if self.lookup_memory < 0:
            raise ValueError(f"lookup_memory={self.lookup_memory!r} must be a number of tokens, at least 0.")
        if not 0.1 <= self.draft_temperature <= 10.0:
            raise ValueError(
                f"draft_temperature={self.draft_temperature!r} must be from 0.1 to 10: it divides the draft's logits."
            )
        if self.costs is not None:
            Costs.from_dict(self.costs)
        self._validate_tree()

    def _validate_tree(self) -> None:
        for name, least, most in (("tree_budget", 2, MOST_CANDIDATES), ("tree_depth", 1, MOST_CANDIDATES)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}={value!r} must be a whole number from {least} to {most}.")
        if not 0.0 <= self.tree_threshold < 1.0:
            raise ValueError(
                f"tree_threshold={self.tree_threshold!r} must be at least 0 and below 1: the first slot of a tree has "
                "value 1, so nothing could be drawn."
            )
        if self.tree_shape is not None:
            listed = len(self.tree_shape)  # either way of writing a shape has no more items than nodes
            nodes = listed if listed > MOST_CANDIDATES else size(make_shape(self.tree_shape))
            if not 1 <= nodes <= MOST_CANDIDATES:
                raise ValueError(
                    f"tree_shape has {nodes} nodes or more; 1 to {MOST_CANDIDATES} are possible: choose another."
                )

    @property
    def most_tokens(self) -> int:
        """The largest number of candidates that a round can have."""
        looked_up = self.lookup_tokens if self.tree is None else self.tree_budget
        if self.tree == "static" and self.tree_shape is not None:
            drafted = size(make_shape(self.tree_shape))
        elif self.tree is not None:
            drafted = self.tree_budget
        else:
            drafted = self.num_tokens if self.rule == "fixed" else self.max_tokens
        return max(drafted, looked_up) if self.lookup else drafted

    def mixes(self, greedy: bool, reads_states: bool) -> bool:
        """Whether a draft is mixed with the target's successors (`draft_successors`) in such texts."""
        return greedy and reads_states if self.draft_successors is None else self.draft_successors

    @property
    def products(self) -> str:
        """Which matrix products passes may take, on which their costs depend."""
        chosen = self.cpu_products, "packed" * self.pack_weights, "int8" * self.int8_draft
        return " ".join(filter(None, chosen))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeculationConfig:
        """Build from `values`; fields that no version knew are named in a warning, and left out as removed ones are.

        Raises:
            ValueError: it is not a mapping, or a value is of the wrong type or outside its range.
        """
        if not isinstance(values, dict):
            raise ValueError(f"speculation={values!r} must be a mapping of settings.")
        known = {field.name for field in fields(cls)}
        warn_unknown(sorted(set(values) - known - REMOVED), "speculation")
        values = {name: value for name, value in values.items() if name in known}
        if (rule := values.get("rule")) in REMOVED_RULES:
            warnings.warn(
                f'speculation has rule={rule!r}, which this version does not have. "throughput", which needs no '
                "threshold, takes its place. The texts are the target's either way.",
                stacklevel=2,
            )
            values["rule"] = "throughput"
        return cls(**values)


def warn_unknown(names: list[str], where: str) -> None:
    if names:
        warnings.warn(
            f"{where} has fields that this version does not know and ignores: {', '.join(names)}. If the assistant was "
            "saved by a newer hf_specdecpp, upgrade: pip install -U hf-specdecpp",
            stacklevel=3,
        )
