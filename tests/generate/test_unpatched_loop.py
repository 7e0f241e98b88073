"""`SpecDecPPCandidateGenerator` inside transformers' own assisted decoding, of which nothing is patched.

Only the method that transformers asks for a candidate generator is set, on the instance: the hook for those who bring
their own loop or generator."""

import types
from itertools import product
from typing import Any

import pytest
import torch
from support.models import Rounds, partly_agreeing, prompt, tiny

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(20)
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.8, "max_tokens": 7},
    "throughput": {"rule": "throughput", "costs": {"draft": 0.4, "verify": [1.0]}},  # some rounds draft nothing
}


def with_generator(target: CausalLM, assistant: SpecDecPPAssistant) -> list[SpecDecPPCandidateGenerator]:
    """Make transformers' loop on `target` draft with our generator; the list collects one a call."""
    made: list[SpecDecPPCandidateGenerator] = []

    def get(self: Any, **kwargs: Any) -> SpecDecPPCandidateGenerator:
        assert kwargs["assistant_model"] is assistant
        made.append(
            SpecDecPPCandidateGenerator(
                assistant.setup(),
                kwargs["generation_config"],
                kwargs["logits_processor"],
                kwargs["model_kwargs"].get("attention_mask"),
            )
        )
        return made[-1]

    target._get_candidate_generator = types.MethodType(get, target)
    return made


QUICK = [("llama", "fixed", "independent"), ("gemma3_text", "threshold", "early exit"),
         ("gpt2", "throughput", "independent")]  # fmt: skip
CASES = list(product(["llama", "gemma3_text", "gpt2"], RULES, ["independent", "early exit"]))


@pytest.mark.every(3, takes=2)
@pytest.mark.parametrize(
    ("family", "rule", "kind"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_greedy_equality(family: str, rule: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, arguments = tiny(family), {"max_new_tokens": 200, "do_sample": False, "repetition_penalty": 1.05}
    plain, speculation = target.generate(PROMPT, **arguments), SpeculationConfig(**RULES[rule])
    if kind == "independent":
        assistant = SpecDecPPAssistant.from_draft(partly_agreeing(target), speculation=speculation)
    else:
        assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=speculation)
        assistant.detach()  # it keeps its draft, and the loop is transformers' again
    made, rounds = with_generator(target, assistant), Rounds(monkeypatch)
    assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **arguments), plain)

    # Feedback: transformers tells the generator of every round, the last one included.
    stats = made[0].stats
    assert len(made) == 1
    assert stats.rounds == len(rounds.outcomes) > 0
    assert stats.accepted + stats.rounds == 200
    if kind == "independent":
        rounds.assert_all_kinds()


def test_the_rule_learns() -> None:
    target = tiny("llama")
    assistant = SpecDecPPAssistant.from_draft(partly_agreeing(target), speculation=SpeculationConfig("threshold"))
    made = with_generator(target, assistant)
    target.generate(PROMPT, assistant_model=assistant, max_new_tokens=30, do_sample=False)
    rule: Any = made[0].rule
    assert rule.rates.rounds > 0
