"""What the package runs: which functions, and how many instructions of Python, which no clock disturbs."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import hf_specdecpp

OURS = str(Path(hf_specdecpp.__file__).parent)
# Frames of their own until Python 3.12.
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")


@contextmanager
def our_calls() -> Iterator[list[CodeType]]:
    """The code of each function of ours that is called within, once a call."""
    found: list[CodeType] = []

    def note(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and code.co_name not in COMPREHENSIONS:
            found.append(code)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@contextmanager
def our_instructions() -> Iterator[Counter[str]]:
    """How many instructions of Python each function of ours runs within."""
    found: Counter[str] = Counter()

    def enter(frame: Any, _event: str, _argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines, name = True, False, frame.f_code.co_name

        def note(_frame: Any, event: str, _argument: object) -> Any:
            found[name] += event == "opcode"
            return note

        return note

    sys.settrace(enter)
    try:
        yield found
    finally:
        sys.settrace(None)
