"""Who proposes candidates for the texts of a call (`Drafts`): one generator for a text (`OneDraft`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hf_specdecpp.generation.target import TargetSide
from hf_specdecpp.generation.text import Round, Text
from hf_specdecpp.trees.tree import DraftTree


class Drafts(Protocol):
    """Proposes candidates for all texts of a call."""

    def propose(self, texts: Sequence[Text], target: TargetSide) -> list[DraftTree]:
        """A tree for each text; a chain has one branch, and an empty tree leaves the round to the target."""

    def saw(self, rounds: Sequence[Round]) -> None:
        """Told what stands of a round."""

    def select(self, places: Sequence[int]) -> None:
        """The texts at these places go on."""


class OneDraft:
    """Proposes for one text: its generator does."""

    def propose(self, texts: Sequence[Text], target: TargetSide) -> list[DraftTree]:
        (text,) = texts
        return [text.generator.propose(text.ids, target.room(text), target.states_of(text))]

    def saw(self, rounds: Sequence[Round]) -> None:
        for each in rounds:
            each.text.generator.saw(each.tree, each.verdict.path, each.length)
            each.text.generator.end_round(each.length, each.width)

    def select(self, places: Sequence[int]) -> None:
        """Nothing goes on after the only text."""
