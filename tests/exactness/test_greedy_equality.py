"""Greedy decoding with an assistant gives the very tokens of plain `generate()`.

In float64, where a pass over several tokens and passes over one token round alike up to 1e-15: any difference is a
bug. The drafts agree with their targets in part, and each test asserts that rounds with no, with some and with all
candidates accepted occurred, since that is where implementations go wrong."""

from typing import Any

import pytest
import torch
from support.targets.models import FAMILIES, Rounds, assistant_for, prompt, tiny

# Without the second, random models soon fall into a loop, which every draft guesses.
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 200, "no_repeat_ngram_size": 6, "do_sample": False}
PROMPT = prompt(20)  # longer than every sliding window
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.8, "min_tokens": 2, "max_tokens": 7},
}


@pytest.mark.daily("llama-fixed-True", "gemma3_text-threshold-True")
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_independent_draft(family: str, rule: str, attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rounds = tiny(family), Rounds(monkeypatch)
    plain = target.generate(PROMPT, **ARGUMENTS)
    assert plain[0, 20:].unique().numel() > 8, "a constant text would prove nothing"
    assistant = assistant_for(target, attached, **RULES[rule])
    text = target.generate(PROMPT, assistant_model=assistant, **ARGUMENTS)
    assert torch.equal(text, plain)
    rounds.assert_all_kinds()
    assert assistant.stats.decided["attached"] == ("before" if attached else "by a call")


# In half precision a pass over several tokens rounds differently from a pass over one. --------------------------------
#
# So greedy texts may part, but only at a near-tie of the target's two likeliest tokens.


# Largest gap between the two likeliest tokens' logits, relative to the largest logit, that rounding may decide:
# bfloat16 keeps 8 bits, float16 keeps 11.
TOLERANCE = {torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


@pytest.mark.daily("gpt2-dtype1", takes=3)
@torch.no_grad()
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_texts_part_only_at_near_ties(family: str, dtype: torch.dtype) -> None:
    target = tiny(family).to(dtype)
    assistant, accepted = assistant_for(target), 0
    for seed in range(6):
        text = prompt(seed=seed)
        plain = target.generate(text, max_new_tokens=40, do_sample=False)[0]
        assisted = target.generate(text, max_new_tokens=40, do_sample=False, assistant_model=assistant)[0]
        accepted += assistant.stats.accepted
        parted = (plain != assisted).nonzero()
        if len(parted):
            length = int(parted[0])
            logits = target(plain[None, :length]).logits[0, -1].float()
            top = logits.topk(2).values
            assert float(top[0] - top[1]) <= TOLERANCE[dtype] * float(logits.abs().max())
            assert {int(plain[length]), int(assisted[length])} <= set(logits.topk(3).indices.tolist())
    assert accepted > 0
