"""The matrix products that a float32 linear layer on a CPU can take, and which of them it takes for how many rows.

Which product is the fastest differs between processors, models and numbers of rows: it is chosen on the passes of texts
(`throughput.target_passes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Product = Literal["own", "onednn", "packed"]

PACKED_FOR = 4  # rows; the order of a packed copy is the same for all numbers but 1


class Ways(Protocol):
    """Which product the layers of a model take, by the number of rows."""

    @property
    def products(self) -> set[Product]:
        """All that may be taken."""

    def of(self, rows: int) -> Product:
        """The product for so many rows, now."""


@dataclass(frozen=True)
class Always:
    """One product for all numbers of rows."""

    product: Product

    @property
    def products(self) -> set[Product]:
        return {self.product}

    def of(self, rows: int) -> Product:  # noqa: ARG002 - all alike
        return self.product


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's product; `weight` may be a packed copy."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def pack(weight: Tensor) -> Tensor:
    """A copy of the weight in the order that oneDNN likes best for few rows."""
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR)
    return copy
