"""Targets with a draft of every kind, whose rounds are captured whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import RETURNS_CHOSEN
from support.files import dspark_files
from support.files.dflash_files import VARIANTS, Checkpoint, assisted, target_for
from support.files.gemma4_files import VARIANTS as GEMMA4
from support.files.gemma4_files import target_for as gemma4_target
from support.files.mtp_files import dense
from support.targets.models import assistant_of, configured, prompt, quiet_later_layers, tiny

Made = tuple[CausalLM, SpecDecPPAssistant]
TREE: dict[str, Any] = {"rule": "fixed", "tree": "dyspec", "tree_budget": 15}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 9, "min_p": 0.01}
KINDS = ["independent", "pard", "early_exit", "conditioned", "eagle3", "mtp 1", "mtp 3", "gemma 4"] + [
    "dflash windows", "dflash windows alone", "dspark deepspec, rnn", "dspark speculators, rnn", "dspark liquid",
    "dspark gemma4",
] * RETURNS_CHOSEN  # fmt: skip


def dflash(checkpoint: Checkpoint, device: str = "cpu", **settings: Any) -> Made:
    target = target_for().to(device)
    return target, assisted(target, checkpoint, **settings)


def mtp(folder: Path, num_layers: int, device: str = "cpu", **settings: Any) -> Made:
    target = dense(num_layers).load(folder).to(device)
    return target, assist(target, "mtp", speculation=SpeculationConfig(**settings), default=False)


def made(kind: str, folder: Path, device: str = "cpu", **settings: Any) -> Made:
    """A target in float64 with a draft of one of `KINDS`."""
    if kind.startswith("dflash"):
        return dflash(replace(VARIANTS[kind.removeprefix("dflash ")], block_size=7), device, **settings)
    if kind.startswith("dspark"):
        target = dspark_files.target_for().to(device)
        draft = replace(dspark_files.VARIANTS[kind.removeprefix("dspark ")], block=7).save(folder)
        return target, configured(SpecDecPPAssistant.from_pretrained(draft, target=target), **settings)
    if kind == "gemma 4":
        target, draft = gemma4_target().to(device), GEMMA4["plain"].theirs().to(device)
        return target, SpecDecPPAssistant.from_draft(draft, target=target, speculation=SpeculationConfig(**settings))
    if kind.startswith("mtp"):
        return mtp(folder, int(kind[-1]), device, **settings)
    target = quiet_later_layers(tiny("llama")).to(device)
    return target, assistant_of(kind, target, **settings)


def batch(rows: int, shortest: int = 4, vocab: int = 48, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Prompts of other lengths, padded on the left, and their mask."""
    texts = [1 + prompt(shortest + 3 * (row % 3), seed=row)[0] % (vocab - 1) for row in range(rows)]
    longest = max(map(len, texts))
    ids = torch.stack([torch.nn.functional.pad(each, (longest - len(each), 0)) for each in texts])
    mask = torch.stack([torch.arange(longest) >= longest - len(each) for each in texts]).long()
    return ids.to(device), mask.to(device)


def together(target: CausalLM, assistant: Any, ids: Tensor, mask: Tensor, **how: Any) -> Any:
    """The texts of a batch, under one seed."""
    torch.manual_seed(0)
    defaults = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    return target.generate(ids, attention_mask=mask, assistant_model=assistant, **{**defaults, **how})
