"""Rounds of product code with token trees, on the toy models of `toy_rounds`."""

from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.estimation.estimators import AcceptanceRates
from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.trees.growth import (
    Expand,
    Growth,
    Slots,
    ThresholdSchedule,
    grow_by_level,
    grow_exactly,
    grow_shape,
)
from hf_specdecpp.trees.shapes import from_nodes
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.verification import Verification, verify_tree
from support.enumeration.exact_distribution import Tokens
from support.enumeration.plans import tree_plan
from support.enumeration.toy_rounds import Models, make_estimator

# Of rounds whose trees grow by the throughput rule.
COSTS = Costs(0.3, (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4))
# For each budget a shape in which nodes have one, two or three children.
SHAPES = {
    1: [[0]], 2: [[0], [1]], 3: [[0], [1], [0, 0]], 4: [[0], [1], [0, 0], [1, 0]], 5: [[0], [1], [2], [0, 0], [0, 1]],
    6: [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]],
}  # fmt: skip


class ToyTree:
    """A round of product code. Call it with a randomness for the tokens that one round emits.

    `trees`: parents of the nodes of every tree so far. `outcomes`: numbers of accepted candidates so far, and
    `accepted` that of the latest round. `last`: its tree and its accepted nodes."""

    def __init__(
        self,
        models: Models,
        algorithm: str,
        estimator: str,
        budget: int,
        max_depth: int = 3,
        ahead: int = 1,
        seed: int = 0,
        verifier: Verification = "block",
    ) -> None:
        self.verifier = verifier
        self.models, self.algorithm, self.estimator = models, algorithm, make_estimator(estimator, seed)
        self.budget, self.max_depth, self.ahead = budget, max_depth, ahead
        self.options: dict[str, Any] = {}
        self.throughput = tree_plan(COSTS, budget)
        self.rates: AcceptanceRates | None = None
        self.trees: set[Tokens] = set()
        self.outcomes: set[int] = set()

    @torch.inference_mode()
    def __call__(self, randomness: Randomness, prefix: Tokens = ()) -> Tokens:
        tree = self.draft(randomness, prefix)
        path, token = self.verify(tree, randomness, prefix)
        self.last = tree, path
        self.trees.add(tuple(tree.parents))
        self.accepted = len(path)
        self.outcomes.add(self.accepted)
        emitted = [*(tree.tokens[node] for node in path), token]
        ends = [place + 1 for place, each in enumerate(emitted) if each in self.models.eos]
        return (*prefix, *emitted[: min(ends, default=len(emitted))])

    # Mutants override these.

    def draft(self, randomness: Randomness, prefix: Tokens) -> DraftTree:
        growth = self.growth(randomness, prefix)
        self.grow(growth)
        return growth.tree

    def verify(self, tree: DraftTree, randomness: Randomness, prefix: Tokens) -> tuple[list[int], int]:
        return verify_tree(tree, lambda node: self.p(tree, node, prefix), randomness, self.verifier)

    def p(self, tree: DraftTree, node: int, prefix: Tokens) -> Tensor:
        return self.models.p((*prefix, *tree.path(node)))

    def expander(self, prefix: Tokens) -> Expand:
        """What the draft says after nodes."""

        def expand(tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
            rows = [self.models.at((*prefix, *tree.path(node))) for node in nodes]
            return torch.stack([row[1] for row in rows]), torch.stack([row[2] for row in rows])

        return expand

    def growth(self, randomness: Randomness | None, prefix: Tokens = ()) -> Growth:
        by_costs = self.algorithm == "throughput" and self.rates is None
        how = Slots(self.estimator, randomness, self.models.eos, self.rates, ahead=self.ahead)
        if by_costs:
            how.rates, how.expected = self.throughput.rates, self.throughput.expected
        how.embed = lambda tokens: self.models.embeddings[tokens]
        return Growth(self.expander(prefix), how, -1, self.max_depth)

    def grow(self, growth: Growth) -> None:
        if self.algorithm == "dyspec-exact":
            grow_exactly(growth, self.budget, **self.options)
        elif self.algorithm == "throughput":
            self.throughput.grow(growth, **self.options)
        elif self.algorithm == "dyspec":
            grow_by_level(growth, self.budget, ThresholdSchedule(), **self.options)
        else:
            grow_shape(growth, from_nodes(SHAPES[self.budget]))


VOCAB = 200
KINDS = {"unsure": (1.5, 1.5), "sharp": (8.0, 8.0), "mixed": (1.0, 10.0)}


class RandomDraft:
    """A random row for every path, of a temperature between two bounds."""

    def __init__(self, kind: str, seed: int, vocab: int = VOCAB) -> None:
        self.bounds, self.vocab = KINDS[kind], vocab
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        rows = [self.at(tuple(tree.path(node))) for node in nodes]
        return torch.stack(rows), torch.ones(len(rows), 4)

    def at(self, path: tuple[int, ...]) -> Tensor:
        if path not in self.rows:
            low, high = self.bounds
            scale = low + (high - low) * torch.rand((), generator=self.generator)
            self.rows[path] = scale * torch.randn(self.vocab, generator=self.generator)
        return self.rows[path]
