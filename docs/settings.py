"""Write docs/settings.md from the dataclasses: `make docs`, or `python docs/settings.py`.

The meaning of a field stands in the docstring of its dataclass and nowhere else; a test compares the page with them.
"""

from dataclasses import MISSING
from pathlib import Path
from typing import Any

from hf_specdecpp.benchmark.settings import BenchmarkConfig
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.descriptions import Setting, describe
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.training.configuration import TrainingConfig

PAGE = Path(__file__).with_suffix(".md")

HEAD = """# Settings

Every field that can be set, with its default. This page is made from the docstrings by `make docs`; edit those. Which
values to choose is in [choosing.md](choosing.md).
"""

SECTIONS: list[tuple[Any, str]] = [
    (
        SpeculationConfig,
        """## Speculation: `SpeculationConfig`

`from_pretrained(..., speculation=SpeculationConfig(...))`, or `assistant.speculation.threshold = 0.5` between two
calls. A repository has defaults of its own in `config.json`; `train` takes them under `speculation:`.
""",
    ),
    (
        Costs,
        """## Given costs: `SpeculationConfig(costs={...})`

For `rule="throughput"` where nothing is to be measured. All are in seconds, but only their ratios matter.
""",
    ),
    (
        TrainingConfig,
        """## Training: `TrainingConfig`

`specdecpp train --config FILE.yaml`; a name with a dot is nested, so `head.rank` is `head: {rank: 64}`. What the stages
do is in [training.md](training.md).
""",
    ),
    (
        BenchmarkConfig,
        """## Benchmark: `BenchmarkConfig`

`specdecpp bench`: each field is an option of the same name, `--max_prompts 20`. How to read its report is in
[benchmarks.md](benchmarks.md).
""",
    ),
]


def page() -> str:
    """The text of docs/settings.md."""
    return "\n".join([HEAD, *(f"{text}\n{table(cls)}\n" for cls, text in SECTIONS)]).rstrip("\n") + "\n"


def table(cls: Any) -> str:
    """A row for each field: name, type, default, unit of its numbers, meaning."""
    rows = [["setting", "type", "default", "unit", "meaning"], ["---"] * 5]
    rows += [
        [f"`{each.name}`", f"`{each.kind}`", default(each), each.unit, each.meaning[0].upper() + each.meaning[1:]]
        for each in describe(cls)
    ]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)


def default(setting: Setting) -> str:
    if setting.default is MISSING:
        return "required"
    return f"`{str(setting.default) if isinstance(setting.default, Path) else setting.default!r}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
