"""Trees that are grown and verified as functions of tensors emit exactly what plain sampling emits.

Every outcome is enumerated: the order in which the siblings below each node are drawn, which slots are among the best,
which nodes stand, what follows; then plain sampling goes on. The distribution of texts must be the target's to
rounding. Wrong versions of the functions must not pass."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.exact_distribution import VISIBLE
from support.grown_trees import LEVELS, NODES, WIDTH, Grown, Judge, Slots, Tests, by_a_head, by_q, trees
from support.next_tokens import Path, add_texts, distributions, furthest, plain_texts
from support.processors_between import MISTAKES, PROCESSORS, Between, Process, rightly
from torch import Tensor

from hf_specdecpp.sampling import on_device
from hf_specdecpp.sampling.on_device import (
    best_slots,
    last_on_path,
    stands_sampled,
)
from hf_specdecpp.trees.tree import DraftTree


def texts_of_rounds(
    p: Callable[[Path], Tensor], grown: Iterator[Grown], tests: Tests, known: Callable[[Grown], Tensor] | None = None
) -> dict[Path, float]:
    """Chances of texts of which a round came first; `known` are p after each node as the round knows it."""
    found: dict[Path, float] = {}
    for tree in grown:
        tokens, parents = torch.tensor([tree.tokens]), torch.tensor([tree.parents])
        drawn = tree.q.gather(1, tokens[0, :, None])[None, :, 0] > 0.0
        rows = torch.stack([p(path) for path in tree.paths])[None] if known is None else known(tree)[None]
        chances, left = tests(tokens, parents, drawn, rows, tree.q[None], WIDTH)
        for passed in itertools.product((0.0, 1.0), repeat=NODES):
            own = torch.where(torch.tensor(passed) > 0, chances[0], 1.0 - chances[0]).prod()
            if (chance := tree.chance * float(own)) == 0.0:
                continue
            uniform = torch.where(torch.tensor([passed]) > 0, -1.0, 2.0)  # below any chance, and above
            last, _ = last_on_path(stands_sampled(parents, chances, uniform), tree.ancestors)
            add_texts(found, p, LEVELS + 1, tree.paths[int(last)], left[0, int(last)], chance)
    return found


def error(tests: Tests = on_device.tree_tests, slots: Slots = best_slots, seeds: int = 4, judge: Judge = by_q) -> float:
    """The largest difference of a text's chance; a visible one ends it."""
    largest = 0.0
    for seed in range(seeds):
        if largest > VISIBLE:
            break
        p, q = (distributions(each, LEVELS, spread=1.5, every=4) for each in (seed, 100 + seed))
        ours = texts_of_rounds(p, trees(q, slots, judge), tests)
        largest = max(largest, furthest(plain_texts(p, LEVELS + 1), ours))
    return largest


@pytest.mark.takes(4)
@pytest.mark.parametrize("judge", [by_q, by_a_head], ids=lambda each: each.__name__)
def test_the_distribution_is_the_targets(judge: Judge) -> None:
    assert error(judge=judge) < 1e-12


def with_q_of_the_first(
    tokens: Tensor, parents: Tensor, drawn: Tensor, p: Tensor, q: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """A mutant: what was drawn without replacement counts as drawn with it."""
    q = q.clone()
    for node in range(1, NODES):
        for other in range(node):
            if parents[0, node] == parents[0, other]:
                q[0, node] = q[0, other]
    return on_device.tree_tests(tokens, parents, drawn, p, q, width)


def without_residuals(*arguments: Any) -> tuple[Tensor, Tensor]:
    """A mutant: what follows comes from p."""
    chances, left = on_device.tree_tests(*arguments)
    return chances, arguments[3].expand_as(left)


def uncapped(*arguments: Any) -> tuple[Tensor, Tensor]:
    chances, left = on_device.tree_tests(*arguments)
    return (1.1 * chances).clamp_max(1.0), left


@pytest.mark.parametrize("mutant", [with_q_of_the_first, without_residuals, uncapped], ids=lambda each: each.__name__)
def test_mutants_of_verification_are_noticed(mutant: Tests) -> None:
    assert error(mutant) > VISIBLE


def by_its_own_token(values: Tensor, chances: Tensor, width: int) -> Tensor:
    """A mutant: slots are chosen by what was drawn there."""
    return (values[..., None] * chances).flatten(1).sort(descending=True, stable=True).indices[:, :width]


def as_for_greedy_targets(values: Tensor, chances: Tensor, width: int) -> Tensor:
    """A mutant: the same, and no sibling before earlier ones."""
    return best_slots(values, chances, width, greedy=True)


@pytest.mark.parametrize("judge", [by_q, by_a_head], ids=lambda each: each.__name__)
@pytest.mark.parametrize("mutant", [by_its_own_token, as_for_greedy_targets], ids=lambda each: each.__name__)
def test_a_mutant_of_growth_is_noticed(mutant: Slots, judge: Judge) -> None:
    """A drawn token would be dropped because of what it is."""
    assert error(slots=mutant, judge=judge) > VISIBLE


def error_of_processors(name: str, process: Process) -> float:
    """The same where processors are called between the target's pass and acceptance, of one seed."""
    raw, q = distributions(0, LEVELS + 1, 1.0, every=10**6), distributions(100, LEVELS, spread=1.5, every=4)
    between = Between(raw, name)

    def known(grown: Grown) -> Tensor:
        tree = DraftTree()
        for parent, token in zip(grown.parents, grown.tokens, strict=True):
            tree.add(parent, token)
        return between.rows(tree, process)

    ours = texts_of_rounds(between.p, trees(q), on_device.tree_tests, known)
    return furthest(plain_texts(between.p, LEVELS + 1), ours)


@pytest.mark.every(3)
@pytest.mark.takes(3)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_between_pass_and_acceptance(name: str) -> None:
    assert error_of_processors(name, rightly) < 1e-12


@pytest.mark.every(3)
@pytest.mark.takes(3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_processors_that_are_asked_wrongly_are_noticed(mistake: str) -> None:
    assert error_of_processors("n-grams", MISTAKES[mistake]) > VISIBLE


def test_slots_before_their_siblings() -> None:
    """A slot is chosen with all before it below the same node, also where a sibling leaves nothing to draw."""
    torch.manual_seed(0)
    for _ in range(200):
        values, probs = torch.rand(2, 3), torch.rand(2, 3, 4)
        probs = probs / probs.sum(-1, keepdim=True)
        probs[:, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
        for greedy in (False, True):
            for row in best_slots(values, probs, 5, greedy).tolist():
                assert all(slot % 4 == 0 or slot - 1 in row[:place] for place, slot in enumerate(row))


def test_several_texts_at_once() -> None:
    """Each text as by itself."""
    torch.manual_seed(1)
    texts, nodes, vocab = 3, 6, 5
    p, q = torch.rand(texts, nodes + 1, vocab).softmax(-1), torch.rand(texts, nodes, vocab).softmax(-1)
    parents = torch.tensor([[0, 0, 1, 1, 3, 4], [0, 0, 1, 2, 3, 3], [0, 0, 2, 2, 4, 3]])
    tokens, drawn = torch.randint(vocab, (texts, nodes)), torch.rand(texts, nodes) < 0.9
    together = on_device.tree_tests(tokens, parents, drawn, p, q, 2)
    for text in range(texts):
        one = slice(text, text + 1)
        alone = on_device.tree_tests(tokens[one], parents[one], drawn[one], p[one], q[one], 2)
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[one], theirs)
