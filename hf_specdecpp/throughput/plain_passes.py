"""What a plain target pass takes, with PyTorch's products and with ours: a generation is judged by it.

Where ours turn out slower, the next text leaves such passes to PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from hf_specdecpp.caches.rollback import undoing
from hf_specdecpp.clocks import typical
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM, cache_among, input_device, num_processes
from hf_specdecpp.models.cpu_products import FasterProducts
from hf_specdecpp.throughput.product_choice import leave_own

TIMED_PASSES, SURE_PASSES = 3, 9  # with each kind of products, once a target; where ours seem slower
WORSE = 1.02  # times the time of PyTorch's products


class PassSeconds(NamedTuple):
    """Seconds of one target pass over a single token.

    Attributes:
        plain: as plain `generate()` makes it; `None` where the clock cannot tell.
        same: with the CPU products and packed weights that an assistant's passes run on.
    """

    plain: float | None
    same: float | None

    @property
    def are_slower(self) -> bool:
        """Whether ours are slower than PyTorch's products."""
        return self.plain is not None and self.same is not None and self.same > WORSE * self.plain

    def share(self, rows: int) -> PassSeconds:
        """That of one row of so many."""
        return PassSeconds(*(None if each is None else each / rows for each in self))


# What they took: of each target, by `cpu_products`, `pack_weights`, number of sequences, and whether it is compiled.
_known: WeakKeyDictionary[CausalLM, dict[tuple[str, bool, int, bool], PassSeconds]] = WeakKeyDictionary()


def pass_seconds(
    target: CausalLM,
    config: SpeculationConfig,
    products: FasterProducts,
    inputs: Callable[[], dict[str, Any]],
    rows: int = 1,
    forward: Callable[..., Any] | None = None,
) -> PassSeconds:
    """What a pass over one token of each of `rows` sequences takes, measured once a target; `inputs` are the pass's.

    Again in the next text if our products are slower than PyTorch's: that text uses PyTorch's (`leave_own`).
    """
    forward = forward or target
    known = _known.setdefault(target, {})
    kind = config.cpu_products, config.pack_weights, rows, forward is not target
    if kind in known:
        return known[kind]
    device = input_device(target)
    found = time_passes(forward, inputs(), products, device)
    # Several processes must make the same passes, whatever each of them finds.
    if products.layers and num_processes(target) == 1 and found.are_slower:
        found = time_passes(forward, inputs(), products, device, SURE_PASSES)
        if found.are_slower and leave_own(target, rows, config.pack_weights):
            return found
    known[kind] = found
    return found


def time_passes(
    forward: Callable[..., Any],
    inputs: dict[str, Any],
    products: FasterProducts,
    device: torch.device,
    passes: int = TIMED_PASSES,
) -> PassSeconds:
    """One target pass over the last token, with its own products and with ours in turns: medians.

    Plain `generate()` makes this very pass, so the text has room for it. Leaves the cache as it was. A forward may be
    compiled in the first.
    """
    times: dict[str, list[float]] = {"plain": [], "same": []}
    for _ in range(passes):
        for name, context in (("plain", nullcontext()), ("same", products)):
            undo = undoing(cache_among(inputs), 1)
            begin = time.perf_counter()
            with context:
                forward(**inputs, return_dict=True)
            times[name].append(seconds_since(begin, device))
            undo()
    return PassSeconds(typical(times["plain"]), typical(times["same"]))


def seconds_since(begin: float, device: torch.device) -> float:
    """Seconds until the device has done all that it has to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # verification waits for the result anyway
    return time.perf_counter() - begin
