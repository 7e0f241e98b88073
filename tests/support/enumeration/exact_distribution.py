"""The exact distribution of what a program with random choices emits: it runs once for every outcome, weighted.

A program takes a `hf_specdecpp.randomness.Randomness` and returns what it emitted. In production that draws from
torch's generators; here it is a `Replay`, which replays a list of choices and notes which other choices there were."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Tokens = tuple[int, ...]
Probs = dict[Tokens, float]
VISIBLE = 1e-3  # an error that is no rounding
NEVER = 1e-14  # of several nearly equal numbers of the size 1, the rounding error of a difference


class Replay:
    """One path through a program's choices.

    `weight`: the probability of the path. `untried`: the paths that branch off this one, for every choice made for the
    first time."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.made = 0
        self.weight = 1.0
        self.untried: list[list[int]] = []

    def categorical(self, probs: Tensor) -> Tensor:
        # Normalised as torch.multinomial does it. No rounding here: float64 from the first step to the last.
        return torch.tensor(self._choose(probs.double().tolist()))

    def bernoulli(self, probability: float) -> bool:
        # 0 and 1 leave only one outcome of positive weight, so they branch into nothing.
        return self._choose([1.0 - probability, probability]) == 1

    def outcome(self, tests: Tensor, weights: Tensor) -> tuple[int, int]:
        index = len(tests) - 1
        while index > 0 and not self.bernoulli(float(tests[index])):
            index -= 1
        return index, int(self.categorical(weights[index]))

    def siblings(self, q: Tensor) -> "ReplayedSiblings":
        return ReplayedSiblings(self, q)

    def _choose(self, weights: list[float]) -> int:
        if self.made == len(self.choices):
            first, *others = [index for index, weight in enumerate(weights) if weight > 0.0]
            self.untried += [[*self.choices, other] for other in others]
            self.choices = [*self.choices, first]
        choice = self.choices[self.made]
        self.made += 1
        self.weight *= weights[choice] / sum(weights)
        return choice


class Answering(Replay):
    """Says to tests what it is told to say. `drawn_from`: the distributions of draws."""

    def __init__(self, answers: list[bool]) -> None:
        super().__init__([])
        self.answers, self.drawn_from = answers, list[Tensor]()

    def bernoulli(self, probability: float) -> bool:
        return self.answers.pop(0)

    def categorical(self, probs: Tensor) -> Tensor:
        self.drawn_from.append(probs)
        return super().categorical(probs)


class ReplayedSiblings:
    """Draws without replacement by the definition: from what is left of each row, renormalised."""

    def __init__(self, replay: Replay, q: Tensor) -> None:
        self.replay, self.q, self.left = replay, q, q.nan_to_num(0.0)  # a copy; where q is nan there is no token

    def draw_next(self, row: int) -> tuple[int, float] | None:
        if float(self.left[row].sum()) == 0.0:
            return None
        token = int(self.replay.categorical(self.left[row]))
        self.left[row, token] = 0.0
        return token, float(self.q[row, token])


def exact_distribution(program: Callable[[Replay], Tokens]) -> Probs:
    """What `program` emits, with its exact probability."""
    probs: Probs = defaultdict(float)
    todo: list[list[int]] = [[]]
    while todo:
        replay = Replay(todo.pop())
        emitted = program(replay)
        probs[emitted] += replay.weight
        todo += replay.untried
    return probs


def accepted_in(toy: Any) -> float:
    """The expected number of accepted candidates of a round, which says in `accepted` how many they were."""

    def program(replay: Replay) -> Tokens:
        toy(replay)
        return (toy.accepted,)

    return sum(accepted * weight for (accepted,), weight in exact_distribution(program).items())


def worst_error(probs: Probs, p: Callable[[Tokens], Tensor], vocab: int) -> float:
    """Largest error of the next token's probabilities, over every prefix that is emitted with a probability that
    rounding does not explain (`NEVER`). `p(prefix)`: `[vocab]`."""
    masses: dict[Tokens, Tensor] = defaultdict(lambda: torch.zeros(vocab, dtype=torch.float64))
    for emitted, weight in probs.items():
        for length, token in enumerate(emitted):
            masses[emitted[:length]][token] += weight
    compared = {prefix: mass for prefix, mass in masses.items() if float(mass.sum()) > NEVER}
    return max(float((mass / mass.sum() - p(prefix)).abs().max()) for prefix, mass in compared.items())


def largest_error(rounds: Iterable[Any]) -> float:
    """Of several programs, each a round on models that say `p` and have a `vocab`."""
    return max(worst_error(exact_distribution(each), each.models.p, each.models.vocab) for each in rounds)


def is_caught(rounds: Iterable[Any]) -> bool:
    """Whether any of them is visibly off; those after the first that is need not be made."""
    return any(largest_error([each]) > VISIBLE for each in rounds)
