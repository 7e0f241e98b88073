"""A user's settings (`SpeculationConfig`), and values that the package chooses itself (`Decisions`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.value_checks import check_values, did_you_mean, hints_of, shown, with_checked_names
from hf_specdecpp.trees.shapes import Shape, make_shape, size
from hf_specdecpp.trees.verification import Verification

Rule = Literal["threshold", "throughput", "fixed"]
CpuProducts = Literal["auto", "off"]
Graphs = Literal["auto", "off"]

Growth = Literal["dyspec", "dyspec-exact", "static"]
Tree = Growth | Literal["auto"] | bool | list[int] | list[list[int]]
TREES: tuple[str, ...] = ("auto", *get_args(Growth))
MOST_CANDIDATES = 1024  # in a round
CANDIDATES = range(1, MOST_CANDIDATES + 1)
BOUNDS: dict[str, Any] = {  # of numbers in `SpeculationConfig` and `Decisions`
    **dict.fromkeys(("num_tokens", "max_tokens", "min_tokens", "tree_depth", "lookup_tokens"), CANDIDATES),
    "tree_budget": CANDIDATES[1:],
    "threshold": (0.0, 1.0),  # compared with a probability
    "tree_threshold": (0.0, 0.99),  # compared with the values of slots, of which the first is 1
    "draft_temperature": (0.1, 10.0),
}


@with_checked_names
@dataclass
class SpeculationConfig:
    """Settings of drafting and verification. The package decides everything else (`stats.decided`).

    Each value is checked when it is set, here or later (`assistant.speculation.threshold = 0.5`): `ValueError` for a
    wrong type or a value out of range; `TypeError` here, or `AttributeError` later, for an unknown name.

    Args:
        rule: when a round stops drafting. `"throughput"`: maximise tokens per second (`docs/throughput.md`);
            `"threshold"` (SpecDec++, section 3): stop once the estimated probability of a rejection exceeds
            `threshold`; `"fixed"`: stop after `num_tokens` candidates.
        threshold (probability): SpecDec++'s h for `rule="threshold"`, in [0, 1]. A larger h gives longer drafts.
        num_tokens (candidates): draft length of every round of `rule="fixed"`.
        max_tokens (candidates): maximum draft length under the other rules (paper: 20).
        tree: which rounds draft token trees. `"auto"`: under `"throughput"` rounds in which siblings are worth their
            time, with at most `max_tokens` nodes; none under other rules, or if trees cannot be drafted or read
            (`stats.decided["tree"]` names the reason). `False`: none. All other values draft a tree in every round:
            `"dyspec"`: DySpec's Algorithm 2, with a draft pass per level, and under `"throughput"` with the number of
            nodes that is fastest; `"dyspec-exact"`: its Algorithm 1, with a draft pass per node; `"static"`: the best
            shape of `tree_budget` candidates for the acceptance rates in the assistant's repository; or a shape:
            children by depth, `[4, 2, 1, 1]`, or a list of nodes by ranks, `[[0], [1], [0, 0]]`. `None` is `"auto"`.
        tree_budget (candidates): size of a dynamic tree, 2 to 1024; under `rule="throughput"` the maximum.
        lookup: also propose the continuation of an earlier occurrence of the latest tokens (`docs/lookup.md`).
            `"history"` also searches up to 50,000 tokens of earlier answers, in memory (`assistant.memory.answers`).
        costs (seconds): costs of a round for `rule="throughput"`, as `{"draft": s, "verify": [s1, s2, ...]}` and the
            other fields of `Costs`. `None`: measured in the rounds.
        reproducible: decisions depend neither on the clock nor on earlier generations, so that a seed repeats a sampled
            output. Nothing learned is kept, costs are given or assumed from the sizes of the models, `tree="auto"`
            drafts chains, and matrix multiplications are PyTorch's own.
        cpu_products: matrix multiplications of large layers of the target and its draft on a CPU. `"auto"`: with exact
            float16 copies of the weights, or oneDNN's packed copies of float32 weights that float16 cannot hold, if
            they are at least 1.05 times as fast here and take at most a quarter of the free memory; with int8 copies
            of a draft that is a separate model. The first two round differently, and with them half precision attends
            in float32. `"off"`: PyTorch's own kernels, without copies.
        graphs: on CUDA. `"auto"`: capture rounds, or the target's passes, as CUDA graphs where possible
            (`stats.uncaptured` names the reason if not); `"off"`: no graphs.
        compile: compile small parts of captured passes with `torch.compile`: on an H100 a pass took 10 to 28 % less
            time, and the first generation some seconds more (`docs/gpu.md`)."""

    rule: Rule = "throughput"
    threshold: float = 0.7
    num_tokens: int = 5
    max_tokens: int = 20
    tree: Tree | None = "auto"
    tree_budget: int = 64
    lookup: bool | Literal["history"] = False
    costs: dict[str, Any] | None = None
    reproducible: bool = False
    cpu_products: CpuProducts = "auto"
    graphs: Graphs = "auto"
    compile: bool = False

    @classmethod
    def check_names(cls, names: Iterable[str], error: type[Exception] = TypeError) -> None:
        """Raise `error` for the first name that is not a setting."""
        known = cls.__dataclass_fields__
        for name in names:
            if name not in known:
                raise error(f"There is no setting {name}.{did_you_mean(name, known)} There are {', '.join(known)}.")

    def __setattr__(self, name: str, value: Any) -> None:
        self.check_names([name], AttributeError)
        check_setting(name, value)
        super().__setattr__(name, "auto" if name == "tree" and value is None else value)

    def validate(self) -> None:
        """Raise `ValueError` naming the first invalid value. Called before every generation, because lists and mappings
        may have been changed in place."""
        for each in fields(self):
            check_setting(each.name, getattr(self, each.name))

    @property
    def shape(self) -> Shape | None:
        """The shape of all trees if `tree` is a shape, else `None`."""
        return make_shape(self.tree) if isinstance(self.tree, list | tuple) else None

    @property
    def draws_trees(self) -> bool:
        """Whether every round drafts a tree."""
        return self.tree not in ("auto", False)

    @property
    def most_drafted(self) -> int:
        """Maximum number of candidates that the draft proposes in a round."""
        if (shape := self.shape) is not None:
            return size(shape)
        if self.draws_trees:
            return self.tree_budget
        return self.num_tokens if self.rule == "fixed" else self.max_tokens

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeculationConfig:
        """Settings from a mapping; `ValueError` for a value of a wrong type or out of range. Unknown fields are left
        out, with a warning."""
        if not isinstance(values, dict):
            raise ValueError(f"speculation={values!r} must be a mapping of settings.")
        known = {field.name for field in fields(cls)}
        warn_unknown(sorted(set(values) - known), "speculation")
        return cls(**{name: value for name, value in values.items() if name in known})


def check_setting(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value` is valid for `name`, which must be a field of `SpeculationConfig`."""
    is_shape = isinstance(value, list | tuple)
    if name == "tree" and not (is_shape or value is None or value is False or str(value) in TREES):
        raise ValueError(
            f"tree={shown(value)} is not a kind of tree.{did_you_mean(value, TREES)} It can be 'auto', 'dyspec', "
            "'dyspec-exact', 'static', a shape such as [4, 2, 1, 1], or False for chains."
        )
    check_values({name: value}, hints_of(SpeculationConfig) | BOUNDS)
    if name == "tree" and is_shape:
        # In both notations a shape has at most as many items as nodes, so a long list need not be built.
        nodes = len(value) if len(value) > MOST_CANDIDATES else size(make_shape(value))
        if not 1 <= nodes <= MOST_CANDIDATES:
            raise ValueError(f"tree has {nodes} nodes or more; 1 to {MOST_CANDIDATES} are possible: choose another.")
    if name == "costs" and value is not None:
        Costs.from_dict(value)


def warn_unknown(names: list[str], where: str) -> None:
    if names:
        warnings.warn(
            f"{where} has fields that this version does not know and ignores: {', '.join(names)}. If the assistant was "
            "saved by a newer hf_specdecpp, upgrade: pip install -U hf-specdecpp",
            stacklevel=3,
        )


@dataclass(frozen=True)
class Decisions:
    """Choices of the package, to change in experiments and tests only: `assistant.decisions`. `ValueError` if a value
    has the wrong type or is out of range.

    `SpeculationStats.decided` reports the choices of a generation. A field that is `None` is decided for each call.

    Args:
        min_tokens (candidates): minimum draft length of `rule="threshold"` (SpecDec++: 2).
        adapt: calibrate the estimates of `"threshold"` and of dynamic trees by verified candidates
            (`docs/specdecpp.md`). `"throughput"` always does.
        tree_depth (candidates): longest path of a dynamic tree or of `"static"`. `"dyspec"` has a draft pass per level.
        tree_threshold (probability): no candidate is drawn at a position of a dynamic tree whose estimated probability
            of being reached by verification is lower (DySpec: at most 1 / budget). 0: no limit.
        lookup_tokens (candidates): maximum length of a looked-up chain. The target's pass has one more token: 32 by
            default. If every round drafts a tree, the maximum is `tree_budget`.
        draft_temperature: divides the draft's logits in sampled generation, before all logits processors and before
            the target's successors are mixed in.
        draft_successors: mix the draft's distribution with the tokens that the target recently chose after the last
            one to three tokens of the sequence. `None`: only in greedy generation on a CPU, with drafts that read the
            target's hidden states (`docs/drafts.md`).
        verification: method for sampled candidates (`docs/verification.md`). `"block"` accepts a chain as a block and
            a tree from its leaves; `"token"` accepts candidates one by one, as in the papers.
        int8_draft: on a CPU, compute the draft's passes over few tokens with int8 copies of its weights. `None`: only
            for drafts that are separate models."""

    min_tokens: int = 1
    adapt: bool = True
    tree_depth: int = 12
    tree_threshold: float = 0.0
    lookup_tokens: int = 31
    draft_temperature: float = 1.0
    draft_successors: bool | None = None
    verification: Verification = "block"
    int8_draft: bool | None = None

    def __post_init__(self) -> None:
        check_values(vars(self), hints_of(Decisions) | BOUNDS)

    def mixes(self, greedy: bool, reads_states: bool) -> bool:
        """The setting `draft_successors`; if it is `None`, whether generation is `greedy` and the draft `reads_states`
        of the target (the caller checks for a CPU)."""
        return greedy and reads_states if self.draft_successors is None else self.draft_successors

    def most_tokens(self, config: SpeculationConfig) -> int:
        """Maximum number of candidates, drafted or looked up, in a round with the settings `config`."""
        drafted = config.most_drafted
        looked_up = config.tree_budget if config.draws_trees else self.lookup_tokens
        return max(drafted, looked_up) if config.lookup else drafted
