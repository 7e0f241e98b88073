"""`specdecpp inspect`: what an assistant's repository holds, for which target, and whether its files are sound."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_specdecpp import repository as files
from hf_specdecpp.configuration import SpecDecPPConfig, SpeculationConfig
from hf_specdecpp.repository import ADAPTER_FILES, ADAPTER_FOLDER, CARD, CONFIG, DRAFT_VOCAB, HEAD, Repository

ADAPTER_CONFIG, ADAPTER = (f"{ADAPTER_FOLDER}/{name}" for name in ADAPTER_FILES)
PATTERNS = [CONFIG, HEAD, DRAFT_VOCAB, ADAPTER_CONFIG, ADAPTER, CARD]
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass
class FileReport:
    """A file, what is in it, and what is wrong with it (`None`: it is sound)."""

    name: str
    content: str = ""
    problem: str | None = None


@dataclass
class Report:
    """What `inspect` found.

    Attributes:
        facts: what the config says, by label.
        files: those that there are and those that the config promises.
        traps: a sound assistant can have them, but they may surprise somebody.
    """

    facts: dict[str, str]
    files: list[FileReport] = field(default_factory=list)
    traps: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return all(file.problem is None for file in self.files)


def inspect(repository: Repository) -> Report:
    """Check every file of an assistant's repository. Opens no pickle, runs no code and loads no draft.

    Raises:
        FileNotFoundError: there is no such subfolder.
        huggingface_hub errors: as they are (missing repo, gated, offline and not in the cache, ...).
    """
    folder = repository.folder(PATTERNS)
    here = Repository(str(folder))
    commit = repository.commit(folder / CONFIG)
    report = Report({"assistant": _name(repository.name, commit)})
    configs: list[SpecDecPPConfig] = []

    def check(name: str, read: Callable[[], str]) -> None:
        path = folder / name
        file = FileReport(name)
        report.files.append(file)
        if not path.is_file():
            said = "there is no assistant here" if name == CONFIG else f"{CONFIG} promises it"
            file.problem = f"Missing: {said}. Look for it elsewhere, or download or save the assistant again."
            return
        try:
            file.content = f"{_size(path.stat().st_size)}, {read()}"
        except (ValueError, TypeError, OSError) as error:
            file.problem = str(error).replace(f"{folder}{os.sep}", "")

    def read_config() -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = files.load_config(here)
            speculation = SpeculationConfig.from_dict(config.speculation)
        report.traps += [str(warning.message) for warning in caught]
        report.facts |= _describe(config, speculation)
        report.traps += _unpinned(config)
        configs.append(config)
        return f"format {config.format_version}"

    check(CONFIG, read_config)
    config = configs[0] if configs else None
    readers: list[tuple[bool, str, Callable[[], str]]] = [
        (config is not None and config.head is not None, HEAD, lambda: _read_head(here, config)),
        (config is not None and config.draft_vocab_size is not None, DRAFT_VOCAB, lambda: _read_vocab(here, config)),
        (config is not None and bool(config.adapter), ADAPTER_CONFIG, lambda: _read_adapter(folder / ADAPTER_CONFIG)),
        (config is not None and bool(config.adapter), ADAPTER, lambda: _count(folder / ADAPTER)),
    ]
    for promised, name, read in readers:
        present = (folder / name).is_file()
        if promised or present:
            check(name, read if promised else lambda name=name: _count(folder / name))  # type: ignore[misc]
        if config is not None and present and not promised:
            report.traps.append(f"{name} is there but {CONFIG} does not mention it, so it is not used. Delete it.")
    _look_for_traps(report, _list(repository, folder), config)
    return report


def _describe(config: SpecDecPPConfig, speculation: SpeculationConfig) -> dict[str, str]:
    """The config, for people."""
    facts = {"target": _name(config.target_id, config.target_revision)}
    if config.draft_kind == "independent":
        facts["draft"] = _name(config.draft_id, config.draft_revision)
    else:
        facts["draft"] = f"layers {', '.join(map(str, config.draft_layers or []))} of the target (early exit)"
    if config.head is None:
        facts["head"] = "none"
    else:
        facts["head"] = ", ".join(f"{name}={value}" for name, value in dict(config.head).items())
    facts["adapter"] = "yes" if config.adapter else "none"
    facts["draft vocabulary"] = f"{config.draft_vocab_size} token ids" if config.draft_vocab_size else "all token ids"
    facts["speculation"] = ", ".join(f"{name}={value}" for name, value in speculation.to_dict().items())
    facts["tokenizer hash"] = str(config.vocab_hash or "not recorded")[:12]
    versions = {"hf_specdecpp": config.specdecpp_version, "transformers": config.transformers_version}
    facts["written by"] = ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "unknown"
    return facts


def _unpinned(config: SpecDecPPConfig) -> list[str]:
    independent = config.draft_kind == "independent"
    model, revision = (
        (config.draft_id, config.draft_revision) if independent else (config.target_id, config.target_revision)
    )
    if model is None:
        field_name = "draft_id" if independent else "target_id"
        return [
            f"{CONFIG} names no {field_name}, so it is not known which model the head belongs to. Write its Hub id there."
        ]
    if revision is None:
        return [f"No revision of {model} is recorded: if it changes, head and adapter no longer fit. Record a commit."]
    return []


def _read_head(repository: Repository, config: SpecDecPPConfig | None) -> str:
    assert config is not None  # noqa: S101 - narrows the type
    head = files.load_head(repository, config)
    return f"{sum(parameter.numel() for parameter in head.parameters()):,} parameters"


def _read_vocab(repository: Repository, config: SpecDecPPConfig | None) -> str:
    assert config is not None  # noqa: S101 - narrows the type
    ids = files.load_draft_vocab(repository, config).tolist()
    end = config.vocab_size or float("inf")
    if not ids or len(set(ids)) < len(ids) or not all(isinstance(i, int) and 0 <= i < end for i in ids):
        raise ValueError(
            f"{DRAFT_VOCAB} does not hold distinct whole numbers from 0 up to the target's vocab_size "
            f"({config.vocab_size}), so they are not its token ids. Make it again."
        )
    return f"{len(ids):,} token ids"


def _read_adapter(path: Path) -> str:
    adapter = files.read_json(path)
    if not isinstance(adapter, dict) or not adapter.get("peft_type"):
        raise ValueError(f"{path} names no peft_type, so it is not of a PEFT adapter. Save the adapter again.")
    modules = adapter.get("target_modules")
    where = ", ".join(sorted(map(str, modules))) if isinstance(modules, list) else str(modules)
    return f"{adapter['peft_type']}, rank {adapter.get('r')}, on {where}"


def _count(path: Path) -> str:
    if path.suffix == ".json":
        files.read_json(path)
        return "not used"
    return f"{sum(tensor.numel() for tensor in files.load_tensors(path).values()):,} numbers"


def _list(repository: Repository, folder: Path) -> list[str]:
    """Paths of all files at the top and one folder down, also of those that were not downloaded."""
    local = [path.relative_to(folder).as_posix() for depth in ("*", "*/*") for path in folder.glob(depth)]
    if repository.is_local:
        return local
    token = repository.hub_kwargs.get("token")
    try:
        remote = HfApi(token=token).list_repo_files(repository.name, revision=repository.revision)
    except Exception:  # noqa: BLE001 - offline, say; its errors share no base, and the cached files can still be checked
        return local
    prefix = f"{repository.subfolder}/" if repository.subfolder else ""
    return [name.removeprefix(prefix) for name in remote if name.startswith(prefix)]


def _look_for_traps(report: Report, names: list[str], config: SpecDecPPConfig | None) -> None:
    if ADAPTER_FILES[0] in names:
        problem = f"AutoModelForCausalLM would take the repository for an adapter. Move both adapter files to {ADAPTER_FOLDER}/."
        report.files.append(FileReport(ADAPTER_FILES[0], problem=problem))
    for pickle in (name for name in names if PurePosixPath(name).suffix in PICKLES):
        report.traps.append(f"{pickle} looks like a pickle, which can run code. We never open it. Delete it.")
    for script in (name for name in names if name.endswith(".py")):
        report.traps.append(f"{script} is code. We never run it, but trust_remote_code=True would. Delete it.")
    if getattr(config, "auto_map", None):
        report.traps.append(
            f"{CONFIG} has an auto_map: trust_remote_code=True would run foreign code. Delete the field."
        )


def show(report: Report, console: Console) -> None:
    """Print a report."""
    facts = Table.grid(padding=(0, 2))
    for label, fact in report.facts.items():
        facts.add_row(Text(label, "bold"), _text(fact))
    table = Table.grid(padding=(0, 2))
    for file in report.files:
        verdict = Text("sound", "green") if file.problem is None else Text("PROBLEM", "bold red")
        table.add_row(verdict, _text(file.name), _text(file.problem or file.content))
    console.print(facts, "", table, "", sep="\n")
    for trap in report.traps:
        console.print(Text("warning ", "yellow") + _text(trap))
    broken = sum(file.problem is not None for file in report.files)
    verdict = (
        Text("All files are sound.", "green")
        if report.sound
        else Text(f"{broken} of {len(report.files)} files have problems.", "bold red")
    )
    console.print(verdict)


def _text(value: str) -> Text:
    """As it is: no markup, and no control characters, since a repository may come from anybody."""
    return Text("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in value))


def _name(name: str | None, revision: str | None) -> str:
    return f"{name or 'not recorded'}{f' at {revision}' if revision else ''}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
