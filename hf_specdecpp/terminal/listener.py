"""Notes who chose each token of an answer, and when (`Listener`); draws two answers as they are written (`picture`)."""

from __future__ import annotations

import html
import io
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.bar import Bar
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specdecpp.generation.stats import SpeculationStats


@dataclass(frozen=True)
class Token:
    """What a token adds to the text of an answer, whether it is an accepted candidate, and the seconds to its pass.

    Of a character of several tokens the last one adds it, the others nothing.
    """

    text: str
    accepted: bool
    seconds: float


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, its seconds with the prompt's pass, seconds by another clock, and the tokens' ids."""

    said: Sequence[Token]
    seconds: float
    by_clock: float = 0.0
    ids: Sequence[int] = ()

    @property
    def rate(self) -> str:
        """Such as "64 tokens in 2.31 s, 27.7 tokens/s"."""
        count = len(self.said)
        return f"{count} tokens in {self.seconds:.2f} s, {count / self.seconds:.1f} tokens/s"


class Listener(BaseStreamer):
    """A streamer that notes which tokens each target pass of one `generate()` call adds, and when.

    Make it right before the call. `passes` has for each pass, in order, the seconds from the beginning to its tokens,
    and the tokens.

    Args:
        onward: another streamer, which gets the same tokens.
        clock: a function that returns seconds, such as `time.process_time`, which other processes do not disturb.
    """

    def __init__(self, onward: BaseStreamer | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.onward, self.clock = onward, clock
        self.passes: list[tuple[float, list[int]]] = []
        self._has_prompt = False
        self.begin = clock()

    def put(self, value: Tensor) -> None:
        seconds = self.clock() - self.begin
        if self._has_prompt:
            self.passes.append((seconds, value.reshape(-1).tolist()))
        self._has_prompt = True  # `generate()` begins with it
        if self.onward is not None:
            self.onward.put(value)

    def end(self) -> None:
        if self.onward is not None:
            self.onward.end()

    def tokens(self, tokenizer: PreTrainedTokenizerBase, stats: SpeculationStats | None = None) -> list[Token]:
        """Each token of the answer, or of what there is of it while it is being written.

        Args:
            stats: the assistant's of the call, once it has ended; `None` without one.

        The target adds a token of its own to the candidates that it accepts, so the last token of a pass is its own,
        but for a text that ends with a candidate. The counts tell: one more token would then have been generated.
        Example: passes of 1, 3 and 2 tokens are 0 + 1, 2 + 1 and 1 + 1, or at such an end 0 + 1, 2 + 1 and 2 + 0.
        """
        passes = list(self.passes)  # another thread may write
        ends_inside = stats is not None and stats.accepted + stats.target_passes > stats.generated
        whose: list[tuple[bool, float]] = []
        for seconds, tokens in passes:
            whose += [(place < len(tokens) - 1, seconds) for place in range(len(tokens))]
        if whose and ends_inside:
            whose[-1] = (True, whose[-1][1])
        texts = _texts(tokenizer, [token for _, tokens in passes for token in tokens])
        return [Token(text, *of) for text, of in zip(texts, whose, strict=True)]


def _texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """What each token adds to the text of those before it, special tokens nothing."""
    options: Any = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    texts, before = [], ""
    for end in range(1, len(tokens) + 1):
        now: Any = tokenizer.decode(tokens[:end], **options)
        if now.endswith("\ufffd") and end < len(tokens):  # part of a character, or none that will ever be one
            now = before
        texts.append(now[len(before) :])
        before = now
    return texts


def without_controls(text: str) -> str:
    """Without control characters but tabs and line ends: what a model says must not steer the terminal."""
    return "".join(c for c in text if c in "\t\n" or unicodedata.category(c) != "Cc")


def coloured(answer: Answer) -> Text:
    """The text of an answer, its accepted candidates green."""
    styles = ((without_controls(token.text), "green" if token.accepted else "") for token in answer.said)
    return Text.assemble(*styles)


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
        Group(Text(title, "bold"), Text(each.rate, "dim"), Bar(longest, 0, each.seconds, width=COLUMNS), text)
        for title, each in (("plain generate()", plain), ("with the assistant", assisted))
        for text in [_written(each, shown)]
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
