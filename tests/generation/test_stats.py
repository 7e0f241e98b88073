"""Counters, rates and verdicts of `SpeculationStats`."""

import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.eagle3_files import VARIANTS
from support.targets.models import Rounds, assistant_for, prompt, random_layer, tiny
from support.targets.watchers import heard

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.choosing import assist
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.cpu import faster_products
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.trees.tree import Chain, DraftTree


def count(stats: SpeculationStats, drafted: int, accepted: int) -> None:
    """A round of a chain."""
    stats.record_outcome(Chain([1] * drafted, [torch.empty(0)] * drafted), list(range(1, accepted + 1)))


def made(**values: object) -> SpeculationStats:
    """Ten rounds of four candidates, half of them accepted; a plain pass takes 0.1 s with all products."""
    stats = SpeculationStats(plain_passes=1, draft_seconds=0.2, target_seconds=1.2)
    stats.plain_pass_seconds = stats.same_pass_seconds = 0.1
    for _ in range(10):
        count(stats, 4, 2)
    stats.generated = stats.accepted + stats.rounds + stats.plain_passes
    for name, value in values.items():
        setattr(stats, name, value)
    return stats


@pytest.mark.daily("True-1", "False-5")
@pytest.mark.parametrize("num_tokens", [1, 3, 5])
@pytest.mark.parametrize("attached", [True, False])
def test_counts_match_the_rounds(monkeypatch: pytest.MonkeyPatch, num_tokens: int, attached: bool) -> None:
    """Against a record kept beside them, attached before or by the call; and the constant-K identity of the paper's
    cost model."""
    rounds, target = Rounds(monkeypatch), tiny("llama")
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
    assert stats.generated == text.shape[1] - prompt().shape[1] == 64
    assert stats.generated + stats.discarded == stats.drafted + stats.target_passes
    # discard = (K + 1) * verification - 1, up to the last rounds, which have room for fewer candidates
    expected = (num_tokens + 1) * stats.verification_rate - 1
    assert stats.discard_rate == pytest.approx(expected, abs=(2 * num_tokens + 2) / 64)
    assert stats.speedup is not None


def test_rates() -> None:
    stats = made()
    assert (stats.generated, stats.target_passes, stats.discarded) == (31, 11, 20)
    rates = stats.tokens_per_pass, stats.discard_rate, stats.verification_rate
    assert rates == pytest.approx((31 / 11, 20 / 31, 11 / 31))
    assert stats.acceptance_by_position == [1.0, 1.0, 0.0, 0.0]
    assert stats.speedup == pytest.approx(30 * 0.1 / 1.4)


PAYS = "Speculation makes this faster"
BAD, SLOW, WIDE = {"accepted": 4, "generated": 15}, {"draft_seconds": 4.0}, {"target_seconds": 4.0}
MANY = {"same_pass_seconds": 0.2, "target_seconds": 3.0}
OF_A_TREE: dict[str, object] = {**BAD, "tree_depths": [0, 0, 10]}


@pytest.mark.parametrize(("values", "remedies", "says", "never"), [
    ({}, set(), f"{PAYS}: 2.14 times the speed of plain generate(). 2.82 tokens per target pass.", "same matrix"),
    ({"overhead_seconds": 3.0}, set(), "too fast for the overhead", PAYS),
    ({"target_seconds": 2.8}, set(), "hardly changes the speed: 1.00 times the speed of plain", PAYS),
    ({"plain_pass_seconds": None}, set(), "was not measured", "times"),
    ({"accepted": 0, "generated": 11}, set(), "makes this slower: 0.71 times the speed", "passes over one token"),
    ({"accepted": 0, "generated": 11}, set(), "None of 40 candidates was accepted. The draft is not good", PAYS),
    ({"accepted": 0, "drafted": 1, "generated": 11}, set(), "The only candidate was not accepted.", PAYS),
    # What the products gained.
    ({"same_pass_seconds": 0.05}, set(), "to 2.00 times its speed, so most of the gain comes from them", "not"),
    ({"same_pass_seconds": 0.08}, set(), "and 1.71 times its speed with the same matrix", "most of"),
    ({"same_pass_seconds": 0.04}, set(), "makes this slower: 2.14 times the speed of plain generate() and 0.86", PAYS),
    (MANY, set(), "bring plain generate() to 0.50 times its speed: set cpu_products='off'.", PAYS),
    # What a first call took to prepare.
    ({"preparing_seconds": 0.05}, set(), f"{PAYS}: 1.94 times the speed of plain generate(). ", "longer"),
    ({"preparing_seconds": 0.4}, set(), "and copy weights: it ran at 1.60 times", "does not"),
    ({"preparing_seconds": 3.0}, set(), f"{PAYS}: 2.00 times", "does not"),
    # What the assistant does already is no advice.
    (BAD, {"training", "head", "throughput"}, "Train it and a head: specdecpp train. Spec", "Another"),
    (BAD, {"head"}, "Train a head: specdecpp train.", "it and"),
    (BAD, {"draft", "throughput"}, "The text is not good enough for this target. SpeculationConfig", "rain"),
    (BAD, set(), "The draft is not good enough for this target. Another one may be, or one that is tr", "rain it"),
    (OF_A_TREE, set(), "", "not good enough"),
    ({**OF_A_TREE, "accepted_at": [4, 0, 0, 0]}, set(), "not good enough", PAYS),
    (SLOW, set(), "The draft is too slow: one of its tokens costs 1.00 target passes.", "SpeculationConfig"),
    (WIDE, {"throughput", "training"}, "SpeculationConfig(rule='throughput')", "rain it"),
    (WIDE, set(), "Verifying several tokens at once is expensive on this device.", "SpeculationConfig"),
])  # fmt: skip
def test_verdict(values: dict[str, object], remedies: set[str], says: str, never: str) -> None:
    prompt_seconds = 0.2 if "preparing_seconds" in values else 0.0
    verdict = made(**values, prompt_seconds=prompt_seconds, remedies=frozenset(remedies)).verdict
    assert says in verdict
    assert never not in verdict


def test_seconds_of_a_call_are_those_of_its_clock() -> None:
    """The example of the docstring: the prompt counts in both, what is prepared once in the assisted call alone."""
    stats = made(prompt_seconds=0.2, preparing_seconds=0.4)
    assert (stats.call_seconds, stats.speedup) == pytest.approx((2.0, 1.6))
    assert made(prompt_seconds=0.2).speedup == pytest.approx(2.0)


def test_a_rule_that_stopped_is_named_and_gains_no_more_than_was_counted() -> None:
    """A useless draft, of which one candidate was tried, and a plain pass that was timed on a busy machine."""
    stats = SpeculationStats(plain_passes=1, generated=32, target_seconds=2.0, plain_pass_seconds=0.1)
    stats.same_pass_seconds = 0.103
    for drafted in (1, *[0] * 30):
        count(stats, drafted, 0)
    assert stats.speedup == pytest.approx(1.55)
    assert stats.verdict == (
        "Speculation hardly changes the speed: 0.97 times the speed of plain generate(). rule='throughput' stopped: "
        "30 of 31 passes without candidates."
    )
    stats.remedies = frozenset({"throughput"})
    assert "Little was drafted: 30 of 31 passes without candidates" in stats.verdict
    assert "rule" not in stats.verdict


def test_it_pays_is_said_of_nothing_that_is_slower_than_plain() -> None:
    """Whatever was measured of speculation, of the products and of a batch, whose rows have shares of its passes."""
    for gain, passes, rows in product((0.6, 0.9, 1.0, 1.1, 1.6, 3.0), (0.5, 0.9, 1.0, 1.04, 1.5), (1, 3)):
        one = made(same_pass_seconds=gain * 1.4 / 30, plain_pass_seconds=passes * gain * 1.4 / 30)
        stats = one if rows == 1 else SpeculationStats.of_batch([replace(one) for _ in range(rows)])
        assert stats.speedup == pytest.approx(gain * passes)
        assert stats.verdict.startswith(PAYS) is (min(gain, gain * passes) >= 1.03)
        assert ("makes this slower" in stats.verdict) is (min(gain, gain * passes) <= 0.97)


@pytest.mark.parametrize("kind", ["untrained", "trained", "lookup"])
@pytest.mark.parametrize("rows", [1, 3])
def test_remedies_are_what_the_assistant_lacks(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster_products, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(DraftSetup, "products", lambda *_: FasterProducts())
    target = tiny("llama").float()
    if kind == "lookup":
        assistant, lacks = assist(target, "lookup", default=False), {"draft"}
    elif kind == "trained":
        head = AcceptanceHead(32, inputs="before", num_blocks=1, embedding_size=32)
        knobs = SpeculationConfig("threshold")
        assistant = SpecDecPPAssistant.from_draft(random_layer(target).float(), target, head=head, speculation=knobs)
        lacks = {"throughput"}
    else:
        assistant, lacks = assistant_for(target, rule="fixed"), {"training", "head", "throughput"}
    ids = prompt().repeat(rows, 1)
    target.generate(ids, assistant_model=assistant, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert assistant.stats.remedies == lacks
    assert (assistant.stats + assistant.stats).remedies == lacks


def first_candidates(accepted: int, rounds: int, suspect: str | None = "EAGLE-3 org/x") -> SpeculationStats:
    """So many of the first of two candidates stood, and one round drafted nothing."""
    stats = SpeculationStats(suspect=suspect)
    for place in range(rounds):
        count(stats, 2, int(place < accepted))
    count(stats, 0, 0)
    return stats


@pytest.mark.parametrize(
    ("accepted", "rounds", "is_named"),
    [(0, 5, False), (0, 6, True), (1, 7, False), (1, 29, False), (4, 30, True), (5, 30, False), (14, 100, True)],
)
def test_a_draft_of_others_that_is_hardly_ever_right_is_named(accepted: int, rounds: int, is_named: bool) -> None:
    said = (
        f"Only {accepted} of {rounds} first candidates were accepted, so EAGLE-3 org/x may be for another target, or "
        "be read wrongly. Find out: specdecpp inspect REPO --target ID, with its repository and this target."
    )
    assert (said in first_candidates(accepted, rounds).verdict) is is_named
    assert "specdecpp inspect" not in first_candidates(accepted, rounds, None).verdict, "a draft of one's own"


def test_suspicions_add_up() -> None:
    assert "Only 0 of 8 first candidates" in (first_candidates(0, 4) + first_candidates(0, 4)).verdict
    looked_up = first_candidates(1, 40)
    looked_up.lookup_rounds = 38
    assert "inspect" not in looked_up.verdict, "rounds in which it drafted nothing do not count"


@pytest.mark.daily("None-2", "dyspec-1")
@pytest.mark.parametrize(("tree", "rows"), [(None, 1), (None, 2), ("dyspec", 1)])
def test_generations_know_whose_draft_it_is(tmp_path: Path, tree: Any, rows: int) -> None:
    target, knobs = tiny("llama"), SpeculationConfig("fixed", num_tokens=2, tree=tree, tree_budget=4)
    folder = VARIANTS["plain"].save(tmp_path)
    assistant = SpecDecPPAssistant.from_pretrained(folder, target=target, speculation=knobs)
    ids = prompt().repeat(rows, 1)
    target.generate(ids, assistant_model=assistant, max_new_tokens=60, do_sample=False, pad_token_id=0)
    assert assistant.stats.suspect == f"EAGLE-3 {folder}"
    own = assistant_for(target)
    target.generate(prompt(), assistant_model=own, max_new_tokens=8, do_sample=False)
    assert own.stats.suspect is None


def test_nothing_drafted() -> None:
    target = tiny("llama")
    assistant = assistant_for(target)
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=1, do_sample=False)
    assert "Nothing was drafted" in assistant.stats.verdict
    assert str(assistant.stats)


def test_sum_of_two_calls() -> None:
    longer = made()
    count(longer, 6, 6)
    total = made() + longer
    assert (total.rounds, total.drafted, total.accepted) == (21, 86, 46)
    assert total.drafted_at == [21, 21, 21, 21, 1, 1]
    assert total.plain_pass_seconds == pytest.approx(0.1)
    assert (made() + made(same_pass_seconds=0.05)).same_pass_seconds == pytest.approx(0.075)
    assert (made() + made(plain_pass_seconds=None)).speedup is None


def test_making_products_is_no_time_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    heard(monkeypatch, DraftSetup, "products", lambda *_: time.sleep(0.5))
    target = tiny("llama")
    assistant = assistant_for(target)
    target.generate(prompt(12), assistant_model=assistant, max_new_tokens=8, pad_token_id=0)
    assert assistant.stats.prompt_seconds < 0.5 <= assistant.stats.preparing_seconds


# What is said of lookups alone, of later calls, and which tree is shown. ----------------------------------------------


@pytest.mark.parametrize(("looked_up", "says"), [
    (40, "looked up             all candidates, in 7 of 10 rounds"),
    (12, "looked up             12 of the candidates, 9 accepted (75%); 7 of 10 rounds drafted no others"),
    (0, None),
])  # fmt: skip
def test_lookups_alone_are_not_compared_with_drafts(looked_up: int, says: str | None) -> None:
    text = str(made(looked_up=looked_up, accepted_lookups=9, lookup_rounds=7))
    assert (says in text) if says else "looked up" not in text
    assert (looked_up == 40) is ("drafted no others" not in text and "looked up" in text)


def test_nothing_is_said_of_first_calls() -> None:
    """What was prepared is known, and not whether an earlier call was the first."""
    verdict = made(preparing_seconds=0.4, prompt_seconds=0.2).verdict
    assert "This call took 0.40 s longer to compare passes and copy weights: it ran at" in verdict
    assert "first call" not in verdict


def tree_of(*parents: int) -> DraftTree:
    """A tree whose nodes are children of these."""
    tree = DraftTree(0)
    for token, parent in enumerate(parents, 1):
        tree.add(parent, token)
    return tree


LINE, STAR, BUSH, LARGER = (0, 1), (0, 0, 0, 0), (0, 0, 1, 1), (0, 0, 1, 1, 4)


@pytest.mark.parametrize(("trees", "shown"), [
    ([LINE], LINE), ([STAR, LINE], STAR), ([LINE, STAR], STAR), ([BUSH, STAR, LINE], BUSH), ([STAR, BUSH], BUSH),
    ([LARGER, BUSH], LARGER), ([BUSH, LARGER], LARGER), ([BUSH, ()], BUSH),
])  # fmt: skip
def test_the_tree_that_is_shown_branches_most(trees: list[tuple[int, ...]], shown: tuple[int, ...]) -> None:
    """In one call, and of several."""
    stats, calls = SpeculationStats(), [SpeculationStats() for _ in trees]
    for each, call in zip(trees, calls, strict=True):
        stats.record_outcome(tree_of(*each), [])
        call.record_outcome(tree_of(*each), [])
    total = sum(calls[1:], calls[0])
    for found in (stats, total):
        assert found.branched_tree is not None
        assert found.branched_tree.tree.parents[1:] == list(shown)
    last = next(each for each in reversed(trees) if each)
    assert stats.last_tree is not None
    assert stats.last_tree.tree.parents[1:] == list(last)


def test_the_verdict_of_a_call_that_drafted_before_it_was_refused() -> None:
    assert made(refusal="a hook").verdict == "Drafting was given up: a hook"
    assert SpeculationStats(refusal="beams").verdict == "The call was a plain one, without its assistant: beams"
