"""No draft: all candidates come from text that was seen before (`lookup`). Any target can have it, untrained."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdecpp.drafting.draft import Draft, Reading
from hf_specdecpp.drafts.kind import Kind, Stored


class NoDraft(Draft):
    """A draft that never draws a candidate."""

    model = None
    places = 0

    def session(self, vocab_size: int) -> NothingRead:  # noqa: ARG002
        return NothingRead()


class NothingRead(Reading):
    """Its side of a generation."""

    length = 0

    @staticmethod
    def embed(_ids: Tensor) -> Tensor:
        return torch.empty(0)

    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        """There is nothing to read."""

    def step(self, _candidates: list[Tensor]) -> None:
        """Nor to propose."""

    def keep(self, path: list[int]) -> None:
        """Nor to go on from."""


LOOKUP = Kind(
    name="lookup",
    rests_on="nothing",
    draft=lambda *_: NoDraft(),
    words=lambda *_: "text that was seen before",
    stored=Stored(
        unserved="This assistant looks its candidates up and has no draft, so there is nothing to export. Engines look "
        "candidates up by themselves, such as vLLM with the method ngram."
    ),
    cannot={
        "replays": "a recorded text has a q a place, and where nothing drafts there is none",
        "training": "there is nothing to train where all candidates are looked up",
    },
)
