"""`specdecpp train`: the stages in order. Each knows what it has done already and goes on from there."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from hf_specdecpp.files import UNFINISHED
from hf_specdecpp.training import card, models
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import stage as distillation
from hf_specdecpp.training.evaluation import calibration
from hf_specdecpp.training.evaluation import stage as evaluation
from hf_specdecpp.training.head import stage as head_fitting
from hf_specdecpp.training.rollouts import stage as rollouts
from hf_specdecpp.training.trainers import check_trackers, process_state

STAGES = {
    "rollouts": rollouts.run,
    "distill": distillation.run,
    "head": head_fitting.run,
    "calibrate": calibration.run,
    "eval": evaluation.run,
    "card": card.run,
}

# Quick stages that write one result: with several processes, the main one does them.
ON_MAIN_PROCESS = ("calibrate", "eval", "card")


def train(config: TrainingConfig, stages: Sequence[str] | None = None) -> None:
    """Run a training run, or some of its stages.

    Args:
        config: the run.
        stages: some of `STAGES`; all by default. They run in the order of `STAGES`.

    Raises:
        ValueError: a setting, a model, a tracker or a stage is unknown or missing, or a stage cannot run on what the
            earlier ones left.
    """
    config.find_ready_made()
    config.validate()
    unknown = sorted(set(stages or ()) - set(STAGES))
    if unknown:
        raise ValueError(f"Unknown stage {unknown[0]!r}. The stages are {', '.join(STAGES)}.")
    check_trackers(config.report_to)
    models.check(config)
    state = process_state()
    if state.is_main_process:
        for unfinished in config.work.glob(f"*/**/{UNFINISHED}"):  # of a run that was killed while it wrote
            unfinished.unlink()
    state.wait_for_everyone()
    console = Console(stderr=True, highlight=False, quiet=not state.is_main_process)
    for name, run in STAGES.items():
        if stages is not None and name not in stages:
            continue
        console.print(f"[bold]{name}[/]")
        begin = time.perf_counter()
        if state.is_main_process or name not in ON_MAIN_PROCESS:
            run(config)
        state.wait_for_everyone()
        console.print(f"[dim]{name}: {time.perf_counter() - begin:.0f} s[/]")
