"""The complete repository of an assistant, written by hand: no model is needed to check files."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from hf_specdecpp import AcceptanceHead, SpecDecPPConfig
from hf_specdecpp.files import save_tensors
from hf_specdecpp.version import __version__

FILES = [
    "acceptance_head.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "config.json",
    "draft_vocab.safetensors",
]  # fmt: skip


def write_assistant(folder: Path, **changed: Any) -> Path:
    """A complete repository: head, adapter and draft vocabulary."""
    head = AcceptanceHead(8, num_blocks=2)
    LoraConfig(r=2, target_modules=["v_proj", "q_proj"]).save_pretrained(str(folder / "adapter"))
    place = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    matrices = {f"{place}_A.weight": torch.ones(2, 8), f"{place}_B.weight": torch.ones(8, 2)}
    save_tensors(matrices, folder / "adapter/adapter_model.safetensors")
    save_tensors(head.state_dict(), folder / "acceptance_head.safetensors")
    save_tensors({"token_ids": torch.arange(10)}, folder / "draft_vocab.safetensors")
    values: dict[str, Any] = {
        "target_id": "org/target", "target_revision": "a" * 40, "draft_id": "org/draft", "draft_revision": "b" * 40,
        "adapter": True, "head": head.to_config(), "draft_vocab_size": 10, "vocab_size": 16,
        "specdecpp_version": __version__,
    }  # fmt: skip
    SpecDecPPConfig(**{**values, **changed}).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
