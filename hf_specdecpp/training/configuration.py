"""All settings of a training run: a dataclass for each stage. YAML files have the same names."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.config.value_checks import check_values, did_you_mean, hints_of, with_checked_names
from hf_specdecpp.draft_kinds.draft_kind import DraftKind
from hf_specdecpp.draft_kinds.known import kind_to_train, ready_made
from hf_specdecpp.files import Repository
from hf_specdecpp.provenance import public_name
from hf_specdecpp.texts.sampling import Sampling


def _at_least(least: int, default: int | None) -> Any:
    return field(default=default, metadata={"least": least})


def _above_zero(default: float) -> Any:
    return field(default=default, metadata={"above": 0.0})


class Section:
    """A group of settings, whose constructor and YAML raise `ValueError` for an unknown name."""

    path: ClassVar[str] = ""  # prefix of its names in messages, such as "head."

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        refuse_unknown(cls, names, cls.path)


@with_checked_names
@dataclass
class RolloutConfig(Section):
    """Answers of the target to the prompts.

    Args:
        data: JSON Lines files with prompts, or `datasets` ids.
        max_prompts (prompts): maximum per file or data set, chosen by `seed`; all by default.
        temperatures: every prompt is answered at every temperature; 0 is greedy. Draft and head train on all answers.
        samples_per_prompt (answers): number per prompt and temperature; only one for greedy answers.
        top_k (tokens): the target samples from this number of its likeliest tokens; 0 for all.
        max_new_tokens (tokens): maximum length of an answer.
        batch_size (prompts): size of a batch on this machine, or number of requests to the server at the same time.
        server: base URL of an OpenAI-compatible server that runs the target and takes token ids.
        server_model: name of the target on that server; by default the target's id.
        shard_size (answers): size of a parquet shard; a killed run loses at most one shard.
        heldout (share of prompts): share excluded from training, chosen by a hash of the prompt.
    """

    path = "rollouts."

    data: list[str] = field(default_factory=list)
    max_prompts: int | None = _at_least(2, None)
    temperatures: list[float] = field(default_factory=lambda: [1.0, 0.0])
    samples_per_prompt: int = _at_least(1, 1)
    top_k: int = _at_least(0, 50)
    max_new_tokens: int = _at_least(1, 512)
    batch_size: int = _at_least(1, 8)
    server: str | None = None
    server_model: str | None = None
    shard_size: int = _at_least(1, 256)
    heldout: float = 0.05


@with_checked_names
@dataclass
class DistillConfig(Section):
    """LoRA distillation of the draft.

    Args:
        enabled: `False` does not train the draft (the paper's setting), and only a head is fitted.
        draft_vocab_size (tokens): size of the draft's vocabulary, the most frequent tokens of the answers and prompts;
            by default all tokens.
        on_prompts: also train on the tokens of the prompts. Recommended for an early exit, which needs many tokens.
        rank (dimensions): LoRA's r; alpha is twice the rank.
        epochs (passes over the answers): may be a fraction.
        learning_rate: maximum of a cosine schedule. For an EAGLE-3 layer 1e-4 is suitable.
        batch_size (answers): number per process and forward pass.
        gradient_accumulation_steps (passes): number per step of the optimiser.
        max_length (tokens): a prompt with its answer is truncated to this length.
        unroll (candidates): number of trained steps of a round, for a draft that reads the target's states. From the
            second step on, it reads its own states instead.
        fusion_learning_rate: for a conditioned draft's fusion. A higher rate would destroy its fitted first weights.
        fusion_rank (dimensions): rank of a conditioned draft's fusion; full by default. A low rank keeps the repository
            small if the target is wide.
        loss: `"kl"`: KL(p || q); `"tv"`: the total variation, which is the probability of a rejection; `"kl+tv"`: the
            KL divergence plus twice the total variation.
        bf16: mixed precision: trained weights in float32, other weights and matrix multiplications in bfloat16.
        start_from: continue to train the draft of another run (its `work_dir`, with the same kind of draft), or of the
            repository of a published EAGLE-3 draft.
    """

    path = "distill."

    enabled: bool = True
    draft_vocab_size: int | None = _at_least(1, None)
    on_prompts: bool = False
    rank: int = _at_least(1, 32)
    epochs: float = _above_zero(1.0)
    learning_rate: float = _above_zero(2e-4)
    batch_size: int = _at_least(1, 4)
    gradient_accumulation_steps: int = _at_least(1, 1)
    max_length: int = _at_least(2, 1024)
    unroll: int = _at_least(1, 4)
    fusion_learning_rate: float = _above_zero(5e-5)
    fusion_rank: int | None = _at_least(1, None)
    loss: Literal["kl", "tv", "kl+tv"] = "kl"
    bf16: bool = False
    start_from: str | None = None


@with_checked_names
@dataclass
class HeadConfig(Section):
    """The acceptance head and its fit.

    Args:
        inputs: what the head reads: `"before"`, the state that produced q, and the candidate; `"after"`, the state at
            the candidate (the paper's head); or `"path"`, the state that produced q alone (DSpark's confidence head).
        num_blocks (layers): residual blocks of an `"after"` head.
        tied: whether the blocks share their weights, as in the released code.
        rank (dimensions): rank of the correction in a `"before"` head.
        rejection_weight: weight w_rej of rejections in the BCE (paper: 6).
        siblings (candidates): number drawn without replacement at each position, for trees (`inputs="before"`).
        dropout (share of inputs): dropout of hidden states while a `"before"` or `"path"` head is fitted.
        epochs (passes over the answers): may be a fraction (paper: 3).
        learning_rate: maximum of a cosine schedule (paper: 5e-5). The network that reads the scalars has ten times this
            rate.
        batch_size (answers): number per step (paper: 32).
        max_texts (answers): maximum that the head is fitted on, chosen by `seed`; all by default.
    """

    path = "head."

    inputs: Literal["before", "after", "path"] = "before"
    num_blocks: int = _at_least(0, 3)
    tied: bool = False
    rank: int = _at_least(1, 64)
    rejection_weight: float = _above_zero(1.0)
    siblings: int = _at_least(1, 4)
    dropout: float = 0.7
    epochs: float = _above_zero(3.0)
    learning_rate: float = _above_zero(1e-3)
    batch_size: int = _at_least(1, 32)
    max_texts: int | None = _at_least(1, None)


@with_checked_names
@dataclass
class EvalConfig(Section):
    """Test sets for the head, in addition to the held-out prompts.

    Args:
        data: JSON Lines files with prompts, or `datasets` ids, each a test set. These prompts are never trained on.
        max_prompts (prompts): maximum per set, chosen by `seed`; all by default.
    """

    path = "evaluation."

    data: list[str] = field(default_factory=list)
    max_prompts: int | None = _at_least(1, None)


@with_checked_names
@dataclass
class TrainingConfig(Section):
    """Settings of a run of `specdecpp train`.

    Args:
        target: Hub id or folder of the target.
        output: folder for the assistant's repository.
        draft: Hub id or folder of an independent draft; `"conditioned"` or `"eagle3"` for drafts that read the target's
            hidden states (`docs/drafts.md`); or the repository of a published EAGLE-3 or DFlash draft, for which only a
            head is fitted. By default an early exit.
        layers: layers of the target that make up the draft: the number of first layers, or ascending indices. By
            default the first 4 for an early exit, and the last layer for a conditioned draft.
        reads: layers of the target whose outputs the draft reads. By default a low, a middle and a high layer.
        dtype: dtype of target and draft in all stages but `distill`; `"auto"` is the dtype of the stored weights.
        target_id: Hub id of the target for the published config, if `target` is a local copy.
        target_revision: commit of `target_id`.
        draft_id: Hub id of the draft for the published config, if `draft` is a local copy.
        draft_revision: commit of `draft_id`.
        speculation: default settings of the repository, fields of `SpeculationConfig`. By default the rule
            `throughput`, and the best measured `threshold` for generation in several processes.
        seed: seed of all random numbers.
        report_to: trackers, as in `transformers.TrainingArguments`: a name, a list, or "none".
        work_dir: folder for shards, checkpoints and features; by default `<output>-work`.
    """

    target: str = ""
    output: str = ""
    draft: str | None = None
    layers: int | list[int] | None = None
    reads: list[int] | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    target_id: str | None = None
    target_revision: str | None = None
    draft_id: str | None = None
    draft_revision: str | None = None
    speculation: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    report_to: str | list[str] = "none"
    work_dir: str | None = None
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    @property
    def kind(self) -> DraftKind:
        """The kind of draft that is trained."""
        return kind_to_train(self.draft)

    @property
    def own_files(self) -> list[str]:
        """Name of the file in `work` with a trained fusion or own layers, as a list; `[]` for other kinds of draft."""
        return [self.kind.own_file] if self.kind.own_file else []

    @property
    def independent_draft(self) -> str | None:
        """Hub id or folder of a draft that is a separate model; otherwise `None`."""
        return self.draft if self.kind.rests_on == "draft" else None

    @property
    def ready_made(self) -> str | None:
        """The repository of a published draft that is not trained further; otherwise `None`."""
        return self.distill.start_from if self.kind.own_layers and not self.distill.enabled else None

    @property
    def named_draft(self) -> str | None:
        """Hub id or folder of a draft that has its own repository; otherwise `None`."""
        return self.independent_draft or self.ready_made

    @property
    def trains_module(self) -> bool:
        """Whether a fusion is trained together with the adapter (conditioned drafts)."""
        return bool(self.own_files) and not self.kind.own_layers

    def find_ready_made(self) -> None:
        """If `draft` is the repository of a published draft, set `distill.start_from` to the repository, `draft` to the
        name of its kind, and `distill.enabled` to `False`."""
        if self.independent_draft is not None and (found := ready_made(Repository(self.independent_draft))) is not None:
            self.distill = replace(self.distill, enabled=False, start_from=self.draft)
            self.draft = found.name

    @property
    def work(self) -> Path:
        return Path(self.work_dir) if self.work_dir else Path(f"{self.output}-work")

    def sampling(self, temperature: float) -> Sampling:
        """How answers are sampled at a temperature, with `rollouts.top_k`; the head's labels are computed for this."""
        return Sampling(temperature, self.rollouts.top_k)

    def validate(self) -> None:
        """Raise `ValueError` for the first invalid setting."""
        check_values({each.name: getattr(self, each.name) for each in fields(self)}, hints_of(TrainingConfig))
        for name in ("target", "output"):
            if not getattr(self, name):
                raise ValueError(f"A training run needs {name}. Pass --{name}, or set it in the --config file.")
        refuse_unknown(SpeculationConfig, self.speculation, "speculation.")
        SpeculationConfig(**self.speculation)
        for section in (self.rollouts, self.distill, self.head, self.evaluation):
            check_values(vars(section), hints_of(type(section)), section.path)
            for each in fields(section):
                name, value = f"{section.path}{each.name}", getattr(section, each.name)
                if "least" in each.metadata and value is not None and value < each.metadata["least"]:
                    raise ValueError(f"{name}={value} must be a whole number of at least {each.metadata['least']}.")
                if "above" in each.metadata and value <= each.metadata["above"]:
                    raise ValueError(f"{name}={value} must be above 0.")
        if not 0.0 < self.rollouts.heldout < 1.0:
            raise ValueError(f"rollouts.heldout={self.rollouts.heldout} must be between 0 and 1: it is a share.")
        if not 0.0 <= self.head.dropout < 1.0:
            raise ValueError(f"head.dropout={self.head.dropout} must be at least 0 and under 1: it is a share.")
        if self.draft_id is not None and self.named_draft is None:
            raise ValueError(
                f"draft_id={self.draft_id!r} names an independent draft, but layers of the target are trained. Set "
                "draft, too, or leave draft_id out."
            )
        for role in ("target", "draft"):
            revision = getattr(self, f"{role}_revision")
            if revision is not None and getattr(self, f"{role}_id") is None:
                raise ValueError(f"{role}_revision={revision!r} is a commit of {role}_id, which is not set. Set both.")
        if not self.rollouts.data:
            raise ValueError("A training run needs prompts. Pass --data FILE.jsonl, or set rollouts.data.")
        temperatures = self.rollouts.temperatures
        if not temperatures or min(temperatures) < 0:
            raise ValueError(
                f"rollouts.temperatures={temperatures!r} must be a list of numbers of at least 0, such as [1.0, 0.0]."
            )
        if len({f"{temperature:g}" for temperature in temperatures}) < len(temperatures):
            raise ValueError(f"rollouts.temperatures={temperatures} has a temperature twice. Name each once.")
        self._check_draft()

    def _check_draft(self) -> None:
        """Raise `ValueError` if drafts of this kind cannot be trained, or not with this `distill` or `head.inputs`."""
        distill, cannot = self.distill, self.kind.cannot
        if self.kind.untrainable:
            raise ValueError(f"draft={self.draft!r}: {self.kind.untrainable}.")
        if (reason := cannot.get("be trained")) is not None and not self.ready_made:
            raise ValueError(f"draft={self.draft!r}: {reason}.")
        if (reason := cannot.get("stay untrained")) is not None and not distill.enabled and not self.ready_made:
            raise ValueError(f"distill.enabled=False: {reason}.")
        if (reason := cannot.get("late verdicts")) is not None and self.head.inputs == "after":
            raise ValueError(f"head.inputs='after' {reason}. Use head.inputs='before'.")
        if (reason := cannot.get("draft vocabulary")) is not None and distill.draft_vocab_size is not None:
            raise ValueError(f"distill.draft_vocab_size={distill.draft_vocab_size}: {reason}. Leave it out.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingConfig:
        """Build settings from nested dicts, as read from YAML. `ValueError` for an unknown name, with its path."""
        built = _built(cls, values)
        for part in (RolloutConfig, DistillConfig, HeadConfig, EvalConfig):
            if isinstance(given := getattr(built, part.path[:-1]), dict):
                setattr(built, part.path[:-1], _built(part, given))
        return built


def _built(cls: Any, values: dict[str, Any]) -> Any:
    built = dict(values)
    for each in fields(cls):
        if each.type == "float" and isinstance(text := built.get(each.name), str):
            with suppress(ValueError):
                built[each.name] = float(text)  # YAML reads 2e-4, which has no point, as text
    return cls(**built)


def refuse_unknown(cls: Any, names: Iterable[str], path: str) -> None:
    """Raise `ValueError` for a name that is not a field of `cls`. `path`: prefix in messages, such as `"head."`."""
    known = [item.name for item in fields(cls)]
    for name in sorted(set(names) - set(known)):
        raise ValueError(
            f"Unknown setting {path}{name}. {path.rstrip('.') or 'A training run'} takes {', '.join(known)}."
            f"{did_you_mean(name, known)}"
        )


def settings(config: TrainingConfig) -> str:
    """Return YAML for `--config` that repeats a run: settings that are not defaults, without this machine's folders."""
    chosen = _differences(asdict(config), asdict(TrainingConfig()))
    for name in ("output", "work_dir", "report_to", "target_id", "target_revision", "draft_id", "draft_revision"):
        chosen.pop(name, None)
    chosen["target"] = config.target_id or public_name(config.target)
    if config.named_draft is not None:
        chosen["draft"] = config.draft_id or public_name(config.named_draft)
        chosen.pop("layers", None)
    if (start := config.distill.start_from) is not None:
        chosen["distill"]["start_from"] = public_name(start)
    if config.ready_made is not None:  # `draft` names it
        del chosen["distill"]["start_from"]
    chosen.setdefault("rollouts", {})["data"] = file_names(config.rollouts.data)
    chosen["rollouts"].pop("server", None)
    if "evaluation" in chosen:
        chosen["evaluation"]["data"] = file_names(config.evaluation.data)
    return yaml.safe_dump(chosen, sort_keys=False, default_flow_style=None, width=110)


def _differences(ours: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in ours.items():
        if value != default.get(name):
            changed[name] = _differences(value, default[name]) if isinstance(value, dict) else value
    return changed


def file_names(paths: list[str]) -> list[str]:
    """Names of files without their folders; ids of data sets unchanged."""
    return [Path(path).name if Path(path).is_file() else path for path in paths]
