"""All steps of a round, at every position of a sequence at once, to train a draft that reads the target's states.

Such a draft reads states of the target in its first step and its own states in later steps, so training unrolls it
(EAGLE-3, arXiv 2503.01840, "training-time test"): step s reads every token of the sequence as the s-th token of a round
whose candidates are the sequence's own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from hf_specdecpp.caches.masks import as_mask, layer_types
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.models.causal_lm import CausalLM

ROUND = 5  # candidates of the rounds that a head is trained on


def unrolled(drafter: Drafter, input_ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield the draft's states `[batch, n, hidden_size]` of each step, in which all tokens are read as a round's first,
    second, ... token. Takes tokens `[batch, n]`, padded on the right, and the target's `states` `[batch, n, width]`.

    Example: the sequence is a b c d. Row d of step 1 reads d with the target's state at c, after b and c, read in the
    same way. Row d of step 2 reads d with the draft's state at c in step 1, after b and c as in step 1. Row d of step 3
    sees b as in step 1 and c as in step 2. Rows whose round would begin before the sequence are meaningless."""
    later, length = input_ids[:, 1:], input_ids.shape[1] - 1  # the first token has no state before it
    cache = DynamicCache()  # rows of all steps, one step after another; masks apply windows
    positions = torch.arange(length, device=input_ids.device)[None]
    before = states[:, :-1]
    for step in range(1, steps + 1):
        mask = _mask(drafter.model, length, step, input_ids.device)
        hidden = drafter.hidden_states(later, cache, before, attention_mask=mask, position_ids=positions)
        yield functional.pad(hidden, (0, 0, 1, 0))
        before = functional.pad(hidden[:, :-1], (0, 0, 1, 0))


def in_rounds(drafter: Drafter, input_ids: Tensor, states: Tensor, steps: int = ROUND) -> Tensor:
    """Return the draft's states `[batch, n, hidden_size]` if the sequence is accepted in rounds of `steps` candidates.

    Example: with 3 steps the tokens a b c d e f are read as the first, second, third, first, second, third of a round.
    """
    by_step = torch.stack(list(unrolled(drafter, input_ids, states.to(input_ids.device), steps)))
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    return by_step[places % steps, :, places].transpose(0, 1)


def in_blocks(draft: Any, input_ids: Tensor, states: Tensor) -> Tensor:
    """States `[batch, n, hidden_size]` of a block draft, which give q after each token if all blocks are accepted.

    Example: 3 places, sequence a b c d e f. The rows of b, c and d are those of candidates 1, 2 and 3 in the block
    after b, the rows of e and f those of candidates 1 and 2 in the block after e. The row of a is zero."""
    (batch, length), places = input_ids.shape, int(draft.places)
    anchors = torch.arange(1, length, places, device=input_ids.device)
    blocks = draft.blocks_after(input_ids, states, anchors.expand(batch, -1))
    tokens = functional.pad(input_ids[:, 1:], (0, len(anchors) * places - length + 1)).unflatten(1, (-1, places))
    along, memory = [], blocks.new_zeros((batch, len(anchors), draft.memory_size))
    for rows, previous in zip(blocks.unbind(2), tokens.unbind(2), strict=True):
        _, state, memory = draft.after(previous, rows.new_zeros(()), rows, memory)
        along.append(state)
    return functional.pad(torch.stack(along, 2).flatten(1, 2)[:, : length - 1], (0, 0, 1, 0))


def reached(draft: Any, kept: Tensor, first: int) -> Tensor:
    """Return `[n]`, the probability that all tokens before a token in its block (`in_blocks`) are drawn and accepted.
    `kept` `[n]`: that of each token alone; `first`: index in the sequence of the token before the n tokens.

    Example: 3 places, the tokens c d e f of the sequence a b c d e f are kept with 0.5, 0.4, 0.9 and 0.8. They are
    reached with 1, 0.5, 0.2 and 1 (`first` = 1), as the first block has the candidates c d e; without blocks with 1."""
    places = 1 if draft.blocks_after is None else int(draft.places)  # else each token is the first of a round
    begin, end = (first - 1) % places, -(first - 1 + len(kept)) % places
    blocks = functional.pad(kept, (begin, end), value=1.0).view(-1, places)
    return functional.pad(blocks[:, :-1].cumprod(1), (1, 0), value=1.0).flatten()[begin : begin + len(kept)]


def _mask(model: CausalLM, length: int, step: int, device: torch.device) -> Any:
    """Bool `[1, 1, length, step * length]` by layer type: the rows of this and earlier steps that each token sees."""
    places = torch.arange(length, device=device)
    key, query = places[None], places[:, None]
    blocks = [key <= query - step + 1, *(key == query - step + other for other in range(2, step + 1))]
    seen, distance = torch.cat(blocks, dim=1), (query - key).repeat(1, step)
    config = model.config.get_text_config(decoder=True)
    kinds = dict.fromkeys(layer_types(config, config.num_hidden_layers))
    window = getattr(config, "sliding_window", None)
    masks = {
        kind: as_mask(seen & (distance < window) if kind == "sliding_attention" and window else seen, model)
        for kind in kinds
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))
