"""Compute the tokens per target pass for each method of verification, on random distributions of 50 tokens.

    python examples/verification_gain.py

Candidates are drawn at random; for each draft the expected number of accepted candidates is computed exactly. The
target's logits are normal with a standard deviation of 2 (for trees 3), the draft's are the target's plus normal noise.
Each mean comes with the relative gain of block (or traversal) verification and two standard errors of the gain.

The last table is about the children of one node, with 8 tokens so that all sets can be enumerated: how often a child is
accepted when children are tested one after another, as in Algorithm 3 and traversal, and the upper bound for any test
(the optimal transport from sets of children to tokens). a is the probability with which the node itself has to be
accepted: 1 at the root, less below.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.sampling.randomness import TorchRandomness
from hf_specdecpp.trees.growth import Growth, Slots, ThresholdSchedule, grow_by_level, grow_shape
from hf_specdecpp.trees.shapes import make_shape
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.verification import block_tests, carries_of, chain_ratios, leftovers, token_weights

sys.path.append(str(Path(__file__).parent / "replay"))
from rounds import ends_at

VOCAB, CHAINS, TREES = 50, 2000, 300
LENGTHS, NOISES = (2, 3, 5, 8, 14), (0.3, 0.7, 1.2)
SHAPES = {"chain of 5": [1] * 5, "4-2-1-1": [4, 2, 1, 1], "4-3-2-1": [4, 3, 2, 1]}
BUDGETS = {"dyspec 6": 6, "dyspec 16": 16, "dyspec 64": 64}
FEW, NODES, CHILDREN, CHANCES = 8, 400, (1, 2, 3, 4), (1.0, 0.5)


def chain(length: int, noise: float) -> list[float]:
    """Expected tokens of a round, token by token and as a block, for one drawn chain."""
    logits = 2.0 * torch.randn(length + 1, VOCAB, dtype=torch.float64)
    p = logits.softmax(-1)
    q = (logits[:-1] + noise * torch.randn(length, VOCAB, dtype=torch.float64)).softmax(-1)
    ratios = chain_ratios(q.multinomial(1)[:, 0].tolist(), p, q)
    carries, numbers = carries_of(ratios, "block"), torch.arange(1, length + 2, dtype=torch.float64)
    tests = block_tests(carries, leftovers(carries, p, q))
    by_block = tests * torch.cat(
        ((1.0 - tests).flip(0).cumprod(0)[:-1].flip(0), tests.new_ones(1))
    )  # the last test that passes
    return [float(weights @ numbers) for weights in (token_weights(ratios), by_block)]


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

    def __call__(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        scores = torch.stack([self.at(tree, node)[1] for node in nodes])
        return scores, scores[:, :1]


def tree(name: str, noise: float, pace: ThresholdSchedule) -> list[float]:
    """Expected tokens of a round, by Algorithm 3 and by traversal, for one drawn tree."""
    models = RandomModels(noise)
    growth = Growth(models, Slots(DraftProbability(), TorchRandomness()), root=0, max_depth=12)
    if name in BUDGETS:
        grow_by_level(growth, BUDGETS[name], pace)
    else:
        grow_shape(growth, make_shape(SHAPES[name]))
    drawn = growth.tree
    p = torch.stack([models.at(drawn, node)[0] for node in range(len(drawn) + 1)]).softmax(-1)
    numbers = torch.tensor(drawn.depths, dtype=torch.float64) + 1.0
    return [float(ends_at(drawn, p, rule) @ numbers) for rule in ("token", "block")]


def without(q: Tensor, token: int) -> Tensor:
    """Of `[nodes, tokens]`: the distributions of the next child after `token`."""
    left = q.clone()
    left[:, token] = 0.0
    return left / left.sum(-1, keepdim=True)


def one_after_another(m: Tensor, q: Tensor, a: Tensor, children: int) -> Tensor:
    """How often one of the children is accepted, `[nodes]`, in the letters of `docs/verification.md`.

    Args:
        m: a p, `[nodes, tokens]`.
        q: of the next child.
        a: `[nodes]`.
    """
    kept = torch.minimum(m, q)
    accepted = kept.sum(-1)
    if children > 1:
        missing = (m - q).clamp(min=0.0)
        left = missing.sum(-1) + 1.0 - a
        for token in range(q.shape[1]):
            rejected = (q - kept)[:, token]
            if bool(rejected.any()):
                rest = missing / left[:, None], without(q, token), missing.sum(-1) / left
                accepted = accepted + rejected * one_after_another(*rest, children - 1)
    return accepted


def chances_of_sets(q: Tensor, children: int, drawn: int = 0) -> dict[int, Tensor]:
    """How likely each set of children is, by the sum of 2 ** token, when they are drawn without replacement."""
    if children == 0:
        return {drawn: q.new_ones(len(q))}
    sets: dict[int, Tensor] = {}
    for token in range(q.shape[1]):
        if not drawn >> token & 1:
            for key, chance in chances_of_sets(without(q, token), children - 1, drawn | 1 << token).items():
                sets[key] = sets.get(key, 0.0) + q[:, token] * chance
    return sets


def at_best(m: Tensor, q: Tensor, children: int) -> Tensor:
    """The same as `one_after_another` for the best test there is: a maximal flow, by its minimal cut.

    Whatever the test, with B any set of tokens: a child in B is accepted with a chance of at most m(B), one outside of
    B only where there is one.
    """
    sets = chances_of_sets(q, children)
    cuts = []
    for b in range(1 << q.shape[1]):
        of_b = m[:, [token for token in range(q.shape[1]) if b >> token & 1]].sum(-1)
        within = [chance for key, chance in sets.items() if key & b == key]
        cuts.append(of_b + 1.0 - (torch.stack(within).sum(0) if within else 0.0))
    return torch.stack(cuts).amin(0)


def siblings(children: int, noise: float) -> str:
    logits = 2.0 * torch.randn(NODES, FEW, dtype=torch.float64)
    p, q = logits.softmax(-1), (logits + noise * torch.randn(NODES, FEW, dtype=torch.float64)).softmax(-1)
    cells = []
    for chance in CHANCES:
        a = p.new_full((NODES,), chance)
        ours, best = one_after_another(chance * p, q, a, children).mean(), at_best(chance * p, q, children).mean()
        cells += [f"{ours:.3f}", f"{best:.3f}", f"{best / ours - 1.0:+.1%}"]
    return f"| {children}, noise {noise} | {' | '.join(cells)} |\n"


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
    torch.manual_seed(0)
    names = [f"{name}, a = {chance:g}" for chance in CHANCES for name in ("one after another", "at best", "left")]
    sys.stdout.write(f"\n| children | {' | '.join(names)} |\n|{' --- |' * (1 + len(names))}\n")
    for noise in NOISES:
        for children in CHILDREN:
            sys.stdout.write(siblings(children, noise))


if __name__ == "__main__":
    main()
