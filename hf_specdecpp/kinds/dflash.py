"""DFlash: a draft that proposes a block of candidates with one pass, and reads the target's states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.foreign import target_of
from hf_specdecpp.dflash.checkpoint import meet, read_model
from hf_specdecpp.dflash.description import looks_like_one, read_settings
from hf_specdecpp.dflash.drafter import DFlashDraft
from hf_specdecpp.dflash.model import DFlashModel
from hf_specdecpp.files import CHECKPOINT, INDEX, Repository, find_weights, read_json, read_weights
from hf_specdecpp.kinds.kind import Parts
from hf_specdecpp.kinds.ready_made import ReadyMade, is_model, raw_config
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.provenance import commit_of
from hf_specdecpp.serving.destination import Destination, Exported


class DFlash(ReadyMade):
    """A block draft that others trained; `config.draft_id` names its repository."""

    name = "dflash"
    title = "DFlash"
    cannot = {
        "replays": "a recorded text has one q a place, but a block's depends on where the round began",
        "training": "DFlash drafts are loaded, not trained: load one, or train with draft: eagle3",
    }

    def owns(self, raw: Mapping[str, Any]) -> bool:
        return super().owns(raw) or looks_like_one(raw)

    def is_ready_made(self, raw: Mapping[str, Any]) -> bool:
        return looks_like_one(raw)

    def names_one(self, draft: Any) -> bool:
        """Whether this is a DFlash draft: a model object, or a folder or Hub id whose `config.json` is of one."""
        if not isinstance(draft, str | Path):
            config = getattr(draft, "config", None)
            return isinstance(config, PreTrainedConfig) and looks_like_one(config.to_dict())
        raw = raw_config(draft)
        return raw is not None and looks_like_one(raw)

    def of_model(self, draft: CausalLM) -> tuple[SpecDecPPConfig, DFlashModel]:
        """The config of an assistant with a model object, and the draft, which shares its tensors."""
        config = SpecDecPPConfig(
            draft_kind=self.name, draft_id=draft.config.name_or_path or None, draft_revision=commit_of(draft),
        )  # fmt: skip
        return config, read_model(draft.config.to_dict(), draft.state_dict(), type(draft).__name__)

    def read_config(self, raw: dict[str, Any], source: Repository, commit: str | None) -> SpecDecPPConfig:
        if not looks_like_one(raw):
            return super().read_config(raw, source, commit)
        settings = read_settings(raw)
        # The size is what transformers compares.
        return self.config_of(source, commit, target_id=target_of(raw), vocab_size=settings.layer.get("vocab_size"))

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        if config.draft_id is None:
            return f"DFlash blocks, which read states of {target}"
        return self.pinned(config)

    def check_storable(self, config: SpecDecPPConfig) -> None:
        if config.draft_id is None:
            raise ValueError(
                "The DFlash draft is a model in memory without a Hub id or folder, so the saved assistant could not be "
                "loaded. Save the draft, and load it from there: from_draft(folder, target=model)."
            )

    def read_module(self, config: SpecDecPPConfig, path: Path) -> DFlashModel:  # noqa: ARG002
        return read_model(read_json(path.parent / "config.json"), read_weights(path), str(path))

    def load_module(
        self, config: SpecDecPPConfig, repository: Repository, draft: CausalLM | str | Path | None = None
    ) -> DFlashModel:
        if is_model(draft):
            return self.of_model(draft)[1]
        self.check_storable(config)
        source = self.source(config, repository, draft)
        source.file("config.json")
        if (path := find_weights(source)) is None:
            raise ValueError(
                f"{source.name!r} has neither {CHECKPOINT} nor {INDEX}, and nothing but safetensors is opened here: a "
                "pickle could run code. Ask its author for safetensors."
            )
        return self.read_module(config, path)

    def note_module(self, config: SpecDecPPConfig, module: Any) -> None:
        """The config names its repository."""

    def save_module(self, config: SpecDecPPConfig, module: Any, folder: Path) -> None:
        """Its weights stay there."""

    def make(self, config: SpecDecPPConfig, parts: Parts, target: CausalLM) -> DFlashDraft:
        meet(parts.module, target, self.describe(config))
        return DFlashDraft(parts.module, target)

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:  # noqa: ARG002
        raise ValueError(
            f"This assistant drafts with {self.describe(config)}, which nobody changed here, so nothing is exported: "
            "vLLM and SGLang serve it from its own repository, with the method dflash."
        )
