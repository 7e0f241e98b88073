"""What a token tree costs outside the models, on one thread, with a vocabulary of 49k."""

import logging
import time

import pytest
import torch
from torch import Tensor

from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.sampling.randomness import TorchRandomness, TreeRandomness
from hf_specdecpp.sampling.verification import likeliest_tokens
from hf_specdecpp.trees.algorithms import ThresholdSchedule, grow_by_level
from hf_specdecpp.trees.slots import Growth, Level, SoftmaxBuffer
from hf_specdecpp.trees.tree import DraftTree, Lineage
from hf_specdecpp.trees.verification import verify_tree_block, verify_tree_greedy

logger = logging.getLogger(__name__)
VOCAB = 49152
# Shares of the likeliest tokens. The draft reads two nodes of five of "bushy", and up to four of five of "long",
# which gets as deep as it may.
SHARES = {"bushy": [0.5, 0.3, 0.199], "long": [0.85, 0.1499]}
DEPTH = {64: 12, 768: 30}  # our default; the paper has less than 10 and less than 30
# Times the softmax of the rows that the draft has read, which no tree can do without.
MOST = 8.0
TURNS = 10


class LargeRandomDraft:
    """A random row for every path. A level that is asked for again costs nothing."""

    def __init__(self, shares: list[float]) -> None:
        self.shares = torch.tensor(shares)
        self.rows: dict[tuple[int, ...], Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)
        self.levels: dict[tuple[int, ...], Level] = {}

    def __call__(self, tree: DraftTree, nodes: list[int]) -> Level:
        if tuple(nodes) not in self.levels:
            rows = torch.stack([self.at(tuple(tree.path(node))) for node in nodes])
            self.levels[tuple(nodes)] = Level(rows, rows[:, :4], lambda tokens: torch.ones(*tokens.shape, 4))
        return self.levels[tuple(nodes)]

    def at(self, path: tuple[int, ...]) -> Tensor:
        if path not in self.rows:
            row = torch.randn(VOCAB, generator=self.generator)
            likely = torch.randint(VOCAB, (len(self.shares),), generator=self.generator)
            row[likely] = row.logsumexp(0) + (self.shares / (1.0 - self.shares.sum())).log()
            self.rows[path] = row
        return self.rows[path]


def one_round(
    draft: LargeRandomDraft, budget: int, randomness: TreeRandomness | None, buffer: SoftmaxBuffer
) -> tuple[float, DraftTree]:
    """Seconds of a round, and its tree. The target agrees with the draft, so that long paths are accepted."""
    torch.manual_seed(0)  # the same tree again, so that its rows are there
    begin = time.process_time()
    growth = Growth(draft, DraftProbability(), randomness, root=0, max_depth=DEPTH[budget], buffer=buffer)
    grow_by_level(growth, budget, ThresholdSchedule())
    tree = growth.tree
    Lineage().feed(tree, tree.depth_first())
    if randomness is None:
        verify_tree_greedy(tree, lambda node: likeliest_tokens(draft.at(tuple(tree.path(node)))[None])[0])
    else:
        verify_tree_block(tree, lambda node: draft.at(tuple(tree.path(node))).softmax(-1), randomness)
    return time.process_time() - begin, tree


def _softmax_seconds(rows: int) -> float:
    scores, begin = torch.zeros((rows, VOCAB)), time.process_time()
    scores.softmax(-1)
    return time.process_time() - begin


@pytest.mark.slow
@pytest.mark.parametrize("randomness", [None, TorchRandomness()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", SHARES)
def test_time_outside_the_models(kind: str, randomness: TreeRandomness | None) -> None:
    """The least of several, as other processes only ever add to it. Also no more than n log n."""
    draft, threads = LargeRandomDraft(SHARES[kind]), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds, softmax = {}, {}
        for budget in (64, 768):
            buffer = SoftmaxBuffer(budget)
            draft.levels.clear()
            rounds = [one_round(draft, budget, randomness, buffer) for _ in range(TURNS)]
            seconds[budget] = min(time for time, _ in rounds)
            tree = rounds[-1][1]
            softmax[budget] = min(_softmax_seconds(len(tree.scores)) for _ in range(TURNS))
            mode = "greedy" if randomness is None else "sampled"
            logger.info(
                f"{kind}, {mode}: {budget} nodes, {len(tree.scores)} read, {1e3 * seconds[budget]:.1f} ms, "
                f"{seconds[budget] / softmax[budget]:.1f} times a softmax"
            )
            assert len(tree) == budget
            assert len(tree.scores) > budget * 0.4, "nodes that the draft has read"
    finally:
        torch.set_num_threads(threads)
    for budget in seconds:
        assert seconds[budget] < MOST * softmax[budget]
    assert seconds[768] / seconds[64] < 1.6 * 12.0 * 1.6, "12 times the nodes, log 768 / log 64 = 1.6"
