"""Settings of a DSpark draft (`DSparkSettings`), read from a `config.json` in several dialects (`read_settings`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from hf_specdecpp.config.value_checks import CURE, shown
from hf_specdecpp.draft_kinds.checkpoints import SPECULATORS, mapping, own_modules, refuse
from hf_specdecpp.draft_kinds.dflash import config_dflash
from hf_specdecpp.draft_kinds.dflash.config_dflash import DFlashSettings, nested
from hf_specdecpp.draft_kinds.dspark.gemma4_layers import in_gemma4

# Architectures of DeepSpec. Their config is a copy of the target's, whose fields `OF_THE_TARGET` are not the draft's.
GEMMA4 = "Gemma4DSparkModel"
COPIES = ("Qwen3DSparkModel", "LingDSparkModel", GEMMA4)
OF_THE_TARGET = (
    "model_type", "partial_rotary_factor", "rope_scaling", "layer_types", "sliding_window", "use_sliding_window",
    "max_window_layers",
)  # fmt: skip
# Names with "dspark" in them, of architectures and of a field, that are read; others belong to relatives of DSpark.
KNOWN = (*COPIES, "Lfm2DSparkDraftModel", "DSparkDraftModel", "DSparkSpeculator", "dspark_config")
RELATIVES = {  # other fields of relatives, and what is different in them
    "enable_qwen35_gated_q_proj": "queries with an output gate",
    "has_embed_tokens": "attention sinks and quantised weights (Nemotron 3.5)",
    "pard_token": "attention sinks and quantised weights (Nemotron 3.5)",
}


@dataclass(frozen=True)
class DSparkSettings(DFlashSettings):
    """Sizes and variants of a DSpark draft: of its block (`DFlashSettings`), and of its Markov and confidence head."""

    markov_rank: int = 0  # of the bias by the token before a candidate; 0 without a bias: DeepSpec's DFlash drafts
    markov_head: Literal["vanilla", "gated", "rnn"] = "vanilla"  # how the bias is computed (`MarkovHead`)
    confidence_head: bool = False  # whether the draft has one
    confidence_with_markov: bool = False  # whether that head also reads the Markov embedding of the token before
    says_layout: bool = True  # whether the config says which row proposes the first candidate (`samples_anchor`)
    gemma4_layers: bool = False  # layers of Gemma 4 (`gemma4_layers.py`), rather than Qwen3's


def architectures(raw: Mapping[str, Any]) -> list[str]:
    found = raw.get("architectures")
    return list(map(str, found)) if isinstance(found, list) else [str(found)]


def read_block(raw: Mapping[str, Any]) -> DFlashSettings:
    """Read the settings of a DSpark draft's block from its `config.json`. `ValueError` as in
    `config_dflash.read_settings` and `refuse_relatives`, and for layer ids that do not ascend."""
    refuse_relatives(raw)
    if set(COPIES) & set(architectures(raw)):
        rope = {"rope_theta": mapping(raw, "rope_parameters").get("rope_theta")}
        raw = {name: value for name, value in raw.items() if name not in OF_THE_TARGET} | {"rope_parameters": rope}
    block = config_dflash.read_settings(raw, "dspark")
    if block.reads != sorted(set(block.reads)):
        raise ValueError(
            f"The draft reads layers {block.reads} of its target, which must ascend in a DSpark draft. {CURE}"
        )
    return block


def read_settings(raw: Mapping[str, Any], named: Mapping[str, Tensor]) -> DSparkSettings:
    """Read the settings of the block from a `config.json`, and those of both heads from the tensors, by their names in
    the module. `ValueError` as in `read_block`, and for a field that contradicts the tensors."""
    block, given, is_gemma4 = read_block(raw), {**raw, **nested(raw)}, GEMMA4 in architectures(raw)
    block = in_gemma4(block, raw, named) if is_gemma4 else block
    rows, columns = ({name: tensor.shape[at] for name, tensor in named.items() if tensor.dim()} for at in (0, -1))
    rank, width = columns.get("markov_head.markov_w1.weight", 0), columns.get("confidence_head.proj.weight")
    with_markov = rank > 0 and width == block.layer["hidden_size"] + rank
    found: dict[str, Any] = {
        "markov_rank": rank,
        "enable_confidence_head": width is not None,
        "draft_vocab_size": next(
            (rows[name] for name in OF_DRAFT_VOCAB if name in rows), block.layer.get("vocab_size")
        ),
    }
    if rank:
        kinds = (kind for kind, part in MARKOV_HEADS.items() if f"markov_head.{part}.weight" in named)
        found["markov_head_type"] = next(kinds, "vanilla")
    if width is not None:
        found["confidence_head_with_markov"] = with_markov
    for name, value in found.items():
        if given.get(name) not in (None, value):
            raise ValueError(
                f"config.json says {name}={shown(given[name])}, and by the draft's tensors that is {value}. The two do "
                "not belong together: download the repository again."
            )
    first, says_layout = _layout(raw, given, block.block_size)
    count, vocab_size = found["draft_vocab_size"], block.layer.get("vocab_size")
    return DSparkSettings(
        **{**vars(block), "samples_anchor": first, **own_modules(named, count, vocab_size)},
        markov_rank=rank,
        markov_head=found.get("markov_head_type", "vanilla"),
        confidence_head=width is not None,
        confidence_with_markov=with_markov,
        says_layout=says_layout,
        gemma4_layers=is_gemma4,
    )


MARKOV_HEADS = {"gated": "gate_proj", "rnn": "joint_proj"}  # kinds of Markov head: a tensor that only they have
OF_DRAFT_VOCAB = ("markov_head.markov_w2.weight", "lm_head.weight", "d2t")  # one row for each of the draft's tokens


def _layout(raw: Mapping[str, Any], given: Mapping[str, Any], block_size: int) -> tuple[Any, bool]:
    """Return whether a block's row of the last token proposes the first candidate, and whether the config is clear.

    A config without such a field is clear if it is in speculators' format and declares as many candidates as a block
    has rows (true), or one less (false). Otherwise false is assumed in this format, and true in others."""
    for name in ("sample_from_anchor", "query_zero_predicts_next"):
        if given.get(name) is not None:
            return given[name], True
    if SPECULATORS not in raw:
        return True, False
    methods = mapping(raw, "speculators_config").get("proposal_methods")
    methods = methods if isinstance(methods, list) else []
    widths = [each.get("speculative_tokens") for each in methods if isinstance(each, Mapping)]
    missing = [size for size in (0, 1) if block_size - size in widths]
    return missing == [0], len(missing) == 1


def refuse_relatives(raw: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a config with a field of `RELATIVES`, an unknown architecture, or embedded layers."""
    for name in (*architectures(raw), *raw):
        different = RELATIVES.get(name)
        if is_embedded(name):
            different = "layers within the target's own checkpoint"
        elif different is None and "dspark" in name.lower() and name not in KNOWN:
            different = "layers that are not known"
        if different is not None:
            refuse(f"relative of DSpark ({name[:80]}) with {different}")


def is_embedded(name: str) -> bool:
    """Whether a config with a field `name` describes a draft within the target's own checkpoint (DeepSeek-V4)."""
    return name.startswith("dspark_") and name != "dspark_config"
