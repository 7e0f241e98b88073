"""How many tokens a target pass yields by each way to verify, on random distributions of 50 tokens.

    python examples/verification_gain.py

Drafts are drawn; given a draft, the expected number of accepted candidates is computed, so no coin of the verification
is thrown. The target's logits are normal with a spread of 2 (a tree's of 3), the draft's are those plus normal noise.
Beside each mean is the share by which block (or traversal) verification leads, and two standard errors of it.
"""

import sys

import torch
from torch import Tensor

from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.sampling.at_once import block_weights, carried, token_weights
from hf_specdecpp.sampling.randomness import TorchRandomness
from hf_specdecpp.sampling.verification import chain_ratios
from hf_specdecpp.trees.algorithms import ThresholdSchedule, grow_by_level, grow_shape
from hf_specdecpp.trees.at_once import ending_chances
from hf_specdecpp.trees.shapes import make_shape
from hf_specdecpp.trees.siblings import Level
from hf_specdecpp.trees.slots import Growth
from hf_specdecpp.trees.tree import DraftTree

VOCAB, CHAINS, TREES = 50, 2000, 300
LENGTHS, NOISES = (2, 3, 5, 8, 14), (0.3, 0.7, 1.2)
SHAPES = {"chain of 5": [1] * 5, "4-2-1-1": [4, 2, 1, 1], "4-3-2-1": [4, 3, 2, 1]}
BUDGETS = {"dyspec 6": 6, "dyspec 16": 16, "dyspec 64": 64}


def chain(length: int, noise: float) -> list[float]:
    """Expected tokens of a round, token by token and as a block, for one drawn chain."""
    logits = 2.0 * torch.randn(length + 1, VOCAB, dtype=torch.float64)
    p = logits.softmax(-1)
    q = (logits[:-1] + noise * torch.randn(length, VOCAB, dtype=torch.float64)).softmax(-1)
    ratios = chain_ratios(q.multinomial(1)[:, 0].tolist(), p, q)
    numbers = torch.arange(1, length + 2, dtype=torch.float64)
    return [float(weights @ numbers) for weights in (token_weights(ratios), block_weights(carried(ratios), p, q))]


class RandomModels:
    """Logits of the target and the draft after every path of a tree."""

    def __init__(self, noise: float) -> None:
        self.noise = noise
        self.rows: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def at(self, tree: DraftTree, node: int) -> tuple[Tensor, Tensor]:
        path = tuple(tree.path(node))
        if path not in self.rows:
            logits = 3.0 * torch.randn(VOCAB)
            self.rows[path] = logits, logits + self.noise * torch.randn(VOCAB)
        return self.rows[path]

    def __call__(self, tree: DraftTree, nodes: list[int]) -> Level:
        scores = torch.stack([self.at(tree, node)[1] for node in nodes])
        return Level(scores, scores[:, :1], lambda tokens: tokens[..., None])


def tree(name: str, noise: float, pace: ThresholdSchedule) -> list[float]:
    """Expected tokens of a round, by Algorithm 3 and by traversal, for one drawn tree."""
    models = RandomModels(noise)
    growth = Growth(models, DraftProbability(), TorchRandomness(), root=0, max_depth=12)
    if name in BUDGETS:
        grow_by_level(growth, BUDGETS[name], pace)
    else:
        grow_shape(growth, make_shape(SHAPES[name]))
    drawn = growth.tree
    p = torch.stack([models.at(drawn, node)[0] for node in range(len(drawn) + 1)]).softmax(-1)
    numbers = torch.tensor(drawn.depths, dtype=torch.float64) + 1.0
    return [float(ending_chances(drawn, p.clone(), rule) @ numbers) for rule in ("token", "block")]


def line(name: str, rounds: list[list[float]]) -> str:
    token, block = torch.tensor(rounds, dtype=torch.float64).T
    lead, error = (block - token).mean() / token.mean(), (block - token).std() / len(rounds) ** 0.5 / token.mean()
    return f"| {name} | {token.mean():.2f} | {block.mean():.2f} | {lead:+.1%} ± {2 * error:.1%} |\n"


def main() -> None:
    torch.manual_seed(0)
    sys.stdout.write("| chain | token by token | block | lead |\n| --- | --- | --- | --- |\n")
    for noise in NOISES:
        for length in LENGTHS:
            sys.stdout.write(line(f"{length}, noise {noise}", [chain(length, noise) for _ in range(CHAINS)]))
    sys.stdout.write("\n| tree | Algorithm 3 | traversal | lead |\n| --- | --- | --- | --- |\n")
    for noise in NOISES:
        for name in (*SHAPES, *BUDGETS):
            pace = ThresholdSchedule()
            sys.stdout.write(line(f"{name}, noise {noise}", [tree(name, noise, pace) for _ in range(TREES)]))


if __name__ == "__main__":
    main()
