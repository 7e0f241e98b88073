"""The example of `docs/dyspec.md`: what the text says is what the code does."""

from pathlib import Path

import pytest
import torch

from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.sampling.randomness import Siblings, likeliest
from hf_specdecpp.trees.algorithms import ThresholdSchedule, grow_by_level, grow_exactly
from hf_specdecpp.trees.drawing import DrawnTree
from hf_specdecpp.trees.slots import Growth, Level
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.verification import verify_tree

DOCUMENT = (Path(__file__).parents[2] / "docs" / "dyspec.md").read_text(encoding="utf-8")
WORDS = ["def", "add", "sum", "plus", "(", "_", "a", "x", ","]
SHARES = {
    "def": {"add": 0.6, "sum": 0.3, "plus": 0.1}, "def add": {"(": 0.9, "_": 0.1}, "def sum": {"(": 0.8, "_": 0.2},
    "def add (": {"a": 0.7, "x": 0.3}, "def sum (": {"a": 0.7, "x": 0.3}, "def add ( a": {",": 1.0},
}  # fmt: skip
# What the target says, otherwise as the draft.
TARGET = {"def": {"add": 0.3, "sum": 0.6, "plus": 0.1}}


def probs(text: str, target: dict[str, dict[str, float]]) -> torch.Tensor:
    row = torch.zeros(len(WORDS))
    for word, probability in {**SHARES, **target}[text].items():
        row[WORDS.index(word)] = probability
    return row


def text_of(tree: DraftTree, node: int) -> str:
    return " ".join(WORDS[token] for token in (tree.tokens[0], *tree.path(node)))


def growth() -> Growth:
    def expand(tree: DraftTree, nodes: list[int]) -> Level:
        scores = torch.stack([probs(text_of(tree, node), {}) for node in nodes]).log()
        return Level(scores, torch.zeros(len(nodes), 1), lambda tokens: tokens[..., None])

    # As for a sampled target; the draws happen to come out as the likeliest.
    return Growth(expand, DraftProbability(), Chances(), root=0, max_depth=4)


class Chances:
    """Notes the chances that it is asked about, and accepts those above a half."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def siblings(self, q: torch.Tensor) -> Siblings:
        return likeliest(q)

    def bernoulli(self, probability: float) -> bool:
        self.seen.append(round(probability, 3))
        return probability > 0.5

    def categorical(self, probs: torch.Tensor) -> torch.Tensor:
        return probs.argmax()

    def outcome(self, *_: object) -> tuple[int, int]:
        raise NotImplementedError("Trees are verified by coins.")


@pytest.mark.parametrize("algorithm", [1, 2])
def test_the_drawings(algorithm: int) -> None:
    tree_growth = growth()
    grow_exactly(tree_growth, 6) if algorithm == 1 else grow_by_level(tree_growth, 6, ThresholdSchedule())
    assert DrawnTree(tree_growth.tree, []).text(WORDS.__getitem__) in DOCUMENT


def test_the_verification() -> None:
    tree_growth = growth()
    grow_exactly(tree_growth, 6)
    chances, tree = Chances(), tree_growth.tree
    path, token = verify_tree(tree, lambda node: probs(text_of(tree, node), TARGET), chances)
    assert chances.seen == [0.5, 1.0, 1.0]
    assert [WORDS[each] for each in (*tree.path(path[-1]), token)] == ["sum", "(", "a"]
    assert "Three tokens for one pass" in " ".join(DOCUMENT.split())


def test_the_thresholds() -> None:
    found = []

    class Noting(ThresholdSchedule):
        def threshold(self, values: list[float], budget: int) -> float:
            found.append(super().threshold(values, budget))
            return found[-1]

    grow_by_level(growth(), 6, Noting())
    assert found[:4] == pytest.approx([0.44, 0.362, 0.358, 0.301], abs=1e-3)
