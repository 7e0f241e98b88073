"""The settings of a run: `SpeculationConfig`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.types import check_types
from hf_specdecpp.trees.shapes import Shape, make_shape, size

Rule = Literal["threshold", "throughput", "fixed"]
RULES: tuple[str, ...] = get_args(Rule)

CpuProducts = Literal["auto", "off"]
Graphs = Literal["auto", "off"]

Growth = Literal["dyspec", "dyspec-exact", "static"]
Tree = Growth | list[int] | list[list[int]]
GROWTHS: tuple[str, ...] = get_args(Growth)
MOST_CANDIDATES = 1024  # in a round

# Settings of earlier versions, with what takes their place. Stored configs have them.
DECIDED = "The package decides that"
EXPERIMENTS = f"{DECIDED}; for experiments there is assistant.decisions"
REMOVED = {
    **dict.fromkeys(("min_tokens", "tree_depth", "tree_threshold", "lookup_tokens", "verification"), EXPERIMENTS),
    **dict.fromkeys(("draft_temperature", "draft_successors", "pack_weights", "int8_draft"), EXPERIMENTS),
    **dict.fromkeys(("confidence_threshold", "svip_threshold", "adaedl_threshold"), 'Use rule="throughput"'),
    "adapt": f"reproducible=True repeats a sampled text under its seed. {EXPERIMENTS}",
    "track_costs": "reproducible=True repeats a sampled text under its seed",
    "tree_shape": "Give the shape as tree=[4, 2, 1, 1], or as a list of nodes",
    "lookup_memory": 'lookup="history" also searches earlier answers',
    "keep_texts": DECIDED,
}
REMOVED_RULES = ("confidence", "svip", "adaedl")


@dataclass
class SpeculationConfig:
    """How far to speculate, and with which means; all else the package decides (`stats.decided`).

    Args:
        rule: when a round stops drafting.
            `"throughput"`: where that maximises tokens a second, with nothing to tune (`docs/throughput.md`); also for
            `tree="dyspec"`;
            `"threshold"` (SpecDec++, section 3): once the chance that a candidate was rejected passes `threshold`;
            `"fixed"`: after `num_tokens` candidates, which is classic speculative decoding.
        threshold (probability): SpecDec++'s h for `rule="threshold"`, in [0, 1]. Larger speculates further.
        num_tokens (candidates): in every round of `rule="fixed"`.
        max_tokens (candidates): the most that a round drafts under every rule but `"fixed"` (paper: 20).
        tree: draft a token tree (on a target that the assistant is attached to). `"dyspec"`: DySpec's Algorithm 2, a
            draft pass a level; `"dyspec-exact"`: its Algorithm 1, a draft pass for every node that gets children;
            `"static"`: the shape of `tree_budget` candidates that is best for the rates of acceptance in the repository
            of the assistant; or a shape: children by depth, such as `[4, 2, 1, 1]`, or a list of nodes, each the ranks
            of the siblings on the way to it: `[[0], [1], [0, 0]]`. `None` drafts chains. `rule` matters to `"dyspec"`
            alone: under `"throughput"` a tree stops growing where a further candidate or level no longer pays.
        tree_budget (candidates): in a dynamic tree, 2 to 1024. All are used; with `rule="throughput"` a `"dyspec"` tree
            has this many at most.
        lookup: candidates also come from the text itself, for nothing: where its end stood before, what followed there
            (`docs/lookup.md`). `"history"` also searches earlier answers of this assistant, up to 50,000 tokens, which
            helps where requests resemble one another. They are kept in memory only (`assistant.memory.answers`).
            `"throughput"` looks up, drafts or does neither, whatever promises most tokens a second; every other rule
            looks up where what it finds is likelier to be accepted than what the draft proposes.
        costs (seconds): of a round, for `rule="throughput"`, as `{"draft": s, "verify": [s1, s2, ...]}` and what else
            `Costs` has. `None` lets the rounds of each text say what they cost.
        reproducible: nothing follows the clock or earlier texts, so a seed repeats a sampled text whatever was
            generated before. Every text begins with nothing learned and no earlier answers, costs are those given or
            assumed of the models' sizes, and matrix products are PyTorch's own.
        cpu_products: on a CPU, for float32 layers of an attached target and its draft. `"auto"`: oneDNN's products,
            with packed weights where memory allows, for the numbers of tokens for which the target's passes are at
            least 1.05 times as fast; int8 copies of a draft that is a model of its own; and attention that does not
            copy the keys and values that heads share. The first two round otherwise. `"off"`: PyTorch's own products
            and transformers' attention.
        graphs: on CUDA. `"auto"`: the passes of target and draft are captured as CUDA graphs, which a GPU replays as
            one launch each, where that can be done (`stats.uncaptured` says why not); `"off"`: they run as ever.
        compile: compile small pieces of what is captured (norms, MLPs, rotary embeddings) with `torch.compile`, each
            once for all layers: on an H100 a captured pass took 10 to 28 % less, and the first text some seconds more
            (`docs/gpu.md`).

    Raises:
        ValueError: a value is outside its range, or the setting is one of an earlier version: what takes its place is
            said.
    """

    rule: Rule = "throughput"
    threshold: float = 0.7
    num_tokens: int = 5
    max_tokens: int = 20
    tree: Tree | None = None
    tree_budget: int = 64
    lookup: bool | Literal["history"] = False
    costs: dict[str, Any] | None = None
    reproducible: bool = False
    cpu_products: CpuProducts = "auto"
    graphs: Graphs = "auto"
    compile: bool = False

    def __new__(cls, *_: Any, **given: Any) -> SpeculationConfig:
        refuse_removed(given)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_removed([name])
        if name not in self.__dataclass_fields__:
            near = get_close_matches(name, self.__dataclass_fields__, 1)
            raise AttributeError(f"There is no setting {name}.{f' Did you mean {near[0]}?' if near else ''}")
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `ValueError` naming the first value out of range. Runs again before every generation."""
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} is not a stopping rule. Choose one of {', '.join(RULES)}.")
        if isinstance(self.tree, str) and self.tree not in GROWTHS:
            raise ValueError(
                f"tree={self.tree!r} is not a kind of tree. Choose one of {', '.join(GROWTHS)}, a shape such as "
                "[4, 2, 1, 1], or None."
            )
        check_types(self)
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(
                f"threshold={self.threshold!r} must be between 0 and 1: it is compared with a probability."
            )
        for name, least in (("num_tokens", 1), ("max_tokens", 1), ("tree_budget", 2)):
            value = getattr(self, name)
            if not least <= value <= MOST_CANDIDATES:
                raise ValueError(
                    f"{name}={value!r} must be a whole number from {least} to {MOST_CANDIDATES}: a round drafts tokens."
                )
        if self.costs is not None:
            Costs.from_dict(self.costs)
        if isinstance(self.tree, list | tuple):
            listed = len(self.tree)  # either way of writing a shape has no more items than nodes
            nodes = listed if listed > MOST_CANDIDATES else size(make_shape(self.tree))
            if not 1 <= nodes <= MOST_CANDIDATES:
                raise ValueError(
                    f"tree has {nodes} nodes or more; 1 to {MOST_CANDIDATES} are possible: choose another."
                )

    @property
    def shape(self) -> Shape | None:
        """The shape of all trees, where `tree` is one."""
        return None if self.tree is None or isinstance(self.tree, str) else make_shape(self.tree)

    @property
    def most_drafted(self) -> int:
        """The largest number of candidates that a draft proposes in a round."""
        if (shape := self.shape) is not None:
            return size(shape)
        if self.tree is not None:
            return self.tree_budget
        return self.num_tokens if self.rule == "fixed" else self.max_tokens

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeculationConfig:
        """Build from `values`; fields that no version knew are named in a warning, and removed ones are left out, but
        for those that say the same as a setting of today.

        Raises:
            ValueError: it is not a mapping, or a value is of the wrong type or outside its range.
        """
        if not isinstance(values, dict):
            raise ValueError(f"speculation={values!r} must be a mapping of settings.")
        known = {field.name for field in fields(cls)}
        warn_unknown(sorted(set(values) - known - set(REMOVED)), "speculation")
        stored, values = values, {name: value for name, value in values.items() if name in known}
        if (rule := values.get("rule")) in REMOVED_RULES:
            warnings.warn(
                f'speculation has rule={rule!r}, which this version does not have. "throughput", which needs no '
                "threshold, takes its place. The texts are the target's either way.",
                stacklevel=2,
            )
            values["rule"] = "throughput"
        if values.get("tree") == "static" and stored.get("tree_shape") is not None:
            values["tree"] = stored["tree_shape"]
        config = cls(**values)
        if config.lookup and stored.get("lookup_memory"):
            config.lookup = "history"
        return config


def refuse_removed(names: Iterable[str], path: str = "") -> None:
    """Raise `ValueError` for the first setting of an earlier version, saying what takes its place."""
    for name in names:
        if name in REMOVED:
            raise ValueError(f"{path}{name} is no setting any more. {REMOVED[name]}.")


def warn_unknown(names: list[str], where: str) -> None:
    if names:
        warnings.warn(
            f"{where} has fields that this version does not know and ignores: {', '.join(names)}. If the assistant was "
            "saved by a newer hf_specdecpp, upgrade: pip install -U hf-specdecpp",
            stacklevel=3,
        )
