"""Stage `eval`: the head, the draft's own probability and fixed lengths on the same held-out chains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.stopping import FixedLength, StoppingRule
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import MODES, DraftProbability
from hf_specdecpp.estimation.metrics import auc, reliability
from hf_specdecpp.figures import COLOURS, MARKERS, new_figure, ratio_of_sums, save
from hf_specdecpp.generation.setup import make_rule
from hf_specdecpp.provenance import device_name
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training import chains, features
from hf_specdecpp.training.calibration import calibration_half, quality
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.models import Trained
from hf_specdecpp.training.rollouts import sets_to_evaluate
from hf_specdecpp.training.trainers import save_json

FOLDER, REPORT = "evaluation", "evaluation.json"
LENGTHS = range(1, 15)  # fixed lengths
THRESHOLDS = [i / 40 for i in range(1, 40)] + [0.98, 0.99, 0.995]
# A draft token's price in target passes, for naming the best fixed length: that of the paper's pair of models.
COST_RATIO = 0.2
# Who judges for the threshold rule, and which signal that is.
JUDGES = {"head": "head", "draft probability": "q"}


def run(config: TrainingConfig) -> dict[str, Any]:
    """Evaluate the calibrated head on held-out prompts that calibration did not use and on every test set, with
    pictures; `ValueError` if there is no head, or there are no rollouts to evaluate on."""
    folder = config.work / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    made = Trained.load(config)
    sets = {
        split: {f"{each:g}": _evaluate(made, split, config.sampling(each)) for each in config.rollouts.temperatures}
        for split in ("heldout", *sets_to_evaluate(config))
    }
    target = made.target
    measured_on = {"device": device_name(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
    report = {"cost_ratio": COST_RATIO, **measured_on, "acceptance_by_rank": acceptance_by_rank(made), "sets": sets}
    save_json(report, folder / REPORT)
    return report


def acceptance_by_rank(made: Trained) -> dict[str, list[float]]:
    """How often each of a head's siblings is accepted on held-out answers, by mode; static trees are shaped for it."""
    if made.config.head.inputs != "before":
        return {}
    texts = features.build(made, "heldout")
    rows: dict[str, list[Tensor]] = {}
    for text in map(texts.__getitem__, range(len(texts))):
        mode = MODES[bool(text["scalars"][0, 0, -1])]
        rows.setdefault(mode, []).append(text["mask"] * text["label"])
    return {mode: torch.cat(accepted).mean(0).tolist() for mode, accepted in rows.items()}


def _evaluate(made: Trained, split: str, sampling: Sampling) -> dict[str, Any]:
    """One set at one temperature: report and pictures."""
    rows = chains.record(made, split, sampling)
    if split == "heldout":
        measuring = ~calibration_half(made, sampling, rows["text"])
        rows = _at(rows, measuring)
    estimates = all_estimates(made, rows, sampling.greedy)
    report, curves = assess(rows, estimates, made.head)
    sources = list(made.texts(split, sampling)["source"])
    report["sources"] = {
        source: assess(_at(rows, here), _at(estimates, here), made.head)[0]
        for source, here in _by_source(rows["text"], sources)
    }
    where, name = f"{split}, temperature {sampling.temperature:g}", f"{split}-{sampling.temperature:g}.png"
    folder = made.config.work / FOLDER
    plot_curves(curves, folder / f"curve-{name}", f"Where to stop drafting ({where})")
    plot_reliability(estimates, rows["label"], folder / f"reliability-{name}", f"Reliability ({where})")
    return report


def all_estimates(made: Trained, rows: dict[str, Tensor], greedy: bool) -> dict[str, Tensor]:
    """Acceptance probabilities `[n]` by the head and by the draft itself, in (0, 1)."""
    head = made.head.cpu()
    log_odds = chains.head_estimates(head, rows, made.drafter)
    if (calibration := head.calibration.get(MODES[greedy])) is not None:
        log_odds = calibration.apply(log_odds, rows["index"])
    estimates = {"head": log_odds.sigmoid(), "draft probability": rows["scalars"][:, 0].exp()}
    return {name: estimate.double().clamp(1e-6, 1.0 - 1e-6) for name, estimate in estimates.items()}


def assess(
    rows: dict[str, Tensor], estimates: dict[str, Tensor], head: AcceptanceHead
) -> tuple[dict[str, Any], dict[str, list[Outcome]]]:
    """Everything that is measured on one set of chains, and the curves as they are plotted."""
    label, index = rows["label"].double(), rows["index"]
    recorded = list(recorded_chains(rows, estimates, head.inputs))
    curves = rule_curves(recorded)
    judged = {name: {"auc": auc(e, label), **quality(e, label, index)} for name, e in estimates.items()}
    report = {
        "texts": len(rows["text"].unique()),
        "chains": len(recorded),
        "candidates": len(label),
        "mean_acceptance": float(label.mean()),
        "interval": acceptance_interval(label, rows["text"]),
        "estimators": judged,
        "equal_verification": equal_verification(curves),
        "curves": {name: [asdict(point) for point in points] for name, points in curves.items()},
    }
    return report, curves


def acceptance_interval(label: Tensor, text: Tensor) -> list[float] | None:
    """The 95 % bootstrap interval over texts of the mean of `label`, both `[n]`; `None` of fewer than two texts."""
    _, of_text = text.unique(return_inverse=True)
    sums, counts = (of_text.bincount(weights) for weights in (label.double(), torch.ones_like(label).double()))
    return list(ratio_of_sums(sums.tolist(), counts.tolist())[1:]) if len(sums) > 1 else None


def recorded_chains(rows: dict[str, Tensor], estimates: Mapping[str, Tensor], inputs: str) -> Iterator[RecordedChain]:
    """The rows, a chain at a time, with what each rule reads after each candidate."""
    begins = (rows["index"] == 0).nonzero()[:, 0].tolist()
    columns = {"head": estimates["head"], "q": rows["scalars"][:, 0].exp()}
    lists = {name: values.tolist() for name, values in columns.items()}
    labels = rows["label"].tolist()
    for begin, end in zip(begins, [*begins[1:], len(labels)], strict=True):
        signals: dict[str, list[float | None]] = {name: values[begin:end] for name, values in lists.items()}
        if inputs == "after":  # the verdict on a candidate comes with the next one
            signals["head"] = [None, *signals["head"][:-1]]
        yield RecordedChain(labels[begin:end], signals)


def rule_curves(recorded: list[RecordedChain]) -> dict[str, list[Outcome]]:
    """The threshold rule over its thresholds by each judge, and fixed lengths."""

    def threshold(setting: float) -> StoppingRule:
        config = SpeculationConfig(rule="threshold", threshold=setting, max_tokens=chains.MAX_TOKENS)
        return make_rule(config, DraftProbability())

    curves = {name: curve(threshold, THRESHOLDS, recorded, signal) for name, signal in JUDGES.items()}
    curves["fixed"] = curve(lambda length: FixedLength(int(length)), LENGTHS, recorded, "q")
    return curves


def equal_verification(curves: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Discards of every rule at the verification rate of each fixed length; `None` where its curve does not reach."""
    table = []
    for point in curves["fixed"]:
        at = {name: discards_at(points, point.verification_rate) for name, points in curves.items() if name != "fixed"}
        fewer = {
            name: 1.0 - rate / point.discard_rate if rate is not None and point.discard_rate > 0 else None
            for name, rate in at.items()
        }
        table.append({**asdict(point), "length": int(point.setting), "discard_rate_of": at, "fewer_discards": fewer})
    best = min(range(len(table)), key=lambda i: time_per_token(curves["fixed"][i], COST_RATIO))
    return {"best_fixed_length": table[best]["length"], "at_best": table[best], "all": table}


def time_per_token(point: Outcome, cost_ratio: float) -> float:
    """Time of a generated token in target passes (SpecDec++, equation 2.1 and N + N_discarded = N_draft + N_target)."""
    return cost_ratio * (1.0 + point.discard_rate - point.verification_rate) + point.verification_rate


def _by_source(text: Tensor, sources: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Which of the candidates (`[n]`) are from each source, where there are several."""
    of_row = [sources[index] for index in text.tolist()]
    names = sorted(set(of_row))
    for name in names if len(names) > 1 else []:
        yield name, torch.tensor([source == name for source in of_row])


def _at(columns: dict[str, Tensor], here: Tensor) -> dict[str, Tensor]:
    return {name: values[here] for name, values in columns.items()}


def plot_curves(curves: Mapping[str, Sequence[Outcome]], path: Path, title: str) -> None:
    """Discard rate over verification rate, a line a rule. Down and left is better."""
    figure, axes = new_figure(7, 5)
    for (name, points), colour, marker in zip(curves.items(), COLOURS, MARKERS, strict=False):
        x, y = [point.verification_rate for point in points], [point.discard_rate for point in points]
        width = 2.2 if name == "head" else 1.2
        axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=width, label=name)
    axes.set(xlabel="verification rate: target passes per generated token", title=title, ylim=(0, None))
    axes.set_ylabel("discard rate: discarded candidates per generated token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="stopping rule (down and left is better)")
    save(figure, path)


def plot_reliability(estimates: Mapping[str, Tensor], label: Tensor, path: Path, title: str) -> None:
    """Mean acceptance over mean estimate in ten bins, an estimator a line. On the diagonal is calibrated."""
    figure, axes = new_figure(5.5, 5.5)
    axes.plot([0, 1], [0, 1], color="#999999", linestyle="--", linewidth=1, label="calibrated")
    for (name, estimate), colour, marker in zip(estimates.items(), COLOURS, MARKERS, strict=False):
        _, predicted, observed, _ = reliability(estimate, label, bins=10)
        axes.plot(predicted, observed, color=colour, marker=marker, markersize=5, label=name)
    axes.set(xlabel="estimated chance of acceptance", ylabel="true chance of acceptance", title=title)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)


# Rules ----------------------------------------------------------------------------------------------------------------


@dataclass
class RecordedChain:
    """Chances that the candidates of a chain are accepted, one after another, and what each rule reads after them."""

    labels: list[float]
    signals: dict[str, list[float | None]]


@dataclass
class Outcome:
    """What a rule does: discarded candidates and target passes, each per generated token; candidates a round."""

    setting: float
    discard_rate: float
    verification_rate: float
    mean_length: float


def stop_length(rule: StoppingRule, signals: Sequence[float | None]) -> int:
    """How many candidates `draft_chain` would have submitted under `rule`."""
    rule.begin_round()
    limit = min(len(signals), rule.max_tokens)
    for length in range(1, limit):
        if rule.stops(signals[length - 1]) and length >= rule.min_tokens:
            return length
    return limit


def outcome(rule: StoppingRule, chains: Iterable[RecordedChain], signal: str, setting: float) -> Outcome:
    """Expected discard and verification rate of a rule, which learns nothing, over chains, each of them one round.

    Exact given the drafted tokens: candidate k is accepted with the product of the labels up to k, and a round
    generates its accepted candidates and one more token, also where the text would have ended. `signal`: which of the
    chains' signals the rule reads; `setting`: the threshold or length, for the record.
    """
    drafted, accepted, rounds = 0, 0.0, 0
    for chain in chains:
        length = stop_length(rule, chain.signals[signal])
        drafted, accepted, rounds = drafted + length, accepted + expected_accepted(chain.labels[:length]), rounds + 1
    generated = accepted + rounds
    return Outcome(setting, (drafted - accepted) / generated, rounds / generated, drafted / rounds)


def curve(
    maker: Callable[[float], StoppingRule],
    settings: Iterable[float],
    chains: Collection[RecordedChain],
    signal: str,
) -> list[Outcome]:
    """`outcome` of a rule over its thresholds (or lengths), of each of which `maker` makes it."""
    return [outcome(maker(setting), chains, signal, setting) for setting in settings]


def expected_accepted(labels: Sequence[float]) -> float:
    """Σ_k Π_{i <= k} label_i."""
    survival, total = 1.0, 0.0
    for label in labels:
        survival *= label
        total += survival
    return total


def discards_at(points: Sequence[Outcome], verification_rate: float) -> float | None:
    """Discard rate of a curve at a verification rate, interpolated: the least, or `None` where it does not reach."""
    found = []
    for pair in zip(points, points[1:], strict=False):
        low, high = sorted(pair, key=lambda point: (point.verification_rate, point.discard_rate))
        if low.verification_rate <= verification_rate <= high.verification_rate:
            width = high.verification_rate - low.verification_rate
            share = (verification_rate - low.verification_rate) / width if width else 0.0
            found.append(low.discard_rate + share * (high.discard_rate - low.discard_rate))
    return min(found, default=None)
