"""The files of an assistant's repository: find them on the Hub or in a folder, check them, read them, write them.

safetensors only, loaded strictly; nothing here opens a pickle or runs code from a repository. A head without its draft:

    repository = Repository("org/head")
    head = load_head(repository, load_config(repository))
    assistant = SpecDecPPAssistant.from_draft(draft, head=head)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils.hub import extract_commit_hash

from hf_specdecpp.acceptance import AcceptanceHead
from hf_specdecpp.configuration import SpecDecPPConfig

CONFIG, HEAD, DRAFT_VOCAB, CARD = "config.json", "acceptance_head.safetensors", "draft_vocab.safetensors", "README.md"
ADAPTER_FOLDER = "adapter"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

HUB_KWARGS = ("token", "cache_dir", "local_files_only", "force_download")
# What Auto classes and pipelines add to a call of `from_pretrained`; none of it concerns an assistant.
AUTO_KWARGS = ("config", "trust_remote_code", "adapter_kwargs", "_from_auto", "_from_pipeline", "_commit_hash")


def check_hub_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments for downloads among `kwargs`.

    Raises:
        TypeError: an argument is neither for downloads nor added by an Auto class; ignoring it would hide a typo.
    """
    unknown = sorted(set(kwargs) - {*HUB_KWARGS, *AUTO_KWARGS})
    if unknown:
        raise TypeError(
            f"from_pretrained() got unexpected arguments {', '.join(unknown)}. It takes target, revision, subfolder, "
            f"dtype, device, speculation and, for downloads, {', '.join(HUB_KWARGS)}."
        )
    return {name: kwargs[name] for name in HUB_KWARGS if kwargs.get(name) is not None}


@dataclass
class Repository:
    """A Hub id or a local folder, and how to reach it.

    Args:
        name: repo id or folder.
        revision, subfolder: within the repo.
        hub_kwargs: passed to `huggingface_hub.hf_hub_download` (`token`, `cache_dir`, `local_files_only`, ...).
    """

    name: str
    revision: str | None = None
    subfolder: str | None = None
    hub_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        return Path(self.name).is_dir()

    def file(self, filename: str, folder: str | None = None) -> Path:
        """Local path of a file, downloaded if need be.

        Raises:
            FileNotFoundError: a local folder does not have it.
            huggingface_hub errors: as they are (missing entry or repo, gated, offline, ...).
        """
        subfolder = "/".join(part for part in (self.subfolder, folder) if part)
        if self.is_local:
            path = Path(self.name, subfolder, filename)
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing, so {self.name!r} is not a complete assistant. Download or save it again."
                )
            return path
        return Path(
            hf_hub_download(self.name, filename, subfolder=subfolder or None, revision=self.revision, **self.hub_kwargs)
        )

    def folder(self, patterns: list[str]) -> Path:
        """Local folder with at least the files that match `patterns`, downloaded if need be.

        Raises:
            FileNotFoundError: there is no such subfolder.
            huggingface_hub errors: as they are (missing repo, gated, offline, ...).
        """
        if self.is_local:
            root = Path(self.name)
        else:
            wanted = ["/".join(part for part in (self.subfolder, pattern) if part) for pattern in patterns]
            root = Path(snapshot_download(self.name, revision=self.revision, allow_patterns=wanted, **self.hub_kwargs))
        folder = root / (self.subfolder or "")
        if not folder.is_dir():
            raise FileNotFoundError(f"{self.name!r} has no folder {self.subfolder!r} with the files of an assistant.")
        return folder

    def commit(self, path: Path) -> str | None:
        """The commit hash that a downloaded file came from; `None` for a folder."""
        return None if self.is_local else extract_commit_hash(str(path), None)

    def adapter(self, folder: str | None = ADAPTER_FOLDER) -> Path:
        """Folder with both adapter files. peft would fall back to a pickle without the safetensors file; we do not."""
        paths = [self.file(name, folder) for name in ADAPTER_FILES]
        check_sound(paths[1])
        return paths[0].parent


def load_config(repository: Repository) -> SpecDecPPConfig:
    """The config of an assistant, with where it came from.

    Raises:
        ValueError: it is damaged, of a newer format, or not the config of an assistant.
    """
    path = repository.file(CONFIG)
    config = SpecDecPPConfig.from_dict(read_config(path))
    config._name_or_path = repository.name
    config._commit_hash = repository.commit(path)
    return config


def load_head(repository: Repository, config: SpecDecPPConfig) -> AcceptanceHead:
    """The acceptance head that `config.head` describes. Needs no draft model.

    Raises:
        ValueError: there is no head, its description makes no sense, or the file is damaged or does not fit it.
    """
    if config.head is None:
        raise ValueError(f"{repository.name!r} has no acceptance head, says its {CONFIG}. Load one that has.")
    try:
        head = AcceptanceHead(**config.head)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{CONFIG} describes no acceptance head that can be built: {error}") from None
    shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
    hint = f"It does not belong to the head that {CONFIG} describes, trained for draft {config.draft_name}."
    head.load_state_dict(load_strict(repository.file(HEAD), shapes, hint))
    return head


def load_draft_vocab(repository: Repository, config: SpecDecPPConfig) -> Tensor:
    """The token ids `[draft_vocab_size]` that the draft may propose.

    Raises:
        ValueError: the file is damaged or holds another number of ids.
    """
    hint = f"{CONFIG} promises {config.draft_vocab_size} token ids."
    shapes = {"token_ids": torch.Size([config.draft_vocab_size or 0])}
    return load_strict(repository.file(DRAFT_VOCAB), shapes, hint)["token_ids"]


def read_json(path: Path) -> Any:
    """Parse a JSON file; `ValueError` if it is none."""
    refuse_pointer(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Download or save it again.") from None


def read_config(path: Path) -> dict[str, Any]:
    """Parse a `config.json`.

    Raises:
        ValueError: it is not JSON, or not the config of an assistant.
    """
    config = read_json(path)
    if not isinstance(config, dict) or config.get("model_type") != "specdecpp":
        kind = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise ValueError(
            f"{path} has model_type {kind!r} and not 'specdecpp', so it is not of an hf_specdecpp assistant. To use an "
            "ordinary model as the draft: SpecDecPPAssistant.from_draft(...). To convert a released SpecDec++ head: "
            "specdecpp inspect FOLDER --convert OUT."
        )
    return config


def refuse_pointer(path: Path) -> None:
    """Raise `ValueError` if git left a pointer in the place of a large file."""
    with path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            raise ValueError(f"{path} is a git-LFS pointer, not the file itself. Run `git lfs pull` in its folder.")


def check_sound(path: Path) -> None:
    """Raise `ValueError` unless `path` is a complete safetensors file with finite numbers."""
    load_tensors(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU.

    Raises:
        ValueError: the file is a git-LFS pointer, truncated, not safetensors, or holds NaN or infinity.
    """
    refuse_pointer(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(
            f"{path} is incomplete or not a safetensors file ({error}). Delete it, or download it again with "
            "force_download=True."
        ) from None
    check_finite(tensors, path)
    return tensors


def check_finite(tensors: dict[str, Tensor], path: Path) -> None:
    """Raise `ValueError` naming the tensors of `path` that hold NaN or infinity."""
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise ValueError(f"{path} holds NaN or infinite values in {', '.join(broken)}, so it cannot be used.")


def load_strict(path: Path, expected: dict[str, torch.Size], hint: str) -> dict[str, Tensor]:
    """Tensors of `path`, which must have exactly the names and shapes of `expected`.

    Raises:
        ValueError: a name is missing or unexpected, or a shape differs; `hint` ends the message.
    """
    tensors = load_tensors(path)
    missing, surplus = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or surplus:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has unexpected {', '.join(surplus)}"] * bool(
            surplus
        )
        raise ValueError(f"{path} {' and '.join(parts)}. {hint}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{path}: {name} has shape {list(tensors[name].shape)}, not {list(shape)}. {hint}")
    return tensors


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What changed between two sets of settings, in words: one entry for each setting."""
    return [
        f"{name} was {earlier.get(name)!r} and is now {now.get(name)!r}"
        for name in {**earlier, **now}
        if earlier.get(name) != now.get(name)
    ]


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file; a reader sees the old file or the new one, never half of one."""
    with replacing(path) as temporary:
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, temporary, {"format": "pt"}
        )


def save_text(text: str, path: Path) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


UNFINISHED = "*.*.[0-9]*.tmp"  # names of what `replacing` leaves when it is killed


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where a file grows, beside its place and under a name that no other process takes, until it is complete.

    Raises:
        OSError: it cannot be written; what was at its place still is.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # the name must not outlive a power cut that the contents do not
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"{path} could not be written ({error}). Earlier contents are kept: make room on the disk and try again."
        ) from error
