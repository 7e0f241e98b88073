"""DSpark drafts (`DSpark`): read the files of several dialects, and find which row proposes the first candidate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_specdecpp.draft_kinds.checkpoints import SPECULATORS
from hf_specdecpp.draft_kinds.dflash.config_dflash import DFlashSettings, nested
from hf_specdecpp.draft_kinds.dflash.loading_dflash import HEADS, DFlash
from hf_specdecpp.draft_kinds.draft_kind import Config
from hf_specdecpp.draft_kinds.dspark import config_dspark
from hf_specdecpp.draft_kinds.dspark.config_dspark import DSparkSettings, read_block
from hf_specdecpp.draft_kinds.dspark.gemma4_layers import with_values
from hf_specdecpp.draft_kinds.dspark.modeling_dspark import DSparkDraft, DSparkModel
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.models.causal_lm import CausalLM


class DSpark(DFlash):
    """Draft with a DFlash block whose candidates depend on the token before (a Markov head). Reads published drafts of
    DeepSpec, speculators, SpecForge, LiquidAI and openbmb, and DeepSpec's DFlash drafts without such a head."""

    name = "dspark"
    title = "DSpark draft"
    settings_class, model_class, drafter = DSparkSettings, DSparkModel, DSparkDraft
    served_by = f"vLLM, SGLang and llama.cpp (converted) serve its own repository, with the method dspark. {HEADS}"
    unsaid = "which row of a block proposes the first candidate (sample_from_anchor)"

    def recognises(self, raw: Config) -> bool:
        parts = [raw, *(raw[name] for name in NESTED if isinstance(raw.get(name), Mapping))]
        words = [raw.get("architectures"), raw.get(SPECULATORS), *(part.get("projector_type") for part in parts)]
        is_called_so = any("dspark" in str(word).lower() for word in words)
        has_markov = any(part.get("markov_rank") for part in parts)
        return is_called_so or has_markov or any(map(config_dspark.is_embedded, raw))

    def block_of(self, raw: Config) -> DFlashSettings:
        return read_block(raw)

    def settings_of(self, raw: Config, named: Mapping[str, Tensor], source: str) -> DSparkSettings:
        return config_dspark.read_settings(raw, named)

    def read(self, raw: Config, tensors: Mapping[str, Tensor], source: str) -> Any:
        if {**raw, **nested(raw)}.get("rope_is_neox_style") is False:
            size = read_block(raw).layer_config().head_dim
            tensors = {name: in_halves(name, tensor, size) for name, tensor in tensors.items()}
        if config_dspark.GEMMA4 in config_dspark.architectures(raw) and raw.get("attention_k_eq_v"):
            tensors = with_values(tensors)
        return super().read(raw, tensors, source)

    def head_of(self, module: Any) -> AcceptanceHead | None:
        if module is None or module.confidence_head is None:
            return None
        proj = module.confidence_head.proj
        width = module.config.hidden_size + module.settings.markov_rank
        head = AcceptanceHead(width, inputs="path").requires_grad_(False)
        head.output.weight[:, : proj.in_features] = proj.weight  # further inputs have the weight 0
        head.output.bias[:] = proj.bias
        head.is_published = True
        return head

    def readings(self, module: Any, target: CausalLM) -> dict[str, DSparkSettings]:
        """As in `StoredKind`: with both values of `samples_anchor`, unless the config determines it (`says_layout`)."""
        settings = module.settings
        if settings.says_layout or settings.block_size < 2:
            return {"": settings}
        usual = settings.samples_anchor
        return {ROWS[row]: replace(settings, samples_anchor=row, says_layout=True) for row in (usual, not usual)}


NESTED = ("dflash_config", "dspark_config")
ROWS = {True: "the row of the last token", False: "the row after that of the last token"}


def in_halves(name: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Return a tensor of a LiquidAI draft; if by its name it belongs to queries or keys, with rows in Qwen3's order:
    LiquidAI rotates pairs of neighbouring dimensions of a head, Qwen3 pairs that are half a head apart.

    Example: a head's dimensions 0 1 2 3 4 5 become 0 2 4 1 3 5."""
    is_rotated = re.search(r"\.self_attn\.[qk]_(proj|norm)\.", name) is not None
    if not is_rotated or not tensor.dim() or head_dim % 2 or tensor.shape[0] % head_dim:
        return tensor
    return tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
