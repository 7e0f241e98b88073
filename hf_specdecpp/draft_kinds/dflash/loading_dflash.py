"""DFlash drafts (`DFlash`): read the files, whose tensor names depend on the format, bind a draft to its target, and
export DFlash and DSpark drafts with a confidence head to other engines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.draft_kinds.checkpoints import SPECULATORS, mapping, own_modules, target_of
from hf_specdecpp.draft_kinds.dflash.config_dflash import OF_TRANSFORMERS, TRANSFORMERS, DFlashSettings, read_settings
from hf_specdecpp.draft_kinds.dflash.modeling_dflash import DFlashDraft, DFlashModel
from hf_specdecpp.draft_kinds.draft_kind import Config, Parts, StoredKind, pinned
from hf_specdecpp.estimation.acceptance_head import Calibration
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
        return "dflash_config" in raw or is_called_so or set(raw) >= OF_TRANSFORMERS

    def original(self, name: str) -> str:
        return ORIGINAL.get(name, name)

    def fields(self, raw: Config) -> dict[str, Any]:
        """Return `target_id` (or `None`), and `vocab_size`, which transformers compares with the target's."""
        return {"target_id": target_of(raw), "vocab_size": self.block_of(raw).layer.get("vocab_size")}

    def block_of(self, raw: Config) -> DFlashSettings:
        """Read the settings of the block from a published config, without its tensors; `ValueError` if damaged."""
        return read_settings(raw)

    def settings_of(self, raw: Config, named: Mapping[str, Tensor], source: str) -> DFlashSettings:
        block = self.block_of(raw)
        return replace(block, **own_modules(named, block.draft_vocab_size, block.layer.get("vocab_size")))

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
            "markov_head_type": getattr(settings, "markov_head", "vanilla"),
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
    parts = {name: {**mapping(raw, name), **fields} for name in ("dflash_config", "dspark_config") if raw.get(name)}
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
