"""Find, read and write files: safetensors and JSON only, checked, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import cached_assets_path, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils.hub import extract_commit_hash

CHECKPOINT, PICKLE = "model.safetensors", "pytorch_model.bin"  # of weights; only `hub/conversion.py` opens the latter
INDEX, SHARDS = "model.safetensors.index.json", "model-*.safetensors"  # of weights in several files
MOST_CONFIG_BYTES, MOST_LEVELS, MOST_TENSORS = 2**18, 50, 2**11


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

    @classmethod
    def named(
        cls, name: str, revision: str | None = None, subfolder: str | None = None, hub_kwargs: Any = None
    ) -> Repository:
        """The same, where `org/repo/folder` may name a folder of a Hub repository."""
        parts = name.split("/")
        if subfolder is None and len(parts) > 2 and not {"", ".", "..", "~"} & set(parts) and not Path(name).exists():
            name, subfolder = "/".join(parts[:2]), "/".join(parts[2:])
        return cls(name, revision, subfolder, hub_kwargs or {})

    @property
    def full_name(self) -> str:
        """The name with the folder, which `named` takes."""
        return f"{self.name}/{self.subfolder}" if self.subfolder else self.name

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
        place = subfolder or None
        with found(self.full_name):
            return Path(
                hf_hub_download(self.name, filename, subfolder=place, revision=self.revision, **self.hub_kwargs)
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
            with found(self.full_name):
                root = Path(
                    snapshot_download(self.name, revision=self.revision, allow_patterns=wanted, **self.hub_kwargs)
                )
        folder = root / (self.subfolder or "")
        if not folder.is_dir():
            raise FileNotFoundError(f"{self.name!r} has no folder {self.subfolder!r} with the files of an assistant.")
        return folder

    def commit(self, path: Path) -> str | None:
        """The commit hash that a downloaded file came from; `None` for a folder."""
        return None if self.is_local else extract_commit_hash(str(path), None)


@contextmanager
def found(name: str) -> Iterator[None]:
    """What goes wrong within, where a Hub id is looked for, says that there is no folder of this name."""
    try:
        yield
    except HFValidationError as error:
        raise FileNotFoundError(f"There is no folder {name!r}, and it cannot be a Hub id: {error}") from None
    except LocalEntryNotFoundError as error:
        raise LocalEntryNotFoundError(
            f"{name!r} is no folder here, and as a Hub id it is neither in the local cache nor reached: {error}"
        ) from error


def parse_json(text: str | bytes) -> Any:
    """What JSON says; `ValueError` if it is none, or nested deeper than those who walk through it can go."""
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
    """The named fields of a config; errors as below."""
    found = read_json(path, most_bytes)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__} in the place of named fields. Download it again.")
    return found


def read_json(path: Path, most_bytes: int | None = None) -> Any:
    """Parse a JSON file; `ValueError` if it is none, or larger than `most_bytes`."""
    refuse_pointer(path)
    if most_bytes is not None and path.stat().st_size > most_bytes:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; a file like it has at most {most_bytes:,}.")
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:  # numbers of thousands of digits are a ValueError
        raise ValueError(f"{path} is not valid JSON ({error}). Download or save it again.") from None


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
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    check_finite(tensors, path)
    return tensors


def find_weights(source: Repository) -> Path | None:
    """The file with a model's weights, or the index of several, all of them downloaded if need be; `None` without any.

    Raises:
        huggingface_hub errors: one may be there, but cannot be reached.
    """
    path = _weights_or_index(source)
    for shard in shards_of(path) if path is not None and path.name == INDEX else []:
        source.file(shard)
    return path


def find_tensors(source: Repository) -> dict[str, str]:
    """Which file of a checkpoint holds which tensor; empty without safetensors. Of several files none is downloaded."""
    path = _weights_or_index(source)
    if path is None:
        return {}
    if path.name == INDEX:
        shards_of(path)
        return dict(read_json(path)["weight_map"])
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path.name)


def read_tensors(source: Repository, files: Mapping[str, str]) -> dict[str, Tensor]:
    """Some tensors of a checkpoint, on the CPU, as they are. Only files with one of them are downloaded.

    Args:
        files: which of them hold which tensor (`find_tensors`).

    Raises:
        ValueError: a file is damaged, or lacks what the index says it has.
    """
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        with _opened(source.file(name)) as file:
            tensors.update({each: file.get_tensor(each) for each, holder in files.items() if holder == name})
    return tensors


def _weights_or_index(source: Repository) -> Path | None:
    for name in (CHECKPOINT, INDEX):
        try:
            return source.file(name)
        except LocalEntryNotFoundError:
            raise
        except (FileNotFoundError, EntryNotFoundError):
            continue
    return None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a draft, of a file or of those that an index names; `ValueError` if no draft has so many."""
    if path.name == INDEX:
        count = len(read_json(path)["weight_map"]) if shards_of(path) else 0
    else:
        with _opened(path) as file:
            count = len(file.keys())
    if count > MOST_TENSORS:
        raise ValueError(
            f"{path} has {count:,} tensors, and a draft has {MOST_TENSORS:,} at most: it is something else. "
            "Download it again, or name another repository."
        )
    return load_shards(path) if path.name == INDEX else load_tensors(path)


def load_shards(index: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint in several safetensors files beside its index; errors as above."""
    shards = shards_of(index)
    if missing := [name for name in shards if not (index.parent / name).is_file()]:
        raise ValueError(f"{index} lists {', '.join(missing[:9])}, which it lacks. Download the repository again.")
    found = [(name, tensor) for shard in shards for name, tensor in load_tensors(index.parent / shard).items()]
    tensors = dict(found)
    if len(found) != len(tensors) or set(tensors) != set(read_json(index)["weight_map"]):
        raise ValueError(f"{index} and the files that it lists have other tensors. Download the repository again.")
    return tensors


def shards_of(index: Path) -> list[str]:
    """Names of the files that an index lists. They lie beside it: an index may come from anybody."""
    raw = read_json(index)
    listed = raw.get("weight_map") if isinstance(raw, dict) else None
    names: list[Any] = list(listed.values()) if isinstance(listed, dict) else [None]
    if not all(isinstance(name, str) and re.fullmatch(r"[\w-]+\.safetensors", name) for name in names):
        raise ValueError(f"{index} does not map tensors to safetensors files beside it. Download the repository again.")
    return sorted(set(names))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
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
    """Raise `ValueError` naming the tensors of `path` that hold NaN or infinity, or numbers of a quantised model."""
    small = [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.element_size() == 1]
    if small:
        raise ValueError(
            f"{path} holds {str(tensors[small[0]].dtype)[6:]} in {', '.join(small[:9])}. Quantised weights are not "
            "read here: look for the same in bfloat16."
        )
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise ValueError(
            f"{path} holds NaN or infinite values in {', '.join(broken[:9])}, so it cannot be used. Download it again, "
            "or ask who made it."
        )


def load_strict(path: Path, expected: Mapping[str, Sequence[int]], hint: str) -> dict[str, Tensor]:
    """Tensors of `path`, which must have exactly the names and shapes of `expected`; else none of them is read.

    Raises:
        ValueError: a name is missing or unexpected, or a shape differs; `hint` ends the message.
    """
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


def recall(kind: str, of: dict[str, Any]) -> Any:
    """What was measured earlier on this machine, in another process too (`remember`), or `None`."""
    try:
        return parse_json(_measured_path(kind, of).read_text(encoding="utf-8"))[kind]
    except (OSError, ValueError, KeyError, TypeError):  # not measured yet, or the file is damaged
        return None


def remember(kind: str, of: dict[str, Any], value: Any) -> None:
    """Keep what was measured in Hugging Face's assets cache.

    Where that cannot be written (a read-only home), it is measured again in the next process.

    Args:
        kind: of measurement, also the name of its folder.
        of: all that the value depends on; JSON-able.
        value: JSON-able.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: huggingface_hub finds a file in the folder's place
        save_text(json.dumps({kind: value, "of": of}, indent=1), _measured_path(kind, of))


def forget(kind: str) -> None:
    """Drop all that was kept of a kind, so that it is measured again."""
    with contextlib.suppress(OSError, ValueError):
        for path in cached_assets_path("hf_specdecpp", kind).glob("*.json"):
            path.unlink()


def _measured_path(kind: str, of: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:24]
    return cached_assets_path("hf_specdecpp", kind) / f"{digest}.json"
