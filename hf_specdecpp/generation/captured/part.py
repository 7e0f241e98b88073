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
from hf_specdecpp.generation.text import Text


class Captured:
    """The captured part of one text.

    Args:
        side: the target's side of it, an `OneTarget`.

    Attributes:
        rounds: where a round is two launches.
        drafts: whether anything can still be drafted.
    """

    def __init__(self, side: Any) -> None:
        # Which owns this: in a circle caches would be free for the next text only when garbage is collected.
        self.side: Any = weakref.proxy(side)
        self.drafts = True
        self.rounds: RoundsOfText | None = None

    def begin(self, input_ids: Tensor) -> None:
        """After the prompt: go on with captured passes, where they can be had."""
        side, prefix = self.side, self.side.prefix
        speculation = side.generator.setup.speculation
        if speculation.graphs == "off" or not isinstance(prefix, Prefix):
            return
        if type(side.generator.session).share is not Reading.share:
            side.stats.uncaptured = "the draft reads the target's own cache"
            return
        reader = side.generator.setup.drafter.reads
        text = captured_text(side.model, prefix, reader, side.config, input_ids, speculation.compile)
        if not isinstance(text, CapturedText):
            side.stats.uncaptured = text
            return
        side.compare_passes()  # with the target's usual ones, which the verdict compares with
        side.prefix = text
        self.rounds = rounds_of(side)

    def make_round(self, text: Text) -> bool:
        """Make a round that is captured whole; `False` where rounds are made step by step."""
        if self.rounds is None:
            return False
        try:
            self.rounds.round(text)
        except CannotCaptureError as error:
            stats, self.rounds = self.side.stats, None
            stats.uncaptured = f"a round cannot be captured ({error})"
            # What a draft would have to read of the target is gone after a round.
            self.drafts = not stats.rounds
            if self.drafts:
                self.side.generator.begin_again()
            return False
        return True

    def end(self) -> Prefix:
        """The text in the cache that `generate()` returns."""
        side, text, stats = self.side, self.side.prefix, self.side.stats
        if isinstance(text, CapturedText):
            stats.graphs, stats.graph_seconds, stats.graph_bytes = text.spent
            stats.uncaptured = stats.uncaptured or text.passes.why_not
            if self.rounds is not None:
                stats.graphs += len(self.rounds.graphs)
                stats.graph_seconds += self.rounds.graphs.seconds
                self.rounds = None  # which refers to this text
            side.prefix = text = text.give_back()
        return text
