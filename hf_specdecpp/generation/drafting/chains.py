"""Drafts the chains of one generation: the algorithm of `drafting.chain` under a stopping rule."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from hf_specdecpp.drafting.chain import Drafting, drafted_alone, drafting, stepper
from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.trees.tree import DraftTree


class ChainDrafting:
    """What stays as it is from round to round.

    Args:
        rule: says after each candidate whether another one follows.
        session: the draft's side of the generation.
        processing: the target's logits processors; each candidate is processed after those before it.
        randomness: draws the candidates; `None` takes the likeliest tokens (greedy).
        eos_token_ids: candidates that end a chain.
    """

    def __init__(
        self,
        rule: StoppingRule,
        session: Reading,
        processing: Processing,
        randomness: Randomness | None,
        eos_token_ids: Collection[int],
    ) -> None:
        self.rule, self.session, self.processing = rule, session, processing
        self.randomness, self.eos_token_ids = randomness, eos_token_ids

    @property
    def survival(self) -> float | None:
        """Chance that all candidates of the last chain stand; `None` where nothing may follow them."""
        return self.rule.survival

    def depth_within(self, room: int, most: int) -> int:
        """How long a chain may be where the text has room for `room` candidates, and the pass for `most`."""
        return min(room, most)

    def draft(self, input_ids: Tensor, most: int) -> DraftTree:
        """A chain after the text `input_ids` `[1, length]`, of at most so many candidates."""
        chain = drafted_alone(self.step_by_step(input_ids, most))
        chain.passes = self.session.passes
        return chain

    def step_by_step(self, input_ids: Tensor, most: int) -> Drafting:
        """The same as a coroutine, so that the rows of a batch draft together."""
        step = stepper(self.session, self.processing, input_ids, greedy=self.randomness is None)
        return drafting(step, self.rule, self.randomness, most, self.eos_token_ids, self.session.unread)

    def saw(self, tree: DraftTree, path: list[int]) -> None:
        """Learn which candidates of the last chain were accepted."""
        self.rule.saw(tree, tree.drawn(path))
