"""A draft that is a model of its own: any smaller causal LM with the target's tokenizer."""

from __future__ import annotations

from pathlib import Path

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafts.kind import Kind, Loading, Parts, Stored, Trainable, pinned
from hf_specdecpp.models.adapters import add_adapter
from hf_specdecpp.models.loading import load_draft
from hf_specdecpp.serving import Destination, Exported, write_plain_model


def load(config: SpecDecPPConfig, parts: Parts, how: Loading) -> Drafter:
    """The model, with its adapter merged into one that is given by name."""
    chosen, revision = (config.draft_id, config.draft_revision) if how.draft is None else (how.draft, None)
    model = load_draft(chosen, revision, how.target, how.dtype, how.device, how.hub_kwargs)
    if parts.adapter is not None:
        model = add_adapter(model, parts.adapter, merge=isinstance(chosen, str | Path))
    return Drafter(model, parts.draft_vocab)


def export(config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
    model = load(config, parts, Loading()).model
    return write_plain_model(model, str(config.draft_id), config.draft_revision, config, to)


INDEPENDENT = Kind(
    name="independent",
    rests_on="draft",
    draft=load,
    words=lambda config, _: pinned(config),
    stored=Stored(is_named=True, export=export),
    trainable=Trainable(),
)
