"""`SpecDecPPConfig`, the `config.json` of an assistant's repository."""

from __future__ import annotations

import inspect
from dataclasses import field
from typing import Any

from transformers import PretrainedConfig

from hf_specdecpp.config.speculation import SpeculationConfig, warn_unknown
from hf_specdecpp.config.value_checks import check_numbers, check_values
from hf_specdecpp.estimation.estimators import MODES
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import hash_of, tokenizer_of
from hf_specdecpp.provenance import commit_of

# Bumped when an older version of this package could not read the repository correctly.
FORMAT_VERSION = 1
MOST_RANKS = 32  # of siblings in a static tree; further siblings are hardly ever accepted


class SpecDecPPConfig(PretrainedConfig):
    """`config.json` of an assistant's repository: the draft, the head, and the origin of both.

    `vocab_size` and the special token ids are the target's, because transformers' assisted generation and pipelines
    compare them with those of the target.

    Args:
        target_id, target_revision: the target that the assistant was trained for, and its commit hash.
        draft_kind: name of a kind in `draft_kinds.known`.
        draft_id, draft_revision: the draft's repository and its commit hash (`"independent"`; `"gemma4"`; `"mtp"`: the
            repository with the multi-token layers; `"dflash"`, `"dspark"`, `"eagle3"` if published by others).
        draft_layers: ascending indices of the target's layers that draft (`"early_exit"`, `"conditioned"`).
        fusion: keyword arguments of `Fusion` (`"conditioned"`).
        eagle3: keyword arguments of `Eagle3Settings`; for a draft from another repository (`draft_id`), fields that
            replace those of its own config (`"eagle3"`).
        dflash: keyword arguments of `DFlashSettings`, if the assistant's repository has the draft.
        adapter: whether `adapter/` contains a PEFT adapter for the draft.
        head: keyword arguments of `AcceptanceHead`, or `None` without a head.
        draft_vocab_size: number of token ids in `draft_vocab.safetensors`, or `None` without that file.
        vocab_hash: `loading.hash_of` the target's tokenizer.
        acceptance_by_rank: for `"sampled"` and `"greedy"` generation, the measured probability that the first, second,
            ... child of a tree's node is accepted: static trees are chosen with these.
        calibration: for `"sampled"` and `"greedy"` generation, the intercept and slope with which the log-odds of
            acceptance estimates are calibrated in the first rounds (`save_pretrained(..., calibration=True)`).
        speculation: fields of `SpeculationConfig` with which the loaded assistant starts."""

    model_type = "specdecpp"

    target_id: str | None = None
    target_revision: str | None = None
    draft_kind: str = "independent"
    draft_id: str | None = None
    draft_revision: str | None = None
    draft_layers: list[int] | None = None
    fusion: dict[str, Any] | None = None
    eagle3: dict[str, Any] | None = None
    dflash: dict[str, Any] | None = None
    adapter: bool = False
    head: dict[str, Any] | None = None
    draft_vocab_size: int | None = None
    vocab_hash: str | None = None
    acceptance_by_rank: dict[str, list[float]] = field(default_factory=dict)
    calibration: dict[str, list[float]] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=lambda: SpeculationConfig().to_dict())
    vocab_size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    format_version: int = FORMAT_VERSION
    specdecpp_version: str | None = None

    def note_target(self, target: CausalLM) -> None:
        """Copy the target's vocabulary size and special token ids to this config; if `target_id` is `None`, also its
        id, commit and tokenizer hash."""
        for name, value in special_tokens(target).items():
            setattr(self, name, value)
        if self.target_id is None:
            self.target_id = target.config.name_or_path or None
            self.target_revision = commit_of(target)
            tokenizer = tokenizer_of(target)
            self.vocab_hash = hash_of(tokenizer) if tokenizer is not None else None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the config from the fields of a `config.json`; `ValueError` for a newer format, or a value of a wrong
        type or range. Unknown fields are left out, with a warning."""
        written_for = config_dict.get("format_version", FORMAT_VERSION)
        if type(written_for) is int and written_for > FORMAT_VERSION:
            raise ValueError(
                f"This assistant is stored in format {written_for}, this hf_specdecpp reads up to {FORMAT_VERSION}, so "
                "it could be misread. Upgrade: pip install -U hf-specdecpp"
            )
        # All valid names; any other name is a typo or from a newer version.
        known = inspect.get_annotations(cls, eval_str=True)
        theirs = set(PretrainedConfig().to_dict()) | {"model_type", "_name_or_path", "_commit_hash", "auto_map"}
        warn_unknown(sorted(set(config_dict) - theirs - set(known)), "config.json")
        # transformers would act on other fields: `attn_implementation`, for instance, can name code on the Hub.
        own = {name: value for name, value in config_dict.items() if name in known and value is not None}
        check_values(own, known)
        check_numbers({name: own.get(name) for name in ("vocab_size", "draft_vocab_size")})
        ranks = max(map(len, own.get("acceptance_by_rank", {}).values()), default=0)
        if ranks > MOST_RANKS:
            raise ValueError(f"acceptance_by_rank has {ranks} ranks; {MOST_RANKS} are the most of use. Leave it out.")
        for mode, line in own.get("calibration", {}).items():
            if mode not in MODES or len(line) != 2:
                raise ValueError(
                    f"calibration={own['calibration']} must have two numbers, intercept and slope, for 'sampled' and "
                    "for 'greedy' targets: log-odds of estimates are calibrated by them."
                )
        config = super().from_dict(own, **kwargs)
        made = config[0] if isinstance(config, tuple) else config  # with `return_unused_kwargs`
        made.architectures = ["SpecDecPPAssistant"]
        written_with = config_dict.get("transformers_version")
        made.transformers_version = written_with if isinstance(written_with, str) else None
        return config


def special_tokens(model: CausalLM) -> dict[str, Any]:
    """A model's `vocab_size` and `bos_token_id`, `eos_token_id`, `pad_token_id`, by these names; `None` if not set."""
    config = model.config.get_text_config()
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(config, name, None) for name in names}
