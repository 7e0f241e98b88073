"""Checks all files in the repository of an assistant or a published draft (`inspect`)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi
from torch import Tensor, nn

from hf_specdecpp import files
from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.draft_kinds import acceptance
from hf_specdecpp.draft_kinds.draft_kind import Loading, Parts, PublishedKind
from hf_specdecpp.draft_kinds.known import KINDS, kind_of
from hf_specdecpp.files import CHECKPOINT, INDEX, SHARDS, Repository
from hf_specdecpp.hub import repository
from hf_specdecpp.hub.publishing import no_id
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, CARD, CONFIG, DRAFT_VOCAB, HEAD, load_config
from hf_specdecpp.models import adapters
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.models.loading import load_model, load_tokenizer

ADAPTER_CONFIG, ADAPTER = (f"{ADAPTER_FOLDER}/{name}" for name in ADAPTER_FILES)
MODULES = [kind.own_file for kind in KINDS if kind.own_file]
FILES = [HEAD, *MODULES, DRAFT_VOCAB, ADAPTER_CONFIG, ADAPTER]
PATTERNS = [CONFIG, *FILES, CARD]
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass
class FileReport:
    """A file's name, and a description of its content or of its problem (`None` for a sound file)."""

    name: str
    content: str = ""
    problem: str | None = None


@dataclass
class RepositoryReport:
    """The result of `inspect`. `files`: those in the repository or named by the config. `traps`: warnings, which do not
    make an assistant unsound. `config`: `None` if unreadable. `is_foreign`: whether the repository is a published
    draft, whose `settings` are given then."""

    name: str
    commit: str | None = None
    config: SpecDecPPConfig | None = None
    files: list[FileReport] = field(default_factory=list)
    traps: list[str] = field(default_factory=list)
    is_foreign: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        return all(file.problem is None for file in self.files)


def inspect(repository: Repository) -> RepositoryReport:
    """Check files of an assistant or a draft; opens no pickles, code or other models. `FileNotFoundError` if none."""
    folder = repository.folder(PATTERNS)
    if not any((folder / name).is_file() for name in (CONFIG, *FILES)):
        raise FileNotFoundError(f"{repository.full_name!r} has no {CONFIG}: it is neither an assistant nor a draft.")
    report, here = RepositoryReport(repository.name, repository.commit(folder / CONFIG)), Repository(str(folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _check(report, folder, CONFIG, lambda: _read_config(report, here))
    report.traps += [str(warning.message) for warning in caught]
    if report.is_foreign:  # download weights of drafts only: other repositories may be large models
        replace(repository, revision=report.commit or repository.revision).folder([CHECKPOINT, INDEX, SHARDS])
    promised = _promised(report, here)
    for name in dict.fromkeys((*FILES, *promised)):
        if name in promised:
            _check(report, folder, name, promised[name])
        elif (folder / name).is_file():
            read: Any = files.read_json if name.endswith(".json") else files.load_tensors
            _check(report, folder, name, partial(read, folder / name))
            if report.config is not None:
                report.traps.append(f"{name} exists but {CONFIG} does not mention it, so it is not used. Delete it.")
    _look_for_traps(report, _list(repository, folder))
    return report


def check_draft(repository: Repository, target_id: str, revision: str | None = None) -> str:
    """Return sentences on how often a published draft's likeliest tokens agree with those of the target. `ValueError`
    if the repository has no published draft, or the draft does not fit the target."""
    config = load_config(repository)
    kind = kind_of(config)
    if not isinstance(kind, PublishedKind) or config.draft_id is None:
        raise ValueError(
            f"--target measures how often a published draft agrees with a target, but this assistant drafts with "
            f"{kind.describe(config)}. Leave --target out. To measure its speed: specdecpp bench --target "
            f"{target_id} --assistant {repository.full_name}"
        )
    target = load_model(target_id, revision)
    module = kind.load(config, repository, target=target)
    draft = kind.make(config, Parts(module=module), Loading(target=target))
    texts = acceptance.texts_for(target, load_tokenizer(target_id, revision))
    return acceptance.describe(draft.agreement or acceptance.agreement(draft, target, texts))


def _check(report: RepositoryReport, folder: Path, name: str, read: Callable[[], Any]) -> None:
    """Add a file to the report, described by the result of `read`, or with its error as the problem."""
    file = FileReport(name)
    report.files.append(file)
    try:
        found = read()
    except (ValueError, OSError) as error:
        file.problem = str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), report.name)
        return
    if isinstance(found, nn.Module):
        found = f"{sum(parameter.numel() for parameter in found.parameters()):,} parameters"
    elif not isinstance(found, str):
        found = f"{len(found):,} {'token ids' if isinstance(found, Tensor) else 'items'}"
    file.content = f"{(folder / name).stat().st_size:,} bytes, {found}"


def _promised(report: RepositoryReport, here: Repository) -> dict[str, Callable[[], Any]]:
    """Return by file name functions that read the files which the config names."""
    config, folder = report.config or SpecDecPPConfig(), Path(here.name)
    kind, found = kind_of(config), dict[str, Callable[[], Any]]()

    def module() -> Any:
        loaded = kind.load(config, here)
        report.settings = kind.settings(loaded) if isinstance(kind, PublishedKind) else {}
        return loaded

    if config.head is not None:
        found[HEAD] = lambda: repository.load_head(here, config)
    if kind.has_own_file(config):
        found[kind.own_file] = module
    if config.draft_vocab_size is not None:
        found[DRAFT_VOCAB] = lambda: repository.load_draft_vocab(here, config)
    if config.adapter:
        found[ADAPTER_CONFIG] = lambda: _read_adapter_config(here)
        found[ADAPTER] = lambda: _read_adapter(here)
    if report.is_foreign:
        has_index = (folder / INDEX).is_file() and not (folder / CHECKPOINT).is_file()
        found[INDEX if has_index else CHECKPOINT] = module
    return found


def _read_config(report: RepositoryReport, here: Repository) -> str:
    if "auto_map" in repository.read_config(here.file(CONFIG))[1]:
        report.traps.append(f"{CONFIG} has an auto_map: trust_remote_code=True would run foreign code. Delete it.")
    config = load_config(here)
    SpeculationConfig.from_dict(config.speculation)
    report.config, report.is_foreign = config, config.draft_id == here.name
    return "of a draft that others trained" if report.is_foreign else f"format {config.format_version}"


def _read_adapter_config(here: Repository) -> str:
    adapter = adapters.read_adapter_config(here.file(ADAPTER_CONFIG))
    modules = adapter.get("target_modules")
    where = ", ".join(sorted(map(str, modules))) if isinstance(modules, list) else modules
    return f"{adapter['peft_type']}, rank {adapter.get('r')}, on {where}"


def _read_adapter(here: Repository) -> Any:
    tensors = files.load_tensors(here.file(ADAPTER))
    try:
        adapters.read_adapter_config(here.file(ADAPTER_CONFIG))
    except (ValueError, OSError):  # reported with that file
        return tensors
    return adapters.read_adapter(here.file(ADAPTER).parent).loras


def _list(repository: Repository, folder: Path) -> list[str]:
    """Paths of all files of a Hub repository, downloaded or not; of a local one, down to the first level of folders."""
    local = [path.relative_to(folder).as_posix() for depth in ("*", "*/*") for path in folder.glob(depth)]
    if repository.is_local:
        return local
    api = HfApi(token=repository.hub_kwargs.get("token"))
    try:
        remote = api.list_repo_files(repository.name, revision=repository.revision)
    except Exception:  # noqa: BLE001 - for example offline: the errors have no common base class
        return local
    prefix = f"{repository.subfolder}/" if repository.subfolder else ""
    return [name.removeprefix(prefix) for name in remote if name.startswith(prefix)]


def _look_for_traps(report: RepositoryReport, names: list[str]) -> None:
    config = report.config
    if ADAPTER_FILES[0] in names:
        problem = f"AutoModelForCausalLM takes the repository for an adapter. Move both files to {ADAPTER_FOLDER}/."
        report.files.append(FileReport(ADAPTER_FILES[0], problem=problem))
    for name in names:
        if PurePosixPath(name).suffix in PICKLES:
            report.traps.append(f"{name} looks like a pickle, which can run code. We never open it.")
        elif PurePosixPath(name).suffix == ".py":
            report.traps.append(f"{name} is code. We never run it, but trust_remote_code=True would. Delete it.")
    if config is None or report.is_foreign:
        return
    needed = kind_of(config).rests_on
    for role in ("target", "draft"):
        if (name := getattr(config, f"{role}_id")) is None and role == needed:
            report.traps.append(f"{CONFIG} has no {role}_id, but a head fits one {role} only. Add it.")
        elif no_id(name) and not Path(name).is_dir():
            report.traps.append(
                f"{CONFIG} has {role}_id={name!r}, which seems to be a local folder: others cannot load it. Write the "
                "Hub id, ORG/NAME, instead."
            )
