"""The attention that an EAGLE-3 layer begins with: some heads of the target's last layer, and heads that carry a map.

The residual of an EAGLE-3 layer is g alone, so whatever else the target's layer has in its input has to come through
attention. A head that attends to its own place alone gives `o v x`, a linear map of x = [norm_e(e); norm_g(g)] of the
head's rank. Several of them together give one of as many times that rank (`Fitted`, `begin`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.training.distillation.initial.layer_behind import MIXES, LayerBehind, norm_weight

DISTANCES = 2048  # places before its own that a head must not attend to
MARGIN = 12.0  # by which the score of the own place is above all others: e^-12 each


@dataclass(frozen=True)
class Fitted:
    """What x = `[2 * hidden_size]` says by least squares, as maps of it.

    Attributes:
        squares: `[2 * hidden_size, 2 * hidden_size]`, the mean of x x^T.
        inputs: `[hidden_size, 2 * hidden_size]`: the input of the target's last layer.
        states: of the same shape: g.
        one: `[1, 2 * hidden_size]`: the number 1, whatever x is.
        attended: `[heads * head_dim, 2 * hidden_size]`: what the heads of that layer give; without rows where that is
            not known.
        left: `[heads * head_dim, heads * head_dim]`, the mean square of what `attended` does not say of it.
    """

    squares: Tensor
    inputs: Tensor
    states: Tensor
    one: Tensor
    attended: Tensor
    left: Tensor


def begin(attention: Any, behind: LayerBehind, fitted: Fitted, frequencies: Tensor) -> None:
    """Set the weights of a draft's attention, each head of which has keys and values of its own.

    Of the target's heads those are kept of which a linear map says least. The others become heads that attend to their
    own place, and carry what the residual lacks: the difference between that layer's input and g, and what the heads
    that are gone give on average. A head of a target of another family stays random.

    Args:
        attention: of the draft.
        frequencies: `[head_dim / 2]` of RoPE.
    """
    size = attention.head_dim
    count, hidden = attention.q_proj.weight.shape[0] // size, len(fitted.inputs)
    num_own = min(-(-hidden // size), count - count // 3)
    mixes = behind.weight(MIXES)
    is_known = mixes is not None and len(fitted.attended) == mixes.shape[1] == count * size
    order, lacking = list(range(count)), fitted.inputs - fitted.states
    if mixes is not None and is_known:
        order = _least_linear_first(mixes, fitted.left, size)
        gone = _rows_of(order[count - num_own :], size)
        lacking = lacking + mixes[:, gone] @ fitted.attended[gone]
        _keep(attention, behind, fitted, order[: count - num_own])
        attention.o_proj.weight[:, : -num_own * size] = mixes[:, _rows_of(order[: count - num_own], size)]
    _attend_to_own_place(attention, fitted.one, frequencies, num_own)
    _carry(attention, lacking, fitted.squares, num_own * size)


def _rows_of(heads: list[int], size: int) -> Tensor:
    return (torch.tensor(heads, dtype=torch.long)[:, None] * size + torch.arange(size)).flatten()


def _least_linear_first(mixes: Tensor, left: Tensor, size: int) -> list[int]:
    """The target's heads by how much of what they add to the residual no linear map says, the most first."""
    products = mixes.T @ mixes
    unsaid = (products * left).unflatten(0, (-1, size)).unflatten(-1, (-1, size)).sum((1, 3)).diagonal()
    return [int(head) for head in unsaid.argsort(descending=True)]


def _keep(attention: Any, behind: LayerBehind, fitted: Fitted, heads: list[int]) -> None:
    """Heads as the target's, of an input that the map makes, normed with its size on average."""
    size = (fitted.inputs @ fitted.squares @ fitted.inputs.T).diagonal().mean().sqrt()
    norm = norm_weight(behind.layer, "input_layernorm")
    factors = torch.ones(len(fitted.inputs)) if norm is None else norm.float().cpu()
    normed = factors[:, None] * fitted.inputs / size
    for name in ("q_proj", "k_proj", "v_proj"):
        ours, theirs = getattr(attention, name).weight, behind.weight(f"self_attn.{name}")
        if theirs is None or theirs.shape[1] != len(normed) or len(ours) % len(theirs):
            continue
        by_head = theirs.unflatten(0, (-1, attention.head_dim))
        each = by_head.repeat_interleave(len(ours) // len(theirs), 0)[heads].flatten(0, 1)
        ours[: len(each)] = (each @ normed).to(ours)


def _attend_to_own_place(attention: Any, one: Tensor, frequencies: Tensor, count: int) -> None:
    """The last heads attend to their own place: query and key are the same vector at every place, but for RoPE, which
    turns them by their distance. So the score is the mean of cos(distance * frequency) over the pairs that it lies in:
    of the highest frequencies as many as make the distances' largest one lowest."""
    distances = torch.arange(1, DISTANCES, dtype=torch.float32)[:, None]
    pairs = torch.arange(1, len(frequencies) + 1)
    largest = ((distances * frequencies.float().cpu()).cos().cumsum(1) / pairs).amax(0)
    num_pairs = int(largest.argmin()) + 1
    score = MARGIN / (1 - float(largest.min()))
    size = attention.head_dim
    for product in (attention.q_proj, attention.k_proj):
        own = product.weight[-count * size :].unflatten(0, (count, size))
        own.zero_()
        own[:, :num_pairs] = ((score / attention.scaling / num_pairs) ** 0.5 * one).to(own)


def _carry(attention: Any, wanted: Tensor, squares: Tensor, room: int) -> None:
    """Make the map of what the last `room` values and what mixes them, or the best of that rank for such x."""
    rank = min(room, len(wanted))
    outputs = torch.linalg.eigh(wanted @ squares @ wanted.T).eigenvectors[:, -rank:]
    values = outputs.T @ wanted
    balance = (values.square().mean() / outputs.square().mean()) ** 0.25  # both of one size: they learn at one rate
    mixed = attention.o_proj.weight[:, -room:]
    mixed.zero_()
    mixed[:, :rank] = (balance * outputs).to(mixed)
    of_values = attention.v_proj.weight[-room:]
    of_values[:rank] = (values / balance).to(of_values)
