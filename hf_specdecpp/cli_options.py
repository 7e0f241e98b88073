"""The command line of a settings dataclass: an option for each field, helped by the field's entry in the docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from hf_specdecpp.config.descriptions import describe

Settings = TypeVar("Settings")
Command = TypeVar("Command", bound=Callable[..., Any])


def parse_layers(layers: str) -> int | list[int]:
    """`"4"` as 4, `"0,1,2,29"` as a list; `ValueError` if it is neither."""
    try:
        numbers = [int(part) for part in layers.split(",")]
    except ValueError:
        raise ValueError(f"--layers {layers!r} must be a number such as 4 or a list such as 0,1,2,29.") from None
    return numbers if "," in layers else numbers[0]


def parse_temperatures(temperatures: str) -> list[float]:
    """`"0,1"` as a list; `ValueError` if it is none."""
    try:
        return [float(part) for part in temperatures.split(",")]
    except ValueError:
        raise ValueError(f"--temperatures {temperatures!r} must be numbers such as 0 or 0,1.") from None


def parse_sizes(sizes: str) -> list[int]:
    """`"1,4,8"` as a list, empty text as none; `ValueError` for anything else."""
    try:
        return [int(part) for part in sizes.split(",") if sizes]
    except ValueError:
        raise ValueError(f"--batch_size {sizes!r} must be whole numbers such as 4 or 1,4,8.") from None


def parse_names(names: str) -> list[str]:
    """`"fixed*, dyspec"` as `["fixed*", "dyspec"]`."""
    return [name.strip() for name in names.split(",") if name.strip()]


@dataclass
class DraftChoice:
    """A model and what drafts for it, as commands are told.

    Args:
        target: Hub id or folder of the model to speed up.
        assistant: Hub id or folder of its assistant, of a draft that others trained or of a smaller model; by default
            the target's own multi-token layers draft, or where its checkpoint has none candidates are looked up in the
            text.
        layers: an untrained early exit drafts: 4 for the first four layers of the target, or indices such as 0,1,2,29.
        lookup: candidates also come from the text itself; without an assistant only these.
        mtp: draft with the target's own multi-token layers, without an assistant.
        tree: draft token trees.
    """

    target: str
    assistant: str | None = None
    layers: int | list[int] | None = field(default=None, metadata={"parse": parse_layers})
    lookup: bool = False
    mtp: bool = False
    tree: bool = False

    def __post_init__(self) -> None:
        check_mtp(self.mtp, self.assistant)

    @property
    def is_by_default(self) -> bool:
        """Whether nothing says what drafts."""
        return self.assistant is None and self.layers is None and not self.lookup and not self.mtp

    def flags(self, kind: str) -> str:
        """The options that name the same draft, such as "--assistant org/head".

        Args:
            kind: name of the kind of draft that the assistant has.
        """
        if self.assistant is not None:
            return f"--assistant {self.assistant}"
        if self.layers is None or self.lookup or self.mtp:
            return f"--{kind}"
        return f"--layers {self.layers if isinstance(self.layers, int) else ','.join(map(str, self.layers))}"


@dataclass
class TrainOptions:
    """What `specdecpp train` is told; what is given here wins over the file.

    Args:
        config: YAML file with any setting.
        target: Hub id or folder of the model to speed up.
        data: prompts: a JSON Lines file or a datasets id; may be repeated.
        output: folder that becomes the assistant's repository.
        draft: Hub id or folder of a draft, `conditioned`, `eagle3`, or `block`; by default an early exit.
        layers: layers of the target that draft: 4, or 0,1,2,29.
        server: URL of an OpenAI-compatible server for the answers.
        stage: run only this stage; may be repeated.
        push_to_hub: Hub id to upload the result to.
    """

    config: Path | None = None
    target: str | None = None
    data: list[str] = field(default_factory=list)
    output: str | None = None
    draft: str | None = None
    layers: int | list[int] | None = field(default=None, metadata={"parse": parse_layers})
    server: str | None = None
    stage: list[str] = field(default_factory=list)
    push_to_hub: str | None = field(default=None, metadata={"metavar": "REPO_ID"})


def check_mtp(mtp: bool, assistant: str | None) -> None:
    """`ValueError` where the target's own multi-token layers and an assistant shall both draft."""
    if mtp and assistant is not None:
        raise ValueError(
            f"--mtp takes no assistant, and --assistant names {assistant!r}: one draft guesses, the target's own "
            "multi-token layers or the assistant's. Leave one of them out."
        )


def options_of(cls: type) -> Callable[[Command], Command]:
    """Make the keyword arguments of a typer command the fields of a settings dataclass (`settings_from` makes one).

    `max_prompts: int | None` becomes `--max_prompts` and `--max-prompts`, `quick: bool = False` becomes `--quick`, and
    what is on or undecided by default becomes a pair, `--live` and `--no-live`. Metadata of a field: `parse`, which
    makes its value from the text of the option, such as `parse_layers`; `min` and `metavar` as typer knows them.
    """
    hints, help_of = get_type_hints(cls), {each.name: each.meaning for each in describe(cls)}

    def option(field: Field[Any]) -> inspect.Parameter:
        metadata = dict(field.metadata)
        hint = str | None if metadata.pop("parse", None) else hints[field.name]
        meaning = help_of[field.name].replace("`", "")
        info = typer.Option(*_flags(field, hint), help=meaning[0].upper() + meaning[1:], **metadata)
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
    """The dataclass filled with the options of a command.

    Raises:
        ValueError: an option makes no sense.
    """
    parsers = {each.name: each.metadata["parse"] for each in fields(cls) if "parse" in each.metadata}  # type: ignore[arg-type]
    given = {name: value for name, value in options.items() if value is not None}
    return cls(**{name: parsers[name](value) if name in parsers else value for name, value in given.items()})


def _flags(field: Field[Any], hint: Any) -> list[str]:
    names = dict.fromkeys((field.name, field.name.replace("_", "-")))
    paired = hint == bool | None or (hint is bool and field.default is True)
    return [f"--{name}/--no-{name}" if paired else f"--{name}" for name in names]


def _default(field: Field[Any]) -> Any:
    """What an option is if it is not given: text where the field is parsed from text."""
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    if default is MISSING:
        return inspect.Parameter.empty
    if "parse" not in field.metadata or default is None:
        return default
    parts = default if isinstance(default, list) else [default]
    return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
