"""Which shape captured rounds take under `rule="throughput"`: against the best one, by what rounds take and bring."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hf_specdecpp.cuda_graphs.captured_draft import RoundShape
from hf_specdecpp.estimation.estimators import AcceptanceRates
from hf_specdecpp.throughput import round_shapes
from hf_specdecpp.throughput.round_shapes import TREES, FastestShapes, RuleShapes, chains_up_to
from hf_specdecpp.trees.tree import DraftTree

TREE_STEPS = {TREES[0]: 1.3, TREES[1]: 1.5}  # times those of a chain of this depth
ROUNDS, WARM = 1500, 500


class Texts:
    """Candidates of which the first is accepted with one chance, and the next best instead with another.

    `chances`: of the first and of the second, of the text at hand."""

    def __init__(self, chances: tuple[float, float], seed: int = 0) -> None:
        self.chances, self.random = chances, np.random.default_rng(seed)

    def report(self, shape: RoundShape) -> Any:
        tree = DraftTree()
        path, parent = [], 0
        first, second = self.chances
        for _ in range(shape.levels):
            children = [tree.add(parent, token) for token in range(1, min(shape.width, 2) + 1)]
            drawn = self.random.random()
            if drawn < first:
                parent = children[0]
            elif shape.width > 1 and drawn < first + second:
                parent = children[1]
            else:
                break
            path.append(parent)
        while len(tree) < shape.nodes:
            tree.add(0, 9)
        return SimpleNamespace(tree=tree, path=path, estimates=[0.7] * shape.levels if shape.width == 1 else [])


def seconds_of(shape: RoundShape, step: float) -> float:
    return 6e-3 + 1e-3 * step * shape.levels * TREE_STEPS.get(shape, 1.0)


def best_of(shapes: list[RoundShape], chances: tuple[float, float], step: float) -> float:
    """Tokens a second with the best of the shapes in all rounds."""
    found = []
    for shape in shapes:
        stands = sum(chances) if shape.width > 1 else chances[0]
        found.append(sum(stands**level for level in range(shape.levels + 1)) / seconds_of(shape, step))
    return max(found)


def tokens_a_second(most: FastestShapes, texts: Texts, step: float) -> float:
    """Of the rounds after the first ones."""
    tokens = seconds = 0.0
    for number in range(ROUNDS):
        shape = most.choose_shape()
        report = texts.report(shape)
        most.seconds.record_round(shape, seconds_of(shape, step))
        most.record_round(shape, [report])
        if number >= WARM:
            tokens += len(report.path) + 1
            seconds += seconds_of(shape, step)
    return tokens / seconds


def throughput(step: float = 0.55) -> FastestShapes:
    shapes = [*chains_up_to(15), *TREES]
    most = FastestShapes(shapes)
    most.seconds.time(shapes, lambda shape: seconds_of(shape, step))
    most.rates = AcceptanceRates()
    return most


@pytest.mark.daily("0.1-(0.8, 0.12)", "0.1-(0.5, 0.02)", "0.55-(0.8, 0.02)", "0.55-(0.02, 0.01)", "3.0-(0.5, 0.3)")
@pytest.mark.parametrize("chances", [(0.8, 0.12), (0.8, 0.02), (0.5, 0.3), (0.5, 0.02), (0.02, 0.01)], ids=str)
@pytest.mark.parametrize("step", [0.1, 0.55, 3.0])
def test_not_far_from_the_best_shape(chances: tuple[float, float], step: float) -> None:
    most = throughput(step)
    assert tokens_a_second(most, Texts(chances), step) > 0.97 * best_of(most.shapes, chances, step)


def test_a_tree_that_pays_is_not_dropped_in_a_text_that_is_hard_to_draft() -> None:
    """Its promise follows the text as that of chains does."""
    most, texts = throughput(), Texts((0.8, 0.12))
    tokens_a_second(most, texts, 0.55)
    texts.chances = (0.5, 0.3)
    shapes = []
    for _ in range(60):
        shapes.append(shape := most.choose_shape())
        most.record_round(shape, [texts.report(shape)])
    assert sum(shape.width > 1 for shape in shapes) > 50


def test_a_tree_that_is_judged_by_its_tokens_alone_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: what the first branch brought is not told apart."""
    monkeypatch.setattr(round_shapes, "first_branch", lambda _tree, path: len(path))
    most = throughput()
    assert tokens_a_second(most, Texts((0.5, 0.3)), 0.55) < 0.97 * best_of(most.shapes, (0.5, 0.3), 0.55)


GIVEN = [RoundShape(0, given=count) for count in (3, 7, 12)]


def lookups(*estimates: float, count: int = 0) -> Any:
    return SimpleNamespace(estimates=list(estimates), count_alone=lambda: count)


def test_lookups_are_taken_where_more_tokens_a_second_are_expected() -> None:
    """A pass of 4 ms, 1 ms a drafted candidate, 0.1 ms a looked-up one: 0.25 tokens a millisecond without any."""
    most = FastestShapes([RoundShape(0), RoundShape(3), *GIVEN])
    most.seconds.time([*most.shapes, *GIVEN], lambda shape: 4.0 + shape.levels + 0.1 * shape.given)
    most.rates = AcceptanceRates()
    drafted = max(most.rates.expected_tokens(3)[3] / 7.0, 0.25)
    for chance in (0.05, 0.3, 0.5, 0.7, 0.9, 0.99):
        found = lookups(*[chance] * 9)
        expected = {shape: sum(chance**place for place in range(min(shape.given, 9) + 1)) for shape in GIVEN}
        rates = {shape: tokens / most.seconds.of(shape) for shape, tokens in expected.items()}
        best = max(GIVEN, key=rates.__getitem__)
        chosen = most.choose_shape([found])
        assert chosen == best if rates[best] > drafted else not chosen.given
    assert most.choose_shape([lookups(*[0.99] * 9)]).given == 12
    # The mean of the rows counts, and rows without lookups get one token.
    assert not most.choose_shape([lookups(*[0.9] * 3), *[lookups()] * 9]).given
    assert most.choose_shape([lookups(*[0.99] * 9), *[lookups()] * 2]).given


def test_a_rule_looks_up_what_half_of_the_rows_would() -> None:
    rule = RuleShapes([RoundShape(4), *GIVEN])
    counts = {(): 0, (0,): 0, (2,): 3, (4,): 7, (20,): 12, (0, 2): 3, (0, 0, 2): 0, (0, 2, 5): 3}
    for each, given in counts.items():
        shape = rule.choose_shape([lookups(count=count) for count in each])
        assert shape == (RoundShape(0, given=given) if given else RoundShape(4))
