"""Growing trees, their shapes, estimates and drawings; no models."""

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support.enumeration.toy_rounds import make_estimator
from support.enumeration.toy_trees import KINDS, VOCAB, RandomDraft
from torch import Tensor

from hf_specdecpp.estimation.estimators import DraftProbability, Estimator, scalar_features
from hf_specdecpp.sampling.randomness import (
    BLOCK,
    InBlocks,
    Randomness,
    Ranked,
    Siblings,
    TorchRandomness,
)
from hf_specdecpp.trees import growth as algorithms
from hf_specdecpp.trees import shapes as of_trees
from hf_specdecpp.trees.drawing import DrawnTree
from hf_specdecpp.trees.growth import Growth, Slots
from hf_specdecpp.trees.head_siblings import _likeliest, sibling_features
from hf_specdecpp.trees.tree import DraftTree


def growth(
    expand: RandomDraft, depth: int = 12, randomness: Randomness | None = None, estimator: Estimator | None = None
) -> Growth:
    how = Slots(estimator or DraftProbability(), randomness, embed=lambda tokens: torch.ones(*tokens.shape, 4))
    return Growth(expand, how, root=0, max_depth=depth)


@pytest.mark.daily("unsure-2-greedy", "unsure-256-sampled", "sharp-64-greedy", "mixed-2-sampled", "mixed-1024-greedy")
@pytest.mark.parametrize("randomness", [None, TorchRandomness()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [2, 16, 64, 256, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_is_used_up_a_pass_for_each_level(kind: str, budget: int, randomness: Randomness | None) -> None:
    tree_growth = growth(RandomDraft(kind, seed=budget), randomness=randomness)
    algorithms.grow_by_level(tree_growth, budget, algorithms.ThresholdSchedule())
    tree = tree_growth.tree
    assert len(tree) == budget
    assert tree.passes == tree.depth <= 12
    slots = [1.0] * len(tree.children)
    for node, children in enumerate(tree.children):
        tokens = [tree.tokens[child] for child in children]
        assert len(set(tokens)) == len(tokens), "siblings are drawn without replacement"
        q = tree.q(node) if children else torch.zeros(0)
        for rank, child in enumerate(children):
            left = 1.0 - sum(float(q[token]) for token in tokens[:rank])
            assert tree.values[child] == pytest.approx(slots[node] * left, abs=1e-4), "the paper's telescoped product"
            slots[child] = slots[node] * float(q[tokens[rank]])


@pytest.mark.parametrize("randomness", [None, TorchRandomness()], ids=["greedy", "sampled"])
def test_algorithm_1_draws_at_the_best_slot(randomness: Randomness | None) -> None:
    torch.manual_seed(0)
    tree_growth = growth(RandomDraft("mixed", seed=0), randomness=randomness)
    algorithms.grow_exactly(tree_growth, 64)
    tree = tree_growth.tree
    worth = tree.values[1:] if randomness else chances(tree)
    assert worth == sorted(worth, reverse=True)
    assert tree.passes == len(tree.scores) <= 65
    assert min(worth) >= max(*tree_growth.open.values(), *tree_growth.leaves.values())


def chances(tree: DraftTree) -> list[float]:
    """That each candidate is accepted."""
    return [v * a for v, a in zip(tree.values[1:], tree.estimates[1:], strict=True)]


@pytest.mark.parametrize(
    "grow", [lambda g, pace: algorithms.grow_exactly(g, 32), lambda g, pace: algorithms.grow_by_level(g, 32, pace)]
)
def test_greedy_slots_compete_with_their_candidates_worth(
    grow: Callable[[Growth, algorithms.ThresholdSchedule], None],
) -> None:
    """The paper's order, by v alone, takes tokens that it knows to be unlikely."""
    expected = []
    for papers_order in (True, False):
        pace, found = algorithms.ThresholdSchedule(), []
        for seed in range(20):
            tree_growth = growth(RandomDraft("mixed", seed))
            tree_growth.greedy = not papers_order
            grow(tree_growth, pace)
            found.append(sum(chances(tree_growth.tree)))
        expected.append(statistics.mean(found))
    assert expected[1] > 1.08 * expected[0]


@pytest.mark.daily("unsure-16-greedy", "sharp-16-sampled", "mixed-64-greedy")
@pytest.mark.parametrize("randomness", [None, TorchRandomness()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_level_by_level_is_nearly_as_good(kind: str, budget: int, randomness: Randomness | None) -> None:
    """In expected accepted candidates, with a draft pass a level in the place of one a node."""
    means = []
    for exact in (True, False):
        pace, accepted = algorithms.ThresholdSchedule(), []
        for seed in range(20):
            torch.manual_seed(seed)
            tree_growth = growth(RandomDraft(kind, seed), randomness=randomness)
            algorithms.grow_exactly(tree_growth, budget) if exact else algorithms.grow_by_level(
                tree_growth, budget, pace
            )
            accepted.append(sum(chances(tree_growth.tree)))
        means.append(statistics.mean(accepted))
    assert means[1] > 0.95 * means[0]


def test_a_fixed_threshold_leaves_the_budget_unused() -> None:
    """The paper's form, which is what `tree_threshold` asks for."""
    tree_growth = growth(RandomDraft("unsure", seed=0), randomness=TorchRandomness())
    algorithms.grow_by_level(tree_growth, 256, algorithms.ThresholdSchedule(), threshold=0.5)
    assert len(tree_growth.tree) < 256
    assert min(tree_growth.tree.values) >= 0.5


def test_depth_and_ends_of_sequences() -> None:
    for grow in (
        lambda g: algorithms.grow_by_level(g, 40, algorithms.ThresholdSchedule()),
        lambda g: algorithms.grow_exactly(g, 40),
    ):
        draft = RandomDraft("sharp", seed=0)
        eos = int(draft.at(()).argmax())
        tree_growth = Growth(draft, Slots(DraftProbability(), eos_token_ids={eos}), 0, 3)
        grow(tree_growth)
        tree = tree_growth.tree
        assert tree.depth <= 3
        assert not tree.children[tree.tokens.index(eos, 1)]
    nothing = growth(draft, depth=0)
    algorithms.grow_by_level(nothing, 8, algorithms.ThresholdSchedule())
    assert len(nothing.tree) == nothing.tree.passes == 0


@pytest.mark.parametrize("randomness", [None, TorchRandomness()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("support", [[3, 5], []])
def test_a_shape_larger_than_the_support(support: list[int], randomness: Randomness | None) -> None:
    draft = RandomDraft("sharp", seed=0)
    row = torch.full((VOCAB,), float("-inf")).index_fill(0, torch.tensor(support, dtype=torch.long), 0.0)
    draft.at = lambda path: row  # type: ignore[method-assign]
    tree_growth = growth(draft, randomness=randomness)
    algorithms.grow_shape(tree_growth, of_trees.from_expansions([3, 3]))
    assert sorted(tree_growth.tree.tokens[1:]) == sorted(3 * support)


def test_shapes() -> None:
    shape = of_trees.from_expansions([2, 1, 2])
    assert of_trees.size(shape) == 2 + 2 + 4
    assert of_trees.from_nodes([[0], [1], [0, 0], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]) == shape
    tree_growth = growth(RandomDraft("mixed", seed=0), randomness=TorchRandomness())
    algorithms.grow_shape(tree_growth, shape)
    assert [len(children) for children in tree_growth.tree.children] == [2, 1, 1, 2, 2, 0, 0, 0, 0]
    assert tree_growth.tree.passes == 3
    with pytest.raises(ValueError, match=r"node \[1\] without its parent or the sibling"):
        of_trees.from_nodes([[1]])
    with pytest.raises(ValueError, match="at least 1"):
        of_trees.from_expansions([2, 0])


@pytest.mark.parametrize("rates", [[0.6, 0.2, 0.1], [0.9, 0.05], [0.3, 0.35, 0.1]])
@pytest.mark.parametrize("budget", [1, 2, 4, 6])
def test_the_best_shape_is_the_best_of_all(rates: list[float], budget: int) -> None:
    def value(shape: of_trees.Shape, node: tuple[int, ...] = ()) -> float:
        return sum(rates[k] * (1.0 + value(shape, (*node, k))) for k in range(shape.get(node, 0)))

    def shapes(count: int, depth: int) -> list[of_trees.Shape]:
        """All shapes of `count` candidates."""
        if depth == 0 or count == 0:
            return [{}] if count == 0 else []
        found = []
        for children in range(1, min(len(rates), count) + 1):
            for sizes in itertools.product(range(count), repeat=children):
                if sum(sizes) + children == count:
                    for parts in itertools.product(*(shapes(n, depth - 1) for n in sizes)):
                        whole: of_trees.Shape = {(): children}
                        for rank, part in enumerate(parts):
                            whole |= {(rank, *node): n for node, n in part.items()}
                        found.append(whole)
        return found

    best = of_trees.best_shape(rates, budget, max_depth=3)
    assert of_trees.size(best) <= budget
    assert value(best) == pytest.approx(max(value(shape) for n in range(1, budget + 1) for shape in shapes(n, 3)))


def race(q: Tensor) -> Siblings:
    return Ranked(q, q / torch.empty_like(q).exponential_())


@pytest.mark.parametrize("draws", [partial(InBlocks, greedy=False), race], ids=["in blocks", "race"])
def test_draws_without_replacement(draws) -> None:
    """The distribution of the first two, against its definition (chi-square, fixed seed), also across blocks."""
    q, support = torch.zeros(2 * BLOCK + 3), [1, BLOCK - 1, BLOCK, 2 * BLOCK + 2]
    q[support] = torch.tensor([0.6, 0.25, 0.1, 0.05])
    torch.manual_seed(0)
    num, counts = 20_000, dict.fromkeys(itertools.permutations(support, 2), 0)
    siblings = draws(q.expand(num, -1).clone())
    for row in range(num):
        first, second = siblings.draw_next(row), siblings.draw_next(row)
        counts[first[0], second[0]] += 1
        assert first[1] == pytest.approx(float(q[first[0]]))
    expected = {(a, b): num * float(q[a] * q[b] / (1.0 - q[a])) for a, b in counts}
    chi_square = sum((counts[pair] - expected[pair]) ** 2 / expected[pair] for pair in counts)
    assert chi_square < 31.3, counts  # 11 degrees of freedom, p = 0.001
    assert [siblings.draw_next(0) is None for _ in range(3)] == [False, False, True]


def test_a_head_is_told_what_it_was_trained_on() -> None:
    """`scalar_features` of the renormalised q, from a few of its numbers."""
    rows = torch.stack([RandomDraft("mixed", seed=seed, vocab=30).at(()) for seed in (1, 2)]).double().softmax(-1)
    tokens = rows.argsort(descending=True)[:, [0, 3, 1, 20, 2]]
    drawn = torch.stack((tokens, rows.gather(1, tokens)), dim=-1)
    ours = sibling_features(drawn, _likeliest(rows, 6), torch.special.entr(rows).sum(-1), greedy=True)
    for row, q in enumerate(rows):
        for index, token in enumerate(tokens[row]):
            rest, mass = q.index_fill(0, tokens[row, :index], 0.0), q[tokens[row, :index]].sum()
            expected = scalar_features(rest / rest.sum(), token, True, mass, torch.tensor(index))
            torch.testing.assert_close(ours[row, index], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("randomness", [None, TorchRandomness()], ids=["greedy", "sampled"])
def test_a_head_judges_a_level_at_once(randomness: Randomness | None) -> None:
    head = make_estimator("before", seed=0)
    tree_growth, calls = growth(RandomDraft("mixed", seed=0), randomness=randomness, estimator=head), []
    head.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[attr-defined]
    algorithms.grow_by_level(tree_growth, 64, algorithms.ThresholdSchedule())
    assert len(tree_growth.tree) == 64
    assert len(calls) < 64 / 2


def test_drawings(tmp_path: Path) -> None:
    """Of a text the lines are those of docs/dyspec.md (`test_tree_cost.py`)."""
    tree = DraftTree(7)
    first = tree.add(0, 1, 1.0, 0.5)
    tree.add(0, 2, 0.5, 0.3)
    drawn = DrawnTree(tree, [first, tree.add(first, 3, 0.5, 0.9)])
    assert str(drawn).startswith("7   (3 candidates, depth 2, width 2, 0 draft passes; 2 accepted: *)\n├─*1   a=0.50")
    pytest.importorskip("matplotlib")
    drawn.save(tmp_path / "tree.png", lambda token: f"${token}")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    DrawnTree(DraftTree(0), []).save(tmp_path / "empty.png")
