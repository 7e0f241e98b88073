"""Everything that a training run can be told, one dataclass a stage; a YAML file mirrors them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any


@dataclass
class RolloutConfig:
    """Answers of the target to the prompts.

    Args:
        data: JSON Lines files with a `prompt` column, or `datasets` ids.
        samples_per_prompt: answers a prompt.
        temperature, top_k: how the target answers; 0 is greedy.
        max_new_tokens: of an answer.
        batch_size: prompts that the local target answers at once, or requests in flight to the server.
        server: base URL of an OpenAI-compatible server that serves the target; by default it runs here.
        server_model: name of the target on that server, by default the target's id.
        shard_size: answers a parquet shard; a killed run loses at most one shard.
        heldout: share of the prompts, chosen by a hash of the text, that nothing is trained on.
    """

    data: list[str] = field(default_factory=list)
    samples_per_prompt: int = 1
    temperature: float = 1.0
    top_k: int = 50
    max_new_tokens: int = 512
    batch_size: int = 8
    server: str | None = None
    server_model: str | None = None
    shard_size: int = 256
    heldout: float = 0.05


@dataclass
class DistillConfig:
    """LoRA distillation of the draft.

    Args:
        enabled: False leaves the draft as it is (the paper's setting).
        draft_vocab_size: most frequent tokens of the rollouts that the draft keeps; all by default.
        rank, alpha, dropout: of the adapter.
        epochs, learning_rate, batch_size, gradient_accumulation_steps, max_length, bf16: of the training loop.
    """

    enabled: bool = True
    draft_vocab_size: int | None = None
    rank: int = 32
    alpha: int = 64
    dropout: float = 0.0
    epochs: float = 1.0
    learning_rate: float = 2e-4
    batch_size: int = 4
    gradient_accumulation_steps: int = 1
    max_length: int = 1024
    bf16: bool = False


@dataclass
class HeadConfig:
    """The acceptance head and its fit.

    Args:
        inputs, num_blocks, tied, rank: of `AcceptanceHead`.
        label: `"sampled"` is the paper's min(1, p(y)/q(y)) of the drawn token; `"analytic"` is sum min(p, q).
        rejection_weight: w_rej of the weighted BCE (paper: 6). 1 leaves the estimates as they are; more makes the head
            wary, which the calibration then takes back from its average.
        mixing: share of the positions where the draft reads the target's token instead of its own (paper: 0.15).
        siblings: candidates drawn without replacement at each position (`inputs="before"`).
        temperature, top_k: of p and q in the labels; by default those of the rollouts.
        epochs, learning_rate, batch_size: of the training loop (paper: 3, 5e-5, 32); a batch is of texts.
    """

    inputs: str = "before"
    num_blocks: int = 3
    tied: bool = False
    rank: int = 64
    label: str = "sampled"
    rejection_weight: float = 1.0
    mixing: float = 0.15
    siblings: int = 1
    temperature: float | None = None
    top_k: int | None = None
    epochs: float = 3.0
    learning_rate: float = 1e-3
    batch_size: int = 32


@dataclass
class TrainingConfig:
    """A whole run of `specdecpp train`.

    Args:
        target: Hub id or folder of the target.
        output: folder that becomes the assistant's repository.
        draft: Hub id or folder of an independent draft; by default an early exit after `layers`.
        layers: of the early exit: a number of first layers, or ascending indices.
        seed: of everything random.
        report_to: trackers as in `transformers.TrainingArguments` ("trackio", "tensorboard", "wandb", "none").
        work_dir: shards, checkpoints and features; by default `<output>-work`.

    Raises:
        ValueError: a value is out of range.
    """

    target: str = ""
    output: str = ""
    draft: str | None = None
    layers: int | list[int] = 4
    seed: int = 0
    report_to: str = "none"
    work_dir: str | None = None
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    head: HeadConfig = field(default_factory=HeadConfig)

    @property
    def work(self) -> Path:
        return Path(self.work_dir) if self.work_dir else Path(f"{self.output}-work")

    def validate(self) -> None:
        """Raise `ValueError` naming the first setting that makes no sense."""
        for name in ("target", "output"):
            if not getattr(self, name):
                raise ValueError(f"A training run needs {name}. Pass --{name}, or set it in the --config file.")
        if not self.rollouts.data:
            raise ValueError("A training run needs prompts. Pass --data FILE.jsonl, or set rollouts.data.")
        if not 0.0 < self.rollouts.heldout < 1.0:
            raise ValueError(f"rollouts.heldout={self.rollouts.heldout} must be between 0 and 1: it is a share.")
        counts = ("samples_per_prompt", "max_new_tokens", "batch_size", "shard_size")
        for name, least in (*((count, 1) for count in counts), ("temperature", 0), ("top_k", 0)):
            if not getattr(self.rollouts, name) >= least:
                raise ValueError(f"rollouts.{name}={getattr(self.rollouts, name)} must be at least {least}.")
        if self.head.inputs not in ("after", "before") or self.head.label not in ("sampled", "analytic"):
            raise ValueError(
                f"head.inputs={self.head.inputs!r} must be 'after' or 'before', head.label={self.head.label!r} "
                "'sampled' or 'analytic'."
            )
        if not 0.0 <= self.head.mixing < 1.0:
            raise ValueError(f"head.mixing={self.head.mixing} must be at least 0 and under 1: it is a share.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingConfig:
        """Build from nested dicts, as read from YAML; an unknown name is an error with its path."""
        return _build(cls, values, "")


def _build(cls: Any, values: dict[str, Any], path: str) -> Any:
    known = {item.name: item for item in fields(cls)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(
            f"Unknown setting {path}{unknown[0]}. {path.rstrip('.') or 'A training run'} takes {', '.join(known)}."
        )
    built = dict(values)
    for name, value in values.items():
        default = getattr(cls(), name)
        if is_dataclass(default) and isinstance(value, dict):
            built[name] = _build(type(default), value, f"{path}{name}.")
    return cls(**built)
