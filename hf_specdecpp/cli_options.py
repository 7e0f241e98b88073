"""Options of the commands: a dataclass for each command, whose fields are the options. Imports no slow modules."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

ENTRY = re.compile(r"(?P<names>\w+(?:, \w+)*)(?: \((?P<unit>[^)]*)\))?: (?P<meaning>.*)")


def meanings(cls: type) -> dict[str, tuple[str, str]]:
    """Return unit and meaning of each field of a dataclass, from the docstrings of the class and its bases.

    An entry under `Args:` is `name (unit): meaning`, or `first, second (unit): meaning` for two fields; further lines
    of an entry are indented.
    """
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__):
        section = re.split(r"\n(?=\S)", (inspect.getdoc(base) or "").partition("\nArgs:\n")[2])[0]
        for entry in re.split(r"\n(?=    \S)", section):
            if match := ENTRY.fullmatch(" ".join(entry.split())):
                found |= dict.fromkeys(match["names"].split(", "), (match["unit"] or "", match["meaning"]))
    return found


Settings = TypeVar("Settings")
Command = TypeVar("Command", bound=Callable[..., Any])


def _numbers(kind: Callable[[str], Any], option: str, wanted: str) -> Callable[[str], list[Any]]:
    """Return a parser of `"0,1"` as a list of numbers (`""`: none), which raises `ValueError` for other text."""

    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",") if text]
        except ValueError:
            raise ValueError(f"{option} {text!r} must be {wanted}.") from None

    return parse


parse_temperatures = _numbers(float, "--temperatures", "numbers such as 0 or 0,1")
parse_sizes = _numbers(int, "--batch_size", "whole numbers such as 4 or 1,4,8")
parse_indices = _numbers(int, "--layers", "a number such as 4 or a list such as 0,1,2,29")


def parse_layers(layers: str) -> int | list[int]:
    """Parse `"4"` as 4, and `"0,1,2,29"` as a list. `ValueError` for other text."""
    numbers = parse_indices(layers)
    return numbers[0] if len(numbers) == 1 and "," not in layers else numbers


def parse_names(names: str) -> list[str]:
    """Parse `"fixed*, dyspec"` as `["fixed*", "dyspec"]`."""
    return [name.strip() for name in names.split(",") if name.strip()]


def _parsed(default: Any, parse: Callable[[str], Any]) -> Any:
    """A field whose option is text that `parse` converts."""
    return field(default_factory=lambda: default, metadata={"parse": parse})


def _at_least_one(default: int | None) -> Any:
    return field(default=default, metadata={"min": 1})


# Settings of commands -------------------------------------------------------------------------------------------------


@dataclass
class DraftChoice:
    """A target model and its draft.

    Args:
        target: Hub id or folder of the model to speed up.
        assistant: Hub id or folder of an assistant, a published draft or a smaller model. By default the target's own
            multi-token layers draft, or, if its checkpoint has none, candidates are looked up in earlier text.
        layers: draft with an untrained early exit: 4 for the first four layers of the target, or indices such as
            0,1,2,29.
        lookup: also look up candidates in earlier text; without an assistant this is the only source of candidates.
        mtp: draft with the target's own multi-token layers, without an assistant.
    """

    target: str
    assistant: str | None = None
    layers: int | list[int] | None = _parsed(None, parse_layers)
    lookup: bool = False
    mtp: bool = False

    def __post_init__(self) -> None:
        if self.mtp and self.assistant is not None:
            raise ValueError(
                f"--mtp drafts with the target's own layers, and --assistant={self.assistant!r} with another draft. "
                "Leave one of them out."
            )

    def next_step(self, kind: str) -> str:
        """A line with the command that measures this draft. `kind`: name of the kind of draft."""
        draft = f"--{kind}" if self.assistant is None else f"--assistant {self.assistant}"
        if self.layers is not None and not (self.assistant or self.lookup or self.mtp):
            draft = f"--layers {self.layers if isinstance(self.layers, int) else ','.join(map(str, self.layers))}"
        return f"Measure more: specdecpp bench --target {self.target} {draft} --quick"


@dataclass
class DemoConfig(DraftChoice):
    """Options of `specdecpp demo`.

    Args:
        tree: draft token trees, and print the most branched tree.
        max_new_tokens (tokens): maximum length of an answer.
        prompt: a question; may be repeated. By default four questions of several kinds.
        svg: file for an animated picture of the last answer, with and without the assistant.
    """

    tree: bool = False
    max_new_tokens: int = _at_least_one(48)
    prompt: list[str] = field(default_factory=list)
    svg: Path | None = field(default=None, metadata={"metavar": "FILE"})


@dataclass
class ChatConfig(DraftChoice):
    """Options of `specdecpp chat`.

    Args:
        max_new_tokens (tokens): maximum length of an answer.
        temperature: 0 is greedy; by default that of the model's generation config.
    """

    max_new_tokens: int = _at_least_one(512)
    temperature: float | None = field(default=None, metadata={"min": 0.0})


@dataclass
class TrainOptions:
    """Options of `specdecpp train`, which override the settings in the YAML file.

    Args:
        config: YAML file with any settings.
        target: Hub id or folder of the model to speed up.
        data: prompts: a JSON Lines file or a datasets id; may be repeated.
        output: folder for the assistant's repository.
        draft: Hub id or folder of a draft, `conditioned`, or `eagle3`; by default an early exit.
        layers: layers of the target that make up the draft: 4 for the first four, or 0,1,2,29.
        server: URL of an OpenAI-compatible server that generates the answers.
        head_only: leave the draft as it is, and fit a head that other engines serve with it (`head.inputs: path`).
        stage: run only this stage; may be repeated.
        push_to_hub: Hub id of the repository to upload to.
    """

    config: Path | None = None
    target: str | None = None
    data: list[str] = field(default_factory=list)
    output: str | None = None
    draft: str | None = None
    layers: int | list[int] | None = _parsed(None, parse_layers)
    server: str | None = None
    head_only: bool = False
    stage: list[str] = field(default_factory=list)
    push_to_hub: str | None = field(default=None, metadata={"metavar": "REPO_ID"})


@dataclass
class BenchmarkConfig(DraftChoice):
    """Options of `specdecpp bench`.

    Args:
        draft: local folder of the draft that the assistant's repository names.
        data: a set of prompts: a JSON Lines file or a datasets id; may be repeated. By default built-in prompts.
        max_prompts (prompts): maximum per set, chosen by `seed`; all by default.
        max_new_tokens (tokens): maximum length of an answer.
        temperatures: every prompt is answered at every temperature, such as 0,1; 0 is greedy.
        contestants: only these: names or patterns, such as `fixed*,dyspec*`.
        output: folder for the results; a killed run resumes there.
        dtype: dtype of the target; `"auto"` is the dtype of the stored weights.
        device: device of the target; by default an accelerator if available.
        threads (threads): number of torch's threads.
        seed: seed of the choice of prompts and of all random numbers.
        cpu_products: `"auto"` or `"off"`; by default the assistant's setting.
        live: time single prompts.
        batch_size (prompts): also time several prompts in one generate(): sizes such as 1,4,8.
        attempts (generations): maximum number of attempts if other load disturbs a generation; the least disturbed is
            kept.
        quick: use few contestants, prompts and tokens: about a minute for a small model on an idle CPU.
        card: file for the speeds in a model card.
    """

    draft: str | None = None
    data: list[str] = field(default_factory=list)
    max_prompts: int | None = _at_least_one(None)
    max_new_tokens: int = _at_least_one(128)
    temperatures: list[float] = _parsed([0.0, 1.0], parse_temperatures)
    contestants: list[str] = _parsed([], parse_names)
    output: Path = Path("bench")
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = _at_least_one(None)
    seed: int = 0
    cpu_products: str | None = None
    live: bool = True
    batch_size: list[int] = _parsed([], parse_sizes)
    attempts: int = _at_least_one(3)
    quick: bool = False
    card: Path | None = field(default=None, metadata={"metavar": "FILE"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(temperature < 0.0 for temperature in self.temperatures) or not self.temperatures:
            raise ValueError(f"temperatures={self.temperatures} must be numbers of at least 0 (greedy).")
        if any(size < 1 for size in self.batch_size):
            raise ValueError(f"batch_size={self.batch_size} must be numbers of prompts, at least 1.")
        if self.lookup and (self.mtp or self.assistant is not None):
            raise ValueError(
                "bench --lookup takes neither --mtp nor --assistant. Leave --lookup out: with a draft, `lookup`, "
                "`lookup + draft` and `lookup + trees` are among the contestants."
            )


# The command line -----------------------------------------------------------------------------------------------------


def options_of(cls: type) -> Callable[[Command], Command]:
    """Decorator that gives a typer command the fields of `cls`, a dataclass, as options for `settings_from`.

    `max_prompts: int | None` becomes `--max_prompts` and `--max-prompts`, `quick: bool = False` becomes `--quick`, and
    a bool with the default `True` or `None` becomes a pair, `--live` and `--no-live`. Metadata of a field: `parse`, a
    function that converts the option's text, such as `parse_layers`; `min` and `metavar` of typer."""
    hints, described = get_type_hints(cls), meanings(cls)

    def option(field: Field[Any]) -> inspect.Parameter:
        metadata = dict(field.metadata)
        hint = str | None if metadata.pop("parse", None) else hints[field.name]
        meaning = described[field.name][1].replace("`", "")
        names = dict.fromkeys((field.name, field.name.replace("_", "-")))
        paired = hint == bool | None or (hint is bool and field.default is True)
        flags = [f"--{name}/--no-{name}" if paired else f"--{name}" for name in names]
        info = typer.Option(*flags, help=meaning[0].upper() + meaning[1:], **metadata)
        return inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=Annotated[hint, info]
        )

    def decorate(command: Command) -> Command:
        signature = inspect.Signature([option(field) for field in fields(cls)])
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
        return command

    return decorate


def settings_from(cls: type[Settings], options: dict[str, Any]) -> Settings:
    """Make a `cls` from the options of a command. `ValueError` if an option is invalid."""
    parsers = {each.name: each.metadata["parse"] for each in fields(cls) if "parse" in each.metadata}  # type: ignore[arg-type]
    given = {name: value for name, value in options.items() if value is not None}
    return cls(**{name: parsers[name](value) if name in parsers else value for name, value in given.items()})


def _default(field: Field[Any]) -> Any:
    """The default of a field's option; text if the field has `parse`."""
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    if default is MISSING:
        return inspect.Parameter.empty
    if "parse" not in field.metadata or default is None:
        return default
    parts = default if isinstance(default, list) else [default]
    return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
