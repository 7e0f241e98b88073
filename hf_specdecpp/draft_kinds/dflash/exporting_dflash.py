"""Write a DFlash or DSpark draft with a confidence head of this package as a DSpark checkpoint for other engines.

The draft's tensors are copied. A DFlash draft also gets a Markov head, since engines load no confidence head without
one. It consists of zeros, so that logits and q stay the same.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from hf_specdecpp.draft_kinds.checkpoints import SPECULATORS, mapping
from hf_specdecpp.draft_kinds.dflash.config_dflash import TRANSFORMERS, DFlashSettings
from hf_specdecpp.draft_kinds.draft_kind import Config, Tensors
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead, Calibration
from hf_specdecpp.estimation.estimators import MODES
from hf_specdecpp.files import CHECKPOINT, save_tensors, save_text
from hf_specdecpp.serving import AS_DSPARK, TEMPERATURES, Destination, Exported, commands_for

RANK = 8  # of a Markov head of zeros
NAMED = {"architectures": ["DSparkDraftModel"]}
MARKOV, CONFIDENCE = "markov_head.markov_", "confidence_head."
NOTE = (
    "The confidence head decides how many candidates are verified: with enable_adaptive_verification (vLLM), "
    f"SGLANG_RAGGED_VERIFY_MODE and a temperature for each place in {TEMPERATURES} (SGLang), or --spec-draft-p-min, "
    "the least confidence, which has to be tuned (llama.cpp). The calibration learned while generating stays here."
)


def write_dspark(raw: Config, tensors: Tensors, settings: DFlashSettings, to: Destination) -> Exported:
    """Write the checkpoint, and for SGLang the temperatures of the head's calibration.

    Args:
        raw, tensors: the published config, and the tensors by their names in the original format.
        settings: those of the draft.
        to: the folder, and a head with `inputs="path"`.

    Raises:
        ValueError: engines read no DSpark draft of this form.
    """
    head: Any = to.head
    if raw.get("model_type") == TRANSFORMERS or settings.reads != sorted(set(settings.reads)):
        raise ValueError(
            f"The draft is of model_type {raw.get('model_type')!r} and reads layers {settings.reads}. Engines read "
            "DSpark drafts in the format of z-lab or speculators, whose layers ascend, so nothing is exported. Look "
            "for the draft in another format."
        )
    size, vocab_size = settings.layer["hidden_size"], settings.layer["vocab_size"]
    written = {name: tensor for name, tensor in tensors.items() if not name.startswith(CONFIDENCE)}
    if f"{MARKOV}w1.weight" not in written:
        like = written["fc.weight"]
        written[f"{MARKOV}w1.weight"] = like.new_zeros(vocab_size, RANK)
        written[f"{MARKOV}w2.weight"] = like.new_zeros(settings.draft_vocab_size or vocab_size, RANK)
    folded, temperatures = fold(head, settings.places)
    rank = written[f"{MARKOV}w1.weight"].shape[1]
    weight = folded[f"{CONFIDENCE}proj.weight"]  # llama.cpp reads no head without inputs for the Markov embedding
    folded[f"{CONFIDENCE}proj.weight"] = functional.pad(weight, (0, size + rank - weight.shape[1]))
    fields = {
        "block_size": settings.block_size,
        "mask_token_id": settings.mask_token_id,
        "sample_from_anchor": settings.samples_anchor,
        "markov_rank": rank,
        "markov_head_type": getattr(settings, "markov_head", "vanilla"),
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    save_tensors(written | folded, to.folder / CHECKPOINT)
    save_text(json.dumps({"temperatures": temperatures}) + "\n", to.folder / TEMPERATURES)
    described = config_of(raw, fields, settings.reads)
    save_text(json.dumps(described, indent=2) + "\n", to.folder / "config.json")
    return Exported(commands_for(replace(to, num_tokens=settings.places), AS_DSPARK), [NOTE])


def config_of(raw: Config, fields: dict[str, Any], reads: list[int]) -> dict[str, Any]:
    """Return the published config `raw` with DSpark's `fields` at the top level, for SGLang's modules. In the original
    format the layers `reads` are added to these fields, and all are repeated in `dflash_config`, for SGLang's settings.
    """
    if SPECULATORS in raw:
        named = {**mapping(raw, "speculators_config"), "algorithm": "dspark"}
        return {**raw, **fields, **NAMED, SPECULATORS: "dspark", "speculators_config": named}
    fields = {**fields, "target_layer_ids": reads}
    parts = {name: {**mapping(raw, name), **fields} for name in ("dflash_config", "dspark_config") if raw.get(name)}
    parts["dflash_config"] = {**parts.get("dflash_config", fields), "projector_type": "dspark"}
    own = {} if "DSpark" in str(raw.get("architectures")) else NAMED
    return {**raw, **fields, **own, **parts}


def fold(head: AcceptanceHead, places: int) -> tuple[Tensors, list[float]]:
    """Return the tensors of a DSpark confidence head, and a temperature for each of `places` candidates. The tensors
    include the bias and the geometric mean temperature of the head's calibration (that for sampled targets, if it has
    one); the temperatures are divided by that mean."""
    known = [head.calibration[mode] for mode in MODES if mode in head.calibration]
    calibration = known[0] if known else Calibration()
    found = [calibration.temperatures[min(place, len(calibration.temperatures) - 1)] for place in range(places)]
    mean = math.exp(sum(map(math.log, found)) / places)
    weight, bias = head.output.weight.detach().cpu() / mean, (head.output.bias.detach().cpu() + calibration.bias) / mean
    tensors = {f"{CONFIDENCE}proj.weight": weight, f"{CONFIDENCE}proj.bias": bias}
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}, [each / mean for each in found]
