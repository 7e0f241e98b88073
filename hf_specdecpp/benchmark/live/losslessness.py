"""Is what was timed the target's own text?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_specdecpp.models.causal_lm import CausalLM

# How far apart two logits may be, relative to the largest, for rounding to decide between them: four times the spacing
# of the type's numbers. A pass over several tokens rounds differently from a pass over one.
ROUNDING = {torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


def parting(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two texts differ, or `None`."""
    shared = min(len(plain), len(other))
    different = next((place for place in range(shared) if plain[place] != other[place]), None)
    return shared if different is None and len(plain) != len(other) else different


@torch.no_grad()
def explain_parting(target: CausalLM, plain: Sequence[int], other: Sequence[int], place: int) -> dict[str, Any]:
    """How a greedy text came to part from that of plain generation.

    Args:
        plain, other: whole texts, alike before `place`.

    Returns:
        `place`; the `tokens` there (`None`: the text had ended); `gap`, the difference of their logits relative to the
        largest logit; `near_tie`, whether both are within rounding of the largest, which excuses half precision only.
    """
    tokens = [text[place] if place < len(text) else None for text in (plain, other)]
    logits = target(torch.tensor([plain[:place]], device=target.device)).logits[0, -1].float()
    largest, scale = float(logits.max()), float(logits.abs().max())
    gaps = [(largest - float(logits[token])) / scale for token in tokens if token is not None]
    near = len(gaps) == 2 and max(gaps) <= ROUNDING.get(target.dtype, -1.0)
    return {"place": place, "tokens": tokens, "gap": max(gaps), "near_tie": near}
