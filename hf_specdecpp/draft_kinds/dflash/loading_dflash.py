"""DFlash and DSpark drafts (`DFlash`, `DSpark`): read the files, whose tensor names depend on the format, bind a draft
to its target, find which row proposes the first candidate, and export a draft with a confidence head."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.draft_kinds.checkpoints import SPECULATORS, mapping, target_of
from hf_specdecpp.draft_kinds.dflash import config_dflash
from hf_specdecpp.draft_kinds.dflash.config_dflash import NESTED, TRANSFORMERS, DFlashSettings, read_block
from hf_specdecpp.draft_kinds.dflash.modeling_dflash import DFlashDraft, DFlashModel, DSparkModel
from hf_specdecpp.draft_kinds.draft_kind import Config, Parts, StoredKind, pinned
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead, Calibration
from hf_specdecpp.estimation.estimators import MODES
from hf_specdecpp.files import CHECKPOINT, Repository, Weights, read_fields, save_tensors, save_text
from hf_specdecpp.models.causal_lm import CausalLM, num_embeddings
from hf_specdecpp.models.loading import outside
from hf_specdecpp.models.quantised import is_quantised, sizes_of
from hf_specdecpp.models.target_states import FINAL
from hf_specdecpp.serving import AS_DSPARK, TEMPERATURES, Destination, Exported, commands_for

ORIGINAL = {"reader.fc.weight": "fc.weight", "reader.norm.weight": "hidden_norm.weight"}
# Patterns from names in a file to names in `DFlashModel`. Example: `encoder.output_norm_enc.weight` becomes
# `reader.norm.weight`.
RENAMED = (
    (r"^(model|logit_head)\.", ""),
    (r"^(encoder\.)?fc\.", "reader.fc."),
    (r"^(hidden_norm|encoder\.output_norm_enc)\.", "reader.norm."),
)
# Not read: buffers, and the target's norm, which speculators stores for training.
IGNORED = r"rotary_emb\.(inv_freq|original_inv_freq)$|^verifier_norm\.weight$"
HEADS = (
    "With a head that is known before a candidate is drawn (specdecpp train --head-only) it is exported as a DSpark "
    "draft; other heads read the candidate or its state, which engines do not have when they ask"
)


class DFlash(StoredKind):
    """Draft a block of candidates with one forward pass that reads the target's hidden states. Published drafts
    (`config.draft_id`) are in the original format (z-lab), transformers' or that of speculators."""

    name = "dflash"
    own_file, own_field = "dflash.safetensors", "dflash"
    unserved = (
        "This assistant drafts with DFlash blocks that were trained here: their first row proposes, too, no row sees a "
        "later one, and engines have not been tried with such blocks, so nothing is exported. They serve EAGLE-3 "
        "drafts: specdecpp train --draft eagle3."
    )
    own_layers = serves_heads = True
    cannot = {
        "late verdicts": "judges the state at a candidate, which a block does not read",
        "draft vocabulary": "a block has the target's own LM head, so it proposes all tokens",
        "be trained": "blocks are not trained here any more, as a trained one was slower than a single layer. Name the "
        "repository of a published DFlash draft, or train draft='conditioned' or draft='eagle3'",
    }
    belongs = (
        "It takes the target's own embeddings and LM head, so it works with the target that it was trained for alone: "
        "load that one, or a draft of this one."
    )
    title, renamed, ignored = "DFlash draft", RENAMED, IGNORED
    unsaid = "which row of a block proposes the first candidate (sample_from_anchor)"
    settings_class = DFlashSettings
    model_class: ClassVar[type[DFlashModel]] = DFlashModel
    drafter: ClassVar[type[DFlashDraft]] = DFlashDraft
    served_by = f"vLLM, SGLang and llama.cpp (converted) serve its own repository, with the method dflash. {HEADS}"

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        name = self.title.removesuffix(" draft")
        return f"{name} {pinned(config)}" if config.draft_id else f"{name} blocks, which read states of {target}"

    def recognises(self, raw: Config) -> bool:
        names = f"{raw.get('architectures')} {raw.get(SPECULATORS)}".lower()
        is_called_so = any(name in names for name in ("dflash", "domino"))
        return "dflash_config" in raw or is_called_so or set(raw) >= config_dflash.OF_TRANSFORMERS

    def original(self, name: str) -> str:
        return ORIGINAL.get(name, name)

    def fields(self, raw: Config) -> dict[str, Any]:
        """Return `target_id` (or `None`), and `vocab_size`, which transformers compares with the target's."""
        return {"target_id": target_of(raw), "vocab_size": read_block(raw, self.name).layer.get("vocab_size")}

    def read(self, raw: Config, tensors: Mapping[str, Tensor], source: str) -> Any:
        if config_dflash.fields_of(raw).get("rope_is_neox_style") is False:
            size = read_block(raw, self.name).layer_config().head_dim
            tensors = {name: in_halves(name, tensor, size) for name, tensor in tensors.items()}
        if config_dflash.GEMMA4 in config_dflash.architectures(raw) and raw.get("attention_k_eq_v"):
            keys = {name: tensor for name, tensor in tensors.items() if name.endswith(".k_proj.weight")}
            tensors = {**{name.replace("k_proj", "v_proj"): key.clone() for name, key in keys.items()}, **tensors}
        return super().read(raw, tensors, source)

    def settings_of(self, raw: Config, named: Mapping[str, Tensor], source: str) -> DFlashSettings:
        return config_dflash.read_settings(raw, named, self.name)

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

    def readings(self, module: Any, target: CausalLM) -> dict[str, DFlashSettings]:
        """As in `StoredKind`: with both values of `samples_anchor`, unless the config determines it (`says_layout`)."""
        settings = module.settings
        if settings.says_layout or settings.block_size < 2:
            return {"": settings}
        usual = settings.samples_anchor
        return {ROWS[row]: replace(settings, samples_anchor=row, says_layout=True) for row in (usual, not usual)}

    def export(self, config: SpecDecPPConfig, parts: Parts, to: Destination) -> Exported:
        """As in `DraftKind`: write the published draft as a DSpark checkpoint whose confidence head is the assistant's
        head (`inputs="path"`), and for SGLang the temperatures of its calibration.

        The draft's tensors are copied. A DFlash draft also gets a Markov head of zeros, which changes no logits:
        engines load no confidence head without one."""
        source, settings, head = Repository(str(config.draft_id), config.draft_revision), parts.module.settings, to.head
        raw = read_fields(source.file("config.json"), self.most_config_bytes)
        if raw.get("model_type") == TRANSFORMERS or settings.reads != sorted(set(settings.reads)):
            raise ValueError(
                f"The draft is of model_type {raw.get('model_type')!r} and reads layers {settings.reads}. Engines read "
                "DSpark drafts in the format of z-lab or speculators, whose layers ascend, so nothing is exported. "
                "Look for the draft in another format."
            )
        named = self.here(Weights.of(source).all(), source.full_name)
        written = {self.original(name): named[name] for name in named if not name.startswith(CONFIDENCE)}
        size, vocab_size = settings.layer["hidden_size"], settings.layer["vocab_size"]
        if f"{MARKOV}w1.weight" not in written:
            like = written["fc.weight"]
            written[f"{MARKOV}w1.weight"] = like.new_zeros(vocab_size, RANK)
            written[f"{MARKOV}w2.weight"] = like.new_zeros(settings.draft_vocab_size or vocab_size, RANK)
        rank = written[f"{MARKOV}w1.weight"].shape[1]
        weight, bias, temperatures = fold(head, settings.places)
        # llama.cpp reads no head without inputs for the Markov embedding.
        written[f"{CONFIDENCE}proj.weight"] = functional.pad(weight, (0, size + rank - weight.shape[1]))
        written[f"{CONFIDENCE}proj.bias"] = bias
        fields = {
            "block_size": settings.block_size,
            "mask_token_id": settings.mask_token_id,
            "sample_from_anchor": settings.samples_anchor,
            "markov_rank": rank,
            "markov_head_type": settings.markov_head,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        save_tensors(written, to.folder / CHECKPOINT)
        save_text(json.dumps({"temperatures": temperatures}) + "\n", to.folder / TEMPERATURES)
        described = config_of(raw, fields, settings.reads)
        save_text(json.dumps(described, indent=2) + "\n", to.folder / "config.json")
        return Exported(commands_for(replace(to, num_tokens=settings.places), AS_DSPARK), [NOTE])

    def misfit(self, module: DFlashModel, target: CausalLM) -> str | None:
        config, settings = target.config.get_text_config(decoder=True), module.settings
        depth, width = config.num_hidden_layers, module.reader.hidden_size
        known = num_embeddings(target) if module.embed_tokens is None else module.embed_tokens.num_embeddings
        theirs = target.get_input_embeddings().weight.shape[1], sizes_of(target.get_output_embeddings())[0]
        if not width == theirs[0] == theirs[1] == config.hidden_size:
            sizes = f"{theirs[0]}, {config.hidden_size}, {theirs[1]}"
            return f"is {width} wide, and embeddings, states and LM head are {sizes}"
        if settings.num_target_layers not in (None, depth):
            return f"was made for {settings.num_target_layers} layers, and there are {depth}"
        if max(settings.reads) >= depth:
            return f"reads layers {settings.reads}, counted from 0, and there are {depth}"
        if settings.mask_token_id >= known:
            return f"has the mask token {settings.mask_token_id}, and there are {known} embeddings"
        return outside(settings.layer.get("vocab_size"), target)

    def adapt(self, module: DFlashModel, target: CausalLM) -> None:
        config = target.config.get_text_config(decoder=True)
        # Copies of the target's weights, as in files of `speculators`, are dropped to save memory.
        theirs = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
        for name, part in theirs.items():
            own = getattr(module, name)
            if own is None or is_quantised(part) or own.weight.shape != part.weight.shape:
                continue
            if torch.equal(own.weight, part.weight.to(own.weight)):
                setattr(module, name, None)
        module.settings = settings = replace(
            module.settings, own_embeddings=module.embed_tokens is not None, own_head=module.lm_head is not None
        )
        if settings.scales_as_target:
            multiplier, cap = (getattr(config, name, None) for name in ("output_multiplier", "final_logit_softcapping"))
            module.settings = replace(settings, output_multiplier=multiplier or 1.0, logit_cap=cap)
        final = config.num_hidden_layers - 1 if settings.reads_normed else None
        module.reader.reads = [FINAL if read == final else read for read in settings.reads]


ROWS = {True: "the row of the last token", False: "the row after that of the last token"}


def in_halves(name: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Return a tensor of a LiquidAI draft; if by its name it belongs to queries or keys, with rows in Qwen3's order:
    LiquidAI rotates pairs of neighbouring dimensions of a head, Qwen3 pairs that are half a head apart.

    Example: a head's dimensions 0 1 2 3 4 5 become 0 2 4 1 3 5."""
    is_rotated = re.search(r"\.self_attn\.[qk]_(proj|norm)\.", name) is not None
    if not is_rotated or not tensor.dim() or head_dim % 2 or tensor.shape[0] % head_dim:
        return tensor
    return tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


class DSpark(DFlash):
    """Draft with a DFlash block whose candidates depend on the token before (a Markov head). Reads published drafts of
    DeepSpec, speculators, SpecForge, LiquidAI and openbmb, and DeepSpec's DFlash drafts without such a head."""

    name = "dspark"
    title = "DSpark draft"
    model_class: ClassVar[type[DFlashModel]] = DSparkModel
    served_by = f"vLLM, SGLang and llama.cpp (converted) serve its own repository, with the method dspark. {HEADS}"

    def recognises(self, raw: Config) -> bool:
        parts = [raw, *(raw[name] for name in NESTED if isinstance(raw.get(name), Mapping))]
        words = [raw.get("architectures"), raw.get(SPECULATORS), *(part.get("projector_type") for part in parts)]
        is_called_so = any("dspark" in str(word).lower() for word in words)
        has_markov = any(part.get("markov_rank") for part in parts)
        return is_called_so or has_markov or any(name.startswith("dspark_") for name in raw)


# For other engines. ---------------------------------------------------------------------------------------------------

RANK = 8  # of a Markov head of zeros
NAMED = {"architectures": ["DSparkDraftModel"]}
MARKOV, CONFIDENCE = "markov_head.markov_", "confidence_head."
NOTE = (
    "The confidence head decides how many candidates are verified: with enable_adaptive_verification (vLLM), "
    f"SGLANG_RAGGED_VERIFY_MODE and a temperature for each place in {TEMPERATURES} (SGLang), or --spec-draft-p-min, "
    "the least confidence, which has to be tuned (llama.cpp). The calibration learned while generating stays here."
)


def config_of(raw: Config, fields: dict[str, Any], reads: list[int]) -> dict[str, Any]:
    """Return the `config.json` of an exported DSpark draft: the published config `raw` with `fields` at the top level,
    where SGLang's modules look. In the original format the target's layers `reads` are added to the fields, and all are
    repeated in `dflash_config`, where SGLang's settings look."""
    if SPECULATORS in raw:
        named = {**mapping(raw, "speculators_config"), "algorithm": "dspark"}
        return {**raw, **fields, **NAMED, SPECULATORS: "dspark", "speculators_config": named}
    fields = {**fields, "target_layer_ids": reads}
    parts = {name: {**mapping(raw, name), **fields} for name in NESTED if raw.get(name)}
    parts["dflash_config"] = {**parts.get("dflash_config", fields), "projector_type": "dspark"}
    own = {} if "DSpark" in str(raw.get("architectures")) else NAMED
    return {**raw, **fields, **own, **parts}


def fold(head: Any, places: int) -> tuple[Tensor, Tensor, list[float]]:
    """Convert `head` (`inputs="path"`) with its calibration to a DSpark confidence head: return weight, bias, and a
    temperature for each of `places` candidates. Weight and bias include the bias and the geometric mean temperature of
    the calibration (for sampled targets, if it has one); the temperatures are divided by that mean."""
    known = [head.calibration[mode] for mode in MODES if mode in head.calibration]
    calibration = known[0] if known else Calibration()
    found = [calibration.temperatures[min(place, len(calibration.temperatures) - 1)] for place in range(places)]
    mean = math.exp(sum(map(math.log, found)) / places)
    weight, bias = (each.detach().cpu().float() for each in (head.output.weight, head.output.bias))
    return weight / mean, (bias + calibration.bias) / mean, [each / mean for each in found]
