"""Find and read the multi-token layers in the target's own checkpoint (`Mtp`, `docs/ready-made.md`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.value_checks import CURE, shown
from hf_specdecpp.draft_kinds.checkpoints import INSTEAD, mapping, renamed
from hf_specdecpp.draft_kinds.draft_kind import Config, Loading, Parts, PublishedKind, pinned
from hf_specdecpp.draft_kinds.mtp.modeling_mtp import POST_NORM, MtpDraft, one_layer
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.files import Repository, check_finite
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.provenance import commit_of

logger = logging.get_logger("hf_specdecpp")

ANNOUNCING = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # config: how many MTP layers
MOST_LAYERS = 16  # multi-token layers
FIELDS = ("num_hidden_layers", *ANNOUNCING)
MOST_OF_TARGET = 2**10  # largest accepted number in `FIELDS`
MOST_BYTES = 2**22  # of a target's config, which may list quantised layers
OWN = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "post_norm.weight")  # tensors outside the decoder layer
# Patterns from names in a file to names in `MtpLayers`, after their prefix is removed: `model.layers.N.`, N counted on
# from the target's layers (DeepSeek, GLM; Step adds `transformer.`), `mtp.` (Qwen, Mellum), `mtp.layers.N.` (Inkling).
RENAMED = (
    (r"^(fc|input_proj)\.", "eh_proj."),
    (r"^(pre_fc_norm_embedding|embed_norm)\.", "enorm."),
    (r"^(pre_fc_norm_hidden|hidden_norm)\.", "hnorm."),
    (r"^((transformer\.)?shared_head\.norm|norm)\.", "post_norm."),
    (r"^(layers\.0|transformer_block)\.", "block."),
)
OTHERS = (r"^(?!(enorm|hnorm|eh_proj|post_norm|block)\.)", "block.")  # only after `model.layers.N.`
# Copies of the target's embeddings and LM head after `model.layers.N.`: skipped.
AGAIN = ("embed_tokens.weight", "shared_head.head.weight", "transformer.shared_head.output.weight")


@dataclass(frozen=True)
class MtpLayers:
    """The multi-token layers of a checkpoint. `tensors`: for each layer a dict with `eh_proj.weight`, `enorm.weight`,
    `hnorm.weight`, maybe `post_norm.weight`, and the decoder layer's tensors, whose names are `block.` and their names
    in the checkpoint. `source`: the checkpoint's name in messages."""

    tensors: list[dict[str, Tensor]]
    source: str

    def state_dict(self) -> dict[str, Tensor]:
        named = enumerate(self.tensors)
        return {f"{place}.{name}": tensor for place, layer in named for name, tensor in layer.items()}


class Mtp(PublishedKind):
    """Draft with the multi-token layers of the target's checkpoint in the repository `config.draft_id`. Users name this
    kind, since the repository's `config.json` describes the target, a model that also works without these layers."""

    name = "mtp"
    is_named = True
    untrainable = (
        "multi-token layers are those of the target's checkpoint: take them as they are (assist), or train with draft: "
        "eagle3"
    )
    no_model = "transformers drops multi-token layers when it loads one. Give the folder or Hub id of its files"
    served_by = (
        "engines read them from the target itself, as `vllm serve TARGET --speculative-config "
        """'{"method":"mtp","num_speculative_tokens":1}'` does"""
    )
    is_whole = False
    most_config_bytes = MOST_BYTES
    cure = "Name a repository that has them: assist(model, 'mtp', source=ID)."

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        return f"multi-token layers of {target if config.draft_id is None else pinned(config)}"

    def make(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> Draft:
        layers, target = parts.module, how.target
        made = [one_layer(tensors, place, target, layers.source) for place, tensors in enumerate(layers.tensors)]
        drafters = [Drafter(model, shares_target=True, fusion=reader) for model, reader in made]
        return drafters[0] if len(drafters) == 1 else MtpDraft(drafters)

    def read(self, raw: Config, tensors: Mapping[str, Tensor], source: str) -> MtpLayers:
        """As in `PublishedKind`: reads only the multi-token layers among the target's `tensors`. `ValueError`, with a
        remedy, if there are none, or if they are quantised, not finite, or of an unknown form."""
        config = {**mapping(raw, "mtp_config"), **(mapping(raw, "text_config") or raw)}
        for field in FIELDS:
            if not isinstance(found := config.get(field) or 0, int) or not 0 <= found <= MOST_OF_TARGET:
                raise ValueError(f"{field}={shown(found)} must be a whole number from 0 to {MOST_OF_TARGET}. {CURE}")
        name, count = next(((name, config[name]) for name in ANNOUNCING if config.get(name)), (None, 0))
        is_chained = bool(config.get("chain_hidden_post_norm"))
        named = layers_among(tensors, config.get("num_hidden_layers") or 0, source, is_chained)
        if len(named) > MOST_LAYERS or (named and not config.get("num_hidden_layers")):
            raise ValueError(
                f"{source!r} has num_hidden_layers={config.get('num_hidden_layers')} and {len(named)} multi-token "
                f"layers, of which {MOST_LAYERS} are the most that draft. {CURE}"
            )
        if not named and name is not None:
            raise ValueError(
                f"The config.json of {source!r} announces multi-token layers ({name}={count}), and its files hold no "
                "tensor of them. They are often left out when a model is quantised, finetuned or saved by "
                "transformers. Name the repository of the original model: assist(model, 'mtp', source=ID). "
                f"{INSTEAD} otherwise."
            )
        if not named:
            raise ValueError(f"{source!r} has no multi-token layers: its config.json announces none. {INSTEAD}.")
        if len(named) < count:
            logger.warning(
                f"{source!r} announces {count} multi-token layers ({name}) and holds {len(named)}, which draft."
            )
        found = {there: tensors[there] for layer in named for there in layer.values()}
        for there, tensor in found.items():
            if not tensor.is_floating_point() or tensor.element_size() == 1:
                raise ValueError(
                    f"{source!r}: {there} holds {str(tensor.dtype)[6:]}, so its multi-token layers are quantised, "
                    "which is not read. Name a repository with them in bfloat16: assist(model, 'mtp', source=ID)."
                )
        check_finite(found, source)
        return MtpLayers([{here: found[there] for here, there in layer.items()} for layer in named], source)

    def repository_of(self, target: CausalLM, source: str | Path | None = None, options: Any = None) -> Repository:
        """Return the repository `source`, or the target's own; `ValueError` if it has none. `options` of downloads."""
        name = source or target.config.name_or_path
        if not name:
            raise ValueError(
                f"This {type(target).__name__} was made in memory, so nothing says where its multi-token layers are. "
                "Name their repository: assist(model, 'mtp', source=ID_OR_FOLDER)."
            )
        return Repository.of(name, {"revision": None if source else commit_of(target), **(options or {})})


def layers_among(names: Iterable[str], depth: int, source: str, is_chained: bool = False) -> list[dict[str, str]]:
    """Return, for each multi-token layer among a checkpoint's tensor `names`, a dict from names in `MtpLayers` to names
    in the checkpoint; `[]` if there are none. `ValueError` if they are of an unknown form. `depth`: number of the
    target's other layers; `is_chained`: the layers `mtp.layers.N.` share the norm `mtp.chain_norm` (Inkling).

    Example: with a target of 61 layers, the first layer's `post_norm.weight` is
    `model.layers.61.shared_head.norm.weight`."""
    names = list(names)
    starts = [re.fullmatch(r"((?:.*\.)?layers\.)(\d{1,6})\.eh_proj\.weight", name) for name in names]
    appended = sorted((int(start[2]), f"{start[1]}{start[2]}.") for start in starts if start and int(start[2]) >= depth)
    if appended:
        own = [name for name in names if not name.endswith(AGAIN)]
        return [_part(own, start, (*RENAMED, OTHERS), source) for _, start in appended]
    starts = [re.match(r"((?:.*\.)?mtp\.)layers\.(\d{1,6})\.(?=transformer_block\.)", name) for name in names]
    numbered = sorted({(int(start[2]), start[0], start[1]) for start in starts if start})
    if numbered:
        norm = f"{numbered[0][2]}chain_norm.weight"
        if is_chained and norm not in names:
            raise ValueError(f"{source!r} says chain_hidden_post_norm=True and lacks {norm}. {INSTEAD}.")
        together = {POST_NORM: norm} if is_chained else {}
        return [{**_part(names, start, RENAMED, source, (POST_NORM,)), **together} for _, start, _ in numbered]
    nested = sorted({match[0] for name in names if (match := re.match(r"(.*\.)?mtp[._]", name))})
    return [_part(names, start, RENAMED, source) for start in nested]


def _part(
    names: list[str], start: str, patterns: tuple[tuple[str, str], ...], source: str, lacks: tuple[str, ...] = ()
) -> dict[str, str]:
    """Map names in `MtpLayers` to names in the checkpoint for one layer, whose tensors in the checkpoint begin with
    `start`. `patterns`: of `renamed`; `lacks`: names of `OWN` that may be missing."""
    own = [name.removeprefix(start) for name in names if name.startswith(start)]
    part = {renamed(name, patterns): start + name for name in own}
    strange = [there for here, there in part.items() if here not in OWN and not here.startswith("block.")]
    lacking = [here for here in OWN if here not in (*part, *lacks)]
    if strange or lacking:
        what = f"among others {', '.join(sorted(strange)[:3])}" if strange else f"without {', '.join(lacking)}"
        raise ValueError(
            f"{source!r} has multi-token layers of a form that hf_specdecpp does not know ({start}*, {what}), so what "
            f"they compute is not known. {INSTEAD}."
        )
    return part
