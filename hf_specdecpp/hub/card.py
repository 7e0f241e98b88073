"""The model card of an assistant, rendered from `card_template.md`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.files import Repository
from hf_specdecpp.kinds.known import describe
from hf_specdecpp.provenance import public_name

TEMPLATE = Path(__file__).with_name("card_template.md")
NONE = "–"
THIS_REPO = "THIS_REPO"  # in the card of a repository that is not on the Hub yet


def make_card(
    config: SpecDecPPConfig, head: AcceptanceHead | None, training: dict[str, Any] | None = None
) -> ModelCard:
    """The model card.

    Args:
        config: as the repository stores it.
        head: the acceptance head, or `None`.
        training: what `training.card` knows of the run that made the assistant: `config`, `settings`, `evaluation`,
            `rollouts`, `distillation`, `head_metrics`, `calibration`, `learning_curve`, `baseline`, `speed`,
            `provenance`; of those that were not made, `None`.
    """
    ids = [name for name in (config.target_id, config.draft_id) if name and not Path(name).exists()]
    bases = [Repository.named(name).name for name in ids]
    data = ModelCardData(
        library_name="hf_specdecpp",
        base_model=bases or None,
        base_model_relation="adapter" if config.adapter and bases else None,
        tags=["speculative-decoding", "assisted-generation", "specdecpp"],
        pipeline_tag="text-generation",
        model_name="SpecDec++ assistant" if training else None,
        eval_results=list(_eval_results(training["evaluation"])) if training else None,
    )
    config = copy.deepcopy(config)
    for name in ("target_id", "draft_id"):
        if (model := getattr(config, name)) is not None:
            setattr(config, name, public_name(model))
    shown: dict[str, Any] = {}
    if training is not None:
        baseline = training.get("baseline")
        shown = {
            "tables": [(name, at, report, _rows(report)) for name, at, report in _reports(training["evaluation"])],
            "comparison": _comparison(training["evaluation"], baseline["evaluation"]) if baseline else [],
        }
    shown["draft"] = describe(config)
    return ModelCard.from_template(
        data, template_path=str(TEMPLATE), config=config, head=head, training=training, number=number, **shown
    )


def number(value: float | None, digits: int = 3, percent: bool = False) -> str:
    """For a cell of a table."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{100 * value:.0f} %" if percent else f"{value:,.{digits}f}"


def _reports(evaluation: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each set and temperature with what was measured there."""
    for name, temperatures in evaluation["sets"].items():
        for temperature, report in temperatures.items():
            yield name, temperature, report


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each estimator and rule: how well it judges, and what it discards beside the best fixed length."""
    best = report["equal_verification"]["at_best"]
    for name in dict.fromkeys((*report["estimators"], *best["discard_rate_of"])):
        judged = report["estimators"].get(name, {})
        fewer = best["fewer_discards"].get(name)
        yield (
            f"**{name}**" if name == "head" else name,
            *(number(judged.get(metric)) for metric in ("auc", "ece", "binary_kl")),
            number(best["discard_rate_of"].get(name)),
            number(fewer, percent=True),
        )
    yield (f"fixed length {best['length']}", NONE, NONE, NONE, number(best["discard_rate"]), NONE)


def _comparison(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each set and temperature that both have: our value / theirs."""
    for name, temperature, report in _reports(ours):
        other = theirs["sets"].get(name, {}).get(temperature)
        if other is None:
            continue
        pairs = [(each["mean_acceptance"], *_of_head(each)) for each in (report, other)]
        cells = [[number(value, percent=place == 4) for place, value in enumerate(values)] for values in pairs]
        yield (name, temperature, *(f"{a} / {b}" for a, b in zip(*cells, strict=True)))


def _of_head(report: dict[str, Any]) -> tuple[float | None, ...]:
    judged = report["estimators"]["head"]
    return (
        *(judged[metric] for metric in ("auc", "ece", "binary_kl")),
        report["equal_verification"]["at_best"]["fewer_discards"]["head"],
    )


def _eval_results(evaluation: dict[str, Any]) -> Iterator[EvalResult]:
    """Of each set and temperature the draft's acceptance and the head's row, for the card's model-index."""
    for name, temperature, report in _reports(evaluation):
        measured = {"mean_acceptance": report["mean_acceptance"], **report["estimators"]["head"]}
        for metric in ("mean_acceptance", "auc", "ece", "binary_kl"):
            value = measured[metric]
            if math.isfinite(value):
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type="rollouts",
                    dataset_name=f"answers of the target to {name}, temperature {temperature}",
                    dataset_config=f"{name}, temperature {temperature}",  # without it, the index joins all sets
                    metric_type=metric,
                    metric_value=round(value, 4),
                )
