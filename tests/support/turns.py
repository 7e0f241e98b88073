"""Two turns of a conversation whose cache is carried on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.models.causal_lm import CACHE


def carry_on(target: Any, assistant: Any, text: Tensor, ear: Any) -> int:
    """Two turns, both as plain `generate()` says them; the first one's tokens. `ear` has heard the second turn only."""
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(text, **how)
    first = target.generate(text, assistant_model=assistant, **how, **{CACHE: DynamicCache(config=target.config)})
    assert torch.equal(first.sequences, plain.sequences)
    ear.rounds.clear()
    further = torch.cat((first.sequences, text), dim=1)
    second = target.generate(further, assistant_model=assistant, **how, **{CACHE: first[CACHE]})
    assert torch.equal(second.sequences, target.generate(further, **how).sequences)
    return int(first.sequences.shape[1])
