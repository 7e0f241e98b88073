"""A command line that is made of a settings dataclass."""

from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hf_specdecpp.cli_options import (
    options_of,
    parse_layers,
    parse_names,
    parse_sizes,
    parse_temperatures,
    settings_from,
)


@dataclass
class Settings:
    """Some of each kind.

    Args:
        target: what is timed, `required`.
        max_prompts (prompts): the most of each set.
        layers: of the exit.
        data: may be repeated.
        costs: likewise.
        quick: off by default.
        live: on by default.
        merge: undecided by default.
        output: a folder.
    """

    target: str
    max_prompts: int | None = field(default=None, metadata={"min": 1})
    layers: int | list[int] = field(default=4, metadata={"parse": parse_layers})
    data: list[str] = field(default_factory=list)
    costs: list[str] = field(default_factory=lambda: ["measured", "paper"])
    quick: bool = False
    live: bool = True
    merge: bool | None = None
    output: Path = Path("out")


def given(*arguments: str) -> Any:
    app, made = typer.Typer(), []

    @app.command()
    @options_of(Settings)
    def command(**options: Any) -> None:
        made.append(settings_from(Settings, options))

    result = CliRunner().invoke(app, arguments)
    return made[0] if made else result


def test_defaults_are_those_of_the_dataclass() -> None:
    assert given("--target", "x") == Settings("x")


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["--max_prompts", "2"], {"max_prompts": 2}),
        (["--max-prompts", "2"], {"max_prompts": 2}),
        (["--layers", "0,2"], {"layers": [0, 2]}),
        (["--data", "a", "--data", "b"], {"data": ["a", "b"]}),
        (["--costs", "0.1"], {"costs": ["0.1"]}),
        (["--quick", "--no-live"], {"quick": True, "live": False}),
        (["--merge"], {"merge": True}),
        (["--no-merge"], {"merge": False}),
        (["--output", "there"], {"output": Path("there")}),
    ],
)
def test_options_reach_the_fields(arguments: list[str], settings: dict[str, Any]) -> None:
    assert given("--target", "x", *arguments) == Settings("x", **settings)


@pytest.mark.parametrize("arguments", [[], ["--target", "x", "--max_prompts", "0"], ["--target", "x", "--no-quick"]])
def test_what_the_command_line_refuses(arguments: list[str]) -> None:
    assert given(*arguments).exit_code == 2


def test_help_is_the_entry_of_the_docstring() -> None:
    @options_of(Settings)
    def command(**_: Any) -> None: ...

    shown = {name: each.annotation.__metadata__[0] for name, each in signature(command).parameters.items()}
    assert shown["target"].help == "What is timed, required."
    assert shown["max_prompts"].help == "The most of each set."


def test_parsing() -> None:
    assert (parse_layers("4"), parse_layers("0,1,29")) == (4, [0, 1, 29])
    assert parse_temperatures("0,0.7") == [0.0, 0.7]
    assert parse_sizes("1,4,8") == [1, 4, 8]
    assert parse_sizes("") == []
    assert parse_names("fixed*, dyspec") == ["fixed*", "dyspec"]
    assert parse_names("") == []
    with pytest.raises(ValueError, match="--layers 'four' must be a number"):
        parse_layers("four")
    with pytest.raises(ValueError, match="--temperatures 'hot' must be numbers"):
        parse_temperatures("hot")
    with pytest.raises(ValueError, match="whole numbers such as 4 or 1,4,8"):
        parse_sizes("4.5")
