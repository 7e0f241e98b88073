"""Which matrix products a model's passes run on here: chosen on its own passes, then kept on disk.

Whole passes are timed, so every weight is read from memory as in use: of a weight that a loop over one layer keeps in
the processor's cache, other products are the fastest.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_specdecpp.clocks import are_sensible, computing_clock
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.files import forget, recall, remember
from hf_specdecpp.models.causal_lm import CausalLM, longest_text, num_processes, trying
from hf_specdecpp.models.cpu_products import FasterProducts, PackedWeights, Part, can_be_packed, large_layers
from hf_specdecpp.models.products import OWN, PRODUCTS, Product, Ways
from hf_specdecpp.version import __version__

logger = logging.get_logger("hf_specdecpp")

ROWS = (1, 2, 4, 8, 64, 3, 16, 6)  # of the measured passes, the most important first
ALWAYS = 4  # of them are measured however long that takes
SECONDS, MOST_TURNS = 1.5, 3  # after which no further number of rows is begun; passes of each kind

# In this process, by what they depend on.
_known: dict[str, Ways] = {}


def parts_of(target: CausalLM | None, drafter: Draft | None, packed: PackedWeights | None) -> list[Part]:
    """Target and draft, each with the ways that its layers go: chosen before, or now.

    Args:
        target, drafter: `None` leaves it as it is.
        packed: keeps packed copies of weights, if there may be any.
    """
    parts = []
    if target is not None and num_processes(target) == 1:  # several would have to time their passes in step
        ways = ways_of([target], _describe(target), partial(_passes, target), packed, longest_text(target))
        parts.append(Part([target], ways))
    if drafter is not None and drafter.model is not None:
        modules, of = drafter.parts, {**_describe(drafter.model), **drafter.describe()}
        ways = ways_of(modules, of, lambda: nullcontext(drafter.read_some), packed, drafter.max_length)
        parts.append(Part(modules, ways))
    return parts


def ways_of(
    modules: Sequence[nn.Module],
    of: dict[str, Any],
    passes: Callable[[], AbstractContextManager[Callable[[int], object]]],
    packed: PackedWeights | None,
    longest: float = float("inf"),
) -> Ways:
    """The ways that the layers of a model go.

    Args:
        modules: of the model.
        of: describes it.
        passes: a context with what makes a pass over so many tokens.
        packed: keeps packed copies, if there may be any.
        longest (tokens): that a pass can read.
    """
    if not any(True for _ in large_layers(modules)):
        return OWN
    name = _name(of, packed is not None)
    if name not in _known:
        conditions = json.loads(name)
        try:
            _known[name] = Ways.from_list(recall("products", conditions))
        except ValueError:  # not measured yet, or the file is damaged
            try:
                with passes() as read:
                    times = measure(modules, read, packed, longest)
            except Exception as error:  # noqa: BLE001 - a foreign forward may ask for more than tokens
                failed = f"a pass to time it failed ({error!r}), which the next text tries again."
                logger.warning_once(f"{of['class']} keeps PyTorch's matrix products: {failed}")
            else:
                if not all(are_sensible(each.values()) for each in times.values()):
                    logger.info("The clock cannot tell which matrix products are faster, so they stay PyTorch's own.")
                    _known[name] = OWN  # for this process: another one may have a better clock
                    return OWN
                _known[name] = Ways.fastest(times)
                remember("products", conditions, _known[name].to_list())
                logger.info(f"Measured passes with each kind of matrix product, in seconds: {times}.")
            if packed is not None and "packed" not in _known.get(name, OWN).products:
                packed.drop(layer.weight for layer in large_layers(modules))
    return _known.get(name, OWN)


def leave_own(target: CausalLM, rows: int, packs: bool) -> bool:
    """From now on passes over so many rows leave the target's products as they are: a text has shown them faster.

    Returns:
        Whether that is a change.
    """
    name = _name(_describe(target), packs)
    if name not in _known or (changed := _known[name].with_own(rows)) == _known[name]:
        return False
    _known[name] = changed
    remember("products", json.loads(name), changed.to_list())
    return True


def forget_products() -> None:
    """Forget all choices of this machine: each is made again when it is needed."""
    _known.clear()
    forget("products")


@torch.inference_mode()
def measure(
    modules: Sequence[nn.Module],
    read: Callable[[int], object],
    packed: PackedWeights | None,
    longest: float = float("inf"),
) -> dict[int, dict[Product, float]]:
    """Seconds of passes by their number of rows and their product: the least of a few, taken in turns.

    Under two seconds for small models. For large ones twelve passes, over 1, 2, 4 and 8 tokens; eight without packed
    copies. With one thread the processor's time is taken, which leaves other load out. Where a clock cannot tell, its
    times make no sense.
    """
    read(1)  # the first pass of all fetches the weights
    products = PRODUCTS if packed is not None else PRODUCTS[:2]
    contexts = {
        product: FasterProducts(Part(modules, Ways.always(product)), packed=packed if product == "packed" else None)
        for product in products
    }
    clock = computing_clock()
    times: dict[int, dict[Product, float]] = {}
    end = time.perf_counter() + SECONDS
    for place, rows in enumerate(rows for rows in ROWS if rows <= longest):
        if place >= ALWAYS and time.perf_counter() > end:
            break
        _warm_up(contexts, rows)
        times[rows] = {}
        for _ in range(MOST_TURNS):
            begun = time.perf_counter()
            for product, context in contexts.items():
                begin = clock()
                with context:
                    read(rows)
                times[rows][product] = min(times[rows].get(product, float("inf")), clock() - begin)
            if time.perf_counter() - begun > SECONDS / len(ROWS):
                break
        if not are_sensible(times[rows].values()):
            break
    return times


def _warm_up(contexts: dict[Product, FasterProducts], rows: int) -> None:
    """One product of each shape: oneDNN prepares itself when it first meets one."""
    for context in contexts.values():
        shapes = {layer.weight.shape: layer for layer in context.layers}
        with context:
            for layer in shapes.values():
                layer(torch.zeros(rows, layer.in_features))


@contextmanager
def _passes(target: CausalLM) -> Iterator[Callable[[int], object]]:
    with trying(target) as read:
        yield lambda count: read(torch.arange(count)[None] % 8, use_cache=False)


def _describe(model: CausalLM) -> dict[str, Any]:
    layers = list(large_layers([model]))
    return {
        "name": model.config.name_or_path,
        "class": type(model).__name__,
        "layers": len(layers),
        "elements": sum(layer.weight.numel() for layer in layers),
        "packable": sum(map(can_be_packed, layers)),
    }


def _name(of: dict[str, Any], packs: bool) -> str:
    machine = {
        "packs": packs,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "versions": [__version__, torch.__version__],
    }
    return json.dumps({**of, **machine}, sort_keys=True)
