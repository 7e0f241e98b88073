"""Several blocks of a text in one pass are what each of them is in a pass of its own."""

from typing import Any

import pytest
import torch
from support.dflash_files import VARIANTS, VOCAB, Checkpoint, assisted, target_for
from support.formulas import states_of
from support.models import prompt
from torch import Tensor

from hf_specdecpp.drafting.unrolling import in_blocks
from hf_specdecpp.drafts.dflash.model import DFlashDraft, DFlashModel
from hf_specdecpp.models.causal_lm import CausalLM

TEXTS = 1 + torch.cat((prompt(17), prompt(17, 5))) % (VOCAB - 1)
ANCHORS = torch.tensor([[3, 9, 10, 16], [12, 1, 4, 11]])


def drafting(checkpoint: Checkpoint) -> tuple[Any, CausalLM]:
    target = target_for()
    return assisted(target, checkpoint).ready_drafter(), target


@torch.no_grad()
def alone(draft: DFlashDraft, states: Tensor, text: int, anchor: int) -> Tensor:
    """Final states of the block of a round after `anchor`."""
    session = draft.session(VOCAB)
    session.begin_round(TEXTS[text : text + 1, : anchor + 1], 0, states[text : text + 1, :anchor])
    return session._block()[1]


@torch.no_grad()
def error(draft: DFlashDraft, target: CausalLM) -> float:
    """The largest difference between blocks in one pass and those of rounds."""
    states = states_of(target, draft, TEXTS)
    together = draft.blocks_after(TEXTS, states, ANCHORS)
    each = [[alone(draft, states, row, int(anchor)) for anchor in ANCHORS[row]] for row in range(len(TEXTS))]
    return float((together - torch.stack([torch.stack(blocks) for blocks in each])).abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_together_they_are_as_alone(name: str) -> None:
    draft, target = drafting(VARIANTS[name])
    assert error(draft, target) < 1e-10


def other_blocks(seen: Tensor, length: int, size: int) -> Tensor:
    """Rows see those of other blocks."""
    return torch.cat((seen[..., :length], torch.ones_like(seen[..., length:])), -1)


def own_state(seen: Tensor, length: int, size: int) -> Tensor:
    """Rows see the target's state at their own anchor, which a round does not have."""
    anchors = ANCHORS.repeat_interleave(size, 1)[:, None, :, None]
    return torch.cat((seen[..., :length] | (torch.arange(length) == anchors), seen[..., length:]), -1)


@pytest.mark.parametrize("mutant", [other_blocks, own_state])
def test_wrong_masks_are_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, target = drafting(VARIANTS["plain"])
    through = DFlashModel.through

    def wrong(model: Any, block: Tensor, context: Tensor, positions: Tensor, mask: Any, *known: Any) -> Tensor:
        size = draft.settings.block_size

        def changed(view: Any, keys: Tensor) -> Any:
            seen = mask(view, keys)
            return seen if seen is None or seen.dim() < 4 else mutant(seen, context.shape[1], size)

        return through(model, block, context, positions, changed, *known)

    monkeypatch.setattr(DFlashModel, "through", wrong)
    assert error(draft, target) > 1e-3


@torch.no_grad()
def test_a_text_in_blocks() -> None:
    """Of 17 tokens and 4 places the first block begins after token 1, the second after token 5."""
    draft, target = drafting(VARIANTS["windows"])
    states = states_of(target, draft, TEXTS)
    hidden = in_blocks(draft, TEXTS, states)
    assert hidden.shape == (2, 17, 32)
    for place in (1, 4, 5, 16):
        anchor = 1 + (place - 1) // 4 * 4
        torch.testing.assert_close(hidden[1, place], alone(draft, states, 1, anchor)[place - anchor])
