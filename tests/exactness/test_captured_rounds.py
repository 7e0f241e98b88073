"""The tensor functions that captured rounds consist of emit exactly what plain sampling emits.

Every outcome of a round is enumerated: which candidates are drawn, where a rule that looks at them stops, how many
stand, what follows; then plain sampling goes on to the length of the longest text. The distribution of texts must be
the target's to rounding. Wrong versions of the functions must not pass."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.devices.processors_between import MISTAKES, PROCESSORS, Between, Process, rightly
from support.enumeration.exact_distribution import VISIBLE, exact_distribution
from support.enumeration.next_tokens import VOCAB, Path, add_texts, distributions, furthest, plain_texts
from support.enumeration.readable_verification import verify_block, verify_chain, weights_of
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.cuda_graphs import on_device
from hf_specdecpp.cuda_graphs.on_device import count_until, last_passing
from hf_specdecpp.trees.verification import Verification, outcomes

K = 3
Stop = Callable[[Path], int]
Outcomes = Callable[[Tensor, Tensor, Tensor, Tensor, Verification], tuple[Tensor, Tensor]]


def texts_of_rounds(
    p: Callable[[Path], Tensor], q: Callable[[Path], Tensor], stop: Stop, verification: Verification, rule: Outcomes,
    rows: Callable[[Path], Tensor] | None = None,
) -> dict[Path, float]:  # fmt: skip
    """The same where one round comes first; `rows` are p after each candidate as the round knows it."""
    found: dict[Path, float] = {}
    for drawn in itertools.product(range(VOCAB), repeat=K):
        chance = 1.0
        for place in range(K):
            chance *= float(q(drawn[:place])[drawn[place]])
        if chance == 0.0:
            continue
        p_rows = torch.stack([p(drawn[:place]) for place in range(K + 1)]) if rows is None else rows(drawn)
        q_rows = torch.stack([q(drawn[:place]) for place in range(K)])
        tests, weights = rule(torch.tensor(drawn), torch.tensor(stop(drawn)), p_rows, q_rows, verification)
        for accepted, share in enumerate(weights_of(tests).tolist()):
            add_texts(found, p, K + 1, drawn[:accepted], weights[accepted], chance * share)
    return found


def error(stop: Stop, verification: Verification, rule: Outcomes = outcomes, seeds: Sequence[int] = range(4)) -> float:
    """The largest difference of a text's chance; a visible one ends it."""
    largest = 0.0
    for seed in seeds:
        if largest > VISIBLE:
            break
        p, q = (distributions(each, K + 1, spread=2.0, every=5) for each in (seed, 100 + seed))
        largest = max(largest, furthest(plain_texts(p, K + 1), texts_of_rounds(p, q, stop, verification, rule)))
    return largest


STOPS: dict[str, Stop] = {
    "fixed": lambda _: K,
    "one": lambda _: 1,
    "after a token": lambda drawn: next((place + 1 for place, token in enumerate(drawn) if token == 1), K),
    "after two alike": lambda drawn: 2 if drawn[0] == drawn[1] else K,
}


@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("stop", STOPS)
def test_the_distribution_is_the_targets(stop: str, verification: Verification) -> None:
    assert error(STOPS[stop], verification) < 1e-12


MUTANTS: dict[str, Outcomes] = {
    "the token after the last candidate comes from the residual": lambda drawn, count, p, q, how: (
        outcomes(drawn, count, p, q, how)[0],
        outcomes(drawn, torch.tensor(K), p, q, how)[1],
    ),
    "what was drawn after the stop is looked at, and left out because of what it is": lambda drawn, count, *rest: (
        outcomes(drawn, (count - (drawn[count - 1] == 1).long()).clamp_min(0), *rest)
    ),
    "what follows comes from p": lambda drawn, count, p, q, how: (outcomes(drawn, count, p, q, how)[0], p),
    "chances are uncapped": lambda *arguments: (
        (1.1 * outcomes(*arguments)[0]).clamp_max(1.0),
        outcomes(*arguments)[1],
    ),
}


@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(mutant: str, verification: Verification) -> None:
    assert error(STOPS["after a token"], verification, MUTANTS[mutant]) > VISIBLE


LOOKED_UP = (0, 2, 1)


@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("count", range(K + 1))
def test_looked_up_candidates(count: int, verification: Verification) -> None:
    """Their q is 1, also behind the last of them. With the q of a draft, the distribution is another one."""

    def stop(_: Path) -> int:
        return count

    def certain(path: Path) -> Tensor:
        return functional.one_hot(torch.tensor(LOOKED_UP[len(path)]), VOCAB).double()

    def with_a_drafts_q(drawn: Tensor, number: Tensor, p: Tensor, q: Tensor, how: Verification) -> Any:
        return outcomes(drawn, number, p, torch.full_like(q, 1.0 / VOCAB), how)

    p = distributions(3, K + 1, spread=2.0, every=5)
    plain = plain_texts(p, K + 1)
    assert furthest(plain, texts_of_rounds(p, certain, stop, verification, outcomes)) < 1e-12
    assert not count or furthest(plain, texts_of_rounds(p, certain, stop, verification, with_a_drafts_q)) > VISIBLE


def error_of_processors(name: str, process: Process, seeds: Sequence[int] = range(2)) -> float:
    """The same where processors are called between the target's pass and acceptance; the draft knows nothing of
    them."""
    largest = 0.0
    for seed in seeds:
        raw, q = distributions(seed, K + 1, 1.0, every=10**6), distributions(100 + seed, K + 1, 2.0, every=5)
        between = Between(raw, name)

        def rows(drawn: Path, between: Between = between) -> Tensor:
            return between.rows(between.chain(drawn), process)

        ours = texts_of_rounds(between.p, q, STOPS["fixed"], "block", outcomes, rows)
        largest = max(largest, furthest(plain_texts(between.p, K + 1), ours))
    return largest


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_between_pass_and_acceptance(name: str) -> None:
    assert error_of_processors(name, rightly) < 1e-12


@pytest.mark.parametrize("mistake", MISTAKES)
def test_processors_that_are_asked_wrongly_are_noticed(mistake: str) -> None:
    assert error_of_processors("n-grams", MISTAKES[mistake]) > VISIBLE


@pytest.mark.parametrize(("verification", "readable"), [("block", verify_block), ("token", verify_chain)])
def test_the_readable_versions_agree(verification: Verification, readable: Callable[..., tuple[int, int]]) -> None:
    """About how likely each number of accepted candidates is."""
    p, q = (distributions(each, K + 1, spread=2.0, every=5) for each in (3, 7))
    drawn = (0, 2, 1)
    p_rows = torch.stack([p(drawn[:place]) for place in range(K + 1)])
    q_rows = torch.stack([q(drawn[:place]) for place in range(K)])
    tests, _ = outcomes(torch.tensor(drawn), torch.tensor(K), p_rows, q_rows, verification)
    counts = weights_of(tests)
    found = exact_distribution(lambda replay: (readable(drawn, p_rows, q_rows, replay)[0],))
    assert [found.get((count,), 0.0) for count in range(K + 1)] == pytest.approx(counts.tolist(), abs=1e-12)


@pytest.mark.parametrize("verification", ["block", "token"])
def test_several_texts_at_once(verification: Verification) -> None:
    """Each text as by itself, with as many candidates as it has."""
    torch.manual_seed(0)
    p, q = torch.rand(4, K + 1, VOCAB).softmax(-1), torch.rand(4, K, VOCAB).softmax(-1)
    candidates, count = torch.randint(VOCAB, (4, K)), torch.tensor([0, 1, 2, 3])
    tests, weights = outcomes(candidates, count, p, q, verification)
    chances = torch.rand(4, K + 1)
    for text in range(4):
        alone = outcomes(candidates[text], count[text], p[text], q[text], verification)
        torch.testing.assert_close((tests[text], weights[text]), alone)
        assert int(last_passing(tests, chances)[text]) == int(last_passing(tests[text], chances[text]))


@pytest.mark.parametrize(
    ("fires", "count"), [([0, 0, 0], 3), ([1, 0, 0], 1), ([0, 1, 0], 2), ([0, 1, 1], 2), ([0, 0, 1], 3)]
)
def test_the_stop_is_the_first_place_that_fires(fires: list[int], count: int) -> None:
    assert int(count_until(torch.tensor(fires).bool())) == count


def test_the_longest_test_that_passes_counts() -> None:
    tests = torch.tensor([0.5, 0.5, 0.5])
    for chances, expected in (([0.1, 0.9, 0.9], 0), ([0.9, 0.1, 0.9], 1), ([0.1, 0.1, 0.1], 2), ([0.9, 0.9, 0.9], 0)):
        assert int(last_passing(tests, torch.tensor(chances))) == expected


def test_a_race_draws_by_weights() -> None:
    torch.manual_seed(0)
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2])
    drawn = (weights / on_device.exponential(torch.empty(20_000, 4))).argmax(-1)
    # Five standard deviations.
    assert torch.allclose(torch.bincount(drawn, minlength=4) / 20_000, weights, atol=0.018)
