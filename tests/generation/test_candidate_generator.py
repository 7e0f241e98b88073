"""`SpecDecPPCandidateGenerator` inside transformers' own assisted decoding."""

from itertools import product
from typing import Any

import pytest
import torch
from support.enumeration.stock_rounds import in_their_loop
from support.targets.models import Rounds, assistant_of, partly_agreeing, prompt, tiny

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator

PROMPT = prompt(20)
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.8, "max_tokens": 7},
    "throughput": {"rule": "throughput", "costs": {"draft": 0.4, "verify": [1.0]}},  # some rounds draft nothing
}


QUICK = [("llama", "fixed", "independent"), ("gemma3_text", "threshold", "early exit"),
         ("gpt2", "throughput", "independent")]  # fmt: skip
CASES = list(product(["llama", "gemma3_text", "gpt2"], RULES, ["independent", "early exit"]))


@pytest.mark.daily("llama-fixed-independent", takes=2)
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
    made, rounds = list[SpecDecPPCandidateGenerator](), Rounds(monkeypatch)
    assert torch.equal(target.generate(PROMPT, **in_their_loop(target, assistant, made), **arguments), plain)

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
    made: list[SpecDecPPCandidateGenerator] = []
    target.generate(PROMPT, **in_their_loop(target, assistant, made), max_new_tokens=30, do_sample=False)
    rule: Any = made[0].method.rule
    assert rule.rates.rounds > 0


@pytest.mark.parametrize(("kind", "settings", "says"), [
    ("independent", {"tree": "dyspec"}, "drafts trees"),
    ("conditioned", {"rule": "fixed"}, "reads hidden states of the target"),
])  # fmt: skip
def test_what_it_cannot_draft_there(kind: str, settings: dict[str, Any], says: str) -> None:
    target = tiny("llama")
    assistant = assistant_of(kind, target, **settings)
    with pytest.raises(ValueError, match=f"{says}.*transformers' own loop"):
        target.generate(PROMPT, **in_their_loop(target, assistant), max_new_tokens=8)
