"""DFlash: a draft that proposes a block of candidates with one pass, and reads the target's states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.foreign import target_of
from hf_specdecpp.dflash.checkpoint import meet, read_model
from hf_specdecpp.dflash.description import looks_like_one, read_settings
from hf_specdecpp.dflash.drafter import DFlashDraft
from hf_specdecpp.dflash.model import DFlashModel
from hf_specdecpp.files import Repository
from hf_specdecpp.kinds.kind import Parts
from hf_specdecpp.kinds.ready_made import TakenAsIs
from hf_specdecpp.models.causal_lm import CausalLM


class DFlash(TakenAsIs):
    """A block draft that others trained; `config.draft_id` names its repository."""

    name = "dflash"
    title = "DFlash"
    served_by = "vLLM and SGLang serve it from its own repository, with the method dflash"
    cannot = {
        "replays": "a recorded text has one q a place, but a block's depends on where the round began",
        "training": "DFlash drafts are loaded, not trained: load one, or train with draft: eagle3",
    }

    def is_ready_made(self, raw: Mapping[str, Any]) -> bool:
        return looks_like_one(raw)

    def read_model(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> DFlashModel:
        return read_model(raw, tensors, source)

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

    def make(self, config: SpecDecPPConfig, parts: Parts, target: CausalLM) -> DFlashDraft:
        meet(parts.module, target, self.describe(config))
        return DFlashDraft(parts.module, target)
