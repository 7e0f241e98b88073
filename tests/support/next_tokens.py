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
