"""What a head's repository says: `SpecDecPPConfig`."""

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
MOST_RANKS = 32  # of siblings: a static tree is made for them, and further ones are hardly ever accepted


class SpecDecPPConfig(PretrainedConfig):
    """`config.json` of an assistant's repository: the draft, the head, where both come from.

    To transformers it looks like the target's config: `vocab_size` and the special token ids are the target's, because
    that is what assisted generation and pipelines compare.

    Args:
        target_id, target_revision: the target that the assistant was trained for, and its commit hash.
        draft_kind: what drafts: the name of one of the kinds in `drafts`.
        draft_id, draft_revision: the draft's repository and its commit hash (`"independent"`; `"gemma4"`; `"mtp"`, the
            target's or its original's; `"dflash"` and `"eagle3"` where others trained it).
        draft_layers: ascending indices of the target's layers (`"early_exit"`, `"conditioned"`).
        fusion: keyword arguments of `Fusion` (`"conditioned"`).
        eagle3: keyword arguments of `Eagle3Settings`; of a draft from another repository (`draft_id`), what is to be
            read otherwise than its own config says (`"eagle3"`).
        dflash: keyword arguments of `DFlashSettings`, where the draft is in the assistant's own repository
            (`"dflash"`).
        adapter: whether `adapter/` holds a PEFT adapter for the draft.
        head: keyword arguments of `AcceptanceHead`, or `None` without a head.
        draft_vocab_size: how many token ids `draft_vocab.safetensors` lists, or `None` without one.
        vocab_hash: `loading.hash_of` the target's tokenizer.
        acceptance_by_rank: for `"sampled"` and for `"greedy"` targets, how often the first, second, ... sibling was the
            accepted one, as evaluation measured it.
        calibration: for `"sampled"` and for `"greedy"` targets, intercept and slope of the line that log-odds of
            estimates are calibrated by before the first round (`save_pretrained(..., calibration=True)`).
        speculation: defaults of `SpeculationConfig`.
    """

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
        """Take over what transformers compares between an assistant and its target, and where the target is from."""
        for name, value in special_tokens(target).items():
            setattr(self, name, value)
        if self.target_id is None:
            self.target_id = target.config.name_or_path or None
            self.target_revision = commit_of(target)
            tokenizer = tokenizer_of(target.config.name_or_path)
            self.vocab_hash = hash_of(tokenizer) if tokenizer is not None else None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of a `config.json`; `ValueError` for a newer format, or a value of a wrong type or range."""
        written_for = config_dict.get("format_version", FORMAT_VERSION)
        if type(written_for) is int and written_for > FORMAT_VERSION:
            raise ValueError(
                f"This assistant is stored in format {written_for}, this hf_specdecpp reads up to {FORMAT_VERSION}, so "
                "it could be misread. Upgrade: pip install -U hf-specdecpp"
            )
        # Everything a config.json of ours may say; any other name comes from a newer version or a typo.
        known = inspect.get_annotations(cls, eval_str=True)
        theirs = set(PretrainedConfig().to_dict()) | {"model_type", "_name_or_path", "_commit_hash", "auto_map"}
        warn_unknown(sorted(set(config_dict) - theirs - set(known)), "config.json")
        # transformers would act upon others: `attn_implementation`, say, can name code on the Hub.
        own = {name: value for name, value in config_dict.items() if name in known and value is not None}
        check_values(own, known)
        check_numbers({name: own.get(name) for name in ("vocab_size", "draft_vocab_size")})
        ranks = max(map(len, own.get("acceptance_by_rank", {}).values()), default=0)
        if ranks > MOST_RANKS:
            raise ValueError(
                f"acceptance_by_rank has {ranks} ranks; {MOST_RANKS} are the most that are of use. Leave it out."
            )
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
    """Size of a model's vocabulary and its special token ids."""
    config = model.config.get_text_config()
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(config, name, None) for name in names}
