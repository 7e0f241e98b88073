"""Who chose each token of an answer, and when (`Listener`): a streamer, so any `generate()` call can be asked."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    """The tokens of an answer, the seconds that it took, the prompt's pass included, and the tokens' ids."""

    said: Sequence[Token]
    seconds: float
    ids: list[int] = field(default_factory=list)

    @property
    def rate(self) -> str:
        """Such as "64 tokens in 2.31 s, 27.7 tokens/s"."""
        count = len(self.said)
        return f"{count} tokens in {self.seconds:.2f} s, {count / self.seconds:.1f} tokens/s"


class Listener(BaseStreamer):
    """Notes what each target pass of one `generate()` call adds, and tells another streamer. Make it right before the
    call.

    Attributes:
        passes: of each pass, in order: seconds from the beginning to its tokens, and the tokens.
    """

    def __init__(self, onward: BaseStreamer | None = None) -> None:
        self.onward = onward
        self.passes: list[tuple[float, list[int]]] = []
        self._has_prompt = False
        self.begin = time.perf_counter()

    def put(self, value: Tensor) -> None:
        seconds = time.perf_counter() - self.begin
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
