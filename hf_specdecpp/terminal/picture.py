"""An answer with an assistant beside the plain one, as an SVG that writes both at the speed that was measured.

It is a picture of its own: no script, no font and no file from elsewhere. Where animation is not shown, or not wanted
(`prefers-reduced-motion`), both answers stand there whole, with bars for their times.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len

from hf_specdecpp.terminal.listener import Token

COLUMNS = 48  # characters a line of an answer
CELL, LINE, MARGIN, GAP = 7.8, 19.0, 20.0, 28.0  # pixels
PANE = COLUMNS * CELL
WIDTH = 2 * (MARGIN + PANE) + GAP
TOP, BELOW = 104.0, 58.0  # above and below the lines of the answers
PAUSE = 4.0  # seconds for which both answers stand there before they are written again

# Words are kept together, and characters of scripts without spaces are not.
PIECES = re.compile(rf"\n|[^\S\n]+|[^\s\u2e80-\U0010ffff]{{1,{COLUMNS}}}|\S")

STYLE = """
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1f2328;white-space:pre}
.card{fill:#fff;stroke:#d0d7de}.hit{fill:#a7e3b8}.plain{fill:#8c959f}.ours{fill:#2da44e}
.head{font-weight:700}.note{font-size:11px;fill:#59636e}
.bar{transform-origin:left;transform-box:fill-box}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.card{fill:#0d1117;stroke:#3d444d}.hit{fill:#17663a}
.plain{fill:#6e7681}.ours{fill:#3fb950}.note{fill:#9198a1}}
@media(prefers-reduced-motion:reduce){*{animation:none!important}}
"""


@dataclass(frozen=True)
class Answer:
    """An answer and the seconds that it took, the prompt's pass included."""

    said: Sequence[Token]
    seconds: float

    @property
    def rate(self) -> str:
        """Such as "64 tokens in 2.31 s, 27.7 tokens/s"."""
        count = len(self.said)
        return f"{count} tokens in {self.seconds:.2f} s, {count / self.seconds:.1f} tokens/s"


def picture(question: str, plain: Answer, assisted: Answer, notes: Sequence[str] = (), is_narrow: bool = False) -> str:
    """The SVG of a question with both answers.

    Args:
        notes: lines of small print under them, such as what was measured where.
        is_narrow: for telephones, 415 pixels wide: the answers stand one above the other, not side by side.
    """
    longest = max(plain.seconds, assisted.seconds)
    lines = [LINE * len(_lines(_text(answer.said))) for answer in (plain, assisted)]
    right, down = (0.0, lines[0] + 84.0) if is_narrow else (PANE + GAP, 0.0)  # of the second answer
    foot = TOP + (down + lines[1] if is_narrow else max(lines))
    width, height = 2 * MARGIN + PANE + right, foot + BELOW + 16 * len(notes)
    legend = "a candidate that the target accepted"
    if not is_narrow:
        legend += ", several at a time; all other tokens it chose itself"
    parts = [
        f'<rect class="card" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>',
        _label(MARGIN, 34, _shortened(question, COLUMNS if is_narrow else 2 * COLUMNS)),
        *_pane("plain", "plain generate()", plain, MARGIN, longest),
        f'<g transform="translate(0 {down:g})">',
        *_pane("ours", "with the assistant", assisted, MARGIN + right, longest),
        "</g>",
        f'<rect class="hit" x="{MARGIN:g}" y="{foot + 23:.1f}" width="24" height="14" rx="3"/>',
        _label(MARGIN + 32, foot + 34, legend, "note"),
        *(_label(MARGIN, foot + 56 + 16 * row, note, "note") for row, note in enumerate(notes)),
    ]
    rules = [STYLE, *_animation("plain", plain, longest), *_animation("ours", assisted, longest)]
    about = f"{question}: {plain.rate} by plain generate(), {assisted.rate} with the assistant."
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img">',
            f"<title>{_plain(about)}</title>",
            *("<style>", *rules, "</style>"),
            *(*parts, "</svg>\n"),
        )
    )


def _pane(name: str, title: str, answer: Answer, left: float, longest: float) -> list[str]:
    """One answer: its title, its time as a number and as a bar, and its tokens, grouped by the passes of the target."""
    width = PANE * answer.seconds / longest
    return [
        _label(left, 60, title, "head"),
        _label(left, 80, answer.rate, "note"),
        f'<rect class="bar {name} {name}-bar" x="{left:g}" y="88" width="{width:.1f}" height="4" rx="2"/>',
        *(f'<g class="{name[0]}{place}">{drawn}</g>' for place, drawn in enumerate(_passes(answer.said, left))),
    ]


def _animation(name: str, answer: Answer, longest: float) -> list[str]:
    """CSS that writes one answer, pass by pass, and again after a pause at the end of the longer one."""
    loop = longest + PAUSE
    return [
        f"@keyframes {name}-bar{{0%{{transform:scaleX(0)}}{_share(answer.seconds, loop)},to{{transform:none}}}}"
        f".{name}-bar{{animation:{name}-bar {loop:.2f}s linear infinite}}",
        *(
            f"@keyframes {name[0]}{place}{{0%{{opacity:0}}{_share(seconds, loop)}{{opacity:1}}}}"
            f".{name[0]}{place}{{animation:{name[0]}{place} {loop:.2f}s step-end infinite}}"
            for place, seconds in enumerate(_times(answer.said))
        ),
    ]


def _times(said: Sequence[Token]) -> list[float]:
    """The seconds of each pass of the target."""
    return list(dict.fromkeys(each.seconds for each in said))


def _passes(said: Sequence[Token], left: float) -> list[str]:
    """Of each pass of the target the drawing of its tokens, where they stand in the text."""
    text = _text(said)
    owners = [place for place, each in enumerate(said) for _ in _written(each.text)]
    runs: dict[float, list[str]] = {seconds: [] for seconds in _times(said)}
    for row, (begin, end) in enumerate(_lines(text)):
        end = begin + len(text[begin:end].rstrip())
        for owner, group in groupby(range(begin, end), key=owners.__getitem__):
            places = list(group)
            x = left + CELL * cell_len(text[begin : places[0]])
            part, token = text[places[0] : places[-1] + 1], said[owner]
            runs[token.seconds].append(_run(x, TOP + LINE * (row + 1), part, token.accepted))
    return ["".join(drawn) for drawn in runs.values()]


def _run(x: float, y: float, text: str, accepted: bool) -> str:
    """A token, or the part of one that is in a line: as wide as its cells in whatever font there is."""
    width = CELL * max(cell_len(text), 1)  # an accent alone has no cell
    back = f'<rect class="hit" x="{x:.1f}" y="{y - 14:g}" width="{width - 1:.1f}" height="18"/>' if accepted else ""
    if text.isspace():
        return back
    inner = text.strip()
    x += CELL * (len(text) - len(text.lstrip()))
    return (
        back + f'<text x="{x:.1f}" y="{y:g}" textLength="{CELL * max(cell_len(inner), 1):.1f}">{_plain(inner)}</text>'
    )


def _label(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{_plain(text)}</text>'


def _text(said: Sequence[Token]) -> str:
    return "".join(_written(each.text) for each in said)


def _written(text: str) -> str:
    return text.replace("\t", "    ").replace("\r", "")


def _lines(text: str) -> list[tuple[int, int]]:
    """Begin and end of each line."""
    lines, begin = [], 0
    for piece in PIECES.finditer(text):
        if piece[0] == "\n":
            lines.append((begin, piece.start()))
            begin = piece.end()
        elif not piece[0].isspace() and cell_len(text[begin : piece.end()]) > COLUMNS:
            lines.append((begin, piece.start()))
            begin = piece.start()
    return [*lines, (begin, len(text))]


def _shortened(text: str, cells: int) -> str:
    line = " ".join(text.split())
    return line if cell_len(line) <= cells else f"{line[: cells - 1]}…"


def _share(seconds: float, loop: float) -> str:
    return f"{100 * seconds / loop:.2f}%"


def _plain(text: str) -> str:
    """Text for XML, which has no place for control characters."""
    return html.escape("".join(c if c.isprintable() else " " for c in text))
