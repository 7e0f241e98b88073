"""Trees as captured rounds grow them, each with its chance: every order in which siblings can be drawn."""

import itertools
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.cuda_graphs import on_device
from hf_specdecpp.cuda_graphs.on_device import best_slots, slot_values
from hf_specdecpp.trees.verification import Verification
from support.enumeration.next_tokens import VOCAB, Path

LEVELS, WIDTH = 2, 2
NODES = LEVELS * WIDTH
Tests = Callable[..., tuple[Tensor, Tensor]]
Slots = Callable[[Tensor, Tensor, int], Tensor]
Judge = Callable[[list[Path], Tensor, Tensor], Tensor]


def by_q(_: list[Path], tokens: Tensor, q: Tensor) -> Tensor:
    """The chance of each sibling among those that are left."""
    probs = q.gather(-1, tokens)
    return probs / (1.0 - functional.pad(probs[..., :-1].cumsum(-1), (1, 0))).clamp_min(1e-12)


def by_a_head(paths: list[Path], tokens: Tensor, _: Tensor) -> Tensor:
    """Anything that depends on the path to each sibling and on its earlier siblings."""
    found = [
        [random.Random(repr((path, of_node[: place + 1]))).random() for place in range(len(of_node))]
        for path, of_node in zip(paths, tokens[0].tolist(), strict=True)
    ]
    return torch.tensor([found], dtype=torch.float64)


def orders(q: Tensor) -> Iterator[tuple[float, Path]]:
    """The orders in which two tokens are drawn from q without replacement, with their chances; where one token alone is
    possible, any other comes second."""
    for order in itertools.permutations(range(VOCAB), WIDTH):
        rest = 1.0 - float(q[order[0]])
        second = float(q[order[1]]) / rest if rest > 1e-12 else 1.0 / (VOCAB - 1)
        if (chance := float(q[order[0]]) * second) > 0.0:
            yield chance, order


class Grown:
    """A tree as `CapturedDraft.propose` grows it, but that the orders of siblings are given.

    `chance`: of all that was drawn. `tokens`, `parents`: `[nodes]`. `paths`: of tokens, of the root and of each node.
    `q`: `[inner nodes, vocab]`, what the first children of the root and of nodes above the last level were drawn
    from."""

    def __init__(
        self, q: Callable[[Path], Tensor], drawn: dict[Path, tuple[float, Path]], slots: Slots, judge: Judge
    ) -> None:
        self.chance, self.tokens, self.parents, self.paths = 1.0, [], [], [()]
        rows: list[Tensor] = []
        above, values = [0], torch.ones(1, 1, dtype=torch.float64)
        for _ in range(LEVELS):
            here = torch.stack([q(self.paths[node]) for node in above])[None]
            order = [drawn[self.paths[node]] for node in above]
            for chance, _ in order:
                self.chance *= chance
            tokens = torch.tensor([[each for _, each in order]])
            chances = judge([self.paths[node] for node in above], tokens, here)
            chosen = slots(values, chances, WIDTH)
            values = (slot_values(values, chances) * chances).flatten(1).gather(1, chosen)
            rows.append(here[0])
            level = []
            for slot in chosen[0].tolist():
                parent = above[slot // WIDTH]
                self.tokens.append(int(tokens.flatten()[slot]))
                self.parents.append(parent)
                self.paths.append((*self.paths[parent], self.tokens[-1]))
                level.append(len(self.tokens))
            above = level
        self.q = torch.cat(rows)

    def ends(self, p: Tensor, tests: Tests, how: Verification) -> Iterator[tuple[int, float, Tensor]]:
        """The nodes that may be accepted last, by `p` `[1, nodes + 1, vocab]`, each time with the chance and with
        weights of the token after them."""
        parents = torch.tensor([self.parents])
        found, left = tests(torch.tensor([self.tokens]), parents, p, self.q[None], WIDTH, how)
        chances = found[0].nan_to_num(0.0)  # no number is below nan
        for passed in itertools.product((False, True), repeat=len(chances)):
            if (chance := float(torch.where(torch.tensor(passed), chances, 1.0 - chances).prod())) > 0.0:
                numbers = torch.where(torch.tensor([passed]), -1.0, 2.0)  # below any chance, and above
                last = int(on_device.accepted_node(parents, self.ancestors, found, numbers, WIDTH))
                yield last, chance, left[0, last]

    @property
    def ancestors(self) -> Tensor:
        seen = torch.eye(NODES + 1, dtype=torch.bool)
        for node, parent in enumerate(self.parents, 1):
            seen[node] |= seen[parent]
        return seen[None]


def trees(q: Callable[[Path], Tensor], slots: Slots = best_slots, judge: Judge = by_q) -> Iterator[Grown]:
    """All trees, each with its chance. What is drawn below a node of which nobody asks is left open."""
    for first in orders(q(())):
        firsts = [(token,) for token in first[1]]
        for below in itertools.product(*(orders(q(path)) for path in firsts)):
            yield Grown(q, {(): first, **dict(zip(firsts, below, strict=True))}, slots, judge)
