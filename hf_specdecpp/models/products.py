"""The matrix products that a float32 linear layer on a CPU can take, and which of them it takes for how many rows.

A product may be cheaper with more rows than with fewer: on an AMD EPYC PyTorch's own takes 37, 54, 66 and 51 ms for all
of SmolLM2's layers and 1, 2, 3 and 4 rows. There rows of zeros are added, and what they give is dropped
(`Ways.filled`). Which product is the fastest differs between processors and models: it is chosen on a model's own
passes (`throughput.product_choice`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

Product = Literal["own", "onednn", "packed"]
PRODUCTS: tuple[Product, ...] = ("own", "onednn", "packed")  # the simplest first

MOST_ROWS = 16  # that are told apart; more rows go as 17 do
PACKED_FOR = 4  # rows; the order of a packed copy is the same for all numbers but 1
LEAST_GAIN = 1.05  # of a pass over one with a simpler product: two measurements of the same differ by a few percent


@dataclass(frozen=True)
class Ways:
    """Which product the layers of a model take, by the number of rows.

    Example: `Ways(("own", "own", "own", "packed"), (1, 4, 4, 4))`: one row takes PyTorch's own product, two and three
    are filled up to four, and four and more take a packed weight.

    Attributes:
        products: for 1, 2, ... rows; the last is for all further numbers, too.
        filled: to how many rows these are filled up.
    """

    products: tuple[Product, ...]
    filled: tuple[int, ...]

    @property
    def are_own(self) -> bool:
        """Whether every number of rows takes PyTorch's own product, as it is."""
        return set(self.products) == {"own"} and not any(self.of(rows)[1] for rows in range(1, len(self.filled) + 1))

    def of(self, rows: int) -> tuple[Product, int]:
        """The product for so many rows, and how many rows of zeros are added."""
        place = min(rows, len(self.products)) - 1
        return self.products[place], max(self.filled[place] - rows, 0)

    def with_own(self, rows: int) -> Ways:
        """The same, but so many rows take PyTorch's own product as they are."""
        place = min(rows, len(self.products)) - 1
        products, filled = list(self.products), list(self.filled)
        products[place], filled[place] = "own", 1
        return replace(self, products=tuple(products), filled=tuple(filled))

    @classmethod
    def always(cls, product: Product) -> Ways:
        """One product for all numbers of rows."""
        return cls((product,), (1,))

    @classmethod
    def fastest(cls, seconds: Mapping[int, Mapping[Product, float]]) -> Ways:
        """The fastest ways, by measured passes; a simpler way stays unless another gains 5 % of the pass.

        Example: passes over 1, 2 and 4 rows take 37, 54 and 51 ms with PyTorch's own product, and 27, 43 and 44 ms with
        oneDNN's. One row takes oneDNN's, which 2 and 3 rows do, too, and they are not filled up: 44 ms are no less than
        43. With PyTorch's own product alone, two rows would be filled up to four (51 ms).

        Args:
            seconds: of passes, by their number of rows and their product. A number of rows that was not measured goes
                as the next lower one that was.
        """
        best = {rows: _fastest(times) for rows, times in sorted(seconds.items())}
        cost = {rows: seconds[rows][product] for rows, product in best.items()}
        products: list[Product] = []
        filled: list[int] = []
        for rows in range(1, MOST_ROWS + 2):
            known = max(each for each in best if each <= rows) if rows <= MOST_ROWS else max(best)
            width = rows
            if rows in cost and rows <= MOST_ROWS:
                cheapest = min((each for each in cost if rows <= each <= MOST_ROWS), key=lambda each: cost[each])
                if cost[rows] >= LEAST_GAIN * cost[cheapest]:
                    width = known = cheapest
            products.append(best[known])
            filled.append(width)
        return cls(tuple(products), tuple(filled))

    def to_list(self) -> list[list[Any]]:
        """As JSON can keep it."""
        return [list(self.products), list(self.filled)]

    @classmethod
    def from_list(cls, kept: Any) -> Ways:
        """From what `to_list` returned.

        Raises:
            ValueError: it is something else.
        """
        with suppress(TypeError, ValueError):
            products, filled = kept
            if set(products) <= set(PRODUCTS) and len(products) == len(filled) == MOST_ROWS + 1:
                return cls(tuple(products), tuple(map(int, filled)))
        raise ValueError(f"{kept!r} does not say which products to use.")


OWN = Ways.always("own")


def _fastest(times: Mapping[Product, float]) -> Product:
    best: Product = "own"
    for product in PRODUCTS[1:]:
        if product in times and times[best] >= LEAST_GAIN * times[product]:
            best = product
    return best


def filled_up(x: Tensor, dummies: int) -> Tensor:
    """`[rows + dummies, in]` of an input `[..., in]`: its rows, and rows of zeros after them."""
    return functional.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, dummies))


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's product; `weight` may be a packed copy."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def pack(weight: Tensor) -> Tensor:
    """A copy of the weight in the order that oneDNN likes best for few rows."""
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR)
    return copy
