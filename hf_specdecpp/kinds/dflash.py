"""DFlash: a draft that proposes a block of candidates with one pass, and reads the target's states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.foreign import target_of
from hf_specdecpp.config.modules import as_described
from hf_specdecpp.config.types import check_arguments
from hf_specdecpp.dflash.checkpoint import build, meet, read_model, tensors_of
from hf_specdecpp.dflash.description import looks_like_one, read_settings
from hf_specdecpp.dflash.drafter import DFlashDraft
from hf_specdecpp.dflash.model import DFlashModel
from hf_specdecpp.dflash.settings import DFlashSettings
from hf_specdecpp.files import (
    CHECKPOINT,
    INDEX,
    Repository,
    find_weights,
    load_tensors,
    read_json,
    read_weights,
    save_tensors,
)
from hf_specdecpp.kinds.kind import Feat, Parts
from hf_specdecpp.kinds.ready_made import ReadyMade, is_model, raw_config
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.provenance import commit_of
from hf_specdecpp.serving.destination import Destination, Exported

WEIGHTS = "dflash.safetensors"  # of a draft that was trained here


class DFlash(ReadyMade):
    """A block draft; `config.draft_id` names the repository that others trained it in."""

    name = "dflash"
    title = "DFlash"
    module_files = (WEIGHTS,)
    own_layer = True
    drafts_blocks = True
    cannot: ClassVar[Mapping[Feat, str]] = {
        "replays": "a recorded text has one q a place, but a block's depends on where the round began",
        "late verdicts": "judges the state at a candidate, which a block does not read",
        "draft vocabulary": "a block has the target's own LM head, so it proposes all tokens",
        "stays untrained": "the layers have to be trained, so leave it on, or name the repository of a ready-made one: "
        "draft=REPO",
    }

    def owns(self, raw: Mapping[str, Any]) -> bool:
        return super().owns(raw) or looks_like_one(raw)

    def is_ready_made(self, raw: Mapping[str, Any]) -> bool:
        return looks_like_one(raw)

    def names_one(self, draft: Any) -> bool:
        """Whether this is a DFlash draft: a model object, or a folder or Hub id whose `config.json` is of one."""
        if isinstance(draft, DFlashModel):
            return True
        if not isinstance(draft, str | Path):
            config = getattr(draft, "config", None)
            return isinstance(config, PreTrainedConfig) and looks_like_one(config.to_dict())
        raw = raw_config(draft)
        return raw is not None and looks_like_one(raw)

    def of_model(self, draft: CausalLM) -> tuple[SpecDecPPConfig, DFlashModel]:
        """The config of an assistant with a model object, and the draft, which shares its tensors."""
        if isinstance(draft, DFlashModel):
            return SpecDecPPConfig(draft_kind=self.name), draft
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

    def read_module(self, config: SpecDecPPConfig, path: Path) -> DFlashModel:
        if config.draft_id is not None:
            return read_model(read_json(path.parent / "config.json"), read_weights(path), str(path))
        if config.dflash is None:
            raise ValueError("The config describes a DFlash draft and not its settings. Save the assistant again.")
        return self.read_layers(config.dflash, path)

    def read_layers(self, arguments: dict[str, Any], path: Path) -> DFlashModel:
        with as_described("DFlash draft"):
            check_arguments(DFlashSettings, arguments)
            settings = DFlashSettings(**arguments)
        return build(settings, load_tensors(path), str(path))

    def tensors_of(
        self, module: Any, state: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        return tensors_of(module, state, dtype)

    def load_module(
        self, config: SpecDecPPConfig, repository: Repository, draft: CausalLM | str | Path | None = None
    ) -> DFlashModel:
        if is_model(draft):
            return self.of_model(draft)[1]
        if config.draft_id is None:
            return self.read_module(config, repository.file(WEIGHTS))
        source = self.source(config, repository, draft)
        source.file("config.json")
        if (path := find_weights(source)) is None:
            raise ValueError(
                f"{source.name!r} has neither {CHECKPOINT} nor {INDEX}, and nothing but safetensors is opened here: a "
                "pickle could run code. Ask its author for safetensors."
            )
        return self.read_module(config, path)

    def note_module(self, config: SpecDecPPConfig, module: Any) -> None:
        if config.draft_id is None:
            config.dflash = module.settings.to_config()

    def save_module(self, config: SpecDecPPConfig, module: Any, folder: Path) -> None:
        if config.draft_id is None:
            save_tensors(tensors_of(module), folder / WEIGHTS)

    def make(self, config: SpecDecPPConfig, parts: Parts, target: CausalLM) -> DFlashDraft:
        meet(parts.module, target, self.describe(config))
        return DFlashDraft(parts.module, target)

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:  # noqa: ARG002
        if config.draft_id is None:
            raise ValueError(
                "This assistant drafts with DFlash blocks that were trained here: their first row proposes, too, no "
                "row sees a later one, and engines have not been tried with such blocks, so nothing is "
                "exported. They serve EAGLE-3 drafts: specdecpp train --draft eagle3."
            )
        raise ValueError(
            f"This assistant drafts with {self.describe(config)}, which nobody changed here, so nothing is exported: "
            "vLLM and SGLang serve it from its own repository, with the method dflash."
        )
