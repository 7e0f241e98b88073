"""What one round runs of the package: counted in functions and files, which no clock disturbs."""

from typing import Any

import pytest
from support.calls import our_calls
from support.models import assistant_for, prompt, tiny

from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.sampling.processors import Processing

# Settings, and the most functions and files of a round.
ROUNDS: dict[str, tuple[dict[str, Any], int, int]] = {
    "fixed": ({"rule": "fixed", "num_tokens": 3}, 66, 16),
    "threshold": ({"rule": "threshold"}, 77, 18),
    "tree": ({"rule": "fixed", "tree": "dyspec", "tree_budget": 8}, 110, 23),
}


def run_by_rounds(monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any]) -> list[set[tuple[str, str]]]:
    """The files and functions of each round but the first two of the second text of an assistant."""
    found: list[set[tuple[str, str]]] = []
    original = AssistedDecoding.round

    def watched(self: AssistedDecoding) -> None:
        with our_calls() as calls:
            original(self)
        found.append({(code.co_filename, f"{code.co_name} at line {code.co_firstlineno}") for code in calls})

    target = tiny("llama").float()
    assistant = assistant_for(target, mix=0.9, **speculation)
    with monkeypatch.context() as patch:
        patch.setattr(AssistedDecoding, "round", watched)
        for _ in range(2):
            found.clear()
            target.generate(prompt(9), assistant_model=assistant, max_new_tokens=30, do_sample=False)
    return found[2:]


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_is_few_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speculation, functions, files = ROUNDS[name]
    rounds = run_by_rounds(monkeypatch, speculation)
    assert len(rounds) > 3
    # Some rounds learn, which takes a few functions more.
    usual = sorted(rounds, key=len)[len(rounds) // 2]
    assert len(usual) <= functions, "\n".join(sorted(f"{file} {function}" for file, function in usual))
    assert len({file for file, _ in usual}) <= files


def test_more_functions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a text asks its processors though there are none."""
    speculation = ROUNDS["threshold"][0]
    few = max(map(len, run_by_rounds(monkeypatch, speculation)))
    original = Processing.__init__

    def asked(self: Processing, processors: Any) -> None:
        original(self, processors)
        self.does_nothing = False

    monkeypatch.setattr(Processing, "__init__", asked)
    assert max(map(len, run_by_rounds(monkeypatch, speculation))) > few
