"""What an assistant's repository holds, and whether its files are sound."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi
from torch import nn

from hf_specdecpp import files
from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafts import acceptance
from hf_specdecpp.drafts.draft_kind import Loading, Parts, PublishedKind
from hf_specdecpp.drafts.known import KINDS, kind_of
from hf_specdecpp.files import CHECKPOINT, INDEX, PICKLE, SHARDS, Repository
from hf_specdecpp.hub import repository
from hf_specdecpp.hub.publishing import no_id
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, CARD, CONFIG, DRAFT_VOCAB, HEAD, load_config
from hf_specdecpp.models import adapters
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.models.loading import load_model, load_tokenizer

ADAPTER_CONFIG, ADAPTER = (f"{ADAPTER_FOLDER}/{name}" for name in ADAPTER_FILES)
MODULES = [kind.own_file for kind in KINDS if kind.own_file]
PATTERNS = [CONFIG, HEAD, *MODULES, DRAFT_VOCAB, ADAPTER_CONFIG, ADAPTER, CARD]
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass
class FileReport:
    """A file, what is in it, and what is wrong with it (`None`: it is sound)."""

    name: str
    content: str = ""
    problem: str | None = None


@dataclass
class Report:
    """What `inspect` found: files that there are or that the config promises, and traps, which a sound assistant may
    have. `config` is `None` if it cannot be read, and `facts` are of a draft that others made (`is_foreign`)."""

    name: str
    commit: str | None = None
    config: SpecDecPPConfig | None = None
    files: list[FileReport] = field(default_factory=list)
    traps: list[str] = field(default_factory=list)
    is_foreign: bool = False
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        return all(file.problem is None for file in self.files)


def inspect(repository: Repository) -> Report:
    """Check every file of an assistant's repository, or of a draft's. No pickle, code or draft is loaded."""
    folder = repository.folder(PATTERNS)
    report = Report(repository.name, repository.commit(folder / CONFIG))
    _check(report, folder, CONFIG, lambda: _read_config(report, folder))
    if report.config is not None and report.is_foreign:  # other weights may be a whole model's
        at_commit = replace(repository, revision=report.commit or repository.revision)
        at_commit.folder([CHECKPOINT, INDEX, SHARDS])
    for name, promised, read in _expected(report, folder):
        present = (folder / name).is_file()
        if promised or present:
            _check(report, folder, name, read if promised else partial(_read_any, folder / name))
        if present and not promised and report.config is not None:
            report.traps.append(f"{name} is there but {CONFIG} does not mention it, so it is not used. Delete it.")
    _look_for_traps(report, _list(repository, folder))
    return report


def check_draft(repository: Repository, target_id: str, revision: str | None = None) -> str:
    """How often a published draft guesses what a target says, in sentences; `ValueError` for other repositories, or for
    another target."""
    config = load_config(repository)
    kind = kind_of(config)
    if not isinstance(kind, PublishedKind) or config.draft_id is None:
        raise ValueError(
            f"--target tells how often a draft that others published guesses what a target says, and this assistant "
            f"drafts with {kind.describe(config)}. Leave --target out. How fast it is: specdecpp bench --target "
            f"{target_id} --assistant {repository.full_name}"
        )
    target = load_model(target_id, revision)
    module = kind.load(config, repository, target=target)
    draft = kind.make(config, Parts(module=module), Loading(target=target))
    texts = acceptance.texts_for(target, load_tokenizer(target_id, revision))
    return acceptance.describe(acceptance.agreement(draft, target, texts))


def _check(report: Report, folder: Path, name: str, read: Callable[[], str]) -> None:
    """Report a file: what `read` says of it, or what it raises."""
    file, path = FileReport(name), folder / name
    report.files.append(file)
    if not path.is_file():
        why = "there is no assistant without it" if name == CONFIG else f"{CONFIG} promises it"
        again = "Download it again." if report.is_foreign else "Download or save the assistant again."
        file.problem = f"Missing, but {why}. {again}"
        return
    try:
        file.content = f"{path.stat().st_size:,} bytes, {read()}"
    except (ValueError, OSError) as error:
        file.problem = str(error).replace(f"{folder}{os.sep}", "")


def _expected(report: Report, folder: Path) -> list[tuple[str, bool, Callable[[], str]]]:
    """Files, whether the config promises them, and how to read those that it does."""
    here, promised = Repository(str(folder)), report.config or SpecDecPPConfig()
    kind, modules = kind_of(promised), MODULES
    own = kind.own_file if kind.has_own_file(promised) else None
    if report.is_foreign:
        own = INDEX if (folder / INDEX).is_file() and not (folder / CHECKPOINT).is_file() else CHECKPOINT
        modules = [*MODULES, own]
    return [
        (HEAD, promised.head is not None, lambda: _size(repository.load_head(here, promised))),
        *((name, name == own, lambda: _read_module(report, here, promised)) for name in modules),
        (DRAFT_VOCAB, promised.draft_vocab_size is not None, lambda: _read_draft_vocab(promised, here)),
        (ADAPTER_CONFIG, bool(promised.adapter), lambda: _read_adapter_config(folder / ADAPTER_CONFIG)),
        (ADAPTER, bool(promised.adapter), lambda: _read_adapter(folder / ADAPTER_FOLDER)),
    ]


def _read_config(report: Report, folder: Path) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if "auto_map" in repository.read_config(folder / CONFIG)[1]:
            report.traps.append(f"{CONFIG} has an auto_map: trust_remote_code=True would run foreign code. Delete it.")
        config = load_config(Repository(str(folder)))
        SpeculationConfig.from_dict(config.speculation)
    report.traps += [str(warning.message) for warning in caught]
    report.config = config
    report.is_foreign = config.draft_id == str(folder)
    return "of a draft that others trained" if report.is_foreign else f"format {config.format_version}"


def _read_module(report: Report, here: Repository, config: SpecDecPPConfig) -> str:
    kind = kind_of(config)
    module = kind.load(config, here)
    report.facts = kind.facts(module) if isinstance(kind, PublishedKind) else {}
    return _size(module)


def _size(module: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()):,} parameters"


def _read_draft_vocab(config: SpecDecPPConfig, here: Repository) -> str:
    ids, end = repository.load_draft_vocab(here, config), config.vocab_size or float("inf")
    if not len(ids) or len(ids.unique()) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= end:
        raise ValueError(
            f"It does not hold distinct whole numbers from 0 up to the target's vocab_size ({config.vocab_size}), so "
            "they are not its token ids. Make it again."
        )
    return f"{len(ids):,} token ids"


def _read_adapter_config(path: Path) -> str:
    adapter = adapters.read_adapter_config(path)
    modules = adapter.get("target_modules")
    where = ", ".join(sorted(map(str, modules))) if isinstance(modules, list) else str(modules)
    return f"{adapter['peft_type']}, rank {adapter.get('r')}, on {where}"


def _read_adapter(folder: Path) -> str:
    try:
        adapters.read_adapter_config(folder / ADAPTER_FILES[0])
    except (ValueError, OSError):  # reported with that file
        return _read_any(folder / ADAPTER_FILES[1])
    loras = adapters.read_adapter(folder).loras
    return f"{sum(lora.a.numel() + lora.b.numel() for lora in loras.values()):,} numbers for {len(loras)} modules"


def _read_any(path: Path) -> str:
    if path.suffix == ".json":
        return f"{len(files.read_json(path))} fields"
    return f"{sum(tensor.numel() for tensor in files.load_tensors(path).values()):,} numbers"


def _list(repository: Repository, folder: Path) -> list[str]:
    """Paths of all files at the top and one folder down; on the Hub of all, also those that were not downloaded."""
    local = [path.relative_to(folder).as_posix() for depth in ("*", "*/*") for path in folder.glob(depth)]
    if repository.is_local:
        return local
    api = HfApi(token=repository.hub_kwargs.get("token"))
    try:
        remote = api.list_repo_files(repository.name, revision=repository.revision)
    except Exception:  # noqa: BLE001 - offline, say: these errors share no base, and what is cached was checked
        return local
    prefix = f"{repository.subfolder}/" if repository.subfolder else ""
    return [name.removeprefix(prefix) for name in remote if name.startswith(prefix)]


def _look_for_traps(report: Report, names: list[str]) -> None:
    config = report.config
    if ADAPTER_FILES[0] in names:
        problem = f"AutoModelForCausalLM takes the repository for an adapter. Move both files to {ADAPTER_FOLDER}/."
        report.files.append(FileReport(ADAPTER_FILES[0], problem=problem))
    for name in names:
        if PurePosixPath(name).suffix in PICKLES:
            convert = f"Convert its tensors: specdecpp inspect {report.name} --convert OUT."
            then = convert if report.is_foreign and not report.facts and name == PICKLE else "Delete it."
            report.traps.append(f"{name} looks like a pickle, which can run code. We never open it. {then}")
        elif PurePosixPath(name).suffix == ".py":
            report.traps.append(f"{name} is code. We never run it, but trust_remote_code=True would. Delete it.")
    if config is not None and not report.is_foreign:
        kind = kind_of(config).rests_on
        if kind != "nothing" and getattr(config, f"{kind}_id") is None:
            report.traps.append(f"{CONFIG} has no {kind}_id, but a head fits one {kind} only. Add it.")
        for role in ("target", "draft"):
            if no_id(name := getattr(config, f"{role}_id")) and not Path(name).is_dir():
                report.traps.append(
                    f"{CONFIG} has {role}_id={name!r}, which seems to be the name of somebody's folder: others cannot "
                    "load it. Write its Hub id, ORG/NAME, there."
                )
