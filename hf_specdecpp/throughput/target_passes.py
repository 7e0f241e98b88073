"""What passes of a target over a few rows take, and which matrix products they run on from then on (`TargetPasses`).

Products are compared in the passes that texts make anyway, in turns: a loop over the same passes before the first text
finds other products the fastest than a text does, and takes as long as many of its rounds.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_specdecpp.caches.text import text_in
from hf_specdecpp.clocks import first_sensible, typical
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.models.causal_lm import CausalLM, cache_among, num_processes
from hf_specdecpp.models.cpu_products import Part, can_be_packed, free_memory, large_layers
from hf_specdecpp.models.products import Always, Product, Ways

MOST_ROWS = 16  # in the passes that are compared
PASSES = 12  # with each product, which decide
LEAST_GAIN = 1.05  # of a pass over one with PyTorch's own product
ALIKE = 1.3  # gain at some rows from which on others are not compared
FEW, CLEAR = 4, 1.1  # pairs of passes are enough where one product takes so many times the other's seconds in each
AT_ONCE = FEW  # passes over one token with each product, which a text makes beside its rounds if these are others
FIRST = 24  # rounds before these but for one: where a draft is useless, the rounds soon are such passes
EVERY = 48  # passes after which one more is made, as long as products are compared: 2 % of a text's seconds
TINY = 1e-6  # seconds; a coarse clock may see none
MOST_OF_FREE = 0.25  # of the memory that is free, which packed copies of weights may take
AGAIN = 128  # passes after which another one with PyTorch's product says whether the machine is still the same
WARM, ENOUGH = 2, 8  # of these passes: the first makes kernels; until there are enough, they are EVERY passes apart
LATEST = 512  # passes of rounds that are remembered

_Way = tuple[int, Product]  # of a pass: its rows and its product


class TargetPasses:
    """Seconds of a target's passes by their rows and product, and which product they take.

    A number of rows begins with PyTorch's own product and another in turns. After twelve passes with each the other one
    is taken if in the median pair PyTorch's took 5 % longer. Four pairs are enough where all say so by 10 %. Pairs are
    compared, since a processor may be busy for half of the passes. Rows above a number from 2 on that is decided go as
    these do, and where one product takes 1.3 times the other's seconds, all others from 2 on.

    Example: passes over 3 rows take 120, 114, 128 and 240 ms with PyTorch's product, and in turns with these 66, 52, 60
    and 130 ms with packed weights, the last two while another process has the processor. So 3 rows are packed, and 2
    and 4 to 16, too.

    Args:
        other: the product that PyTorch's own is compared with, if there is one.
    """

    def __init__(self, other: Product | None = None) -> None:
        self.contestants: tuple[Product, ...] = ("own",) if other is None else ("own", other)
        self.chosen: dict[int, Product] = {}  # by rows
        self._gains: dict[int, float] = {}  # by rows: seconds with PyTorch's product over those with the other one
        self._seconds: dict[int, dict[Product, deque[float]]] = defaultdict(
            lambda: {product: deque(maxlen=PASSES) for product in self.contestants}
        )
        self._ways: list[Product] = ["own"]  # by rows; more go as the last
        self._beside: dict[int, _Beside] = {}  # by rows
        self._latest_passes: deque[tuple[_Way, float]] = deque(maxlen=LATEST)  # of rounds
        self._now: Product | None = None  # of the pass that is being timed
        self._rounds = self._count = 0  # rounds, and passes that were timed
        self._latest: dict[int, int] = {}  # by rows: how many there were until the latest pass
        self._latest_own: dict[int, int] = {}  # by rows: until the latest with PyTorch's product

    @property
    def products(self) -> set[Product]:
        """All that a text may take: not the other one where it has lost everywhere."""
        is_open = not self.chosen or not self._seconds.keys() <= self.chosen.keys()
        return set(self.contestants if is_open else self.chosen.values()) | {"own"}

    def of(self, rows: int) -> Product:
        return self._now or self._ways[min(rows, len(self._ways) - 1)]

    @contextmanager
    def timed(self, rows: int, has_choice: bool, device: torch.device) -> Iterator[None]:
        """A pass over so many rows is made within, on the product whose turn it is; `has_choice`: whether the text's
        layers can take both (`FasterProducts`), else those of the next one can. Only a pass on a CPU is over when its
        call returns, and timed."""
        if device.type != "cpu":
            yield
            return
        follows = rows not in self._seconds and any(1 < each < rows for each in self.chosen)
        if rows > MOST_ROWS or follows:
            yield
            return
        times = self._seconds[rows]  # which is met
        if not has_choice and len(self.contestants) > 1 and rows not in self.chosen:
            yield
            return
        product = self.chosen[rows] if rows in self.chosen else rarest(times)
        self._now, begin = product, time.perf_counter()
        try:
            yield
            self.note(rows, product, time.perf_counter() - begin)
        finally:
            self._now = None

    def note(self, rows: int, product: Product, seconds: float, is_beside: bool = False) -> None:
        """A pass of a round, or one beside those, took so long."""
        times = self._seconds[rows]
        if is_beside:
            self._beside.setdefault(rows, _Beside())
        is_warm = bool(times[product])  # the first pass over so many rows makes its kernels
        if is_warm and not is_beside:
            self._latest_passes.append(((rows, product), seconds))
            for beside in self._beside.values():
                if beside.open_pairs:
                    beside.pair((rows, product), seconds)
        if is_warm and product == "own" and rows in self._beside:
            self._beside[rows].begin(seconds)
        times[product].append(seconds)
        self._count += 1
        self._latest[rows] = self._count
        if product == "own":
            self._latest_own[rows] = self._count
        if rows not in self.chosen and self._is_decided(rows, *times.values()):
            gain = self._gains.get(rows, 1.0)
            self.chosen[rows] = self.contestants[-1] if gain >= LEAST_GAIN else "own"
            if rows > 1 and not 1.0 / ALIKE < gain < ALIKE:
                # So clearly that numbers of rows beside it, which a rule would meet one by one, are not compared.
                self.chosen = dict.fromkeys(range(2, MOST_ROWS + 1), self.chosen[rows]) | self.chosen
            self._ways = ["own"]
            for number in range(1, max(self.chosen) + 1):
                self._ways.append(self.chosen.get(number, self._ways[-1]))

    def _is_decided(self, rows: int, own: deque[float], other: deque[float] | None = None) -> bool:
        """Whether the passes so far are enough; keeps what they say."""
        if other is None:
            return True
        gains = [max(one, TINY) / max(another, TINY) for one, another in zip(own, other, strict=False)]
        if len(gains) < FEW or len(own) != len(other):
            return False
        self._gains[rows] = median(gains)
        return len(gains) >= PASSES or min(gains) > CLEAR or max(gains) * CLEAR < 1.0

    def missing(self, rows: int, has_choice: bool) -> Product | None:
        """The product of a pass over a token of each of `rows` texts that is to be made beside those of the rounds."""
        times, compares = self._seconds[rows], len(self.contestants) > 1
        self._rounds += 1
        since = self._count - self._latest_own.get(rows, 0)
        if len(times["own"]) < WARM or (since >= EVERY and since >= self._apart(rows)):
            return "own"
        if self._rounds < FIRST or (compares and not has_choice):
            return None
        product = rarest(times)
        if rows in self.chosen and product != "own":
            return None
        most = PASSES if self._count - self._latest.get(rows, 0) >= EVERY and compares else AT_ONCE
        return product if len(times[product]) < most else None

    def _apart(self, rows: int) -> int:
        """Passes between two with PyTorch's own product: more where enough are known, or products take turns."""
        is_known = rows in self._beside and self._beside[rows].count >= ENOUGH
        takes_turns = len(self.contestants) > 1 and rows not in self.chosen
        return AGAIN if is_known or takes_turns else EVERY

    def make(self, rows: int, product: Product, forward: Callable[..., Any], inputs: dict[str, Any]) -> None:
        """Time a pass beside those of the rounds, and leave the cache as it was. A forward may be compiled in it."""
        text, begin = text_in(cache_among(inputs)), time.perf_counter()
        self._now = product
        try:
            forward(**inputs, return_dict=True).logits[0, -1, 0].item()  # a read waits for all of it
        finally:
            self._now = None
        self.note(rows, product, time.perf_counter() - begin, is_beside=True)
        text.back()

    def seconds(self, rows: int, rounds: int) -> tuple[float | None, float | None]:
        """Of a pass over so many rows as the machine was in the latest `rounds`, those of a text: with PyTorch's
        product, and with the chosen one; `None` without any, or where the clock cannot tell.

        Example: passes over one row took 1.1 and 1.2 times the seconds of those over four beside them, and those of
        the text over four rows took 50 to 54 ms, 52 ms in the mean. So one over one row took 1.15 * 52 = 60 ms in it.
        """
        times = self._seconds[rows]["own"]
        ratios: dict[_Way, Sequence[float]] = {**self._beside[rows].ratios} if rows in self._beside else {}
        if ratios:
            ratios[rows, "own"], ratios[rows, self.contestants[-1]] = [1.0], [self._gains.get(rows, 1.0)]
        passes = list(self._latest_passes)[-rounds:] if ratios else []
        of_ways = {way: ratio_of(ratios, way) for way in {way for way, _ in passes}}
        # The mean, since what another process slows is as much slower in the rounds, whose seconds are added up.
        own = first_sensible(fmean(of_ways[way] * seconds for way, seconds in passes)) if passes else None
        own = own or (typical(times) if times else None)
        if own is None:
            return None, None
        if self.chosen.get(rows, "own") == "own":
            return own, own
        # Where the choice is that of other numbers of rows, so is the gain.
        return own, own / self._gains[min(self._gains, key=lambda known: abs(known - rows))]


class _Beside:
    """Passes with PyTorch's own product beside others of rounds, which a busy machine slows alike. `count`: of these
    passes; `ratios`: their seconds over those of the two rounds' passes that followed, which take products in turns."""

    def __init__(self) -> None:
        self.ratios: dict[_Way, deque[float]] = {}
        self.count = self.open_pairs = 0  # the latter: how many more passes are held against the latest of these
        self._seconds = 0.0  # of the latest one

    def begin(self, seconds: float) -> None:
        """Such a pass took so long."""
        self.count += 1
        self._seconds, self.open_pairs = seconds, 2

    def pair(self, way: _Way, seconds: float) -> None:
        """A round's pass took so long."""
        self.ratios.setdefault(way, deque(maxlen=PASSES)).append(max(self._seconds, TINY) / max(seconds, TINY))
        self.open_pairs -= 1


def rarest(times: Mapping[Product, Sequence[float]]) -> Product:
    """The product of which there are the fewest passes."""
    return min(times, key=lambda product: len(times[product]))


def ratio_of(ratios: Mapping[_Way, Sequence[float]], way: _Way) -> float:
    """What stands beside a pass over so many rows, or beside those over the most similar number."""
    rows, product = way
    return median(ratios[min(ratios, key=lambda known: (known[1] != product, abs(known[0] - rows)))])


# Of each target by the product that is compared with PyTorch's own; and which one that is, where it was not told.
_known: WeakKeyDictionary[CausalLM, dict[Product | None, TargetPasses]] = WeakKeyDictionary()
_other: WeakKeyDictionary[CausalLM, Product] = WeakKeyDictionary()


def passes_of(target: CausalLM, other: Product | None) -> TargetPasses:
    """What is known of a target's passes; `other` is compared with PyTorch's own product (`other_product`)."""
    return _known.setdefault(target, {}).setdefault(other, TargetPasses(other))


def other_product(target: CausalLM, packs: bool | None) -> Product | None:
    """What PyTorch's own product is compared with in the passes of a target; `None` where there is no choice. Without
    being told whether it `packs`, it does so where the copies take a small part of the memory that is free when it is
    first met."""
    # Several processes would have to take turns in step.
    if num_processes(target) > 1 or not any(True for _ in large_layers([target])):
        return None
    if packs is not None:
        return "packed" if packs else "onednn"
    if target not in _other:
        copies = sum(layer.weight.nbytes for layer in large_layers([target]) if can_be_packed(layer))
        _other[target] = "packed" if copies <= MOST_OF_FREE * free_memory() else "onednn"
    return _other[target]


def ways_of(target: CausalLM, other: Product | None) -> Ways:
    """Which products the layers of a target and its draft take."""
    return passes_of(target, other)


def parts_of(target: CausalLM | None, drafter: Draft | None, other: Product | None) -> list[Part]:
    """Target and draft, if given, with the products that have shown to be fastest here; `other` as in `passes_of`."""
    ways = Always("own") if target is None else ways_of(target, other)
    return [
        *([] if target is None else [Part([target], ways)]),
        *([] if drafter is None or drafter.model is None else [Part(drafter.parts, ways)]),
    ]


def forget_products() -> None:
    """Forget what is known of all targets' passes."""
    _known.clear()
    _other.clear()
