"""What of a text its draft has not been shown yet (`NewText`)."""

from __future__ import annotations

import torch
from torch import Tensor


class NewText:
    """Tells what is new in a text that grows. Padding of the prompt is left out: the target ignores these tokens, and
    the draft is simply not shown them.

    Example: the prompt `[pad, pad, 5, 6]` has the mask `[0, 0, 1, 1]`, so that 5 and 6 are new. Once 7 and 8 follow,
    these are.

    Args:
        attention_mask: `[1, length]` of the prompt, longer where that continues a cache; or `None`.
    """

    def __init__(self, attention_mask: Tensor | None) -> None:
        self._mask, self._length = attention_mask, 0

    def take(self, input_ids: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The new tokens `[1, n]` of the text `[1, length]`, and the target's `states` `[1, m, size]` at them."""
        new, mask = input_ids[:, self._length :], self._mask if self._length == 0 else None
        self._length = input_ids.shape[1]
        if mask is None:
            return new, states
        if states is not None:
            shown = mask[0, -states.shape[1] :].bool()
            states = states[:, shown.to(states.device)] if bool(shown.any()) else states
        shown = mask[0].bool()[-new.shape[1] :]
        kept = torch.cat((new[:, : shown.shape[0]][:, shown], new[:, shown.shape[0] :]), dim=1)
        return kept if kept.shape[1] else new, states

    def begin_again(self) -> None:
        """Nothing has been shown."""
        self._length = 0
