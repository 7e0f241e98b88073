"""Where two greedy answers differ first, and whether rounding explains the difference (`explain_parting`)."""

from __future__ import annotations

from typing import Any

import torch

from hf_specdecpp.models.causal_lm import CausalLM

# Maximum difference of two logits, relative to the largest, that rounding can reverse: four times the largest relative
# rounding error of the dtype. A pass over several tokens rounds differently from a pass over one.
ROUNDING = {torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


@torch.no_grad()
def explain_parting(target: CausalLM, prompt: list[int], plain: list[int], other: list[int]) -> dict[str, Any]:
    """Explain where a greedy answer `other` first differs from the different answer `plain` of plain generation.

    Returns:
        `place`, the index of the first different token; `tokens`, both tokens there (`None` if an answer has ended);
        `gap`, how far the lower of their logits is below the largest, relative to the largest magnitude of a logit;
        `near_tie`, whether rounding explains the gap, which is never the case in float32 and float64.
    """
    pairs = enumerate(zip(plain, other, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), min(len(plain), len(other)))
    tokens = [text[place] if place < len(text) else None for text in (plain, other)]
    logits = target(torch.tensor([prompt + plain[:place]], device=target.device)).logits[0, -1].float()
    largest, scale = float(logits.max()), float(logits.abs().max())
    gaps = [(largest - float(logits[token])) / scale for token in tokens if token is not None]
    near = len(gaps) == 2 and max(gaps) <= ROUNDING.get(target.dtype, -1.0)
    return {"place": place, "tokens": tokens, "gap": max(gaps), "near_tie": near}
