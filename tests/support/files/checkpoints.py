"""Files of drafts that others trained: their layers, written, changed, spread over several."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.targets.formulas import EPSILON

WEIGHTS = "model.safetensors"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 4, 2, 8, 48  # of the layers of drafts


class Numbers:
    """Random tensors in float64, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64) * 0.3

    def norm(self, size: int) -> Tensor:
        return 1 + self.random(size)

    def layer(self, name: str, inputs: int = HIDDEN, head_dim: int = HEAD_DIM, norms: bool = True) -> dict[str, Tensor]:
        """A decoder layer, whose attention reads `inputs` numbers, and by `norms` normalises queries and keys."""
        attention, width, kv = f"{name}.self_attn", HEADS * head_dim, KV_HEADS * head_dim
        rows = {"q": width, "k": kv, "v": kv}
        found = {f"{attention}.{part}_proj.weight": self.random(count, inputs) for part, count in rows.items()}
        found[f"{attention}.o_proj.weight"] = self.random(HIDDEN, width)
        found |= {f"{attention}.{part}_norm.weight": self.norm(head_dim) for part in "qk" if norms}
        for part, shape in (("gate", (MLP, HIDDEN)), ("up", (MLP, HIDDEN)), ("down", (HIDDEN, MLP))):
            found[f"{name}.mlp.{part}_proj.weight"] = self.random(*shape)
        return found | {f"{name}.{norm}_layernorm.weight": self.norm(HIDDEN) for norm in ("input", "post_attention")}


def layer_config(num_layers: int, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """What a config says of such layers."""
    return {
        "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": num_layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": head_dim, "hidden_act": "silu", "rms_norm_eps": EPSILON,
        "max_position_embeddings": 2048,
    }  # fmt: skip


def written(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """The folder with both files; what is `...` in the config is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def edited(folder: Path, **changed: Any) -> Path:
    """Its tensors with these in the place of what was there; `None` leaves one out. `d2t` stands for itself."""
    tensors: dict[str, Any] = {**load_file(folder / WEIGHTS), **changed}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS, {"format": "pt"})  # transformers asks for that
    return folder


def in_shards(folder: Path, last: str = "$^") -> Path:
    """Two files and an index in the place of one, and a third of the tensors whose names match `last`.

    Example: of `a.0`, `b` and `c` the first file has `a.0` and `c`, and with `last=r"a\\.\\d"` the third has `a.0`."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    apart = {name for name in tensors if re.search(last, name)}
    shards = [sorted(tensors.keys() - apart)[place::2] for place in (0, 1)] + [sorted(apart)] * bool(apart)
    files = [f"model-{place:05}-of-{len(shards):05}.safetensors" for place in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
    where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder
