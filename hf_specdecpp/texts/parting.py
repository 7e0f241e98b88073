"""Where greedy answers part, and whether rounding explains that (`explain_parting`)."""

from __future__ import annotations

from typing import Any

import torch

from hf_specdecpp.models.causal_lm import CausalLM

# How far apart two logits may be, relative to the largest, for rounding to decide between them: four times the spacing
# of the type's numbers. A pass over several tokens rounds differently from a pass over one.
ROUNDING = {torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


@torch.no_grad()
def explain_parting(target: CausalLM, prompt: list[int], plain: list[int], other: list[int]) -> dict[str, Any]:
    """How a greedy answer came to part from that of plain generation, from which it differs.

    Returns:
        `place`, the first that differs; the `tokens` there (`None`: the text had ended); `gap`, the difference of their
        logits relative to the largest logit; `near_tie`, whether both are within rounding of the largest, which excuses
        half precision only.
    """
    pairs = enumerate(zip(plain, other, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), min(len(plain), len(other)))
    tokens = [text[place] if place < len(text) else None for text in (plain, other)]
    logits = target(torch.tensor([prompt + plain[:place]], device=target.device)).logits[0, -1].float()
    largest, scale = float(logits.max()), float(logits.abs().max())
    gaps = [(largest - float(logits[token])) / scale for token in tokens if token is not None]
    near = len(gaps) == 2 and max(gaps) <= ROUNDING.get(target.dtype, -1.0)
    return {"place": place, "tokens": tokens, "gap": max(gaps), "near_tie": near}
