"""The files of a repository that others trained an EAGLE-3 draft in."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import Tensor

from hf_specdecpp.files import INDEX, Repository, load_shards, load_tensors, shards_of

CHECKPOINT, PICKLE = "model.safetensors", "pytorch_model.bin"


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of those that an index names."""
    return load_shards(path) if path.name == INDEX else load_tensors(path)


def find_weights(source: Repository) -> Path:
    """The file with a draft's weights, or the index of several, all of them downloaded if need be."""
    try:
        return source.file(CHECKPOINT)
    except LocalEntryNotFoundError:  # it may be there, but cannot be reached
        raise
    except (FileNotFoundError, EntryNotFoundError):
        pass
    try:
        index = source.file(INDEX)
    except (FileNotFoundError, EntryNotFoundError) as error:
        raise ValueError(
            f"{source.name!r} has no {CHECKPOINT}. EAGLE's own repositories have {PICKLE}, a pickle, which could run "
            "code and is never opened here. Convert it once, tensors only: "
            f"specdecpp inspect {source.name} --convert FOLDER. Then load FOLDER."
        ) from error
    for shard in shards_of(index):
        source.file(shard)
    return index
