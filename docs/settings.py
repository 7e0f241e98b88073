"""Write docs/settings.md from the dataclasses: `make docs`, or `python docs/settings.py`.

The meaning of a field stands in the docstring of its dataclass and nowhere else; a test compares the page with them.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from hf_specdecpp.cli_options import BenchmarkConfig, meanings
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.training.configuration import TrainingConfig

PAGE = Path(__file__).with_suffix(".md")

HEAD = """# Settings

Made from the docstrings by `make docs`; edit those. [choosing.md](choosing.md) helps to choose.
"""

SECTIONS: list[tuple[Any, str]] = [
    (
        SpeculationConfig,
        """## Speculation: `SpeculationConfig`

`assist(model, ..., threshold=0.5)`, or `assistant.speculation.threshold = 0.5` between two calls. A repository has
defaults of its own; `train` takes them under `speculation:`.
""",
    ),
    (
        Costs,
        """## Given costs: `SpeculationConfig(costs={...})`

For `rule="throughput"` where nothing is to be measured. Only ratios matter.
""",
    ),
    (
        TrainingConfig,
        """## Training: `TrainingConfig`

`specdecpp train --config FILE.yaml`; a name with a dot is nested: `head.rank` is `head: {rank: 64}`
([training.md](training.md)).
""",
    ),
    (
        BenchmarkConfig,
        """## Benchmark: `BenchmarkConfig`

Each field is an option of `specdecpp bench`, `--max_prompts 20` ([benchmarks.md](benchmarks.md)).
""",
    ),
]


class Setting(NamedTuple):
    """A field of a settings dataclass.

    Attributes:
        name: of the field, after the names of the dataclasses around it: `"head.rank"`.
        default: its default, `MISSING` where there is none.
        kind: what it takes, its annotation written out: `"int | None"`, `'"before" | "after"'`.
        unit: what its number counts, such as `"tokens"`; empty for what is no number.
        meaning: a sentence or more, with Markdown's backticks.
    """

    name: str
    default: Any
    kind: str
    unit: str
    meaning: str


def describe(cls: Any, path: str = "") -> Iterator[Setting]:
    """The fields of a dataclass in their order; those of a dataclass within it follow under its name. `ValueError` if a
    field has no entry in the docstring (`cli_options.meanings`)."""
    hints, described = get_type_hints(cls), meanings(cls)
    for each in fields(cls):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if is_dataclass(default):
            yield from describe(type(default), f"{path}{each.name}.")
        elif each.name in described:
            yield Setting(f"{path}{each.name}", default, kind_of(hints[each.name]), *described[each.name])
        else:
            raise ValueError(
                f"{cls.__name__}.{each.name} has no entry under Args: of the docstring, so nobody knows it."
            )


def kind_of(hint: Any) -> str:
    """An annotation written out."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(kind_of(one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return " | ".join(f'"{value}"' for value in get_args(hint))
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def page() -> str:
    """The text of docs/settings.md."""
    return "\n".join([HEAD, *(f"{text}\n{table(cls)}\n" for cls, text in SECTIONS)]).rstrip("\n") + "\n"


def table(cls: Any) -> str:
    """A row for each field: name, default, type or unit of its numbers, meaning."""
    rows = [["setting", "default", "takes", "meaning"], ["---"] * 4]
    rows += [
        [f"`{each.name}`", default(each), takes(each), each.meaning[0].upper() + each.meaning[1:]]
        for each in describe(cls)
    ]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)


def takes(setting: Setting) -> str:
    """The unit of a number, or the type: `None` stands in the column of defaults."""
    return setting.unit or f"`{setting.kind.removesuffix(' | None')}`"


def default(setting: Setting) -> str:
    if setting.default is MISSING:
        return "required"
    return f"`{str(setting.default) if isinstance(setting.default, Path) else setting.default!r}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
