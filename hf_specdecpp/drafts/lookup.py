"""No draft: all candidates come from text that was seen before (`lookup`). Any target can have it, untrained."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafting.draft import Draft, Reading
from hf_specdecpp.drafts.kind import Kind, Loading
from hf_specdecpp.drafts.stored import Parts, Stored


class NoDraft(Draft):
    """A draft that never draws a candidate."""

    model = None
    places = 0

    def session(self, vocab_size: int) -> NothingRead:  # noqa: ARG002
        return NothingRead()

    def describe(self) -> dict[str, Any]:
        return {"reads": None, "draft_vocab": None, "captured": False}


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


class Lookup(Kind):
    """Nothing drafts."""

    name = "lookup"
    rests_on: ClassVar[Literal["draft", "target", "nothing"]] = "nothing"
    stored = Stored(
        unserved="This assistant looks its candidates up and has no draft, so there is nothing to export. Engines look "
        "candidates up by themselves, such as vLLM with the method ngram."
    )
    cannot = {
        "replays": "a recorded text has a q a place, and where nothing drafts there is none",
        "training": "there is nothing to train where all candidates are looked up",
    }

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:  # noqa: ARG002
        return "text that was seen before"

    def draft(self, config: SpecDecPPConfig, parts: Parts, how: Loading) -> NoDraft:  # noqa: ARG002
        return NoDraft()
