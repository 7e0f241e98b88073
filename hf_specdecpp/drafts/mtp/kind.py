"""Multi-token layers: those that the target's own checkpoint brings for drafting (`docs/ready-made.md`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafts.conditioned import Conditioned
from hf_specdecpp.drafts.kind import Feat, Parts
from hf_specdecpp.drafts.mtp.checkpoint import MtpLayers, read_layers
from hf_specdecpp.drafts.mtp.drafter import MtpDraft
from hf_specdecpp.drafts.mtp.model import one_layer
from hf_specdecpp.drafts.ready_made import ReadyMade, is_model, pinned
from hf_specdecpp.files import Repository
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.provenance import commit_of
from hf_specdecpp.serving.destination import Destination, Exported


class Mtp(ReadyMade):
    """Layers beside those that the target decodes with; `config.draft_id` names the repository that holds them."""

    name = "mtp"
    title = "MTP"
    cannot: ClassVar[Mapping[Feat, str]] = {
        "replays": Conditioned.cannot["replays"],
        "training": "multi-token layers are those of the target's checkpoint: take them as they are (from_mtp), or "
        "train with draft: eagle3",
        "late verdicts": Conditioned.cannot["late verdicts"],
    }

    def of_target(
        self, target: CausalLM, source: str | Path | None = None, hub_kwargs: dict[str, Any] | None = None
    ) -> tuple[SpecDecPPConfig, MtpLayers]:
        """The config of an assistant that drafts with the layers of a target's checkpoint, and their tensors.

        Args:
            source: repository that holds them; by default that the target was loaded from.

        Raises:
            ValueError: the target is not from a repository, or its own has no such layers; with what to do.
        """
        name = source or target.config.name_or_path
        if not name:
            raise ValueError(
                f"This {type(target).__name__} was made in memory, so nothing says where its multi-token layers are. "
                "Name their repository: from_mtp(model, source=ID_OR_FOLDER)."
            )
        repository = Repository(str(name), None if source else commit_of(target), None, hub_kwargs or {})
        commit = repository.commit(repository.file("config.json"))
        return self.config_of(repository, commit), read_layers(repository)

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        return f"multi-token layers of {target if config.draft_id is None else pinned(config)}"

    def load_module(
        self, config: SpecDecPPConfig, repository: Repository, draft: CausalLM | str | Path | None = None
    ) -> MtpLayers:
        if is_model(draft):
            raise ValueError(
                "transformers drops multi-token layers when it loads a model, so draft= cannot be one here. Give the "
                "folder or Hub id of its files."
            )
        if config.draft_id is None and draft is None:
            raise ValueError(
                "config.json names no repository with the multi-token layers (draft_id). Write the target's Hub id "
                "there."
            )
        return read_layers(self.source(config, repository, draft))

    def note_module(self, config: SpecDecPPConfig, module: Any) -> None:
        """The config names their repository."""

    def save_module(self, config: SpecDecPPConfig, module: Any, folder: Path) -> None:
        """Their weights stay there."""

    def make(self, config: SpecDecPPConfig, parts: Parts, target: CausalLM) -> Draft:  # noqa: ARG002
        layers: MtpLayers = parts.module
        made = [one_layer(tensors, place, target, layers.source) for place, tensors in enumerate(layers.tensors)]
        drafters = [Drafter(model, shares_target=True, fusion=reader) for model, reader in made]
        return drafters[0] if len(drafters) == 1 else MtpDraft(drafters)

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:  # noqa: ARG002
        target = to.target or "TARGET"
        raise ValueError(
            f"This assistant drafts with {self.describe(config)}, which nobody changed here, so nothing is exported: "
            f"engines read them from the target itself, as `vllm serve {target} --speculative-config "
            """'{"method":"mtp","num_speculative_tokens":1}'` does."""
        )
