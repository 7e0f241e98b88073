"""The exact distribution of what `generate()` emits with a draft of any kind, and a q that is told wrongly.

Everything is product code; only the random numbers are replaced by a `Replay`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator
from hf_specdecpp.models.causal_lm import CausalLM
from support.enumeration.exact_distribution import VISIBLE, Probs, Replay, Tokens, exact_distribution, worst_error
from support.enumeration.stock_rounds import PROMPT, VOCAB, target_distribution

TOLERANCE = 1e-6  # logits become float32 before anything else
NEW_TOKENS = 4  # the prompt's own, a round of up to two candidates, and more rounds where they are rejected
Enumerate = Callable[[Replay], None]


def generations(
    target: CausalLM,
    assistant: SpecDecPPAssistant,
    use: Enumerate,
    count: int = NEW_TOKENS,
    penalty: float = 1.0,
    how: dict[str, Any] | None = None,
) -> tuple[Probs, int]:
    """What `generate()` emits, and how many ways there are to it; with a penalty on repetitions unless it is 1. `how`:
    arguments that have it draft, by default the assistant."""
    paths = 0

    def program(replay: Replay) -> Tokens:
        nonlocal paths
        paths += 1
        use(replay)
        assistant.memory.clear()  # every path begins alike
        options: Any = {"temperature": 0.8, "top_k": 2, "do_sample": True, "max_new_tokens": count}
        options["repetition_penalty"] = None if penalty == 1.0 else penalty
        options |= {"assistant_model": assistant} if how is None else how
        return tuple(target.generate(PROMPT, **options)[0, PROMPT.shape[1] :].tolist())

    return exact_distribution(program), paths


def assert_exactly_p(
    target: CausalLM,
    assistant: SpecDecPPAssistant,
    use: Enumerate,
    count: int = NEW_TOKENS,
    penalty: float = 1.0,
    how: dict[str, Any] | None = None,
) -> float:
    """What is emitted has the target's distribution, and some candidates were rejected. Returns the ways to a text."""
    distribution, paths = generations(target, assistant, use, count, penalty, how)
    p = target_distribution(target, 0.8, 2, penalty)
    assert worst_error(distribution, p, VOCAB) < TOLERANCE
    for tokens, weight in distribution.items():
        joint = torch.stack([p(tokens[:place])[token] for place, token in enumerate(tokens)]).prod()
        assert weight == pytest.approx(float(joint), abs=TOLERANCE)
    assert {len(tokens) for tokens in distribution} == {count}
    assert paths > len(distribution), "no candidate was rejected"
    return paths / len(distribution)


def assert_caught(target: CausalLM, assistant: SpecDecPPAssistant, use: Enumerate) -> None:
    """What is emitted visibly has another distribution than the target's."""
    distribution, _ = generations(target, assistant, use)
    assert worst_error(distribution, target_distribution(target, 0.8, 2), VOCAB) > VISIBLE


def change_drafts(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Let what is drafted, chains and trees, be what `change` makes of it."""
    propose = SpecDecPPCandidateGenerator.propose
    monkeypatch.setattr(SpecDecPPCandidateGenerator, "propose", lambda *args, **named: change(propose(*args, **named)))
