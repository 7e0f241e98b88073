"""The command line: demo, chat, train, bench, inspect, export, drafts. Commands import their modules when they run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.pretty import pretty_repr
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from hf_specdecpp.cli_options import BenchmarkConfig, ChatConfig, DemoConfig, TrainOptions, options_of, settings_from

if TYPE_CHECKING:
    from hf_specdecpp.hub.inspection import RepositoryReport


class _Commands(TyperGroup):
    """Prints a question mark for characters that the terminal's encoding lacks, for example in pipes on Windows."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        return super().main(*args, **kwargs)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from hf_specdecpp.version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face generate()."""


@app.command()
@options_of(DemoConfig)
def demo(**options: Any) -> None:
    """Answer questions with and without the assistant.

    The exit code is 1 if answers differ. Speeds are compared in CPU time."""
    from hf_specdecpp.terminal.demo import run

    with _failing():
        run(settings_from(DemoConfig, options), _console())


@app.command()
@options_of(ChatConfig)
def chat(**options: Any) -> None:
    """Chat with a model that has an assistant. Messages may come from a pipe, one per line."""
    from hf_specdecpp.terminal.chat import run

    with _failing():
        run(settings_from(ChatConfig, options), _console())


@app.command()
@options_of(TrainOptions)
def train(**options: Any) -> None:
    """Train an assistant: its draft, its acceptance head, its card.

    The stages are rollouts, distill, head, calibrate, eval and card. A stopped run resumes where it stopped."""
    try:
        from hf_specdecpp.training.run import run
    except ImportError as error:
        _fail(f"Training cannot be imported: {error}. Install the extra: pip install 'hf-specdecpp[train]'.")
    with _failing(quiet=False):
        run(settings_from(TrainOptions, options))


@app.command()
@options_of(BenchmarkConfig)
def bench(**options: Any) -> None:
    """Time plain generation, other methods and all rules.

    All use the same prompts. The exit code is 1 if a greedy answer of this package differs from plain generation
    by more than a near-tie."""
    from hf_specdecpp.benchmark.live import run

    with _failing():
        lossless = run(settings_from(BenchmarkConfig, options), _console())
    if not lossless:
        raise typer.Exit(1)


@app.command()
def inspect(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Hub id (private: set HF_TOKEN) or folder.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    subfolder: Annotated[str | None, typer.Option(help="Folder within the repository.")] = None,
    convert: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Convert a released SpecDec++ head, or an EAGLE-3 pickle, into this folder."),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="With --convert: the head's draft, Hub id or id@commit.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Hub id or id@commit of a target: measure how often a published draft agrees with this target. With "
            "--convert, the target that the head was trained for."
        ),
    ] = None,
) -> None:
    """Show and check the files of a repository.

    REPO is an assistant or a published draft. The exit code is 1 if a file has a problem."""
    if convert is None and draft is not None:
        raise typer.BadParameter("--draft names the draft of a converted head, so it needs --convert OUT.")
    from hf_specdecpp.files import Repository
    from hf_specdecpp.hub import conversion, inspection

    repository = Repository(repo, revision, subfolder)
    with _failing(repo):
        if convert is not None:
            folder = repository.folder(conversion.PATTERNS)
            names = "draft_id", "draft_revision", "target_id", "target_revision"
            conversion.convert(folder, convert, **dict(zip(names, (*_pin(draft), *_pin(target)), strict=True)))
            repository, target = Repository(str(convert)), None
        report = inspection.inspect(repository)
        name, commit = _pin(target)
        found = inspection.check_draft(repository, name, commit) if name is not None and report.sound else None
    console = _console()
    _show(report, console)
    if found is not None:
        console.line()
        console.print(_text(found))
    if not report.sound:
        raise typer.Exit(1)
    at = f", revision={repository.revision!r}" if repository.revision else ""
    console.print(_text(f"next      assist(model, {repository.full_name!r}{at})"), soft_wrap=True)  # to be copied


@app.command()
def export(
    assistant: Annotated[str, typer.Argument(metavar="ASSISTANT", help="Hub id or folder of its repository.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="New or empty folder for the draft.")],
    target: Annotated[
        str | None, typer.Option(metavar="ID", help="Hub id or folder of the target; by default that of ASSISTANT.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help="vllm, sglang or llama.cpp: print its commands, write serve.sh."),
    ] = None,
) -> None:
    """Write a draft for vLLM, SGLang and llama.cpp.

    The commands that serve the draft are printed. The exit code is 1 if no engine serves it."""
    from hf_specdecpp.hub.exporting import export as write

    with _failing(assistant):
        exported = write(assistant, output, target, to)
    console = _console()
    console.print(_text(f"Written: {output}"), soft_wrap=True)
    for note in exported.notes:
        console.print(Text("note     ", "yellow") + _text(note), soft_wrap=True)
    for engine, commands in exported.commands.items():  # one line per command, for copying
        console.print(Text(f"\n{engine}", "bold"))
        for command in commands:
            console.print(_text(command), soft_wrap=True)


@app.command()
def drafts(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Hub id or folder; all by default.")] = None,
) -> None:
    """List published drafts, for assist(model, DRAFT).

    The exit code is 1 if none is known."""
    from hf_specdecpp.hub.published import published, table

    found = list(table()) if model is None else published(model)
    if not found:
        _fail(f"No published draft of {model} is known. Without one: assist(model). To train one: specdecpp train.")
    console = _console()
    for before, each in zip([None, *found], found, strict=False):
        if before is None or each.target != before.target:
            console.print(Text(each.target, "bold"), soft_wrap=True)
        measured = f", {each.measured}" if each.measured else ""
        convert = "" if each.file == "safetensors" else "; a pickle, so first: specdecpp inspect DRAFT --convert FOLDER"
        console.print(f"  {each.draft}  {each.form}{measured}{convert}", soft_wrap=True)
    console.print("Figures are as published. To use a draft: assist(model, DRAFT)", soft_wrap=True)


@contextmanager
def _failing(repository: str | None = None, quiet: bool = True) -> Iterator[None]:
    """Context in which `ValueError` and `OSError` become a line on stderr and exit code 1. For errors of the Hub, which
    are `OSError`, the line adds that there is no folder `repository` either, unless there is one. `quiet`: without the
    progress bars of loading."""
    from hf_specdecpp.models.loading import quiet_loading

    try:
        with quiet_loading() if quiet else nullcontext():
            yield
    except (ValueError, OSError) as error:
        is_said = repository is None or isinstance(error, (ValueError, FileNotFoundError)) or Path(repository).is_dir()
        _fail(str(error) if is_said else f"{error} There is no folder {repository!r} either.")


def _fail(message: str) -> NoReturn:
    """Print the message as one line on stderr, and exit with code 1."""
    _console(stderr=True).print(_text(f"Error: {' '.join(message.split())}"), soft_wrap=True)
    raise typer.Exit(1) from None


def _pin(model: str | None) -> tuple[str | None, str | None]:
    """Split `id@commit` into id and commit; the commit is `None` for `id`."""
    name, _, commit = (model or "").partition("@")
    return name or None, commit or None


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 100  # rich takes 80 for a pipe
    return console


def _show(report: RepositoryReport, console: Console) -> None:
    facts, table = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    facts.add_row("repository" if report.is_foreign else "assistant", _text(_pinned(report.name, report.commit)))
    for label, fact in _facts(report).items():
        facts.add_row(label, _text(fact))
    for file in report.files:
        verdict = Text("sound", "green") if file.problem is None else Text("PROBLEM", "bold red")
        table.add_row(verdict, _text(file.name), _text(file.problem or file.content))
    console.print(facts, "", table, "", sep="\n")
    for trap in report.traps:
        console.print(Text("warning  ", "yellow") + _text(trap))
    broken = sum(file.problem is not None for file in report.files)
    console.print(f"{broken} of {len(report.files)} files have problems." if broken else "All files are sound.")


def _facts(report: RepositoryReport) -> dict[str, str]:
    from hf_specdecpp.draft_kinds.known import describe

    config = report.config
    if config is None:
        return {}
    facts = {"target": _pinned(config.target_id, config.target_revision), "draft": describe(config)}
    facts |= {"settings": _items(report.settings)} if report.settings else {}
    if report.is_foreign:
        return facts
    versions = {"hf_specdecpp": config.specdecpp_version, "transformers": config.transformers_version}
    return {
        **facts,
        "head": _items(config.head),
        "adapter": "yes" if config.adapter else "none",
        "draft vocabulary": f"{config.draft_vocab_size} token ids" if config.draft_vocab_size else "all token ids",
        "speculation": _items(config.speculation),
        "tokenizer hash": str(config.vocab_hash or "not recorded"),
        "written by": ", ".join(f"{name} {version or '?'}" for name, version in versions.items()),
    }


def _items(values: dict[str, Any] | None) -> str:
    """Settings as text, such as "hidden_size=8, inputs='after', temperatures=[1.2, 1.1, 1.3, 1.2, ... +16]"."""
    shown = {name: pretty_repr(value, max_width=1000, max_length=4) for name, value in (values or {}).items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items()) or "none"


def _pinned(name: str | None, revision: str | None) -> str:
    """Name and commit, such as "org/model at 1a2b3c"; folders have no commit."""
    if name is None or os.path.isdir(name):  # noqa: PTH112 - Path.is_dir fails at very long names
        return name or "not recorded"
    return f"{name} at {revision or 'a commit that is not recorded'}"


def _text(value: str) -> Text:
    """`value` without markup and control characters, since repositories are untrusted."""
    return Text("".join(c if c.isprintable() else repr(c)[1:-1] for c in value))
