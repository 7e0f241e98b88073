"""Convert a released SpecDec++ head into an assistant's repository, and a pickle of weights into safetensors.

The original code uses one object for all D blocks, so that its tensors are stored D times (`pytorch_model.bin`), or
once, with aliases in the metadata (safetensors). A fork has D distinct blocks. Only this module opens pickles, and only
with `weights_only=True`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_specdecpp import files
from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.draft_kinds.draft_kind import PublishedKind
from hf_specdecpp.draft_kinds.known import recognise
from hf_specdecpp.estimation.acceptance_head import MOST_BLOCKS, AcceptanceHead
from hf_specdecpp.files import CHECKPOINT, PICKLE
from hf_specdecpp.hub.repository import CONFIG, HEAD
from hf_specdecpp.version import __version__

PATTERNS = [CONFIG, CHECKPOINT, PICKLE]  # files to download
PARTS = ("weight", "bias")  # of a block


def convert(folder: Path, out: Path, **models: str | None) -> None:
    """Convert the SpecDec++ head, or the published draft, in `folder` into the new folder `out`. `ValueError` if a file
    is damaged, unsafe or neither of these; `OSError` if a file is missing, or `out` has a `config.json` already.

    `models`, only for heads: `draft_id`, `draft_revision`, `target_id` and `target_revision` that the head was trained
    with. Without `draft_id` only the head can be loaded (`repository.load_head`), not the assistant."""
    if (out / CONFIG).exists():
        raise FileExistsError(f"{out} already has a {CONFIG}, which would be overwritten. Choose a new folder.")
    raw: Any = files.read_json(folder / CONFIG, files.MOST_CONFIG_BYTES) if (folder / CONFIG).is_file() else None
    is_ours = not isinstance(raw, dict) or raw.get("model_type") == SpecDecPPConfig.model_type
    kind = None if is_ours else recognise(raw)
    if isinstance(kind, PublishedKind):
        if any(models.values()):
            raise ValueError(f"{folder} has a draft: --draft and --target are for SpecDec++ heads. Leave them out.")
        _convert_draft(kind, raw, folder, out)
        return
    head = read_released_head(folder)
    config = SpecDecPPConfig(
        **models,  # type: ignore[arg-type]
        head=head.to_config(),
        speculation=SpeculationConfig(rule="threshold").to_dict(),  # as in the paper
        specdecpp_version=__version__,
        architectures=["SpecDecPPAssistant"],
    )
    out.mkdir(parents=True, exist_ok=True)
    files.save_tensors(head.state_dict(), out / HEAD)
    files.save_text(config.to_json_string(), out / CONFIG)  # last: a config marks the folder as complete


def _convert_draft(kind: PublishedKind, raw: dict[str, Any], folder: Path, out: Path) -> None:
    """Write the tensors of a draft's pickle to a safetensors file, and copy its config."""
    path = folder / PICKLE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {PICKLE}, so there is nothing to convert. Safetensors files need no conversion: use "
            "SpecDecPPAssistant.from_pretrained."
        )
    tensors = {name: tensor.detach().clone() for name, tensor in _load_pickle(path).items()}  # some share memory
    files.check_finite(tensors, path)
    kind.read(raw, tensors, str(path))
    out.mkdir(parents=True, exist_ok=True)
    files.save_tensors(tensors, out / CHECKPOINT)
    files.save_text((folder / CONFIG).read_text(encoding="utf-8"), out / CONFIG)


def read_released_head(folder: Path) -> AcceptanceHead:
    """Read the released SpecDec++ head in `folder`. Its blocks are tied if their tensors are equal, or if the metadata
    of a safetensors file has aliases for all blocks. `ValueError` if a file is damaged, unsafe or not such a head,
    `FileNotFoundError` if `folder` has no config or no weights."""
    size, depth = _read_sizes(folder / CONFIG)
    path = _find_weights(folder)
    tensors = _load_pickle(path) if path.name == PICKLE else files.load_tensors(path)
    if path.name != PICKLE:  # add the aliases of tensors that are stored once
        with safe_open(path, framework="pt") as file:
            names: dict[str, str] = file.metadata() or {}
        tensors = {**{alias: tensors[name] for alias, name in names.items() if name in tensors}, **tensors}
    with torch.device("meta"):
        expected = {_released(name, depth): tensor for name, tensor in AcceptanceHead(size, depth).state_dict().items()}
    wanted = {name: list(tensor.shape) for name, tensor in expected.items()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items() if tensor.is_floating_point()}
    if differing := sorted(name for name in wanted | found if wanted.get(name) != found.get(name)):
        first = differing[0]
        raise ValueError(
            f"{path} does not fit its {CONFIG} (hidden_size={size}, num_layers={depth}) in {', '.join(differing[:12])}:"
            f" {first} has the shape {found.get(first, 'of no floating point tensor')}, and should have "
            f"{wanted.get(first, 'none')}. The two files do not belong together, or this is not a SpecDec++ head."
        )
    tensors = {name: tensor.detach().float() for name, tensor in tensors.items()}
    files.check_finite(tensors, path)
    parts = [torch.stack([tensors[f"model.{i}.linear.{part}"] for i in range(depth)]) for part in PARTS if depth]
    head = AcceptanceHead(size, depth, depth > 1 and all(bool((part == part[0]).all()) for part in parts))
    head.load_state_dict({name: tensors[_released(name, depth)] for name in head.state_dict()})
    return head


def _released(name: str, depth: int) -> str:
    """The released format's name of a tensor of a head with `depth` blocks: "model.0.x" for our "blocks.0.x"."""
    return name.replace("blocks.", "model.").replace("output.", f"model.{depth}.")


def _read_sizes(path: Path) -> tuple[int, int]:
    """Return `hidden_size` and `num_layers` of the config of a released head. `ValueError` if they are invalid."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, which has the head's size. Download the whole repository.")
    config = files.read_json(path, files.MOST_CONFIG_BYTES)
    if isinstance(config, dict) and config.get("model_type") == SpecDecPPConfig.model_type:
        raise ValueError(f"{path} is in the format of hf_specdecpp already and needs no conversion.")
    size, depth = (config.get(key) if isinstance(config, dict) else None for key in ("hidden_size", "num_layers"))
    if type(size) is not int or type(depth) is not int or size < 1 or not 0 <= depth <= MOST_BLOCKS:
        raise ValueError(
            f"{path} has hidden_size={size!r} and num_layers={depth!r}; a released SpecDec++ head has a whole number "
            f"for each, at least 1 and from 0 to {MOST_BLOCKS}. This is not such a head, or its config is damaged."
        )
    return size, depth


def _find_weights(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    weights = [path for path in found if path.name == CHECKPOINT] or found or [folder / PICKLE]
    if len(weights) > 1:
        names = ", ".join(path.name for path in weights)
        raise ValueError(f"{folder} has several safetensors files ({names}); a head is one. Keep only the head's.")
    if not weights[0].is_file():
        raise FileNotFoundError(f"{folder} has no safetensors file and no {PICKLE}, so there is no head to convert.")
    return weights[0]


def _load_pickle(path: Path) -> dict[str, Tensor]:
    files.refuse_pointer(path)
    try:
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - damaged or malicious pickles raise errors of any class
        lines = [line for line in str(error).splitlines() if "GLOBAL" in line or "corrupted" in line]
        raise ValueError(
            f"{path} is damaged or holds more than tensors, which can be code, so it was refused and nothing in it was "
            f"run ({type(error).__name__}: {lines[0] if lines else 'not readable'}). Download it again, or ask its "
            "author for a safetensors file."
        ) from None
    values = tensors.values() if isinstance(tensors, dict) else [None]
    if not all(isinstance(t, Tensor) and t.layout is torch.strided and t.device.type == "cpu" for t in values):
        raise ValueError(f"{path} contains objects other than named tensors, so it cannot be converted.")
    return {str(name): tensor for name, tensor in tensors.items()}
