"""The list of all kinds of draft, and the kind of draft that a config describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.draft_kinds.conditioned import Conditioned
from hf_specdecpp.draft_kinds.dflash.loading_dflash import DFlash, DSpark
from hf_specdecpp.draft_kinds.draft_kind import Config, DraftKind, PublishedKind, raw_config
from hf_specdecpp.draft_kinds.eagle3.loading_eagle3 import Eagle3
from hf_specdecpp.draft_kinds.gemma4 import Gemma4
from hf_specdecpp.draft_kinds.mtp.loading_mtp import Mtp
from hf_specdecpp.draft_kinds.plain import EarlyExit, Independent, Lookup
from hf_specdecpp.files import Repository
from hf_specdecpp.models.causal_lm import CausalLM

INDEPENDENT, EARLY_EXIT, CONDITIONED, LOOKUP = Independent(), EarlyExit(), Conditioned(), Lookup()
PUBLISHED = DSPARK, DFLASH, EAGLE3, GEMMA4, MTP = DSpark(), DFlash(), Eagle3(), Gemma4(), Mtp()
KINDS: tuple[DraftKind, ...] = (INDEPENDENT, EARLY_EXIT, CONDITIONED, *PUBLISHED, LOOKUP)
BY_NAME = {kind.name: kind for kind in KINDS}


def kind_of(config: SpecDecPPConfig) -> DraftKind:
    """Return the kind of an assistant's draft; `ValueError` for an unknown `draft_kind`."""
    if config.draft_kind not in BY_NAME:
        raise ValueError(f"draft_kind={config.draft_kind!r} must be one of {', '.join(BY_NAME)}.")
    return BY_NAME[config.draft_kind]


def kind_to_train(draft: str | None) -> DraftKind:
    """Return the kind that `specdecpp train --draft` names: `draft` is a kind's name, "block" (DFlash), or the id
    or folder of a model (independent); `None`, without the option, means an early exit."""
    return EARLY_EXIT if draft is None else DFLASH if draft == "block" else BY_NAME.get(draft, INDEPENDENT)


# Configs. -------------------------------------------------------------------------------------------------------------


def recognise(raw: Config) -> DraftKind | None:
    """Return the kind of draft that the `config.json` of an assistant or of a published draft describes, or `None`."""
    if raw.get("model_type") == SpecDecPPConfig.model_type:
        return BY_NAME.get(str(raw.get("draft_kind", SpecDecPPConfig().draft_kind)))
    if "draft_kind" in raw:  # a damaged config of an assistant
        return None
    return next((kind for kind in PUBLISHED if kind.recognises(raw)), None)


def read_config(raw: dict[str, Any], kind: DraftKind, source: Repository, commit: str | None) -> SpecDecPPConfig:
    """Return an assistant's config from `raw`: its own `config.json`, or that of a published draft of this kind in the
    repository `source` at `commit`. `ValueError` if `raw` is damaged or of a newer format."""
    if not isinstance(kind, PublishedKind) or raw.get("model_type") == SpecDecPPConfig.model_type:
        return SpecDecPPConfig.from_dict(raw)
    return published(kind, source, commit, **kind.fields(raw))


def published(kind: DraftKind, source: Repository, commit: str | None, **fields: Any) -> SpecDecPPConfig:
    """Make the config of an assistant that uses the published draft in `source`, with further `fields`."""
    return SpecDecPPConfig(draft_kind=kind.name, draft_id=source.full_name, draft_revision=commit, **fields)


def describe(config: SpecDecPPConfig) -> str:
    return kind_of(config).describe(config)


def draft_name(config: SpecDecPPConfig) -> str:
    """Describe the draft for error messages, such as "'owner/draft'" or "layers 0, 1 of 'owner/target'"."""
    kind = kind_of(config)
    if kind.rests_on == "draft":
        return repr(config.draft_id)
    return kind.describe(config, repr(config.target_id) if config.target_id else "the target")


# Drafts. --------------------------------------------------------------------------------------------------------------


def ready_made(draft: CausalLM | Repository) -> PublishedKind | None:
    """Return the kind of a published draft, given its model object or repository. `None` for ordinary models, which
    may be independent drafts, and for assistants."""
    for kind in PUBLISHED:
        if kind.model_class is not None and isinstance(draft, kind.model_class):
            return kind
    raw = raw_config(draft) or {}
    found = None if raw.get("model_type") == SpecDecPPConfig.model_type else recognise(raw)
    return found if isinstance(found, PublishedKind) and found.is_marked(raw) else None


def multi_token_layers(
    target: CausalLM, source: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> tuple[SpecDecPPConfig, Any]:
    """Return the config of an assistant that drafts with multi-token layers, and these layers (`MtpLayers`), from the
    repository `source` (default: the target's own), read with the `DownloadOptions` `options`.

    Raises:
        ValueError: the target has no repository, or its repository has no such layers; the message has a remedy.
        OSError, huggingface_hub errors: a file is missing or cannot be downloaded."""
    repository = MTP.repository_of(target, source, options)
    config = published(MTP, repository, repository.commit(repository.file("config.json")))
    return config, MTP.load(config, repository)
