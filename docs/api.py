"""Write docs/api.md from the docstrings of the public names: `make docs`, or `python docs/api.py`.

A test compares the page with the docstrings.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_specdecpp
from hf_specdecpp.assistant import DraftOptions, LoadingOptions, Options
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.files import DownloadOptions
from hf_specdecpp.terminal.listener import Listener

PAGE = Path(__file__).with_suffix(".md")

HEAD = """# The API

Made from the docstrings by `make docs`; edit those. Everything here is imported from `hf_specdecpp` unless its module
is named. [using.md](using.md) shows how the parts are used together; [settings.md](settings.md) has the settings.
"""

# In the order of the page: what most users call comes first.
NAMES = [
    "assist", "SpecDecPPAssistant", "SpeculationConfig", "SpeculationStats", "AcceptanceHead", "SpecDecPPConfig",
    "SpecDecPPCandidateGenerator",
]  # fmt: skip
OPTIONS = [Options, DraftOptions, LoadingOptions, DownloadOptions]
BESIDE: list[Any] = [*OPTIONS, Decisions, Listener]  # what those take or give
METHODS = {
    "SpecDecPPAssistant": [
        "from_pretrained", "from_draft", "from_early_exit", "from_conditioned", "attach", "detach", "as_default",
        "paused", "warm_up", "save_pretrained", "push_to_hub",
    ],
    "SpeculationConfig": ["validate", "to_dict", "from_dict"],
    "Listener": ["tokens"],
}  # fmt: skip
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
ENTRY = re.compile(r"    (\S[^:]*): (.*)")


def page() -> str:
    """The text of docs/api.md."""
    parts = [entry(name, getattr(hf_specdecpp, name)) for name in NAMES]
    parts += [entry(each.__name__, each, f"{each.__module__}.{each.__name__}") for each in BESIDE]
    return "\n".join([HEAD, *parts]).rstrip("\n") + "\n"


def entry(name: str, thing: Any, path: str = "") -> str:
    """A public name: its signature, its docstring, and those of its methods and properties."""
    lines = [f"## {name}", ""]
    if path:
        lines += [f"`{path}`", ""]
    if thing not in (*OPTIONS, hf_specdecpp.SpecDecPPConfig):  # not called, or as transformers says
        lines += [*signature(name, thing), ""]
    lines += markdown(documentation(thing))
    for member, of in members(thing) if inspect.isclass(thing) else ():
        lines += [f"### {name}.{member}", ""]
        if callable(of):
            lines += [*signature(member, of), ""]
        lines += markdown(inspect.getdoc(of) or "")
    return "\n".join(lines)


def documentation(thing: Any) -> str:
    """A docstring; of a class also the attributes that a base of ours describes."""
    bases = [each for each in getattr(thing, "__mro__", ())[1:] if each.__module__.startswith("hf_specdecpp")]
    inherited = [inspect.cleandoc(vars(each)["__doc__"] or "") for each in bases]
    attributes = [doc[place:] for doc in inherited if (place := doc.find("Attributes:\n")) >= 0]
    return "\n\n".join([inspect.getdoc(thing) or "", *attributes])


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The methods that users call, then the properties that our classes describe, in the order of the code."""
    for name in METHODS.get(cls.__name__, ()):
        yield name, getattr(cls, name)
    ours = [each for each in cls.__mro__ if each.__module__.startswith("hf_specdecpp")]
    properties = {name: of for each in ours for name, of in vars(each).items() if isinstance(of, property)}
    yield from ((name, of) for name, of in properties.items() if of.__doc__ and name not in ("generation_config",))


def signature(name: str, thing: Any) -> list[str]:
    """A block with what a call is given, an argument a line where they are many."""
    found = [each for each in inspect.signature(thing).parameters.values() if each.name not in ("self", "cls")]
    marks = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    texts = []
    for each in (each for each in found if each.name != "_"):
        default = "" if each.default is each.empty else f" = {each.default!r}"
        texts.append(f"{marks.get(each.kind, '')}{each.name}: {each.annotation}{default}".replace("<factory>", "..."))
    shown = ", ".join(texts) if len(texts) < 2 else "".join(f"\n    {text}," for text in texts) + "\n"
    return ["```", f"{name}({shown})", "```"]


def markdown(doc: str) -> list[str]:
    """A docstring with its sections as lists, an entry an item."""
    lines: list[str] = []
    in_section = False
    for line in doc.splitlines():
        if match := SECTION.match(line):
            in_section = True
            lines += [f"**{match[1]}**", ""]
        elif in_section and (match := ENTRY.fullmatch(line)):
            names = re.sub(r"(?<![\w (])(\w+)|(?<=, )(\w+)(?=,|$| \()", r"`\g<0>`", match[1])
            lines.append(f"- {names}: {match[2]}")
        elif in_section and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            in_section = in_section and not line
            lines.append(line)
    return [*lines, ""]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
