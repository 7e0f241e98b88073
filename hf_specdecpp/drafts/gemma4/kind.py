"""Gemma 4 assistants: a few layers that attend to the keys and values in the target's own cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafts.gemma4.checkpoint import looks_like_one, meet, read_model, vocab_size_of
from hf_specdecpp.drafts.gemma4.drafter import Gemma4Draft
from hf_specdecpp.drafts.kind import Parts
from hf_specdecpp.drafts.ready_made import TakenAsIs
from hf_specdecpp.files import Repository
from hf_specdecpp.models.causal_lm import CausalLM


class Gemma4(TakenAsIs):
    """An assistant of transformers' class, beside the target that it was trained for."""

    name = "gemma4"
    title = "Gemma 4 assistant"
    served_by = "engines that serve such assistants read its own repository"
    cannot = {
        "replays": "a recorded text has one q a place, but an assistant's depends on where the round began",
        "training": "Gemma 4 assistants are loaded, not trained: load one, or train with draft: eagle3",
    }

    def is_ready_made(self, raw: Mapping[str, Any]) -> bool:
        return looks_like_one(raw)

    def read_model(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> CausalLM:
        return read_model(raw, tensors, source)

    def read_config(self, raw: dict[str, Any], source: Repository, commit: str | None) -> SpecDecPPConfig:
        if not looks_like_one(raw):
            return super().read_config(raw, source, commit)
        return self.config_of(source, commit, vocab_size=vocab_size_of(raw))

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        if config.draft_id is None:
            return f"a Gemma 4 assistant, which reads the cache of {target}"
        return self.pinned(config)

    def facts(self, module: Any) -> dict[str, str]:
        own, config = module.config.get_text_config(), module.config
        kinds = ", ".join(kind.removesuffix("_attention") for kind in own.layer_types)
        clusters = f"{config.centroid_intermediate_top_k} of {config.num_centroids} clusters"
        return {
            "draft": f"Gemma 4 assistant, {own.num_hidden_layers} layers ({kinds}), {own.hidden_size} wide",
            "reads of the target": f"its final state, {config.backbone_hidden_size} wide, its keys and values",
            "draft vocabulary": f"{clusters if config.use_ordered_embeddings else 'all'} of {own.vocab_size} token ids",
        }

    def make(self, config: SpecDecPPConfig, parts: Parts, target: CausalLM) -> Gemma4Draft:
        meet(parts.module, target, self.describe(config))
        drafter = Gemma4Draft(parts.module, target)
        drafter.suspect = None if config.draft_id is None else self.describe(config)
        return drafter
