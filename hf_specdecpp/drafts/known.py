"""The kinds that there are, and which of them a config is of. The one list of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafts.conditioned import CONDITIONED
from hf_specdecpp.drafts.dflash.kind import DFLASH
from hf_specdecpp.drafts.eagle3.kind import EAGLE3
from hf_specdecpp.drafts.gemma4.kind import GEMMA4
from hf_specdecpp.drafts.kind import Kind, raw_config
from hf_specdecpp.drafts.mtp.kind import MTP, repository_of
from hf_specdecpp.drafts.plain import EARLY_EXIT, INDEPENDENT, LOOKUP
from hf_specdecpp.files import Repository
from hf_specdecpp.models.causal_lm import CausalLM

KINDS: tuple[Kind, ...] = (INDEPENDENT, EARLY_EXIT, CONDITIONED, DFLASH, EAGLE3, GEMMA4, MTP, LOOKUP)
BY_NAME = {kind.name: kind for kind in KINDS}
FORMATS = [(kind, form) for kind in KINDS if (form := kind.format) is not None]
TRAINED = {**BY_NAME, "block": DFLASH}  # names that `specdecpp train --draft` takes


def kind_of(config: SpecDecPPConfig) -> Kind:
    """The kind of an assistant's draft; `ValueError` if there is no such kind."""
    if config.draft_kind not in BY_NAME:
        raise ValueError(f"draft_kind={config.draft_kind!r} must be one of {', '.join(BY_NAME)}.")
    return BY_NAME[config.draft_kind]


def kind_to_train(draft: str | None) -> Kind:
    """What `specdecpp train --draft` asks for: a kind's name, a model's, or nothing, which is an early exit."""
    return EARLY_EXIT if draft is None else TRAINED.get(draft, INDEPENDENT)


# Configs. -------------------------------------------------------------------------------------------------------------


def recognise(raw: Mapping[str, Any]) -> Kind | None:
    """The kind of the draft that a `config.json` describes, an assistant's or one of others, if it is one of these."""
    if raw.get("model_type") == SpecDecPPConfig.model_type:
        return BY_NAME.get(str(raw.get("draft_kind", SpecDecPPConfig().draft_kind)))
    if "draft_kind" in raw:  # a damaged one of an assistant
        return None
    return next((kind for kind, form in FORMATS if form.recognises(raw)), None)


def read_config(raw: dict[str, Any], kind: Kind, source: Repository, commit: str | None) -> SpecDecPPConfig:
    """The config of an assistant that a `config.json` of this kind describes, an assistant's or one of others;
    `ValueError` if it is damaged, or of a newer format. `source` and `commit`: where it is from."""
    form = kind.format
    if form is None or raw.get("model_type") == SpecDecPPConfig.model_type:
        config: SpecDecPPConfig = SpecDecPPConfig.from_dict(raw)
        return config
    return published(kind, source, commit, **form.fields(raw))


def published(kind: Kind, source: Repository, commit: str | None, **fields: Any) -> SpecDecPPConfig:
    """The config, with these fields, of an assistant that drafts with what is in a repository of others."""
    return SpecDecPPConfig(draft_kind=kind.name, draft_id=source.full_name, draft_revision=commit, **fields)


def override(config: SpecDecPPConfig, values: Any) -> None:
    """Read a draft of others otherwise than its own config says; `ValueError` where there is nothing to override."""
    kind = kind_of(config)
    check = None if config.draft_id is None or kind.format is None else kind.format.check_overrides
    if check is None or kind.own is None:
        raise ValueError(
            f"eagle3={values} says how an EAGLE-3 draft that others trained is to be read, and this assistant drafts "
            f"with {describe(config)}. Leave it out."
        )
    setattr(config, kind.own.field, check(values))


def describe(config: SpecDecPPConfig) -> str:
    return kind_of(config).describe(config)


def draft_name(config: SpecDecPPConfig) -> str:
    """The same for a message, with the names of models."""
    kind = kind_of(config)
    if kind.rests_on == "draft":
        return repr(config.draft_id)
    return kind.describe(config, repr(config.target_id) if config.target_id else "the target")


# Drafts. --------------------------------------------------------------------------------------------------------------


def ready_made(draft: CausalLM | str | Path) -> Kind | None:
    """The kind of a draft that cannot draft by itself: a model object, or what is found in a folder or Hub id."""
    made = [kind for kind, form in FORMATS if form.module is not None and isinstance(draft, form.module)]
    if made:
        return made[0]
    raw = raw_config(draft)
    if raw is None or raw.get("model_type") == SpecDecPPConfig.model_type or "draft_kind" in raw:
        return None
    return next((kind for kind, form in FORMATS if (form.is_marked or form.recognises)(raw)), None)


def multi_token_layers(
    target: CausalLM, source: str | Path | None = None, hub_kwargs: dict[str, Any] | None = None
) -> tuple[SpecDecPPConfig, Any]:
    """The config of an assistant that drafts with the layers of a target's own checkpoint, and their tensors.

    Raises:
        ValueError: the target is not from a repository, or its own has no such layers; with what to do.
        OSError, huggingface_hub errors: a file is missing or cannot be reached.
    """
    repository = repository_of(target, source, hub_kwargs)
    config = published(MTP, repository, repository.commit(repository.file("config.json")))
    return config, MTP.load(config, repository)
