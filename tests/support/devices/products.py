"""Copies of weights for layers of any size, and which products layers take now."""

import inspect
from collections import Counter

import pytest
from torch import nn

from hf_specdecpp.models.cpu import faster_products, products
from hf_specdecpp.models.cpu.faster_products import FasterProducts, _is_routed, _local
from hf_specdecpp.models.cpu.products import ProductTimes, has_float16, measured_copy
from hf_specdecpp.models.cpu.weight_copies import WeightCopies, background

needs_float16 = pytest.mark.skipif(not has_float16(), reason="this PyTorch has no float16 products")


def use_copies(patch: pytest.MonkeyPatch, least: int = 1, most: int = 24, copied: float = 1e-9) -> None:
    """From now on layers of every size use copies of their weights for `least` to `most` rows. An element's share of a
    product takes 2e-9 seconds with PyTorch's own, and so many with a copy."""
    made_up = ProductTimes((2e-9,) * 4, (copied,) * 4, least, most)
    patch.setattr(faster_products, "LEAST_ELEMENTS", 1)
    patch.setattr(products, "_measured", {})
    patch.setattr(products, "_first", {})
    patch.setattr(products, "_measure", lambda *_: made_up)


def faster(*modules: nn.Module, copies: WeightCopies | None = None) -> FasterProducts:
    """Products with copies of weights, which have been made."""
    copies = copies or WeightCopies(measured_copy)
    products = FasterProducts(modules[0], modules[1:], copies=copies)
    background.wait()
    return products


def products_of(model: nn.Module) -> dict[str, int]:
    """How many linear layers of a model use which product in this thread: `{"float16": 210, "own": 2}`."""
    return dict(sorted(Counter(_product(each) for each in model.modules() if type(each) is nn.Linear).items()))


def _product(layer: nn.Linear) -> str:
    forward = _local.contexts[-1].get(layer) if _is_routed(layer) else None
    made = None if forward is None else inspect.getclosurevars(forward).nonlocals["copy"].made
    return "own" if made is None else str(made.copy.name)
