"""What a head's repository says (`SpecDecPPConfig`) and the knobs of a run (`SpeculationConfig`)."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from transformers import PretrainedConfig

from hf_specdecpp.field_types import check_types
from hf_specdecpp.optimal_stopping import Costs
from hf_specdecpp.tree_shapes import make_shape, size

Rule = Literal["threshold", "throughput", "fixed", "confidence", "svip", "adaedl"]
RULES: tuple[str, ...] = get_args(Rule)

Tree = Literal["dyspec", "dyspec-exact", "static"]
TREES: tuple[str, ...] = get_args(Tree)
MOST_NODES = 1024

# Bumped when an older version of this package could not read the repository correctly.
FORMAT_VERSION = 1


@dataclass
class SpeculationConfig:
    """How far to speculate: the stopping rule of a chain and its parameters.

    Args:
        rule: when a round stops drafting.
            `"threshold"` (SpecDec++, section 3): stop once the chance that a candidate was rejected passes `threshold`;
            `"throughput"`: stop where that maximises tokens a second; nothing to tune (`docs/throughput.md`). Also for
            `tree="dyspec"`;
            `"fixed"`: classic speculative decoding, always `num_tokens` candidates;
            `"confidence"`: stop after a candidate whose own draft probability is below `confidence_threshold`
            (what transformers does by default);
            `"svip"`: stop once sqrt(0.15 H(q)) > `svip_threshold`, H being the entropy of q in nats (arXiv 2411.18462);
            `"adaedl"`: stop once 1 - sqrt(0.2 H(q)) falls under a bound that follows the acceptance rate and starts at
            `adaedl_threshold` (arXiv 2410.18351).
        threshold: SpecDec++'s h, in [0, 1]. Larger speculates further.
        num_tokens: candidates a round for `rule="fixed"`.
        min_tokens, max_tokens: bounds on the candidates a round for every other rule, both inclusive (paper: 2 and 20).
            `"throughput"` has no least number: it drafts nothing where that is fastest.
        costs: for `rule="throughput"`: `{"draft": s, "verify": [s1, s2, ...], "overhead": s, "read": s, "branch": s}`,
            the seconds of a draft step, of target passes over 1, 2, ... tokens, of the rest of a round, of each token
            that the draft has yet to read after a pause, and of each further node that a draft step reads in a tree.
            The last three may be missing. `None` measures them, once a machine.
        tree: draft a token tree (on a target that the assistant is attached to). `"dyspec"`: DySpec's Algorithm 2, a
            draft pass a level; `"dyspec-exact"`: its Algorithm 1, a draft pass for every node that gets children;
            `"static"`: always `tree_shape`. `None` drafts chains. With trees `rule` and its parameters do not matter,
            but for `rule="throughput"` with `"dyspec"`: the tree then stops growing where a further candidate or level
            no longer raises tokens a second, and nothing is drafted where that is fastest.
        tree_budget: candidates a round for the dynamic trees, 2 to 1024. All are used unless `tree_threshold` forbids;
            with `rule="throughput"` a `"dyspec"` tree has this many at most.
        tree_depth: longest path, which is also the most draft passes of `"dyspec"`.
        tree_threshold: a dynamic tree never draws where the chance of getting there is estimated to be lower. In
            [0, 1); the paper has 1 / budget and less, 0 always uses the whole budget.
        tree_shape: for `"static"`: children by depth, such as `[4, 2, 1, 1]`, or a list of nodes, each the ranks of
            the siblings on the way to it: `[[0], [1], [0, 0]]`. `None` is the best shape of `tree_budget` candidates
            for the rates of acceptance that the assistant's repository has.
        pack_weights: on a CPU, in float32: keep a copy of the weights of target and draft in the order that its
            matrix products like best, made at the first answer. Verifying a few tokens then costs half, and the weights
            take twice the memory until `detach`.

    Raises:
        ValueError: a value is outside its range.
    """

    rule: Rule = "threshold"
    threshold: float = 0.7
    num_tokens: int = 5
    min_tokens: int = 1
    max_tokens: int = 20
    confidence_threshold: float = 0.4
    svip_threshold: float = 0.3
    adaedl_threshold: float = 0.4
    costs: dict[str, Any] | None = None
    tree: Tree | None = None
    tree_budget: int = 64
    tree_depth: int = 12
    tree_threshold: float = 0.0
    tree_shape: list[int] | list[list[int]] | None = None
    pack_weights: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `ValueError` naming the first value out of range. Runs again before every generation."""
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} is not a stopping rule. Choose one of {', '.join(RULES)}.")
        if self.tree is not None and self.tree not in TREES:
            raise ValueError(f"tree={self.tree!r} is not a kind of tree. Choose one of {', '.join(TREES)}, or None.")
        check_types(self)
        for name in ("threshold", "confidence_threshold", "svip_threshold", "adaedl_threshold"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={value!r} must be between 0 and 1: it is compared with a probability.")
        for name in ("num_tokens", "min_tokens", "max_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1: a round drafts tokens.")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}, so no number of candidates "
                "satisfies both. Lower min_tokens or raise max_tokens."
            )
        if self.costs is not None:
            Costs.from_dict(self.costs)
        self._validate_tree()

    def _validate_tree(self) -> None:
        for name, least, most in (("tree_budget", 2, MOST_NODES), ("tree_depth", 1, MOST_NODES)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}={value!r} must be a whole number from {least} to {most}.")
        if not 0.0 <= self.tree_threshold < 1.0:
            raise ValueError(
                f"tree_threshold={self.tree_threshold!r} must be at least 0 and below 1: the first slot of a tree has "
                "value 1, so nothing could be drawn."
            )
        if self.tree_shape is not None and not 1 <= (nodes := size(make_shape(self.tree_shape))) <= MOST_NODES:
            raise ValueError(f"tree_shape={self.tree_shape!r} has {nodes} nodes; 1 to {MOST_NODES} are possible.")

    @property
    def most_tokens(self) -> int:
        """The largest number of candidates that a round can draft."""
        return self.num_tokens if self.rule == "fixed" else self.max_tokens

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeculationConfig:
        """Build from `values`; fields that this version does not know are named in a warning and left out."""
        known = {field.name for field in fields(cls)}
        _warn_unknown(sorted(set(values) - known), "speculation")
        return cls(**{name: value for name, value in values.items() if name in known})


class SpecDecPPConfig(PretrainedConfig):
    """`config.json` of an assistant's repository: the draft, the head, where both come from.

    To transformers it looks like the target's config: `vocab_size` and the special token ids are the target's, because
    that is what assisted generation and pipelines compare.

    Args:
        target_id, target_revision: the target that the assistant was trained for, and its commit hash.
        draft_kind: `"independent"` (a model of its own) or `"early_exit"` (layers of the target).
        draft_id, draft_revision: the draft model and its commit hash (`"independent"`).
        draft_layers: ascending indices of the target's layers (`"early_exit"`).
        adapter: whether `adapter/` holds a PEFT adapter for the draft.
        head: keyword arguments of `AcceptanceHead`, or `None` without a head.
        draft_vocab_size: how many token ids `draft_vocab.safetensors` lists, or `None` without one.
        vocab_hash: `vocabulary.hash_of` the target's tokenizer.
        acceptance_by_rank: for `"sampled"` and for `"greedy"` targets, how often the first, second, ... sibling was the
            accepted one, as evaluation measured it.
        speculation: defaults of `SpeculationConfig`.
    """

    model_type = "specdecpp"

    # Everything a config.json of ours may say; any other name comes from a newer version or a typo.
    OWN_FIELDS: ClassVar[tuple[str, ...]] = (
        "format_version", "specdecpp_version", "target_id", "target_revision", "draft_kind", "draft_id",
        "draft_revision", "draft_layers", "adapter", "head", "draft_vocab_size", "vocab_hash", "acceptance_by_rank",
        "speculation",
        "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip

    def __init__(
        self,
        target_id: str | None = None,
        target_revision: str | None = None,
        draft_kind: str = "independent",
        draft_id: str | None = None,
        draft_revision: str | None = None,
        draft_layers: list[int] | None = None,
        adapter: bool = False,
        head: dict[str, Any] | None = None,
        draft_vocab_size: int | None = None,
        vocab_hash: str | None = None,
        acceptance_by_rank: dict[str, list[float]] | None = None,
        speculation: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        format_version: int = FORMAT_VERSION,
        specdecpp_version: str | None = None,
        **kwargs: Any,
    ) -> None:
        if draft_kind not in ("independent", "early_exit"):
            raise ValueError(f"draft_kind={draft_kind!r} must be 'independent' or 'early_exit'.")
        self.target_id = target_id
        self.target_revision = target_revision
        self.draft_kind = draft_kind
        self.draft_id = draft_id
        self.draft_revision = draft_revision
        self.draft_layers = draft_layers
        self.adapter = adapter
        self.head = head
        self.draft_vocab_size = draft_vocab_size
        self.vocab_hash = vocab_hash
        self.acceptance_by_rank = acceptance_by_rank or {}
        self.speculation = speculation if speculation is not None else SpeculationConfig().to_dict()
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.format_version = format_version
        self.specdecpp_version = specdecpp_version
        super().__init__(**kwargs)

    @property
    def draft_name(self) -> str:
        """The draft, for a message."""
        if self.draft_kind == "independent":
            return repr(self.draft_id)
        return f"layers {self.draft_layers} of {self.target_id!r}"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        written_for = config_dict.get("format_version", FORMAT_VERSION)
        if written_for > FORMAT_VERSION:
            raise ValueError(
                f"This assistant is stored in format {written_for}, this hf_specdecpp reads up to {FORMAT_VERSION}, so "
                "it could be misread. Upgrade: pip install -U hf-specdecpp"
            )
        theirs = set(PretrainedConfig().to_dict()) | {"model_type", "_name_or_path", "_commit_hash", "auto_map"}
        _warn_unknown(sorted(set(config_dict) - theirs - set(cls.OWN_FIELDS)), "config.json")
        return super().from_dict(config_dict, **kwargs)


def _warn_unknown(names: list[str], where: str) -> None:
    if names:
        warnings.warn(
            f"{where} has fields that this version does not know and ignores: {', '.join(names)}. If the assistant was "
            "saved by a newer hf_specdecpp, upgrade: pip install -U hf-specdecpp",
            stacklevel=3,
        )
