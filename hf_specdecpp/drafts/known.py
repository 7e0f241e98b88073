"""The kinds that there are, and which of them a config is of. The one list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafts.conditioned import Conditioned
from hf_specdecpp.drafts.dflash.kind import DFlash
from hf_specdecpp.drafts.dflash.model import DFlashModel
from hf_specdecpp.drafts.eagle3.kind import Eagle3
from hf_specdecpp.drafts.early_exit import EarlyExit
from hf_specdecpp.drafts.gemma4.kind import Gemma4
from hf_specdecpp.drafts.independent import Independent
from hf_specdecpp.drafts.kind import Kind
from hf_specdecpp.drafts.lookup import Lookup
from hf_specdecpp.drafts.mtp.kind import Mtp
from hf_specdecpp.drafts.ready_made import TakenAsIs, raw_config

INDEPENDENT, EARLY_EXIT, CONDITIONED = Independent(), EarlyExit(), Conditioned()
DFLASH, EAGLE3, GEMMA4, MTP, LOOKUP = DFlash(), Eagle3(), Gemma4(), Mtp(), Lookup()
KINDS: tuple[Kind, ...] = (INDEPENDENT, EARLY_EXIT, CONDITIONED, DFLASH, EAGLE3, GEMMA4, MTP, LOOKUP)
BY_NAME = {kind.name: kind for kind in KINDS}
TRAINED = {**BY_NAME, "block": DFLASH}  # names that `specdecpp train --draft` takes


def recognise(raw: Mapping[str, Any]) -> Kind | None:
    """The kind that a `config.json` describes, if it is one of these."""
    return next((kind for kind in KINDS if kind.owns(raw)), None)


def kind_of(config: SpecDecPPConfig) -> Kind:
    """The kind of an assistant's draft.

    Raises:
        ValueError: there is no such kind.
    """
    if config.draft_kind not in BY_NAME:
        raise ValueError(f"draft_kind={config.draft_kind!r} must be one of {', '.join(BY_NAME)}.")
    return BY_NAME[config.draft_kind]


def kind_to_train(draft: str | None) -> Kind:
    """What `specdecpp train --draft` asks for: a kind's name, a model's, or nothing, which is an early exit."""
    return EARLY_EXIT if draft is None else TRAINED.get(draft, INDEPENDENT)


def ready_made(name: str) -> Kind | None:
    """The kind of the draft that others trained in a repository, if one is there and can be reached."""
    raw = raw_config(name)
    return None if raw is None else next((kind for kind in KINDS if kind.is_ready_made(raw)), None)


def taken_as_is(draft: Any) -> TakenAsIs | None:
    """The kind of a draft that cannot draft by itself, of a model object or of what a folder or Hub id holds."""
    if isinstance(draft, DFlashModel):
        return DFLASH
    raw = raw_config(draft)
    return None if raw is None else next((kind for kind in (DFLASH, GEMMA4) if kind.is_ready_made(raw)), None)


def describe(config: SpecDecPPConfig) -> str:
    """The draft of an assistant in a few words."""
    return kind_of(config).describe(config)


def draft_name(config: SpecDecPPConfig) -> str:
    """The same for a message, with the names of models."""
    kind = kind_of(config)
    if kind.rests_on == "draft":
        return repr(config.draft_id)
    return kind.describe(config, repr(config.target_id) if config.target_id else "the target")
