"""Trees that are grown and verified as functions of tensors emit exactly what plain sampling emits.

Every outcome is enumerated: the order in which the siblings below each node are drawn, which slots are among the best,
which nodes stand, what follows; then plain sampling goes on. The distribution of texts must be the target's to
rounding. Wrong versions of the functions must not pass."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.devices.processors_between import MISTAKES, PROCESSORS, Between, Process, rightly
from support.enumeration.exact_distribution import VISIBLE, Replay, exact_distribution
from support.enumeration.grown_trees import LEVELS, WIDTH, Grown, Judge, Slots, Tests, by_a_head, by_q, trees
from support.enumeration.next_tokens import Path, add_texts, distributions, furthest, plain_texts
from support.enumeration.readable_verification import verify_tree, verify_tree_block
from torch import Tensor

from hf_specdecpp.cuda_graphs import on_device
from hf_specdecpp.cuda_graphs.on_device import best_slots
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.verification import Verification, acceptance_of, sibling_tests


def texts_of_rounds(
    p: Callable[[Path], Tensor], grown: Iterator[Grown], tests: Tests, how: Verification,
    known: Callable[[Grown], Tensor] | None = None,
) -> dict[Path, float]:  # fmt: skip
    """Chances of texts of which a round came first; `known` are p after each node as the round knows it."""
    found: dict[Path, float] = {}
    for tree in grown:
        rows = torch.stack([p(path) for path in tree.paths])[None] if known is None else known(tree)[None]
        for last, chance, weights in tree.ends(rows, tests, how):
            add_texts(found, p, LEVELS + 1, tree.paths[last], weights, tree.chance * chance)
    return found


def error(
    how: Verification, tests: Tests = on_device.tree_tests, slots: Slots = best_slots, seeds: int = 4,
    judge: Judge = by_q,
) -> float:  # fmt: skip
    """The largest difference of a text's chance; a visible one ends it."""
    largest = 0.0
    for seed in range(seeds):
        if largest > VISIBLE:
            break
        p, q = (distributions(each, LEVELS, spread=1.5, every=4) for each in (seed, 100 + seed))
        ours = texts_of_rounds(p, trees(q, slots, judge), tests, how)
        largest = max(largest, furthest(plain_texts(p, LEVELS + 1), ours))
    return largest


VERIFICATIONS: tuple[Verification, ...] = ("block", "token")


@pytest.mark.daily("by_q-block", "by_a_head-token")
@pytest.mark.takes(6)
@pytest.mark.parametrize("how", VERIFICATIONS)
@pytest.mark.parametrize("judge", [by_q, by_a_head], ids=lambda each: each.__name__)
def test_the_distribution_is_the_targets(judge: Judge, how: Verification) -> None:
    assert error(how, judge=judge) < 1e-12


def changed(**parts: Any) -> Any:
    """`sibling_tests` with mistakes: `share` is applied to f, `own` to the last a and the first one, `rest` to the
    weights and p."""

    def mutant(p: Tensor, q: Tensor, tokens: Any, owed: Tensor, exist: Any) -> Iterator[tuple[Tensor, Tensor]]:
        *found, (own, rest) = sibling_tests(p, q, tokens, owed, exist)
        for mass, share in found:
            yield mass, parts.get("share", lambda f: f)(share)
        yield parts.get("own", lambda a, _: a)(own, owed), parts.get("rest", lambda weights, _: weights)(rest, p)

    return mutant


MUTANTS: dict[str, Any] = {
    "what follows comes from p": ("sibling_tests", changed(rest=lambda _, p: p)),
    "without replacement counts as with it": ("sibling_tests", changed(share=torch.ones_like)),
    "uncapped": ("acceptance_of", lambda *of: (1.1 * acceptance_of(*of)).clamp_max(1.0)),
    "a node keeps its chance": ("sibling_tests", changed(own=lambda _, owed: owed)),
}
CASES = [
    (each, how) for each in MUTANTS for how in VERIFICATIONS if each != "a node keeps its chance" or how == "block"
]


@pytest.mark.daily(
    "what follows comes from p-block", "without replacement counts as with it-block", "uncapped-block",
    "a node keeps its chance-block",
)  # fmt: skip
@pytest.mark.parametrize(("mutant", "how"), CASES)
def test_mutants_of_verification_are_noticed(mutant: str, how: Verification, monkeypatch: pytest.MonkeyPatch) -> None:
    name, function = MUTANTS[mutant]
    monkeypatch.setattr(on_device, name, function)
    assert error(how) > VISIBLE


def test_another_order_of_the_tests_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where later siblings, and all below them, are asked first."""
    ranks = on_device.sibling_ranks
    right = on_device.accepted_node

    def mutant(*arguments: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(on_device, "sibling_ranks", lambda parents: WIDTH - 1 - ranks(parents))
            return right(*arguments)

    monkeypatch.setattr(on_device, "accepted_node", mutant)
    assert error("block") > VISIBLE


@pytest.mark.parametrize(("how", "loop"), [("block", verify_tree_block), ("token", verify_tree)])
def test_the_readable_loops_agree(how: Verification, loop: Any) -> None:
    """About how likely each node is to be the last that is accepted, and what follows it."""
    p, q = (distributions(each, LEVELS, spread=1.5, every=4) for each in (5, 105))
    for grown in itertools.islice(trees(q), 0, None, 7):
        found: dict[Path, float] = {}
        rows = torch.stack([p(path) for path in grown.paths])[None]
        for last, chance, weights in grown.ends(rows, on_device.tree_tests, how):
            for token, share in enumerate((weights / weights.sum()).tolist()):
                key = (*grown.paths[last], -1, token)
                found[key] = found.get(key, 0.0) + chance * share
        tree = DraftTree()
        for parent, token in zip(grown.parents, grown.tokens, strict=True):
            tree.add(parent, token)
        tree.distributions = dict(enumerate(grown.q))
        if any(float(grown.q[parent, token]) == 0.0 for parent, token in zip(grown.parents, grown.tokens, strict=True)):
            continue  # nodes that could not be drawn, which a tree of a host does not have

        def program(replay: Replay, tree: DraftTree = tree, rows: Tensor = rows) -> Path:
            path, token = loop(tree, lambda node: rows[0, node], replay)
            return *(tree.tokens[node] for node in path), -1, token

        expected = exact_distribution(program)
        assert max(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in {*found, *expected}) < 1e-12


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
    assert error("block", slots=mutant, judge=judge) > VISIBLE


def error_of_processors(name: str, process: Process) -> float:
    """The same where processors are called between the target's pass and acceptance, of one seed."""
    raw, q = distributions(0, LEVELS + 1, 1.0, every=10**6), distributions(100, LEVELS, spread=1.5, every=4)
    between = Between(raw, name)

    def known(grown: Grown) -> Tensor:
        tree = DraftTree()
        for parent, token in zip(grown.parents, grown.tokens, strict=True):
            tree.add(parent, token)
        return between.rows(tree, process)

    ours = texts_of_rounds(between.p, trees(q), on_device.tree_tests, "token", known)
    return furthest(plain_texts(between.p, LEVELS + 1), ours)


@pytest.mark.daily("n-grams")
@pytest.mark.takes(3)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_between_pass_and_acceptance(name: str) -> None:
    assert error_of_processors(name, rightly) < 1e-12


@pytest.mark.daily("row i has the prefix of row i + 1")
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


@pytest.mark.parametrize("how", VERIFICATIONS)
def test_several_texts_at_once(how: Verification) -> None:
    """Each text as by itself."""
    torch.manual_seed(1)
    texts, nodes, vocab = 3, 6, 5
    p, q = torch.rand(texts, nodes + 1, vocab).softmax(-1), torch.rand(texts, nodes, vocab).softmax(-1)
    parents = torch.tensor([[0, 0, 1, 1, 3, 4], [0, 0, 1, 2, 3, 3], [0, 0, 2, 2, 4, 3]])
    tokens = torch.rand(texts, nodes + 1, vocab).topk(2).indices  # siblings are different
    tokens = tokens.flatten(1).gather(1, parents * 2 + on_device.sibling_ranks(parents))
    q = torch.where(torch.rand(q.shape) < 0.2, 0.0, q)
    together, numbers = on_device.tree_tests(tokens, parents, p, q, 2, how), torch.rand(texts, nodes + 1)
    seen = torch.eye(nodes + 1, dtype=torch.bool).repeat(texts, 1, 1)
    for node in range(nodes):
        seen[:, node + 1] |= seen[torch.arange(texts), parents[:, node]]
    numbers = numbers[:, : together[0].shape[1]]
    last = on_device.accepted_node(parents, seen, together[0], numbers, 2)
    for text in range(texts):
        one = slice(text, text + 1)
        alone = on_device.tree_tests(tokens[one], parents[one], p[one], q[one], 2, how)
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[one], theirs)
        assert last[text] == on_device.accepted_node(parents[one], seen[one], alone[0], numbers[one], 2)
