"""DFlash: a draft that proposes a block of candidates with one pass, and reads the target's states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.foreign import target_of
from hf_specdecpp.config.modules import as_described
from hf_specdecpp.config.types import check_arguments
from hf_specdecpp.drafts.dflash.checkpoint import build, meet, read_model, tensors_of
from hf_specdecpp.drafts.dflash.description import looks_like_one, read_settings
from hf_specdecpp.drafts.dflash.drafter import DFlashDraft
from hf_specdecpp.drafts.dflash.model import DFlashModel
from hf_specdecpp.drafts.dflash.settings import DFlashSettings
from hf_specdecpp.drafts.kind import Feat, Parts
from hf_specdecpp.drafts.ready_made import TakenAsIs
from hf_specdecpp.files import Repository, read_weights, save_tensors
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.serving.destination import Destination, Exported

WEIGHTS = "dflash.safetensors"  # of a draft that was trained here


class DFlash(TakenAsIs):
    """A block draft; `config.draft_id` names the repository that others trained it in."""

    name = "dflash"
    title = "DFlash"
    served_by = "vLLM and SGLang serve it from its own repository, with the method dflash"
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

    def is_ready_made(self, raw: Mapping[str, Any]) -> bool:
        return looks_like_one(raw)

    def read_model(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> DFlashModel:
        return read_model(raw, tensors, source)

    def of_model(self, draft: CausalLM) -> tuple[SpecDecPPConfig, nn.Module]:
        if isinstance(draft, DFlashModel):
            return SpecDecPPConfig(draft_kind=self.name), draft
        return super().of_model(draft)

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

    def read_module(self, config: SpecDecPPConfig, path: Path) -> nn.Module:
        if config.draft_id is not None:
            return super().read_module(config, path)
        if config.dflash is None:
            raise ValueError("The config describes a DFlash draft and not its settings. Save the assistant again.")
        return self.read_layers(config.dflash, path)

    def read_layers(self, arguments: dict[str, Any], path: Path) -> DFlashModel:
        with as_described("DFlash draft"):
            check_arguments(DFlashSettings, arguments)
            settings = DFlashSettings(**arguments)
        return build(settings, read_weights(path), str(path))

    def tensors_of(
        self, module: Any, state: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        return tensors_of(module, state, dtype)

    def load_module(
        self, config: SpecDecPPConfig, repository: Repository, draft: CausalLM | str | Path | None = None
    ) -> nn.Module:
        if config.draft_id is None and draft is None:
            return self.read_module(config, repository.file(WEIGHTS))
        return super().load_module(config, repository, draft)

    def note_module(self, config: SpecDecPPConfig, module: Any) -> None:
        if config.draft_id is None:
            config.dflash = module.settings.to_config()

    def save_module(self, config: SpecDecPPConfig, module: Any, folder: Path) -> None:
        if config.draft_id is None:
            save_tensors(tensors_of(module), folder / WEIGHTS)

    def make(self, config: SpecDecPPConfig, parts: Parts, target: CausalLM) -> DFlashDraft:
        meet(parts.module, target, self.describe(config))
        return DFlashDraft(parts.module, target)

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
        if config.draft_id is None:
            raise ValueError(
                "This assistant drafts with DFlash blocks that were trained here: their first row proposes, too, no "
                "row sees a later one, and engines have not been tried with such blocks, so nothing is "
                "exported. They serve EAGLE-3 drafts: specdecpp train --draft eagle3."
            )
        return super().export(config, parts, to)
