"""What a benchmark is told: its options, on the command line (`cli_options`) and in docs/settings.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_specdecpp.cli_options import check_mtp, parse_layers, parse_names, parse_sizes, parse_temperatures


def _parsed(default: Any, parse: Callable[[str], Any]) -> Any:
    """A field that the command line gives as text."""
    return field(default_factory=lambda: default, metadata={"parse": parse})


def _at_least_one(default: int | None) -> Any:
    return field(default=default, metadata={"min": 1})


@dataclass
class BenchmarkConfig:
    """A benchmark.

    Args:
        target: Hub id or folder of the model to speed up.
        assistant: Hub id or folder of its assistant; by default the target's own multi-token layers, or lookups.
        layers: draft with an untrained early exit: 4 for the first four layers, or indices such as 0,1,2,29.
        lookup: no draft: candidates are looked up in the text.
        mtp: draft with the target's own multi-token layers.
        draft: folder of the draft that the assistant's repository names.
        data: prompts: JSON Lines files, each a set; may be repeated; a few of ours by default.
        max_prompts (prompts): the most taken of each set, chosen by `seed`; all by default.
        max_new_tokens (tokens): the longest answer.
        temperatures: every prompt is answered at each of them, such as 0,1; 0 is greedy.
        contestants: only these: names or patterns such as `fixed*,dyspec*`.
        output: folder of the results; a killed run goes on there.
        dtype: dtype of the target; `"auto"` is what it is stored in.
        device: device of the target; by default an accelerator if there is one.
        threads (threads): number of torch's threads.
        seed: seed of the choice of prompts and of all draws.
        cpu_products: `"auto"` or `"off"`; by default as the assistant says.
        costs: costs that replays reckon with: `measured`, `paper`, a ratio t_draft / t_target, a JSON file; may be
            repeated.
        rollouts: work folder of `specdecpp train`: replays take the target's answers from there.
        live: time generations.
        replay: compare all rules on recorded texts.
        replay_rounds: count the tokens per target pass of trees and chains along the texts.
        batch_size (prompts): also time several prompts in one generate(): sizes such as 1,4,8.
        draws (records): the number made of each sampled text.
        attempts (generations): the most tries of one that other load disturbs; the quietest is kept.
        quick: take a few contestants, prompts and tokens: one to three minutes with a small model on a CPU.
        card: file for the speeds as a model card shows them.
    """

    target: str
    assistant: str | None = None
    layers: int | list[int] | None = _parsed(None, parse_layers)
    lookup: bool = False
    mtp: bool = False
    draft: str | None = None
    data: list[str] = field(default_factory=list)
    max_prompts: int | None = _at_least_one(None)
    max_new_tokens: int = _at_least_one(128)
    temperatures: list[float] = _parsed([0.0, 1.0], parse_temperatures)
    contestants: list[str] = _parsed([], parse_names)
    output: Path = Path("bench")
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = _at_least_one(None)
    seed: int = 0
    cpu_products: str | None = None
    costs: list[str] = field(default_factory=lambda: ["measured", "paper"])
    rollouts: Path | None = field(default=None, metadata={"metavar": "WORK_DIR"})
    live: bool = True
    replay: bool = True
    replay_rounds: bool = False
    batch_size: list[int] = _parsed([], parse_sizes)
    draws: int = _at_least_one(1)
    attempts: int = _at_least_one(3)
    quick: bool = False
    card: Path | None = field(default=None, metadata={"metavar": "FILE"})

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "draws", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if any(temperature < 0.0 for temperature in self.temperatures) or not self.temperatures:
            raise ValueError(f"temperatures={self.temperatures} must be numbers of at least 0 (greedy).")
        if any(size < 1 for size in self.batch_size):
            raise ValueError(f"batch_size={self.batch_size} must be numbers of prompts, at least 1.")
        check_mtp(self.mtp, self.assistant)
        if self.lookup and (self.mtp or self.assistant is not None):
            raise ValueError(
                "--lookup takes neither --mtp nor an assistant: with a draft, `lookup`, `lookup + draft` and "
                "`lookup + trees` are among the contestants."
            )
        if self.rollouts is not None and not (self.rollouts / "rollouts").is_dir():
            raise ValueError(
                f"--rollouts {self.rollouts} has no folder `rollouts`. Give the work folder of a `specdecpp train`, "
                "such as my-assistant-work."
            )
