"""Records which tokens of an answer are accepted candidates, and when (`Listener`); draws two answers (`picture`)."""

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
    """A token of an answer: its text, whether it is an accepted candidate, and the seconds until its pass ended.

    If a character consists of several tokens, the text of the last one is the character, and that of others is empty.
    """

    text: str
    accepted: bool
    seconds: float


@dataclass(frozen=True)
class Answer:
    """An answer's tokens, seconds of `generate()` (such as CPU time), seconds by the wall clock, and token ids."""

    tokens: Sequence[Token]
    seconds: float
    by_clock: float = 0.0
    ids: Sequence[int] = ()

    @property
    def rate(self) -> str:
        """Length and speed, such as "64 tokens in 2.31 s, 27.7 tokens/s"."""
        count = len(self.tokens)
        return f"{count} tokens in {self.seconds:.2f} s, {count / self.seconds:.1f} tokens/s"


class Listener(BaseStreamer):
    """A streamer that records which tokens each target pass of one `generate()` call adds, and when.

    Create the listener right before the call. Its attribute `passes` is a list with an item for each pass: the seconds
    since creation, and the token ids that the pass added.

    Args:
        onward: another streamer, which gets the same tokens.
        clock: function that returns seconds, for example `time.process_time` for CPU time.
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
        self._has_prompt = True  # the first call has the prompt
        if self.onward is not None:
            self.onward.put(value)

    def end(self) -> None:
        if self.onward is not None:
            self.onward.end()

    def tokens(self, tokenizer: PreTrainedTokenizerBase, stats: SpeculationStats | None = None) -> list[Token]:
        """Return all tokens of the answer so far. May be called during generation.

        Args:
            stats: `assistant.stats` after the call; `None` during generation, or without an assistant.

        A pass adds the accepted candidates and a bonus token of the target. If the answer ends with an accepted
        candidate, there is no last bonus token, which the counts in `stats` show. Example: passes of 1, 3 and 2 tokens
        are 0 + 1, 2 + 1 and 1 + 1 candidates and bonus tokens, or 0 + 1, 2 + 1 and 2 + 0.
        """
        passes = list(self.passes)  # a copy, since another thread may append
        ends_inside = stats is not None and stats.accepted + stats.target_passes > stats.generated
        whose: list[tuple[bool, float]] = []
        for seconds, tokens in passes:
            whose += [(place < len(tokens) - 1, seconds) for place in range(len(tokens))]
        if whose and ends_inside:
            whose[-1] = (True, whose[-1][1])
        texts = _texts(tokenizer, [token for _, tokens in passes for token in tokens])
        return [Token(text, *of) for text, of in zip(texts, whose, strict=True)]


def _texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text that each token adds to the answer; empty for special tokens."""
    options: Any = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    texts, before = [], ""
    for end in range(1, len(tokens) + 1):
        now: Any = tokenizer.decode(tokens[:end], **options)
        if now.endswith("\ufffd") and end < len(tokens):  # an incomplete or invalid character
            now = before
        texts.append(now[len(before) :])
        before = now
    return texts


def without_controls(text: str) -> str:
    """Remove control characters, which could control the terminal, except tabs and newlines."""
    return "".join(c for c in text if c in "\t\n" or unicodedata.category(c) != "Cc")


def coloured(answer: Answer) -> Text:
    """The text of an answer, with accepted candidates in green."""
    styles = ((without_controls(token.text), "green" if token.accepted else "") for token in answer.tokens)
    return Text.assemble(*styles)


COLUMNS, GAP = 48, 3  # width of an answer and of the space between answers, in characters
PAUSE = 4.0  # seconds between the end of the animation and its repetition
CHOSEN, GUESSED = (0xC0, 0xC0, 0xC0), (0x40, 0xD0, 0x60)  # colours of the target's tokens and of accepted candidates
SHADES = 16  # invisible variations per colour channel: each pass has its own colour, which identifies its SVG elements
ELSEWHERE = re.compile(r"<!--.*?-->|@font-face {.*?}\n", re.DOTALL)  # rich's reference to a font on a server
STILL = "@media(prefers-reduced-motion:reduce){*{animation:none!important}}"


def picture(question: str, plain: Answer, assisted: Answer, notes: Sequence[str] = (), is_narrow: bool = False) -> str:
    """Return an animated SVG of a question with both answers, side by side or (`is_narrow`) one above the other.
    `notes`: lines below the answers."""
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
    legend = Text("Green: accepted candidates, verified several at a time; other tokens are the target's own.")
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
    """The text of an answer with one colour per pass. Adds the seconds of each colour to `shown`."""
    text, first = Text(overflow="fold"), len(shown)
    times = list(dict.fromkeys(each.seconds for each in answer.tokens))
    for token in answer.tokens:
        colour = _colour(GUESSED if token.accepted else CHOSEN, first + times.index(token.seconds))
        shown[colour] = token.seconds
        text.append(without_controls(token.text), colour)
    return text


def _colour(base: tuple[int, int, int], number: int) -> str:
    """The variation `number` of a colour, such as "#c0c1c0"."""
    parts = zip(base, (number, number // SHADES, number // SHADES**2), strict=True)
    return "#" + "".join(f"{part + more % SHADES:02x}" for part, more in parts)
