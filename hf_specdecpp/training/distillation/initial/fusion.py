"""Where the training of a conditioned draft begins: a fusion that imitates the target's own layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_specdecpp.drafts.conditioned import Fusion
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import TargetStates

RIDGE = 1e-3  # of the mean of the squares
OUTLIER = 5.0  # times the median norm: states that a target uses to store something, such as those of the first token


@torch.no_grad()
def fit(fusion: Fusion, target: CausalLM, layer: int, texts: Iterable[Tensor]) -> None:
    """Set F to what makes x, by least squares, the target's own input of its `layer` at each token.

    So the draft's first layer begins with inputs like those that it knows, made of what a draft has: the target's final
    state at the token before, and the token. Linear predictors of this kind are the idea of jump drafting.

    Args:
        fusion: is changed; what it reads of further layers still adds nothing.
        layer: the first one that drafts. 0 reads embeddings: then nothing is fitted.
        texts: `[1, n]` each.
    """
    if layer == 0:
        return
    below = Fusion(fusion.hidden_size, fusion.embedding_size, [layer - 1])  # only says what to catch
    reader = Reader(target)
    size = fusion.hidden_size + fusion.embedding_size
    squares, products = torch.zeros(size, size), torch.zeros(size, fusion.hidden_size)
    with TargetStates(target, below) as caught:
        for ids in texts:
            reader.hidden_states(ids)
            states = caught.take()
            if states is None or ids.shape[1] < 3:
                continue
            final, wanted = states[0].cpu().float().split(fusion.hidden_size, dim=-1)
            known = torch.cat((final[:-1], reader.embed(ids[0, 1:]).cpu().float()), dim=-1)
            norms = wanted[1:].norm(dim=-1)
            usual = norms < OUTLIER * norms.median()
            squares += known[usual].T @ known[usual]
            products += known[usual].T @ wanted[1:][usual]
    squares += RIDGE * squares.diagonal().mean() * torch.eye(size)
    _set(fusion, torch.linalg.solve(squares, products).T, squares)


def _set(fusion: Fusion, solution: Tensor, squares: Tensor) -> None:
    """Write the map `[E, H + E]` into F; of one with a rank, the best approximation for these inputs."""
    if isinstance(fusion.fuse, nn.Linear):
        fusion.fuse.weight.copy_(solution)
    elif isinstance(fusion.fuse, nn.Sequential) and fusion.rank is not None:
        outputs = torch.linalg.eigh(solution @ squares @ solution.T).eigenvectors[:, -fusion.rank :]
        first, second = fusion.fuse
        first.weight.copy_(outputs.T @ solution)  # type: ignore[operator]
        second.weight.copy_(outputs)  # type: ignore[operator]
