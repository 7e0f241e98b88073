"""Seconds of a target's forward pass over one token, computed from the passes of rounds (`PassTimes`)."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import fmean, median, median_low
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from hf_specdecpp.caches.cached_context import GrowingContext
from hf_specdecpp.clocks import working_clock
from hf_specdecpp.models.causal_lm import CausalLM, cache_among
from hf_specdecpp.models.cpu.faster_products import FasterProducts

KEPT = 512  # latest passes
ENOUGH = 3  # passes of a width for a median of its own
WARM, EVERY = 2, 128  # separate passes over one token: at first, and rounds between two later ones
TINY = 1e-6  # seconds, the lower bound of a time: coarse clocks return 0
LEAST = 0.25  # least share of a pass's time for a pass over fewer tokens


class Pass(NamedTuple):
    """A timed forward pass."""

    tokens: int
    saved: float  # CPU seconds that the copies of weights of that time save in a pass over one token of each row
    work: float  # CPU seconds of the pass
    clock: float  # wall seconds of the pass


class PassTimes:
    """Seconds of a target's pass over one token, in a batch over one token of each row.

    On a CPU with large layers they are computed from the passes of rounds: matrix multiplications of the layers were
    measured once (`FasterProducts.seconds`), which gives the difference of two widths, and of two kinds of
    multiplication. Elsewhere a separate pass is timed, twice and then every 128 rounds.

    Example: passes over 4 tokens took 120 ms, of which large layers take 80 ms with copies of their weights. For one
    token the layers take 70 ms with copies and 95 ms with PyTorch's own multiplications. So a pass over one token takes
    110 ms, and 135 ms in plain `generate()`."""

    def __init__(self) -> None:
        self._latest: deque[Pass] = deque(maxlen=KEPT)
        self._beside: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=ENOUGH))  # of separate passes, by rows
        self._rounds = 0  # since the latest separate pass

    def record_pass(self, tokens: int, work: float, clock: float, rows: int, products: FasterProducts) -> None:
        """Record a round's pass over `tokens` tokens of all `rows`, made with these matrix multiplications: CPU seconds
        `work`, wall seconds `clock`. Called on a CPU only, where a pass ends when its call returns."""
        saved = (products.seconds(rows, own=True) or 0.0) - (products.seconds(rows) or 0.0)
        self._latest.append(Pass(tokens, saved, max(work, TINY), max(clock, TINY)))

    def is_missing(self, rows: int, products: FasterProducts) -> bool:
        """Whether a separate pass over `rows` tokens, one of each row, is due. Called once per round."""
        self._rounds += 1
        return products.seconds(rows) is None and (self._rounds >= EVERY or len(self._beside[rows]) < WARM)

    def make(self, rows: int, forward: Callable[..., Any], inputs: dict[str, Any]) -> None:
        """Time a pass over `rows` tokens, `forward` of `inputs`, which may compile. The cache is rolled back."""
        clock = working_clock() if inputs["input_ids"].device.type == "cpu" else time.perf_counter
        text = GrowingContext(cache_among(inputs))
        text.begin_round()
        begin = clock()
        forward(**inputs, return_dict=True).logits[0, -1, 0].item()  # reading a number waits for the pass
        self._beside[rows].append(max(clock() - begin, TINY))
        text.roll_back()
        self._rounds = 0

    def seconds(self, rows: int, rounds: int, products: FasterProducts) -> tuple[float | None, float | None]:
        """Return wall seconds of a pass over `rows` tokens (one of each row) in plain `generate()`, and with the matrix
        multiplications of these rounds, both under the load of the latest `rounds` passes. `None` if unknown."""
        passes, beside = list(self._latest)[-rounds:], self._beside[rows]
        # From CPU to wall time by the rounds, if these are timed: a busy machine delays all passes.
        delay = sum(each.clock for each in passes) / sum(each.work for each in passes) if passes else 1.0
        if products.seconds(rows) is None or not passes:
            alone = median_low(beside) * delay if beside else None
            return alone, alone
        works: dict[tuple[int, float], list[float]] = defaultdict(list)
        for each in passes:
            works[each.tokens, each.saved].append(each.work)
        narrow = {}
        for (tokens, saved), taken in works.items():
            known = works.get((rows, saved), ())
            is_known, own = len(known) >= ENOUGH, not saved  # the latter: no layer had a copy of its weight
            narrow[tokens, saved] = median(known) if is_known else _narrower(median(taken), tokens, rows, own, products)
        same = fmean(narrow[each.tokens, each.saved] for each in passes)
        return (same + fmean(each.saved for each in passes)) * delay, same * delay


def _narrower(seconds: float, tokens: int, rows: int, own: bool, products: FasterProducts) -> float:
    """Seconds of a pass over `rows` tokens, computed from the `seconds` of a pass over more `tokens`. `own`: of passes
    with PyTorch's own matrix multiplications."""
    further = (products.seconds(tokens, own) or 0.0) - (products.seconds(rows, own) or 0.0)
    return max(seconds - further, LEAST * seconds)


_known: WeakKeyDictionary[CausalLM, PassTimes] = WeakKeyDictionary()


def pass_times_of(target: CausalLM) -> PassTimes:
    """The pass times of a target; new if missing."""
    return _known.setdefault(target, PassTimes())


def forget_pass_times() -> None:
    _known.clear()
