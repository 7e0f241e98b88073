"""Where the training of a conditioned draft begins: a fusion that imitates the target's own layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_specdecpp.drafts.conditioned import Fusion
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.training.distillation.initial.least_squares import is_usual, low_rank, observed, solved


@torch.no_grad()
def fit(fusion: Fusion, target: CausalLM, layer: int, texts: Iterable[Tensor]) -> None:
    """Set F to what makes x, by least squares, the target's own input of its `layer` at each token.

    So the draft's first layer begins with inputs like those that it knows, made of what a draft has: the target's final
    state at the token before, and the token.

    Args:
        fusion: is changed; what it reads of further layers still adds nothing.
        layer: the first one that drafts. 0 reads embeddings: then nothing is fitted.
        texts: `[1, n]` each.
    """
    if layer == 0:
        return
    below = Fusion(fusion.hidden_size, fusion.embedding_size, [layer - 1])  # only says what to catch
    reader, size = Reader(target), fusion.hidden_size + fusion.embedding_size
    squares, products = torch.zeros(size, size), torch.zeros(size, fusion.hidden_size)
    for ids, states, _ in observed(target, below, texts):
        final, wanted = states.cpu().split(fusion.hidden_size, dim=-1)
        known = torch.cat((final[:-1], reader.embed(ids[1:]).cpu().float()), dim=-1)
        usual = is_usual(wanted[1:])
        squares += known[usual].T @ known[usual]
        products += known[usual].T @ wanted[1:][usual]
    solution = solved(squares, products)
    if isinstance(fusion.fuse, nn.Linear):
        fusion.fuse.weight.copy_(solution)
    elif isinstance(fusion.fuse, nn.Sequential) and fusion.rank is not None:
        first, second = fusion.fuse
        outputs, inner = low_rank(solution, squares, fusion.rank)
        first.weight.copy_(inner)  # type: ignore[operator]
        second.weight.copy_(outputs)  # type: ignore[operator]
