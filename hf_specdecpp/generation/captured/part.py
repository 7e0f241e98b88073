"""What of one text is captured: the target's passes, whole rounds, or neither (`Captured`)."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from hf_specdecpp.captured.graphs import CannotCaptureError
from hf_specdecpp.drafting.reading import Reading
from hf_specdecpp.generation.captured.rounds import RoundsOfText, rounds_of
from hf_specdecpp.generation.captured.text import CapturedText, captured_text
from hf_specdecpp.generation.prefix import Prefix


class Captured:
    """The captured part of one text.

    Args:
        decoding: an `AssistedDecoding` of it.

    Attributes:
        rounds: where a round is two launches.
        drafts: whether anything can still be drafted.
    """

    def __init__(self, decoding: Any) -> None:
        # Which owns this: in a circle caches would be free for the next text only when garbage is collected.
        self.decoding: Any = weakref.proxy(decoding)
        self.drafts = True
        self.rounds: RoundsOfText | None = None

    def begin(self, input_ids: Tensor) -> None:
        """After the prompt: go on with captured passes, where they can be had."""
        decoding, prefix = self.decoding, self.decoding.prefix
        speculation = decoding.generator.setup.speculation
        if speculation.graphs == "off" or not isinstance(prefix, Prefix):
            return
        if type(decoding.generator.session).share is not Reading.share:
            decoding.stats.uncaptured = "the draft reads the target's own cache"
            return
        reader = decoding.generator.setup.drafter.reads
        text = captured_text(decoding.target, prefix, reader, decoding.config, input_ids, speculation.compile)
        if not isinstance(text, CapturedText):
            decoding.stats.uncaptured = text
            return
        decoding.compare_passes(input_ids)  # with the target's usual ones, which the verdict compares with
        decoding.prefix = text
        self.rounds = rounds_of(decoding)

    def round(self, input_ids: Tensor) -> tuple[Tensor, bool] | None:
        """A round that is captured whole; `None` where rounds are made step by step."""
        if self.rounds is None:
            return None
        try:
            return self.rounds.round(input_ids)
        except CannotCaptureError as error:
            stats, self.rounds = self.decoding.stats, None
            stats.uncaptured = f"a round cannot be captured ({error})"
            # What a draft would have to read of the target is gone after a round.
            self.drafts = not stats.rounds
            if self.drafts:
                self.decoding.generator.begin_again()
        return None

    def end(self) -> Prefix:
        """The text in the cache that `generate()` returns."""
        decoding, text, stats = self.decoding, self.decoding.prefix, self.decoding.stats
        if isinstance(text, CapturedText):
            stats.graphs, stats.graph_seconds, stats.graph_bytes = text.spent
            stats.uncaptured = stats.uncaptured or text.passes.why_not
            if self.rounds is not None:
                stats.graphs += len(self.rounds.graphs)
                stats.graph_seconds += self.rounds.graphs.seconds
                self.rounds = None  # which refers to this text
            decoding.prefix = text = text.give_back()
        return text
