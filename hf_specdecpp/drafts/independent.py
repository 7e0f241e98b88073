"""A draft that is a model of its own: any smaller causal LM with the target's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafts.kind import Kind, Loading, Parts
from hf_specdecpp.models.adapters import add_adapter
from hf_specdecpp.models.loading import load_draft
from hf_specdecpp.serving.destination import Destination, Exported
from hf_specdecpp.serving.plain_model import write_plain_model


class Independent(Kind):
    """A model of its own; an adapter is merged into one that is given by name."""

    name = "independent"
    rests_on: ClassVar[Literal["draft", "target", "nothing"]] = "draft"

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:  # noqa: ARG002
        return f"{config.draft_id}{f' at {config.draft_revision}' if config.draft_revision else ''}"

    def check_storable(self, config: SpecDecPPConfig) -> None:
        if config.draft_id is None:
            raise ValueError(
                "The draft is a model in memory without a Hub id or folder, so the saved assistant could not be "
                "loaded. Save the draft, load it from there and build the assistant from that: from_draft(folder)."
            )

    def check_shareable(self, config: SpecDecPPConfig) -> None:
        if config.draft_id is not None and Path(config.draft_id).exists():
            raise ValueError(
                f"The draft {config.draft_id!r} is a local folder, so nobody else could load this assistant. Push the "
                "draft model first and build the assistant from its Hub id, or set assistant.config.draft_id to it."
            )

    def load(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> Drafter:
        chosen, pinned = (config.draft_id, config.draft_revision) if how.draft is None else (how.draft, None)
        model = load_draft(chosen, pinned, how.target, how.dtype, how.device, how.hub_kwargs)
        if parts.adapter is not None:
            model = add_adapter(model, parts.adapter, merge=isinstance(chosen, str | Path))
        return Drafter(model, parts.draft_vocab)

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
        model = self.load(config, parts, Loading()).model
        return write_plain_model(model, str(config.draft_id), config.draft_revision, config, to)
