"""What a forward pass of a target over one token takes, by the passes that texts make (`PassTimes`)."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import fmean, median, median_low
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from hf_specdecpp.caches.text import text_in
from hf_specdecpp.models.causal_lm import CausalLM, cache_among
from hf_specdecpp.models.cpu.faster_products import FasterProducts

KEPT = 512  # passes
ENOUGH = 3  # passes of a width in a text
WARM, EVERY = 2, 128  # passes beside those of the rounds: at first, and rounds between two of them
TINY = 1e-6  # seconds; a coarse clock may see none
LEAST = 0.25  # of a pass, that one over fewer tokens takes at least


class Pass(NamedTuple):
    """One pass: how many tokens it read, its seconds of the processor, and its seconds by the clock."""

    rows: int
    work: float
    clock: float


class PassTimes:
    """Seconds of a target's passes over few tokens.

    On a CPU with large layers nothing is measured beside the rounds: a pass over n tokens took what was timed, and the
    products of its layers were measured once (`FasterProducts.seconds`), so the difference of two widths, and of two
    kinds of product, is known. Elsewhere a pass over one token is made beside the rounds, twice and then every 128.

    Example: passes over 4 tokens took 120 ms, of which large layers take 80 ms with copies of their weights. Over one
    token these take 70 ms with copies and 95 ms with PyTorch's own products. So a pass over one token takes 110 ms,
    and 135 ms in plain `generate()`.
    """

    def __init__(self) -> None:
        self._latest: deque[Pass] = deque(maxlen=KEPT)
        self._beside: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=ENOUGH))  # by rows
        self._rounds = 0  # since the latest pass beside them

    def note(self, rows: int, work: float, clock: float) -> None:
        """A pass over so many tokens took so many seconds of the processor, and so many by the clock. Called on a CPU,
        where a pass is over when its call returns."""
        self._latest.append(Pass(rows, max(work, TINY), max(clock, TINY)))

    def is_missing(self, rows: int, products: FasterProducts) -> bool:
        """Whether a pass over so many tokens should be made now, beside those of the rounds."""
        self._rounds += 1
        return products.seconds(rows) is None and (self._rounds >= EVERY or len(self._beside[rows]) < WARM)

    def make(self, rows: int, forward: Callable[..., Any], inputs: dict[str, Any]) -> None:
        """Time a pass beside those of the rounds, and leave the cache as it was. A forward may be compiled in it."""
        clock = time.process_time if inputs["input_ids"].device.type == "cpu" else time.perf_counter
        text, begin = text_in(cache_among(inputs)), clock()
        forward(**inputs, return_dict=True).logits[0, -1, 0].item()  # a read waits for all of it
        self._beside[rows].append(max(clock() - begin, TINY))
        text.back()
        self._rounds = 0

    def seconds(self, rows: int, rounds: int, products: FasterProducts) -> tuple[float | None, float | None]:
        """Seconds by the clock of a pass over so many tokens (one of each row), as the machine was in the latest
        `rounds`: in plain `generate()`, and on the products that the rounds run on; `None` where they are not known."""
        passes = list(self._latest)[-rounds:]
        with_copies, beside = products.seconds(rows), self._beside[rows]
        if with_copies is None or not passes:
            if not beside:
                return None, None
            # By the clock of the rounds, where these are timed: a busy machine slows them alike.
            delay = sum(each.clock for each in passes) / sum(each.work for each in passes) if passes else 1.0
            return median_low(beside) * delay, median_low(beside) * delay
        works: dict[int, list[float]] = defaultdict(list)
        for each in passes:
            works[each.rows].append(each.work)
        usual = {width: median(each) for width, each in works.items()}
        if len(works[rows]) < ENOUGH:
            usual[rows] = fmean(_narrower(usual[each.rows], each.rows, rows, products) for each in passes)
        same = fmean(each.clock / usual[each.rows] for each in passes) * usual[rows]
        own = products.seconds(rows, own=True) or with_copies
        return same * (1.0 + (own - with_copies) / usual[rows]), same


def _narrower(seconds: float, of: int, rows: int, products: FasterProducts) -> float:
    """What a pass over `rows` tokens takes where one over `of` tokens takes so many seconds."""
    further = (products.seconds(of) or 0.0) - (products.seconds(rows) or 0.0)
    return max(seconds - further, LEAST * seconds)


_known: WeakKeyDictionary[CausalLM, PassTimes] = WeakKeyDictionary()


def pass_times_of(target: CausalLM) -> PassTimes:
    """What is known of a target's passes."""
    return _known.setdefault(target, PassTimes())


def forget_pass_times() -> None:
    _known.clear()
