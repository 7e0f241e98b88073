"""Times the passes of a target, whoever runs them; and notices when the machine was busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from typing_extensions import Self

from hf_specdecpp.models.causal_lm import CausalLM

# Share of a run that its threads may wait for a processor before it counts as disturbed.
MOST_WAITING = 0.05

Generated = TypeVar("Generated")


class PassClock:
    """Watches the passes of `target` while it is entered (`with`), by hooks: for contestants that count nothing.

    Attributes:
        passes: of each pass how many tokens of a row it read, and its seconds; on a GPU those of its launches, since
            waiting for it would slow the contestant down.
    """

    def __init__(self, target: CausalLM) -> None:
        self.target = target
        self.passes: list[tuple[int, float]] = []

    def __enter__(self) -> Self:
        before = self.target.register_forward_pre_hook(self._before)
        self.hooks = before, self.target.register_forward_hook(self._after, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _before(self, module: Any, args: Any) -> None:  # noqa: ARG002
        self._begin = time.perf_counter()

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG002
        self.passes.append((kwargs["input_ids"].shape[1], time.perf_counter() - self._begin))


class Disturbance:
    """What else the machine did while this was entered (`with`).

    Attributes:
        seconds: wall time.
        waited: share of it that a thread of ours was ready to run and did not get a processor, time that the host took
            from a virtual machine included. Where the system does not tell: the share in which a single thread did not
            run, or 0 with several.
        others: processors that other processes kept busy on average; `None` where the system does not tell.
    """

    others: float | None = None

    def __enter__(self) -> Self:
        self._begin = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        (wall, own, delays, machine), (wall0, own0, delays0, machine0) = self._read(), self._begin
        self.seconds, self.waited = wall - wall0, 0.0
        if delays is not None and delays0 is not None:
            self.waited = max(delay - delays0.get(thread, 0.0) for thread, delay in delays.items()) / self.seconds
        elif torch.get_num_threads() == 1:
            self.waited = max(1.0 - (own - own0) / self.seconds, 0.0)
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
