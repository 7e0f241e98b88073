"""Stage `eval`: compare the head with the draft's own probability and fixed lengths, on the same held-out chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.estimation.acceptance_head import Calibration
from hf_specdecpp.estimation.estimators import LAGS, MODES
from hf_specdecpp.estimation.metrics import SMALLEST, auc
from hf_specdecpp.figures import ratio_of_sums
from hf_specdecpp.files import read_json
from hf_specdecpp.provenance import device_name
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.throughput.known_costs import Rounds
from hf_specdecpp.training import features, recorded_chains
from hf_specdecpp.training.calibration import calibration_half, quality, survival
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.models import CALIBRATION, EVALUATION_FOLDER, HEAD, Trained
from hf_specdecpp.training.rollouts import sets_to_evaluate
from hf_specdecpp.training.trainers import save_json

REPORT = "evaluation.json"
LENGTHS = range(1, 15)  # fixed lengths
THRESHOLDS = [i / 40 for i in range(1, 40)] + [0.98, 0.99, 0.995]


def run(config: TrainingConfig) -> dict[str, Any]:
    """Evaluate the calibrated head on the held-out prompts that calibration did not use, and on every test set. Returns
    the report, which is also written to `work/evaluation`. `ValueError` without a calibrated head or rollouts."""
    if not (config.work / HEAD / CALIBRATION).is_file():
        raise ValueError(f"{config.work / HEAD / CALIBRATION} is missing: run 'head' and 'calibrate' before 'eval'.")
    made = Trained.load(config)
    sets = {
        split: {f"{each:g}": _evaluate(made, split, config.sampling(each)) for each in config.rollouts.temperatures}
        for split in ("heldout", *sets_to_evaluate(config))
    }
    where = {"device": device_name(made.target.device), "dtype": str(made.target.dtype).removeprefix("torch.")}
    report = {**where, "acceptance_by_rank": acceptance_by_rank(made), "sets": sets}
    save_json(report, config.work / EVALUATION_FOLDER / REPORT)
    return report


def acceptance_by_rank(made: Trained) -> dict[str, list[float]]:
    """Return by mode (`"sampled"`, `"greedy"`) the probability that a node's first, second, ... child is the accepted
    one, on held-out answers, for static trees (`best_shape`); empty for a head without siblings."""
    if made.config.head.inputs != "before":
        return {}
    texts = features.build(made, "heldout")
    rows: dict[str, list[Tensor]] = {}
    for text in map(texts.__getitem__, range(len(texts))):
        mode = MODES[bool(text["scalars"][0, 0, -1])]
        rows.setdefault(mode, []).append(text["mask"] * text["label"])
    return {mode: torch.cat(accepted).mean(0).tolist() for mode, accepted in rows.items()}


def _evaluate(made: Trained, split: str, sampling: Sampling) -> dict[str, Any]:
    """The report of one set of prompts at one temperature."""
    rows = recorded_chains.record(made, split, sampling)
    if split == "heldout":
        measuring = ~calibration_half(made, sampling, rows["text"])
        rows = {name: values[measuring] for name, values in rows.items()}
    estimates = all_estimates(made, rows, sampling)
    label, index = rows["label"].double(), rows["index"]
    costs = Rounds(made.target, made.drafter, made.head, recorded_chains.MAX_TOKENS).assumed()
    curves = rule_curves(*survivals(rows, estimates, made.head.inputs), costs.round_seconds(recorded_chains.MAX_TOKENS))
    return {
        "texts": len(rows["text"].unique()),
        "chains": int((index == 0).sum()),
        "candidates": len(label),
        "mean_acceptance": float(label.mean()),
        "interval": acceptance_interval(label, rows["text"]),
        "estimators": {name: {"auc": auc(e, label), **quality(e, label, index)} for name, e in estimates.items()},
        "equal_verification": equal_verification(curves),
        "speeds": {name: max(point.speed for point in points) for name, points in curves.items()},
        "curves": {name: [asdict(point) for point in points] for name, points in curves.items()},
    }


def all_estimates(made: Trained, rows: dict[str, Tensor], sampling: Sampling) -> dict[str, Tensor]:
    """Return the estimates `[n]`, in (0, 1), by estimator: the calibrated head, the confidence head that the draft was
    published with, if any, and the draft's q, without and with a calibration like the head's, for n recorded `rows`."""
    heads = [("head", made.head), ("published head", made.assistant.published_head)]
    log_odds = {name: recorded_chains.head_estimates(head.cpu(), rows, made.drafter) for name, head in heads if head}
    greedy, index, of_q = sampling.greedy, rows["index"], rows["scalars"][:, 0].exp().logit(SMALLEST)
    estimates = {name: head.probability(log_odds[name], index, greedy) for name, head in heads if head}
    fitted = read_json(made.config.work / HEAD / CALIBRATION)[f"{sampling.temperature:g}"]["q"]
    calibrated = Calibration(**fitted).apply(of_q, index).sigmoid()
    estimates |= {"draft probability": of_q.sigmoid(), "draft probability, calibrated": calibrated}
    return {name: estimate.double().clamp(1e-6, 1.0 - 1e-6) for name, estimate in estimates.items()}


def acceptance_interval(label: Tensor, text: Tensor) -> list[float] | None:
    """The 95 % bootstrap interval of the mean of `label` `[n]`, resampled by `text` `[n]`; `None` for a single text."""
    _, of_text = text.unique(return_inverse=True)
    sums, counts = (of_text.bincount(weights) for weights in (label.double(), torch.ones_like(label).double()))
    return list(ratio_of_sums(sums.tolist(), counts.tolist())[1:]) if len(sums) > 1 else None


def survivals(
    rows: dict[str, Tensor], estimates: Mapping[str, Tensor], inputs: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the probability that a candidate and all earlier ones of its chain are accepted, `[chains, longest]`, NaN
    after a chain's end: the true one, and by estimator the estimate known before the next candidate is drafted, which
    excludes the candidate itself if a head's `inputs` are "after", and includes the next one if "path"."""
    lags = {"head": LAGS[inputs], "published head": LAGS["path"]}
    judged = {name: survival(each, rows["index"]) for name, each in estimates.items()}
    judged = {name: functional.pad(each, (lag := lags.get(name, 0), -lag), value=1.0) for name, each in judged.items()}
    return survival(rows["label"], rows["index"]), judged


def rule_curves(true: Tensor, judged: Mapping[str, Tensor], seconds: Any) -> dict[str, list[Outcome]]:
    """Return the `outcome` of each of `THRESHOLDS`, by estimator in `judged`, and of each of `LENGTHS` (`"fixed"`)."""
    whole = (~true.isnan()).sum(1)
    curves = {
        name: [outcome(torch.minimum(stop_lengths(each, h), whole), true, h, seconds) for h in THRESHOLDS]
        for name, each in judged.items()
    }
    curves["fixed"] = [outcome(whole.clamp_max(length), true, length, seconds) for length in LENGTHS]
    return curves


def equal_verification(curves: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """`at_best`: the outcome of the fastest fixed length; by estimator the discard rate of its threshold rule at the
    same verification rate, and the share of discards that the rule saves (`None` outside the rule's curve)."""
    best = max(curves["fixed"], key=lambda point: point.speed)
    at = {name: discards_at(points, best.verification_rate) for name, points in curves.items() if name != "fixed"}
    fewer = {
        name: 1.0 - rate / best.discard_rate if rate is not None and best.discard_rate > 0 else None
        for name, rate in at.items()
    }
    return {"at_best": {**asdict(best), "length": int(best.setting), "discard_rate_of": at, "fewer_discards": fewer}}


# Rules ----------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Expected results of a stopping rule with one setting."""

    setting: float  # the threshold, or the fixed length
    discard_rate: float  # discarded candidates per generated token
    verification_rate: float  # target passes per generated token
    mean_length: float  # candidates per round
    speed: float  # generated tokens per unit of the `seconds` of `outcome`: relative to plain generation in reports


def stop_lengths(judged: Tensor, threshold: float) -> Tensor:
    """Return the number of candidates `[chains]` after which the probability of a rejection exceeds the threshold, as
    in `drafting.chain.Threshold`; larger than the chain if the rule does not stop. `judged`: survival estimates."""
    return (1.0 - judged <= threshold).long().cumprod(1).sum(1) + 1


def outcome(lengths: Tensor, true: Tensor, setting: float, seconds: Any) -> Outcome:
    """Expected results if the first `lengths` `[chains]` candidates of the chains are drafted, each chain in a round.

    A candidate is accepted with probability `true` `[chains, longest]` (`survivals`), and a round generates its
    accepted candidates and one more token. `seconds` `[longest + 1]`: cost of a round by number of candidates."""
    accepted = float(true.nan_to_num().cumsum(1).gather(1, lengths[:, None] - 1).sum())
    drafted, rounds = int(lengths.sum()), len(lengths)
    generated, spent = accepted + rounds, float(seconds[lengths.numpy()].sum())
    return Outcome(setting, (drafted - accepted) / generated, rounds / generated, drafted / rounds, generated / spent)


def discards_at(points: Sequence[Outcome], verification_rate: float) -> float | None:
    """Return the lowest discard rate of a curve at a verification rate, interpolated; `None` outside the curve."""
    found = []
    for pair in zip(points, points[1:], strict=False):
        low, high = sorted(pair, key=lambda point: (point.verification_rate, point.discard_rate))
        if low.verification_rate <= verification_rate <= high.verification_rate:
            width = high.verification_rate - low.verification_rate
            share = (verification_rate - low.verification_rate) / width if width else 0.0
            found.append(low.discard_rate + share * (high.discard_rate - low.discard_rate))
    return min(found, default=None)
