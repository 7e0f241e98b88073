"""The files of an assistant's repository: find them on the Hub or in a folder, check them, read them, write them.

safetensors only, loaded strictly; nothing here opens a pickle or runs code from a repository. A head without its draft:

    repository = Repository("org/head")
    head = load_head(repository, load_config(repository))
    assistant = SpecDecPPAssistant.from_draft(draft, head=head)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from torch import Tensor
from transformers.utils.hub import extract_commit_hash

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.modules import as_described, read_module
from hf_specdecpp.config.types import check_arguments
from hf_specdecpp.estimation.head import AcceptanceHead, Calibration
from hf_specdecpp.files import check_sound, load_strict, read_json
from hf_specdecpp.kinds.kind import Kind, Parts
from hf_specdecpp.kinds.known import draft_name, kind_of, recognise
from hf_specdecpp.models.adapters import ADAPTER_FILES, MOST_CONFIG_BYTES

CONFIG, CARD, ADAPTER_FOLDER = "config.json", "README.md", "adapter"
HEAD, DRAFT_VOCAB = "acceptance_head.safetensors", "draft_vocab.safetensors"

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
    kind, raw = read_config(path)
    config = kind.read_config(raw)
    config._name_or_path = repository.name
    config._commit_hash = repository.commit(path)
    return config


def load_parts(repository: Repository, config: SpecDecPPConfig) -> tuple[AcceptanceHead | None, Parts]:
    """Head, and what the config promises of the draft; errors as below."""
    kind = kind_of(config)
    head = load_head(repository, config) if config.head is not None else None
    draft_vocab = load_draft_vocab(repository, config) if config.draft_vocab_size is not None else None
    module = kind.read_module(config, repository.file(kind.module_file)) if kind.module_file is not None else None
    return head, Parts(repository.adapter() if config.adapter else None, draft_vocab, module)


def load_head(repository: Repository, config: SpecDecPPConfig) -> AcceptanceHead:
    """The acceptance head that `config.head` describes. Needs no draft model.

    Raises:
        ValueError: there is no head, its description makes no sense, or the file is damaged or does not fit it.
    """
    if config.head is None:
        raise ValueError(f"{repository.name!r} has no acceptance head, says its {CONFIG}. Load one that has.")
    hint = f"It does not belong to the head that {CONFIG} describes, trained for draft {draft_name(config)}."
    return read_head(config.head, repository.file(HEAD), hint)


def read_head(arguments: dict[str, Any], path: Path, hint: str) -> AcceptanceHead:
    """The head with these arguments of `AcceptanceHead`, whose weights are in `path`; the rest as in `read_module`."""
    with as_described("acceptance head"):
        check_arguments(AcceptanceHead.__init__, arguments)  # first: a calibration of the wrong type has no values
        for each in (arguments.get("calibration") or {}).values():
            check_arguments(Calibration, each)
    return read_module(AcceptanceHead, "acceptance head", arguments, path, hint)


def load_draft_vocab(repository: Repository, config: SpecDecPPConfig) -> Tensor:
    """The token ids `[draft_vocab_size]` that the draft may propose.

    Raises:
        ValueError: the file is damaged or holds another number of ids.
    """
    hint = f"{CONFIG} promises {config.draft_vocab_size} token ids."
    path = repository.file(DRAFT_VOCAB)
    token_ids = load_strict(path, {"token_ids": [config.draft_vocab_size or 0]}, hint)["token_ids"]
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{path} holds {str(token_ids.dtype)[6:]}; token ids are whole numbers. Make it again.")
    return token_ids


def read_config(path: Path) -> tuple[Kind, dict[str, Any]]:
    """Parse a `config.json`, and find out which kind of draft it describes.

    Raises:
        ValueError: it is not JSON, or not the config of an assistant.
    """
    config = read_json(path, MOST_CONFIG_BYTES)
    if not isinstance(config, dict) or (kind := recognise(config)) is None:
        if isinstance(config, dict) and config.get("model_type") == SpecDecPPConfig.model_type:
            kind_of(SpecDecPPConfig.from_dict(config))  # says what is wrong: the format, a type, or the kind
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise ValueError(
            f"{path} has model_type {found!r} and not 'specdecpp', so it is not of an hf_specdecpp assistant. To use "
            "an ordinary model as the draft: SpecDecPPAssistant.from_draft(...). To convert a released SpecDec++ head: "
            "specdecpp inspect FOLDER --convert OUT."
        )
    return kind, config
