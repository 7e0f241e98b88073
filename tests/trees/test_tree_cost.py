"""What a token tree costs outside the models, on one thread, with a vocabulary of 49k."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.enumeration.toy_trees import RandomDraft
from torch import Tensor

from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.sampling.randomness import Randomness, TorchRandomness
from hf_specdecpp.trees.drawing import DrawnTree
from hf_specdecpp.trees.growth import Growth, Slots, ThresholdSchedule, grow_by_level, grow_exactly
from hf_specdecpp.trees.tree import DraftTree, TreePass
from hf_specdecpp.trees.verification import likeliest_tokens, verify_greedy, verify_tree

VOCAB = 49152
# Shares of the likeliest tokens. The draft reads two nodes of five of "bushy", and up to four of five of "long",
# which gets as deep as it may.
SHARES = {"bushy": [0.5, 0.3, 0.199], "long": [0.85, 0.1499]}
DEPTH = {64: 12, 768: 30}  # our default; the paper has less than 10 and less than 30
# Times the softmax of the rows that the draft has read, which no tree can do without.
MOST, TURNS = 8.0, 10


class LargeRandomDraft(RandomDraft):
    """A random row for every path. A level that is asked for again costs nothing."""

    def __init__(self, shares: list[float]) -> None:
        super().__init__("unsure", 0, VOCAB)
        self.shares = torch.tensor(shares)
        self.levels: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        if tuple(nodes) not in self.levels:
            self.levels[tuple(nodes)] = super().__call__(tree, nodes)
        return self.levels[tuple(nodes)]

    def at(self, path: tuple[int, ...]) -> Tensor:
        if path not in self.rows:
            row = torch.randn(VOCAB, generator=self.generator)
            likely = torch.randint(VOCAB, (len(self.shares),), generator=self.generator)
            row[likely] = row.logsumexp(0) + (self.shares / (1.0 - self.shares.sum())).log()
            self.rows[path] = row
        return self.rows[path]


def one_round(draft: LargeRandomDraft, budget: int, randomness: Randomness | None) -> tuple[float, DraftTree]:
    """Seconds of a round, and its tree. The target agrees with the draft, so that long paths are accepted."""
    torch.manual_seed(0)  # the same tree again, so that its rows are there
    begin = time.process_time()
    growth = Growth(draft, Slots(DraftProbability(), randomness), root=0, max_depth=DEPTH[budget])
    grow_by_level(growth, budget, ThresholdSchedule())
    tree = growth.tree
    TreePass(tree).upload(torch.device("cpu"))
    if randomness is None:
        verify_greedy(tree, lambda node: likeliest_tokens(draft.at(tuple(tree.path(node)))[None])[0])
    else:
        verify_tree(tree, lambda node: draft.at(tuple(tree.path(node))).softmax(-1), randomness, "block")
    return time.process_time() - begin, tree


def _softmax_seconds(rows: int) -> float:
    scores, begin = torch.zeros((rows, VOCAB)), time.process_time()
    scores.softmax(-1)
    return time.process_time() - begin


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("randomness", [None, TorchRandomness()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", SHARES)
def test_time_outside_the_models(kind: str, randomness: Randomness | None) -> None:
    """The least of several, as other processes only ever add to it. Also no more than n log n."""
    draft, found = LargeRandomDraft(SHARES[kind]), []
    for budget in (64, 768):
        draft.levels.clear()
        rounds = [one_round(draft, budget, randomness) for _ in range(TURNS)]
        seconds, tree = min(time for time, _ in rounds), rounds[-1][1]
        assert len(tree) == budget
        assert len(tree.scores) > budget * 0.4, "nodes that the draft has read"
        assert seconds < MOST * min(_softmax_seconds(len(tree.scores)) for _ in range(TURNS))
        found.append(seconds)
    assert found[1] / found[0] < 1.6 * 12.0 * 1.6, "12 times the nodes, log 768 / log 64 = 1.6"


# The example of `docs/dyspec.md`: what the text says is what the code does. -------------------------------------------


DOCUMENT = (Path(__file__).parents[2] / "docs" / "dyspec.md").read_text(encoding="utf-8")
WORDS = ["def", "add", "sum", "plus", "(", "_", "a", "x", ","]
CHANCES = {
    "def": {"add": 0.6, "sum": 0.3, "plus": 0.1}, "def add": {"(": 0.9, "_": 0.1}, "def sum": {"(": 0.8, "_": 0.2},
    "def add (": {"a": 0.7, "x": 0.3}, "def sum (": {"a": 0.7, "x": 0.3}, "def add ( a": {",": 1.0},
}  # fmt: skip


def test_the_drawings() -> None:
    """Of both algorithms, as for a sampled target whose draws happen to come out as the likeliest."""

    def text_of(tree: DraftTree, node: int) -> str:
        return " ".join(WORDS[token] for token in (tree.tokens[0], *tree.path(node)))

    def expand(tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        chances = [CHANCES[text_of(tree, node)] for node in nodes]
        scores = torch.tensor([[row.get(word, 0.0) for word in WORDS] for row in chances]).log()
        return scores, torch.zeros(len(nodes), 1)

    for grow in (lambda growth: grow_exactly(growth, 6), lambda growth: grow_by_level(growth, 6, ThresholdSchedule())):
        growth = Growth(expand, Slots(DraftProbability()), root=0, max_depth=4)
        growth.greedy = False
        grow(growth)
        assert DrawnTree(growth.tree, []).text(WORDS.__getitem__) in DOCUMENT
