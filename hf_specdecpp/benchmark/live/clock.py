"""Times the passes of a target and what they verified, whoever runs them; and notices when the machine was busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from typing_extensions import Self

from hf_specdecpp.models.causal_lm import CausalLM, cache_among

# Share of a run that its threads may wait for a processor before it counts as disturbed.
MOST_WAITING = 0.05

Generated = TypeVar("Generated")


class Round(NamedTuple):
    """A target pass and what led to it.

    Attributes:
        drafted: candidates, or nodes of a tree.
        accepted: those of them that are in the text.
        between: seconds since the previous pass: verification of that one, drafting of this one.
        target: seconds of the pass.
    """

    drafted: int
    accepted: int
    between: float
    target: float


@dataclass
class _Pass:
    cached: int  # tokens before it
    tokens: list[int]
    begin: float
    end: float = 0.0


class RoundClock:
    """Watches the passes of `target` while it is entered (`with`), by hooks: the same for every contestant."""

    def __init__(self, target: CausalLM) -> None:
        self.target = target
        self.passes: list[_Pass] = []

    def __enter__(self) -> Self:
        self.entered = self._now()
        self.hooks = [
            self.target.register_forward_pre_hook(self._before, with_kwargs=True),
            self.target.register_forward_hook(self._after),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self.hooks:
            hook.remove()

    def rounds(self, ids: list[int], prompt_length: int) -> list[Round]:
        """What each pass verified, the one over the prompt first.

        Args:
            ids: the whole text, prompt included.
        """
        cached = [*[each.cached for each in self.passes], len(ids) - 1]
        rounds, ended, length = [], self.entered, prompt_length
        for each, later in zip(self.passes, cached[1:], strict=True):
            candidates = each.tokens[length - each.cached :]
            if not candidates and (later == each.cached or each.cached + len(each.tokens) < length):
                continue  # only timed, and made again; or tokens that a target with recurrent layers had yet to read
            # All of the text but its last token is in the cache when a pass begins. After a rejection a target with
            # recurrent layers goes back instead, and reads the tokens that stand again.
            after = later + 1 if later > each.cached else length + _matching(candidates, ids[length:]) + 1
            after = min(after, len(ids))
            accepted = after - length - 1  # the token after them is the target's own
            if after == len(ids) and accepted < len(candidates):
                accepted += candidates[accepted] == ids[-1]  # unless the text ended with a candidate
            rounds.append(Round(len(candidates), accepted, each.begin - ended, each.end - each.begin))
            ended, length = each.end, after
        return rounds

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        cache = cache_among(kwargs)
        cached = cache.get_seq_length() if cache is not None else 0
        begin = self._now()
        self.passes.append(_Pass(int(cached), kwargs["input_ids"][0].tolist(), begin))

    def _after(self, module: Any, args: Any, output: Any) -> None:  # noqa: ARG002
        self.passes[-1].end = self._now()

    def _now(self) -> float:
        if self.target.device.type != "cpu":
            torch.accelerator.synchronize(self.target.device)
        return time.perf_counter()


def _matching(candidates: list[int], ids: list[int]) -> int:
    """How many candidates stand before the first that the text does not have."""
    pairs = enumerate(zip(candidates, ids, strict=False))
    return next((place for place, (drafted, said) in pairs if drafted != said), min(len(candidates), len(ids)))


class Disturbance:
    """What else the machine did while this was entered (`with`).

    Attributes:
        seconds: wall time.
        waited: share of it that a thread of ours was ready to run and did not get a processor, time that the host took
            from a virtual machine included. Where the system does not tell: the share in which a single thread did not
            run, or 0 with several.
        others: processors that other processes kept busy on average; `None` where the system does not tell.
    """

    def __enter__(self) -> Self:
        self._begin = self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (wall, own, delays, machine), (wall0, own0, delays0, machine0) = self._read(), self._begin
        self.seconds = wall - wall0
        if delays is not None and delays0 is not None:
            self.waited = max(delay - delays0.get(thread, 0.0) for thread, delay in delays.items()) / self.seconds
        else:
            self.waited = max(1.0 - (own - own0) / self.seconds, 0.0) if torch.get_num_threads() == 1 else 0.0
        self.others = None
        if machine is not None and machine0 is not None:
            busy, stolen = machine[0] - machine0[0], machine[1] - machine0[1]
            self.waited += stolen / self.seconds
            self.others = max(busy - (own - own0), 0.0) / self.seconds

    @property
    def disturbed(self) -> bool:
        return self.waited > MOST_WAITING

    @staticmethod
    def _read() -> tuple[float, float, dict[str, float] | None, tuple[float, float] | None]:
        return time.perf_counter(), time.process_time(), _delays(), _machine()


def quietest(
    attempts: int, generate: Callable[[], Generated], describe: Callable[[Generated], dict[str, Any]]
) -> dict[str, Any]:
    """`generate()` timed, again if it was disturbed: the row of the least disturbed attempt, and how it was timed."""
    rows: list[dict[str, Any]] = []
    while len(rows) < attempts and not (rows and not rows[-1]["disturbed"]):
        with Disturbance() as load:
            generated = generate()
        rows.append({
            **describe(generated), "seconds": load.seconds, "disturbed": load.disturbed,
            "waited": round(load.waited, 4), "others": None if load.others is None else round(load.others, 3),
        })  # fmt: skip
    return {**min(rows, key=lambda row: row["waited"]), "attempts": len(rows)}


def _delays() -> dict[str, float] | None:
    """Seconds that each thread of this process has waited for a processor since it began (Linux)."""
    delays = {}
    for thread in Path("/proc/self/task").glob("*"):
        try:
            delays[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # the thread has just ended, or the kernel does not count
            continue
    return delays or None


def _machine() -> tuple[float, float] | None:
    """Seconds that all processors together have worked, and that the host has stolen from them (Linux)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, softirq, steal, *_ = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
    except (OSError, ValueError):
        return None
    return user + nice + system + irq + softirq, steal
