"""What a forward pass of a target over one token takes, by the passes that texts make (`PassTimes`)."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median, median_low
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from hf_specdecpp.caches.text import text_in
from hf_specdecpp.clocks import working_clock
from hf_specdecpp.models.causal_lm import CausalLM, cache_among
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.models.cpu.weight_copies import background

KEPT = 512  # passes
ENOUGH = 3  # passes of a width in a text
WARM, EVERY = 2, 128  # passes beside those of the rounds: at first, and rounds between two of them
TINY = 1e-6  # seconds; a coarse clock may see none
LEAST = 0.25  # of a pass, that one over fewer tokens takes at least


class Pass(NamedTuple):
    """One pass.

    Attributes:
        rows: tokens that it read.
        saved: seconds of the processor that the copies of weights there were then save in a pass over one token.
        work, clock: its seconds of the processor, and by the clock.
    """

    rows: int
    saved: float
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
        self._products: Callable[[], FasterProducts | None] = lambda: None  # must not keep a target alive
        self._copies, self._saved = 0, 0.0  # copies that were made so far, and what they save in a pass over one token

    def begin(self, products: FasterProducts) -> None:
        """Passes of a text on these products follow."""
        self._products, self._copies, self._saved = ref(products), background.made, _saved(products, 1)

    def note(self, rows: int, work: float, clock: float) -> None:
        """A pass over so many tokens took so many seconds of the processor, and so many by the clock. Called on a CPU,
        where a pass is over when its call returns."""
        if self._copies != background.made and (products := self._products()) is not None:
            self.begin(products)  # copies were made while the text is generated
        self._latest.append(Pass(rows, self._saved, max(work, TINY), max(clock, TINY)))

    def is_missing(self, rows: int, products: FasterProducts) -> bool:
        """Whether a pass over so many tokens should be made now, beside those of the rounds."""
        self._rounds += 1
        return products.seconds(rows) is None and (self._rounds >= EVERY or len(self._beside[rows]) < WARM)

    def make(self, rows: int, forward: Callable[..., Any], inputs: dict[str, Any]) -> None:
        """Time a pass beside those of the rounds, and leave the cache as it was. A forward may be compiled in it."""
        clock = working_clock() if inputs["input_ids"].device.type == "cpu" else time.perf_counter
        text, begin = text_in(cache_among(inputs)), clock()
        forward(**inputs, return_dict=True).logits[0, -1, 0].item()  # a read waits for all of it
        self._beside[rows].append(max(clock() - begin, TINY))
        text.back()
        self._rounds = 0

    def seconds(self, rows: int, rounds: int, products: FasterProducts) -> tuple[float | None, float | None]:
        """Seconds by the clock of a pass over so many tokens (one of each row), as the machine was in the latest
        `rounds`: in plain `generate()`, and on the products that these had; `None` where they are not known."""
        passes, beside = list(self._latest)[-rounds:], self._beside[rows]
        if products.seconds(rows) is None or not passes:
            if not beside:
                return None, None
            # By the clock of the rounds, where these are timed: a busy machine slows them alike.
            delay = sum(each.clock for each in passes) / sum(each.work for each in passes) if passes else 1.0
            return median_low(beside) * delay, median_low(beside) * delay
        works: dict[tuple[int, float], list[float]] = defaultdict(list)
        for each in passes:
            works[each.rows, each.saved].append(each.work)
        usual = {kind: median(each) for kind, each in works.items()}
        saved, of_one, plain, same = _saved(products, rows), _saved(products, 1), 0.0, 0.0
        for each in passes:
            taken = usual[each.rows, each.saved]
            is_known = len(works.get((rows, each.saved), ())) >= ENOUGH
            narrow = usual[rows, each.saved] if is_known else _narrower(taken, each, rows, products)
            same += each.clock / taken * narrow
            plain += each.clock / taken * (narrow + (saved * each.saved / of_one if of_one else 0.0))
        return plain / len(passes), same / len(passes)


def _narrower(seconds: float, of: Pass, rows: int, products: FasterProducts) -> float:
    """What a pass over `rows` tokens takes where one such as `of` takes so many seconds."""
    own = not of.saved  # no layer had a copy of its weight
    further = (products.seconds(of.rows, own) or 0.0) - (products.seconds(rows, own) or 0.0)
    return max(seconds - further, LEAST * seconds)


def _saved(products: FasterProducts, rows: int) -> float:
    """Seconds of the processor that copies of weights save now in a pass over so many tokens."""
    return (products.seconds(rows, own=True) or 0.0) - (products.seconds(rows) or 0.0)


_known: WeakKeyDictionary[CausalLM, PassTimes] = WeakKeyDictionary()


def pass_times_of(target: CausalLM) -> PassTimes:
    """What is known of a target's passes."""
    return _known.setdefault(target, PassTimes())


def forget_pass_times() -> None:
    _known.clear()
