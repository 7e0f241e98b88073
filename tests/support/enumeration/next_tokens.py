"""Made-up distributions over the next token after each path, and the texts that plain sampling makes of them."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

VOCAB = 3
Path = tuple[int, ...]


def distributions(seed: int, depth: int, spread: float, every: int) -> Callable[[Path], Tensor]:
    """A distribution over the next token after each path of up to `depth` tokens: sharp, flat, and one of `every` with
    an impossible token. Logits have the standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    known: dict[Path, Tensor] = {}
    for length in range(depth + 1):
        for path in itertools.product(range(VOCAB), repeat=length):
            logits = spread * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
            if len(known) % every == every - 1:
                logits[int(torch.randint(VOCAB, (), generator=generator))] = float("-inf")
            known[path] = logits.softmax(-1)
    return known.__getitem__


def plain_texts(p: Callable[[Path], Tensor], length: int, begun: Path = (), chance: float = 1.0) -> dict[Path, float]:
    """Chances of all texts of `length` tokens that begin in one way."""
    if len(begun) == length:
        return {begun: chance}
    found: dict[Path, float] = {}
    for token in range(VOCAB):
        if (share := float(p(begun)[token])) > 0.0:
            found |= plain_texts(p, length, (*begun, token), chance * share)
    return found


def add_texts(
    found: dict[Path, float], p: Callable[[Path], Tensor], length: int, begun: Path, weights: Tensor, chance: float
) -> None:
    """Where a round that is as likely as `chance` ends with a token by weights, plain sampling goes on."""
    for token, weight in enumerate((weights / weights.sum()).tolist()):
        if chance * weight > 0.0:
            for text, each in plain_texts(p, length, (*begun, token), chance * weight).items():
                found[text] = found.get(text, 0.0) + each


def furthest(plain: dict[Path, float], ours: dict[Path, float]) -> float:
    """The largest difference of a text's chance, relative to nothing: chances are at most one."""
    return max(abs(plain.get(text, 0.0) - ours.get(text, 0.0)) for text in {*plain, *ours})
