"""A draft that is a model (`Drafter`), and whether a head was trained for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_specdecpp.cuda_graphs.model_copy import for_capture
from hf_specdecpp.cuda_graphs.room_cache import num_room_layers, why_not_in_place
from hf_specdecpp.drafting.draft import Draft, Reading
from hf_specdecpp.drafting.draft_model import DraftModel
from hf_specdecpp.drafting.model_steps import ModelSteps
from hf_specdecpp.drafting.session import BatchSession, DraftSession, RowSession
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder, takes_positions, why_no_positions
from hf_specdecpp.models.target_states import StateReader


class Drafter(DraftModel, Draft):
    """A causal LM as a draft: it proposes one distribution a step. The arguments are those of `DraftModel`."""

    @property
    def reads(self) -> StateReader | None:
        return self.fusion

    def session(self, vocab_size: int) -> Reading:
        return DraftSession(self, vocab_size)

    def round_steps(self, vocab_size: int) -> ModelSteps | None:
        return None if self.captured_copy is None else ModelSteps(self.captured_copy, vocab_size)

    def row_session(self, vocab_size: int) -> RowSession:
        return RowSession(self, vocab_size)

    def batch(self, rows: Sequence[Any]) -> BatchSession:
        return BatchSession(rows)

    @property
    def tree_reader(self) -> CausalLM | None:
        return self.model

    def for_capture(self, fuse: bool) -> Any:
        return for_capture(self, self.model, fuse=fuse)

    def why_not_captured(self) -> str | None:
        if num_room_layers(self.text_config) is None:
            return "not all of its layers are attention"
        if getattr(self.model, "is_quantized", False):
            return "it is quantised"
        if not takes_positions(inner_decoder(self.model)):
            return f"it {why_no_positions(inner_decoder(self.model))}"
        return why_not_in_place(self.model)


def check_head(head: AcceptanceHead, drafter: Drafter, draft_name: str) -> None:
    """Raise `ValueError` unless the head was trained for states and embeddings of the draft's sizes."""
    ours = {"hidden_size": head.hidden_size}
    theirs = {"hidden_size": drafter.hidden_size}
    if head.inputs == "before":
        ours["embedding_size"], theirs["embedding_size"] = head.embedding_size, drafter.embedding_size
    if ours != theirs:
        raise ValueError(
            f"The acceptance head was trained for {ours} but draft {draft_name} has {theirs}, so it cannot "
            "read the draft's states. Load the draft that it was trained with, or train a head for this one."
        )
