"""Finds files on the Hub or on disk, reads and checks safetensors and JSON files, and writes files atomically."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils.hub import extract_commit_hash

CHECKPOINT, PICKLE = "model.safetensors", "pytorch_model.bin"  # weights; only `hub/conversion.py` opens pickles
INDEX, SHARDS = "model.safetensors.index.json", "model-*.safetensors"  # weights in several files
MOST_CONFIG_BYTES, MOST_LEVELS = 2**18, 50


class DownloadOptions(TypedDict, total=False):
    """Where and how a repository is read (`Repository.of`).

    Attributes:
        revision: branch, tag or commit. (A saved assistant stores the commit of its draft.)
        subfolder: folder within the repository.
        token, cache_dir, local_files_only, force_download: passed to every download.
    """

    revision: str | None
    subfolder: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool


HUB_KWARGS = ("token", "cache_dir", "local_files_only", "force_download")


@dataclass
class Repository:
    """A Hub repository or a local folder."""

    name: str  # Hub id or folder; `org/repo/folder` is a folder within the repository `org/repo`
    revision: str | None = None  # branch, tag or commit
    subfolder: str | None = None  # folder within the repository
    hub_kwargs: dict[str, Any] = field(default_factory=dict)  # for `hf_hub_download`: `token`, `cache_dir`, ...

    @classmethod
    def of(cls, name: str | Path, options: Mapping[str, Any]) -> Repository:
        """The repository or folder `name`, to be read with the `DownloadOptions` among `options`."""
        hub_kwargs = {each: options[each] for each in HUB_KWARGS if options.get(each) is not None}
        return cls(str(name), options.get("revision"), options.get("subfolder"), hub_kwargs)

    def __post_init__(self) -> None:
        parts = self.name.split("/")
        if self.subfolder is None and len(parts) > 2 and not {"", ".", "..", "~"} & set(parts) and not self.is_local:
            self.name, self.subfolder = "/".join(parts[:2]), "/".join(parts[2:])

    @property
    def full_name(self) -> str:
        return f"{self.name}/{self.subfolder}" if self.subfolder else self.name

    @property
    def is_local(self) -> bool:
        return Path(self.name).is_dir()

    def file(self, filename: str) -> Path:
        """Local path of a file, downloaded if necessary. `FileNotFoundError` or a Hub error if the file is missing."""
        if self.is_local:
            path = Path(self.name, self.subfolder or "", filename)
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing, so {self.name!r} is not a complete assistant. Download or save it again."
                )
            return path
        place: dict[str, Any] = {"subfolder": self.subfolder, "revision": self.revision}
        with found(self.full_name):
            return Path(hf_hub_download(self.name, filename, **place, **self.hub_kwargs))

    def folder(self, patterns: list[str]) -> Path:
        """Local folder with the files that match `patterns`, downloaded if necessary. Errors as in `file`."""
        if self.is_local:
            root = Path(self.name)
        else:
            prefix = f"{self.subfolder}/" if self.subfolder else ""
            wanted: dict[str, Any] = {"allow_patterns": [prefix + pattern for pattern in patterns]}
            with found(self.full_name):
                root = Path(snapshot_download(self.name, revision=self.revision, **wanted, **self.hub_kwargs))
        folder = root / (self.subfolder or "")
        if not folder.is_dir():
            raise FileNotFoundError(f"{self.name!r} has no folder {self.subfolder!r} with the files of an assistant.")
        return folder

    def commit(self, path: Path) -> str | None:
        """The commit hash of a file that `file` has returned; `None` for a local folder."""
        return None if self.is_local else extract_commit_hash(str(path), None)


@contextmanager
def found(name: str) -> Iterator[None]:
    """Context for a download from `name`: errors about an invalid or unreachable id add that no such folder exists."""
    try:
        yield
    except HFValidationError as error:
        raise FileNotFoundError(f"There is no folder {name!r}, and it cannot be a Hub id: {error}") from None
    except LocalEntryNotFoundError as error:
        why = f"reached: {error}"
        if constants.HF_HUB_OFFLINE:
            why = (
                "downloaded, because offline mode is on (the environment variable HF_HUB_OFFLINE or "
                "TRANSFORMERS_OFFLINE). Unset it, or name a folder."
            )
        raise LocalEntryNotFoundError(
            f"There is no folder {name!r}, and the Hub id {name!r} is not in the local cache and cannot be {why}"
        ) from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. `ValueError` if `text` is not valid, or nested more than 50 levels deep."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [found]
    for _ in range(MOST_LEVELS):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in inner for each in values]
    if level:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
    return found


def read_fields(path: Path, most_bytes: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """Parse a JSON file that contains an object. `ValueError` for another type; other errors as in `read_json`."""
    found = read_json(path, most_bytes)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__} instead of named fields. Download it again.")
    return found


def read_json(path: Path, most_bytes: int | None = None) -> Any:
    """Parse a JSON file. `ValueError` if it is not valid, or larger than `most_bytes`."""
    refuse_pointer(path)
    if most_bytes is not None and path.stat().st_size > most_bytes:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than the maximum of {most_bytes:,}.")
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also for numbers with thousands of digits
        raise ValueError(f"{path} is not valid JSON ({error}). Download or save it again.") from None


def refuse_pointer(path: Path) -> None:
    """Raise `ValueError` if the file is only a git-LFS pointer to its contents."""
    with path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            raise ValueError(f"{path} is a git-LFS pointer, not the file itself. Run `git lfs pull` in its folder.")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU. `ValueError` if it is damaged, or contains NaN or infinity."""
    with _opened(path) as file:
        # Copies: Windows cannot replace or remove a file while tensors are mapped from it.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    check_finite(tensors, path)
    return tensors


class Weights(Mapping[str, Tensor]):
    """The tensors of a model in one or more safetensors files, by name. `files`: the file name of each tensor. A file
    is downloaded when its first tensor is read, and open only while a tensor is read."""

    def __init__(self, source: Repository, index: Path | None, files: Mapping[str, str]) -> None:
        self.source, self.index, self.files, self._paths = source, index, files, dict[str, Path]()

    @classmethod
    def of(cls, source: Repository) -> Weights:
        """The weights of a repository; empty without safetensors. Downloads only `model.safetensors` or the index."""
        for name in (CHECKPOINT, INDEX):
            try:
                path = source.file(name)
            except LocalEntryNotFoundError:
                raise
            except (FileNotFoundError, EntryNotFoundError):
                continue
            return cls.at(path) if name == CHECKPOINT else cls(source, path, _listed(path))
        return cls(source, None, {})

    @classmethod
    def at(cls, path: Path) -> Weights:
        with _opened(path) as file:
            return cls(Repository(str(path.parent)), path, dict.fromkeys(file.keys(), path.name))

    def __getitem__(self, name: str) -> Tensor:
        holder = self.files[name]
        if holder not in self._paths:
            self._paths[holder] = self.source.file(holder)
        with _opened(self._paths[holder]) as file:
            tensor: Tensor = file.get_tensor(name).clone()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def all(self) -> dict[str, Tensor]:
        """All tensors, on the CPU. `ValueError` if a file is damaged, or has other tensors than listed in the index."""
        return self._of_files(load_tensors)

    def outline(self) -> dict[str, Tensor]:
        """All tensors on the meta device: names, shapes and dtypes. Downloads all files, reads only headers."""
        return self._of_files(_outline)

    def _of_files(self, load: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
        shards = [self.source.file(name) for name in sorted(set(self.files.values()))]
        found = [(name, tensor) for shard in shards for name, tensor in load(shard).items()]
        tensors = dict(found)
        if len(found) != len(tensors) or set(tensors) != set(self.files):
            raise ValueError(f"{self.index} lists other tensors than its files contain. Download the repository again.")
        return tensors


def _outline(path: Path) -> dict[str, Tensor]:
    with _opened(path) as file:
        return {name: file.get_tensor(name).to("meta") for name in file.keys()}  # noqa: SIM118 - not a dict


def _listed(index: Path) -> dict[str, str]:
    """The file name of each tensor in the JSON file `index`. `ValueError` for paths, because it is untrusted."""
    raw = read_json(index)
    listed = raw.get("weight_map") if isinstance(raw, dict) else None
    names: list[Any] = list(listed.values()) if isinstance(listed, dict) else [None]
    if not all(isinstance(name, str) and re.fullmatch(r"[\w-]+\.safetensors", name) for name in names):
        raise ValueError(f"{index} does not map tensors to safetensors files in its folder. Download it again.")
    return dict(listed or {})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Context that yields an open safetensors file. Errors of safetensors become `ValueError`."""
    refuse_pointer(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} is incomplete or not a safetensors file ({error}). Delete it, or download it again with "
            "force_download=True."
        ) from None


def check_finite(tensors: dict[str, Tensor], path: Path | str) -> None:
    """Raise `ValueError` if tensors contain NaN, infinity or 8-bit floats. The message names them and `path`."""
    small = [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.element_size() == 1]
    if small:
        raise ValueError(
            f"{path} holds {str(tensors[small[0]].dtype)[6:]} in {', '.join(small[:9])}. Quantised weights are not "
            "supported here: look for the same weights in bfloat16."
        )
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise ValueError(
            f"{path} holds NaN or infinite values in {', '.join(broken[:9])}, so it cannot be used. Download it again, "
            "or ask its author."
        )


def load_strict(path: Path, expected: Mapping[str, Sequence[int]], hint: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file. `ValueError`, ending with `hint`, if names or shapes are not as `expected`."""
    with _opened(path) as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    missing, surplus = sorted(set(expected) - set(shapes)), sorted(set(shapes) - set(expected))
    if missing or surplus:
        parts = [f"lacks {', '.join(missing[:9])}"] * bool(missing)
        parts += [f"has unexpected {', '.join(surplus[:9])}"] * bool(surplus)
        raise ValueError(f"{path} {' and '.join(parts)}. {hint}")
    for name, shape in expected.items():
        if shapes[name] != list(shape):
            raise ValueError(f"{path}: {name} has shape {shapes[name]}, not {list(shape)}. {hint}")
    return load_tensors(path)


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A text for each setting with different values, such as "rank was 8 and is now 4"."""
    return [
        f"{name} was {earlier.get(name)!r} and is now {now.get(name)!r}"
        for name in {**earlier, **now}
        if earlier.get(name) != now.get(name)
    ]


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file, completely or not at all (`replacing`)."""
    with replacing(path) as temporary:
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, temporary, {"format": "pt"}
        )


def save_text(text: str, path: Path) -> None:
    """Write a text file, completely or not at all (`replacing`)."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


UNFINISHED = "*.*.[0-9]*.tmp"  # temporary files of `replacing`, which remain if the process is killed


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context that yields a temporary path to write to, and then moves that file to `path`. `OSError` if this fails."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("r+b") as file:  # Windows syncs only files that are open for writing
            os.fsync(file.fileno())  # before the move, so that a power cut cannot leave an empty file
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"{path} could not be written ({error}). Earlier contents are kept: make room on the disk and try again."
        ) from error
