"""Blocks after several tokens of a text, with one pass (`blocks_after`): for training, and for recorded texts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.drafts.dflash.drafter import DFlashDraft
from hf_specdecpp.drafts.dflash.model import View


def blocks_after(draft: DFlashDraft, input_ids: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
    """Final states `[batch, a, places, hidden_size]` of the block after each anchor, as a round there computes them.

    A block sees the text before its anchor and its own rows, and nothing of the other blocks.

    Example: anchors 3 and 5, blocks of 2 rows. Rows 0 and 1 stand at the positions 3 and 4 of the text and see the
    target's states at 0, 1 and 2; rows 2 and 3 stand at 5 and 6 and see those at 0 to 4.

    Args:
        input_ids: `[batch, n]`.
        states: `[batch, n, width]`, the target's at each token.
        anchors: `[batch, a]`, places of tokens in the text, each at least 1.
    """
    model, size = draft.model, draft.settings.block_size
    blocks = draft.block_after(input_ids.gather(1, anchors)[..., None]).to(draft.dtype)  # [batch, a, b, hidden_size]
    context = model.reader(states)
    batch, length = context.shape[:2]
    text = torch.arange(length, device=anchors.device)
    rows = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
    positions = torch.cat((text.expand(batch, -1), rows), dim=1)
    own = torch.arange(rows.shape[1], device=anchors.device) // size
    is_own = own[:, None] == own
    before = text < anchors.repeat_interleave(size, dim=1)[..., None]  # [batch, a * b, n]
    seen = torch.cat((before, is_own.expand(batch, -1, -1)), dim=2)

    def mask(view: View, _keys: Tensor) -> Tensor:
        reach, is_causal = view
        back = rows[..., None] - positions[:, None]
        visible = seen & (back >= 0) if is_causal else seen
        return (visible if reach is None else visible & (back.abs() <= reach))[:, None]

    hidden = model.through(blocks.flatten(1, 2), context, positions, mask)
    return hidden.unflatten(1, (-1, size))[:, :, -draft.settings.places :]


def in_blocks(draft: DFlashDraft, input_ids: Tensor, states: Tensor) -> Tensor:
    """States `[batch, n, hidden_size]` that q after each token comes from, as if the text had been accepted in blocks.

    Example: with 3 places what follows b, c and d in the text a b c d e f is the first, second and third candidate of
    the block after b, and what follows e and f those after e. Before a there is no state, so nothing follows it.
    """
    anchors = torch.arange(1, input_ids.shape[1], draft.settings.places, device=input_ids.device)
    blocks = blocks_after(draft, input_ids, states, anchors.expand(len(input_ids), -1))
    return functional.pad(blocks.flatten(1, 2)[:, : input_ids.shape[1] - 1], (0, 0, 1, 0))
