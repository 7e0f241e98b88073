"""An answer with an assistant beside the plain one, drawn by rich as an SVG that writes both at the measured speed.

It loads nothing from elsewhere. Without animation, or where a reader wants no motion, both answers stand there whole.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence

from rich.bar import Bar
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from hf_specdecpp.terminal.listener import Answer, without_controls

COLUMNS, GAP = 48, 3  # characters a line of an answer, and between the two
PAUSE = 4.0  # seconds for which both answers stand there before they are written again
CHOSEN, GUESSED = (0xC0, 0xC0, 0xC0), (0x40, 0xD0, 0x60)  # the target's own tokens, and candidates that it accepted
SHADES = 16  # of each part of a colour, too close to see: every pass has its own, by which its drawing is found
ELSEWHERE = re.compile(r"<!--.*?-->|@font-face {.*?}\n", re.DOTALL)  # rich names a font on a server
STILL = "@media(prefers-reduced-motion:reduce){*{animation:none!important}}"


def picture(question: str, plain: Answer, assisted: Answer, notes: Sequence[str] = (), is_narrow: bool = False) -> str:
    """The SVG of a question with both answers, for telephones one above the other, and lines of small print."""
    longest, shown = max(plain.seconds, assisted.seconds), dict[str, float]()
    panes = [
        Group(
            Text(title, "bold"),
            Text(each.rate, "dim"),
            Bar(longest, 0.0, each.seconds, width=COLUMNS),
            _written(each, shown),
        )
        for title, each in (("plain generate()", plain), ("with the assistant", assisted))
    ]
    table = Table.grid(*(Column(width=COLUMNS) for _ in range(1 if is_narrow else 2)), padding=(0, GAP, 1, 0))
    for row in [[each] for each in panes] if is_narrow else [panes]:
        table.add_row(*row)
    width = COLUMNS if is_narrow else 2 * COLUMNS + GAP
    console = Console(file=io.StringIO(), record=True, width=width, highlight=False, markup=False)
    console.print(without_controls(" ".join(question.split())), style="bold", no_wrap=True, overflow="ellipsis")
    console.print(table)
    legend = Text("Green: candidates that the target accepted, several at a time; all other tokens it chose itself.")
    legend.stylize(_colour(GUESSED, 0), 0, len("Green"))
    console.print(legend, *(Text(note, "dim") for note in notes), sep="\n")
    svg = ELSEWHERE.sub("", console.export_svg(title="specdecpp demo", unique_id="answer"))
    about = f"{question}: {plain.rate} by plain generate(), {assisted.rate} with the assistant."
    rules = [
        f"@keyframes {name}{{0%{{opacity:0}}{100 * shown[colour] / (longest + PAUSE):.2f}%{{opacity:1}}}}"
        f".{name}{{animation:{name} {longest + PAUSE:.2f}s step-end infinite}}"
        for name, colour in re.findall(r"\.(answer-r\d+) { fill: (#\w+)", svg)
        if colour in shown
    ]
    head = f"<title>{html.escape(without_controls(about))}</title>\n<style>{''.join(rules)}{STILL}</style>\n<style>"
    return svg.replace("<style>", head, 1)


def _written(answer: Answer, shown: dict[str, float]) -> Text:
    """The text of an answer; the seconds of each colour are noted, a shade a pass."""
    text, first = Text(overflow="fold"), len(shown)
    times = list(dict.fromkeys(each.seconds for each in answer.said))
    for token in answer.said:
        colour = _colour(GUESSED if token.accepted else CHOSEN, first + times.index(token.seconds))
        shown[colour] = token.seconds
        text.append(without_controls(token.text), colour)
    return text


def _colour(base: tuple[int, int, int], number: int) -> str:
    """A shade of a colour, such as "#c0c1c0"."""
    parts = zip(base, (number, number // SHADES, number // SHADES**2), strict=True)
    return "#" + "".join(f"{part + more % SHADES:02x}" for part, more in parts)
