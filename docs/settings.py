"""Write docs/settings.md from the dataclasses: `make docs`, or `python docs/settings.py`.

The meaning of a field stands in the docstring of its dataclass and nowhere else; a test compares the page with them.
"""

from dataclasses import MISSING
from pathlib import Path
from typing import Any

from hf_specdecpp.cli_options import BenchmarkConfig, Setting, describe
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
