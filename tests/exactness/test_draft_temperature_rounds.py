"""The exact distribution of whole generations whose draft has a temperature of its own.

Everything is product code; only the random numbers are replaced by a `Replay`. Mutant: q is told without that
temperature.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.models import assistant_of, tiny
from support.stock_rounds import VOCAB
from support.whole_generations import Enumerate, assert_caught, assert_exactly_p, tell_another_q

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"rule": "fixed", "num_tokens": 2},
    "dyspec": {"tree": "dyspec", "tree_budget": 3, "tree_depth": 2},
}


@pytest.mark.takes(3)
@pytest.mark.every(5)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_generate_emits_exactly_p_whatever_the_draft_s_temperature(
    shape: str, temperature: float, enumerate_torch: Enumerate
) -> None:
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=3)
    assistant = assistant_of("early_exit", target, **SHAPES[shape], draft_temperature=temperature)
    assert_exactly_p(target, assistant, enumerate_torch)


def test_a_draft_temperature_that_is_not_told_is_caught(
    enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=3)
    assistant = assistant_of("early_exit", target, **SHAPES["chain"], draft_temperature=0.6)
    tell_another_q(monkeypatch, lambda scores: scores * 0.6)
    assert_caught(target, assistant, enumerate_torch)
