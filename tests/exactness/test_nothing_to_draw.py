"""Where p is nan, plain sampling raises once the text gets there. Rounds raise exactly as often, and emit every text as
often as plain sampling; also where q is nan, which no target knows of.

Every outcome of a round is enumerated, an error being one of them. Wrong versions of the functions must not pass."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.enumeration.exact_distribution import VISIBLE, Replay, exact_distribution
from support.enumeration.grown_trees import Grown, trees
from support.enumeration.next_tokens import VOCAB, Path, distributions
from support.enumeration.readable_verification import weights_of
from support.enumeration.toy_rounds import VERIFIERS
from torch import Tensor

from hf_specdecpp.cuda_graphs import on_device
from hf_specdecpp.sampling.randomness import NothingToDrawError
from hf_specdecpp.trees import verification
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.verification import verify_tree

K, LENGTH = 2, 3  # candidates of a chain, and tokens of the texts
RAISES = -1  # in the place of a token
Law = Callable[[Path], Tensor]
Found = dict[Path, float]
NAN = torch.full((VOCAB,), float("nan"), dtype=torch.float64)
# After which texts a distribution is nan; candidates may go on from there, and have numbers again.
PLACES: dict[str, tuple[Path, ...]] = {
    "nowhere": (), "at once": ((),), "after 0": ((0,),), "after 1 2": ((1, 2),), "after 0 and 2 0": ((0,), (2, 0)),
}  # fmt: skip


def law(seed: int, place: str) -> Law:
    known = distributions(seed, LENGTH, spread=1.0, every=7)
    return lambda path: NAN if path in PLACES[place] else known(path)


def go_on(found: Found, p: Law, begun: Path, chance: float) -> None:
    """Plain sampling after a text, which may have raised."""
    if begun[-1:] == (RAISES,) or len(begun) >= LENGTH:
        found[begun[:LENGTH]] = found.get(begun[:LENGTH], 0.0) + chance
    else:
        add(found, p, begun, p(begun), chance)


def add(found: Found, p: Law, begun: Path, weights: Tensor, chance: float) -> None:
    """A token by weights after a text, then plain sampling."""
    if not float(weights.sum()) > 0.0:
        go_on(found, p, (*begun, RAISES), chance)
        return
    for token, weight in enumerate((weights / weights.sum()).tolist()):
        if weight > 0.0:
            go_on(found, p, (*begun, token), chance * weight)


class Strict(Replay):
    """Raises as what it stands for does, and no number is below nan."""

    def bernoulli(self, probability: float) -> bool:
        return super().bernoulli(probability if probability > 0.0 else 0.0)

    def categorical(self, probs: Tensor) -> Tensor:
        if bool(probs.isnan().any()):
            raise NothingToDrawError
        return super().categorical(probs)


def ways(verify: Callable[[Replay], Path]) -> Found:
    """What a round emits, with its chance; of an error nobody knows how many candidates stood."""

    def program(replay: Replay) -> Path:
        strict = Strict(replay.choices)
        try:
            return verify(strict)
        except NothingToDrawError:
            return (RAISES,)
        finally:
            replay.weight, replay.untried = strict.weight, strict.untried

    return exact_distribution(program)


# Chains. --------------------------------------------------------------------------------------------------------------


def chains(q: Law) -> Iterator[tuple[float, Path, int]]:
    """What is drawn, with its chance, and how many candidates are submitted: none that is drawn from nan."""
    for drawn in itertools.product(range(VOCAB), repeat=K):
        chance, count = 1.0, K
        for place in range(K):
            row = q(drawn[:place])
            if bool(row.isnan().any()):
                chance, count = chance * (set(drawn[place:]) == {0}), place  # as `argmax` of nan
                break
            chance *= float(row[drawn[place]])
        if chance > 0.0:
            yield chance, drawn, count


def in_graphs(p: Law, q: Law, how: Any, submits_all: bool = False) -> Found:
    """`submits_all`: as in uncaptured rounds on a device, where nobody reads whether q is nan."""
    found: Found = {}
    for chance, drawn, count in chains(q):
        of_p, of_q = (torch.stack([each(drawn[:place]) for place in range(n)]) for each, n in ((p, K + 1), (q, K)))
        submitted = torch.tensor(K if submits_all else count)
        tests, weights = verification.outcomes(torch.tensor(drawn), submitted, of_p, of_q, how)
        counts = weights_of(tests.nan_to_num(0.0))  # no number is below nan
        for accepted, share in enumerate(counts.tolist()):
            if share > 0.0:
                add(found, p, drawn[:accepted], weights[accepted], chance * share)
    return found


def uncaptured(p: Law, q: Law, verify: Callable[..., tuple[int, int]]) -> Found:
    found: Found = {}
    for chance, drawn, count in chains(q):
        of_p = torch.stack([p(drawn[:place]) for place in range(count + 1)])
        of_q = torch.stack([q(drawn[:place]) for place in range(count)]) if count else of_p[:0]

        def emitted(replay: Replay, rows: Any = (list(drawn[:count]), of_p, of_q), drawn: Path = drawn) -> Path:
            accepted, token = verify(*rows, replay)
            return *drawn[:accepted], token

        for text, share in ways(emitted).items():
            go_on(found, p, text, chance * share)
    return found


# Trees, of drafts that have numbers everywhere: others are not drawn from. --------------------------------------------


def trees_in_graphs(p: Law, q: Law, how: Any) -> Found:
    found: Found = {}
    for tree in trees(q):
        rows = torch.stack([p(path) for path in tree.paths])[None]
        for last, chance, weights in tree.ends(rows, on_device.tree_tests, how):
            add(found, p, tree.paths[last], weights, tree.chance * chance)
    return found


def trees_uncaptured(p: Law, q: Law, verify: Callable[..., tuple[list[int], int]]) -> Found:
    found: Found = {}
    for grown in trees(q):
        tree = DraftTree()
        for parent, token in zip(grown.parents, grown.tokens, strict=True):
            if float(q(grown.paths[parent])[token]) > 0.0:  # the others were left open
                tree.add(parent, token)
                tree.scores[parent] = q(grown.paths[parent]).log()

        def emitted(replay: Replay, tree: DraftTree = tree, grown: Grown = grown) -> Path:
            path, token = verify(tree, lambda node: p(tuple(tree.path(node))), replay)
            return *(tree.tokens[node] for node in path), token

        for text, share in ways(emitted).items():
            go_on(found, p, text, grown.chance * share)
    return found


# Of each function that makes texts, whether it is known after which text it raises.
OF_CHAINS: dict[str, tuple[Callable[[Law, Law], Found], bool]] = {
    "graphs, block": (partial(in_graphs, how="block"), True),
    "graphs, token": (partial(in_graphs, how="token"), True),
    "graphs, block, all": (partial(in_graphs, how="block", submits_all=True), True),
    "graphs, token, all": (partial(in_graphs, how="token", submits_all=True), True),
    **{name: (partial(uncaptured, verify=verify), False) for name, verify in VERIFIERS.items()},
}
OF_TREES: dict[str, tuple[Callable[[Law, Law], Found], bool]] = {
    "graphs, block": (partial(trees_in_graphs, how="block"), True),
    "graphs, token": (partial(trees_in_graphs, how="token"), True),
    "block": (partial(trees_uncaptured, verify=partial(verify_tree, verification="block")), False),
    "token": (partial(trees_uncaptured, verify=partial(verify_tree, verification="token")), False),
}


def error(run: Callable[[Law, Law], Found], knows_where: bool, place: str, place_of_q: str = "nowhere") -> float:
    """The largest difference of a text's chance."""
    p, q, plain = law(3, place), law(103, place_of_q), dict[Path, float]()
    go_on(plain, p, (), 1.0)
    ours, plain = (each if knows_where else together(each) for each in (run(p, q), plain))
    return max(abs(ours.get(text, 0.0) - plain.get(text, 0.0)) for text in {*ours, *plain})


def together(found: Found) -> Found:
    """All errors as one."""
    merged: Found = {}
    for text, chance in found.items():
        key = (RAISES,) if text[-1] == RAISES else text
        merged[key] = merged.get(key, 0.0) + chance
    return merged


@pytest.mark.parametrize("place_of_q", PLACES)
@pytest.mark.parametrize("place", PLACES)
def test_chains(place: str, place_of_q: str) -> None:
    for run, knows_where in OF_CHAINS.values():
        assert error(run, knows_where, place, place_of_q) < 1e-12


@pytest.mark.daily(
    "nowhere-token", "at once-block", "after 1 2-token", "after 0-graphs, token", "after 0 and 2 0-block", takes=3,
)  # fmt: skip
@pytest.mark.parametrize("name", OF_TREES)
@pytest.mark.parametrize("place", PLACES)
def test_trees(place: str, name: str) -> None:
    assert error(*OF_TREES[name], place) < 1e-12


def ratios_with_nan(candidates: Any, p: Tensor, q: Tensor) -> Tensor:
    columns = torch.as_tensor(candidates)[..., None]
    p_of, q_of = (probs[..., : columns.shape[-2], :].gather(-1, columns)[..., 0] for probs in (p, q))
    return p_of / q_of


def chances_with_nan(carries: Tensor, left: Tensor) -> Tensor:
    sums = left.sum(-1)
    return sums / (sums + 1.0 - carries)


@pytest.mark.parametrize(("name", "mutant", "where"), [
    ("chain_ratios", ratios_with_nan, "token"),
    ("block_tests", chances_with_nan, "graphs, block"),
    ("block_tests", chances_with_nan, "block, at once"),
])  # fmt: skip
def test_mutants_of_chains_are_noticed(name: str, mutant: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are accepted after an error, or an error never comes, since nothing is accepted before it."""
    monkeypatch.setattr(verification, name, mutant)
    assert error(*OF_CHAINS[where], "after 0") > VISIBLE


@pytest.mark.takes(2)
@pytest.mark.parametrize("name", ["block", "graphs, block"])
def test_a_mutant_of_trees_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child counts where p is nan, as if its chance were `min(1.0, nan)`, which is 1.0."""
    right = verification.acceptance_of
    for module in (verification, on_device):
        monkeypatch.setattr(module, "acceptance_of", lambda *of: right(*of).nan_to_num(1.0))
    assert error(*OF_TREES[name], "after 0") > VISIBLE
