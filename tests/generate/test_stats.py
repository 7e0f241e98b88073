"""Counters, rates and verdicts of `SpeculationStats`."""

from __future__ import annotations

import pytest
import torch
from support.models import Rounds, assistant_for, prompt, tiny

from hf_specdecpp import SpeculationStats


def made(**values: object) -> SpeculationStats:
    """Ten rounds of four candidates, half of them accepted; a plain pass takes 0.1 s."""
    stats = SpeculationStats(plain_passes=1, plain_pass_seconds=0.1, draft_seconds=0.2, target_seconds=1.2)
    for _ in range(10):
        stats.record_round(4, 2)
    stats.generated = stats.accepted + stats.rounds + stats.plain_passes
    for name, value in values.items():
        setattr(stats, name, value)
    return stats


@pytest.mark.parametrize("num_tokens", [1, 3, 5])
@pytest.mark.parametrize("attached", [True, False])
def test_counts_match_the_rounds(monkeypatch: pytest.MonkeyPatch, num_tokens: int, attached: bool) -> None:
    """Against a record kept beside them, for both doors; and the constant-K identity of the paper's cost model."""
    rounds = Rounds(monkeypatch)
    target = tiny("llama")
    assistant = assistant_for(target, attached, rule="fixed", num_tokens=num_tokens)
    text = target.generate(prompt(), assistant_model=assistant, max_new_tokens=64, do_sample=False)
    stats = assistant.stats
    assert (stats.rounds, stats.drafted, stats.accepted) == (
        len(rounds.outcomes),
        sum(drafted for drafted, _ in rounds.outcomes),
        sum(accepted for _, accepted in rounds.outcomes),
    )
    assert 0 < stats.accepted < stats.drafted
    for position, share in enumerate(stats.acceptance_by_position):
        reached = [accepted > position for drafted, accepted in rounds.outcomes if drafted > position]
        assert share == pytest.approx(sum(reached) / len(reached))
    if attached:
        assert stats.generated == text.shape[1] - prompt().shape[1] == 64
        assert stats.generated + stats.discarded == stats.drafted + stats.target_passes
        # discard = (K + 1) * verification - 1, up to the last rounds, which have room for fewer candidates
        expected = (num_tokens + 1) * stats.verification_rate - 1
        assert stats.discard_rate == pytest.approx(expected, abs=(2 * num_tokens + 2) / 64)
        assert stats.speedup is not None
    else:
        assert not stats.complete
        assert 64 - num_tokens - 1 <= stats.generated <= 64
        assert "not reported" in str(stats)
        assert "attach" in stats.verdict


def test_times_add_up_and_are_those_of_this_call() -> None:
    target = tiny("llama")
    assistant = assistant_for(target)
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=32, do_sample=False)
    first = assistant.stats
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=32, do_sample=False)
    assert assistant.stats is not first
    for stats in (first, assistant.stats):
        assert min(stats.prompt_seconds, stats.draft_seconds, stats.target_seconds, stats.overhead_seconds) > 0
    assert assistant.stats.plain_pass_seconds == first.plain_pass_seconds  # measured once a target


def test_rates() -> None:
    stats = made()
    assert (stats.generated, stats.target_passes, stats.discarded) == (31, 11, 20)
    assert stats.tokens_per_pass == pytest.approx(31 / 11)
    assert stats.discard_rate == pytest.approx(20 / 31)
    assert stats.verification_rate == pytest.approx(11 / 31)
    assert stats.acceptance_by_position == [1.0, 1.0, 0.0, 0.0]
    assert stats.speedup == pytest.approx(30 * 0.1 / 1.4)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "It pays: about 2.14 times"),
        ({"target_seconds": 4.0}, "expensive on this device"),
        ({"draft_seconds": 4.0}, "The draft is too slow: one of its tokens costs 1.00 target passes"),
        ({"accepted": 4, "generated": 15}, "not good enough for this target"),
        ({"overhead_seconds": 3.0}, "too fast for the overhead"),
        ({"target_seconds": 2.8}, "about as fast as plain"),
        ({"plain_pass_seconds": None}, "was not measured"),
    ],
)
def test_verdict_names_the_reason(values: dict[str, object], says: str) -> None:
    assert says in made(**values).verdict


def test_nothing_drafted() -> None:
    target = tiny("llama")
    assistant = assistant_for(target)
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=1, do_sample=False)
    assert "Nothing was drafted" in assistant.stats.verdict
    assert str(assistant.stats)


def test_sum_of_two_calls() -> None:
    longer = made()
    longer.record_round(6, 6)
    total = made() + longer
    assert (total.rounds, total.drafted, total.accepted) == (21, 86, 46)
    assert total.drafted_at == [21, 21, 21, 21, 1, 1]
    assert total.plain_pass_seconds == pytest.approx(0.1)
    assert (made() + made(plain_pass_seconds=None)).speedup is None
    assert not (made() + made(complete=False)).complete


def test_table_is_small_and_complete() -> None:
    lines = str(made()).splitlines()
    assert len(lines) <= 10
    assert all(len(line) <= 100 for line in lines[:-1])  # the verdict is prose
    assert lines[-1].startswith("verdict")


def test_a_faster_draft_changes_only_the_times() -> None:
    """The same seed, the same rounds: statistics are of the text, not of the clock."""
    target = tiny("llama")
    assistant = assistant_for(target, rule="threshold", threshold=0.6)
    counts = []
    for _ in range(2):
        torch.manual_seed(0)
        target.generate(prompt(), assistant_model=assistant, max_new_tokens=40, do_sample=True)
        counts.append((assistant.stats.rounds, assistant.stats.drafted, assistant.stats.accepted))
    assert counts[0] == counts[1]
