"""Published drafts that get a head which is known before a draw, and are exported with that."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.models.causal_lm import CausalLM
from support.files import dflash_files, dspark_files

DFLASH, DSPARK = dflash_files.Checkpoint(reads=(0, 1, 2)), dspark_files.Checkpoint()
DRAFTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "DFlash": (DFLASH, {}), "DFlash, first row": (replace(DFLASH, samples_anchor=True), {}),
    "DFlash of speculators": (DFLASH, {"dialect": "speculators"}),
    **{dialect: (replace(DSPARK, dialect=dialect), {}) for dialect in dspark_files.DIALECTS},
    "plain of DeepSpec": (replace(DSPARK, rank=0, confidence="none"), {}),
    "gated, prefixed": (replace(DSPARK, head="gated", prefix="logit_head.", fills_in=True, says="field"), {}),
    "reduced": (replace(DSPARK, dialect="speculators", reduced=True, says="tokens"), {}),
}  # fmt: skip
CALIBRATION = {"sampled": {"bias": 0.4, "temperatures": [1.2, 0.7]}, "greedy": {"bias": 3.0, "temperatures": [9.0]}}


def random_head(size: int, **arguments: Any) -> AcceptanceHead:
    head = AcceptanceHead(size, inputs="path", calibration=CALIBRATION, **arguments)
    with torch.no_grad():
        head.output.weight.copy_(torch.randn(1, size, generator=torch.Generator().manual_seed(3)))
        head.output.bias.fill_(0.3)
    return head


def given_back(name: str, folder: Path, head: AcceptanceHead | None = None) -> tuple[SpecDecPPAssistant, CausalLM, Any]:
    """The draft with a random head, its target, and what `export` returned."""
    checkpoint, options = DRAFTS[name]
    target = (dflash_files if checkpoint.__class__ is dflash_files.Checkpoint else dspark_files).target_for()
    assistant = SpecDecPPAssistant.from_pretrained(checkpoint.save(folder / "draft", **options), target=target)
    assistant.head = head or random_head(assistant.ready_drafter().hidden_size)
    assistant.save_pretrained(folder / "assistant")
    return assistant, target, export(folder / "assistant", folder / "out", "org/target")
