"""Files of drafts that others trained: written, changed, spread over several."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


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
