"""The evaluation stage on a tiny run, and its rules against the code that generation uses."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.models import VOCAB_SIZE
from support.toy_rounds import draft_chain
from support.training_files import evaluated, training_run
from torch import Tensor

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.session import DraftSession
from hf_specdecpp.estimation.estimators import DraftProbability, DraftStep
from hf_specdecpp.generation.setup import make_rule
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training import chains, evaluation
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.evaluation import (
    Outcome,
    equal_verification,
    outcome,
    stop_lengths,
    survivals,
    time_per_token,
)
from hf_specdecpp.training.models import Trained


@pytest.fixture(scope="module", params=["before", "after"])
def fitted(request: pytest.FixtureRequest) -> TrainingConfig:
    return evaluated(request.param)


@pytest.fixture(scope="module")
def report(fitted: TrainingConfig) -> Any:
    return json.loads((fitted.work / "evaluation" / "evaluation.json").read_text())


def test_the_report(fitted: Any, report: Any) -> None:
    folder = fitted.work / "evaluation"
    assert (report["dtype"], report["device"].split()[0]) == ("float32", "CPU")
    temperatures_of = {name: list(temperatures) for name, temperatures in report["sets"].items()}
    assert temperatures_of == dict.fromkeys(("heldout", "sums"), ["1", "0"])
    for name, temperatures in report["sets"].items():
        for temperature, part in temperatures.items():
            assert set(part["estimators"]) == {"head", "draft probability"}
            assert all(0 <= e["ece"] <= 1 and 0 <= e["auc"] <= 1 for e in part["estimators"].values())
            assert set(part["curves"]) == {"head", "draft probability", "fixed"}
            assert set(part["equal_verification"]["at_best"]["fewer_discards"]) == set(part["curves"]) - {"fixed"}
            if fitted.head.inputs == "before":
                with Image.open(folder / f"curve-{name}-{temperature}.png") as image:
                    assert min(image.size) > 500


def test_only_heldout_prompts_that_the_calibration_did_not_use(report: Any) -> None:
    """One of three held-out prompts, two samples of it or one greedy answer; of a test set everything."""
    texts = {name: [part["texts"] for part in each.values()] for name, each in report["sets"].items()}
    assert texts == {"heldout": [2, 1], "sums": [4, 2]}


def test_acceptance_by_rank(fitted: Any, report: Any) -> None:
    """What the rows of the features say, siblings that were hardly ever tested counting as little as they do."""
    ranks = report["acceptance_by_rank"]
    if fitted.head.inputs == "after":
        assert ranks == {}, "this head knows nothing of siblings"
        return
    assert set(ranks) == {"sampled", "greedy"}
    for rates in ranks.values():
        assert len(rates) == fitted.head.siblings
        assert all(0.0 <= rate <= 1.0 for rate in rates)
        assert sum(rates) <= 1.0 + 1e-6, "at most one sibling is the accepted one"


def test_each_mode_has_its_calibration(fitted: Any) -> None:
    made = Trained.load(fitted)
    for temperature, mode in ((1.0, "sampled"), (0.0, "greedy")):
        rows = chains.record(made, "sums", Sampling(temperature, 0))
        raw = chains.head_estimates(made.head, rows, made.drafter)
        ours = evaluation.all_estimates(made, rows, temperature == 0.0)["head"]
        expected = made.head.calibration[mode].apply(raw, rows["index"]).sigmoid().double()
        torch.testing.assert_close(ours, expected.clamp(1e-6, 1 - 1e-6))


@pytest.mark.every(3)
@pytest.mark.parametrize(("judge", "threshold"), [("head", 0.95), ("draft probability", 0.99)])
def test_chains_stop_where_generation_would(fitted: Any, judge: str, threshold: float) -> None:
    """Greedy drafts of both: same tokens, so the lengths must agree."""
    made = Trained.load(fitted)
    estimator = made.head if judge == "head" else DraftProbability()
    config = SpeculationConfig(rule="threshold", threshold=threshold, max_tokens=chains.MAX_TOKENS)
    texts, found = made.texts("train", Sampling()), set()
    recorder = chains.Recorder(made.assistant, made.target, Sampling(0.0), fitted.head.inputs)
    for row in range(6):
        ids, starts = texts[row]["input_ids"], [6, 12, 20]
        rows = recorder.of_text(ids, starts, torch.Generator())
        rows["text"] = torch.zeros_like(rows["start"])
        estimates = evaluation.all_estimates(made, rows, greedy=True)
        true, judged = survivals(rows, estimates, fitted.head.inputs)
        for start, length in zip(starts, lengths(threshold, true, judged[judge]).tolist(), strict=True):
            assert length == live_length(made.drafter, torch.tensor([ids[:start]]), make_rule(config, estimator))
            found.add(length)
    assert len(found) > 1


@torch.inference_mode()
def live_length(drafter: Any, prefix: Tensor, rule: Any) -> int:
    session = DraftSession(drafter, VOCAB_SIZE)
    session.begin_round(prefix, 0)

    def step(candidates: list[Tensor]) -> DraftStep:
        return DraftStep(len(candidates), *session.step(candidates), session.embed, greedy=True)

    return len(draft_chain(step, rule, None, chains.MAX_TOKENS))


def test_the_interval_of_the_acceptance_is_over_texts(report: Any) -> None:
    label = torch.tensor([0.0, 1.0, 0.0, 1.0] + 400 * [0.2] + 400 * [0.8])
    text = torch.tensor([7, 7, 9, 9] + 400 * [11] + 400 * [12])
    low, high = evaluation.acceptance_interval(label, text) or (0.0, 0.0)
    assert low < 0.3, "four texts, not eight hundred candidates"
    assert high > 0.7
    assert evaluation.acceptance_interval(label[:2], text[:2]) is None, "of one text nobody knows"
    for temperatures in report["sets"].values():
        for part in temperatures.values():
            if part["interval"] is not None:
                assert part["interval"][0] <= part["mean_acceptance"] <= part["interval"][1]
            assert (part["interval"] is None) == (part["texts"] == 1)


def test_evaluation_needs_a_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run the stage 'head'"):
        evaluation.run(training_run(tmp_path, num_texts=2))


def test_discards_at_equal_verification_rate() -> None:
    fixed = [Outcome(1, 0.2, 0.6, 1.0), Outcome(2, 0.6, 0.4, 3.0), Outcome(3, 1.2, 0.38, 4.8)]
    head = [Outcome(0.1, 0.1, 0.6, 0.8), Outcome(0.2, 0.3, 0.4, 2.2)]
    found = [equal_verification({"head": head, "fixed": points})["at_best"] for points in (fixed, fixed[2:])]
    assert found[0]["fewer_discards"]["head"] == pytest.approx(0.5)
    assert found[1]["fewer_discards"]["head"] is None
    assert time_per_token(fixed[1], 0.2) == pytest.approx(0.2 * (1 + 0.6 - 0.4) + 0.4)
    assert found[0]["length"] == 2


# Expected discards of stopping rules against simulated coins. ---------------------------------------------------------


def recorded(seed: int, count: int = 30) -> tuple[list[list[float]], Tensor, Tensor]:
    """Labels of chains, and what `survivals` makes of them and of estimates."""
    chance, labels, estimates = random.Random(seed), [], []
    for _ in range(count):
        labels.append([chance.random() for _ in range(chance.randint(1, 20))])
        estimates += [min(max(y + chance.gauss(0, 0.2), 0.01), 0.99) for y in labels[-1]]
    index = torch.tensor([place for chain in labels for place in range(len(chain))])
    rows = {"index": index, "label": torch.tensor(sum(labels, []), dtype=torch.float64)}
    true, judged = survivals(
        {**rows, "scalars": torch.zeros(len(index), 6)}, {"head": torch.tensor(estimates)}, "before"
    )
    return labels, true, judged["head"]


def lengths(rule: float, true: Tensor, judged: Tensor) -> Tensor:
    """Of a fixed length, or under a threshold, which is below 1."""
    whole = (~true.isnan()).sum(1)
    return whole.clamp_max(int(rule)) if rule >= 1 else torch.minimum(stop_lengths(judged, rule), whole)


def simulated(lengths: list[int], labels: list[list[float]], coins: int) -> tuple[float, float]:
    chance = random.Random(0)
    discarded = generated = passes = 0
    for length, chain in zip(lengths, labels, strict=True):
        for _ in range(coins):
            accepted = 0
            while accepted < length and chance.random() < chain[accepted]:
                accepted += 1
            discarded, generated, passes = discarded + length - accepted, generated + accepted + 1, passes + 1
    return discarded / generated, passes / generated


@pytest.mark.parametrize("rule", [4, 0.6])
def test_expected_rates_are_what_coins_give(rule: float) -> None:
    labels, true, judged = recorded(0)
    drafted = lengths(rule, true, judged)
    exact = outcome(drafted, true, 0.0)
    discard_rate, verification_rate = simulated(drafted.tolist(), labels, coins=3000)
    assert exact.discard_rate == pytest.approx(discard_rate, rel=0.02)  # about eight standard deviations
    assert exact.verification_rate == pytest.approx(verification_rate, rel=0.02)
    assert exact.mean_length == pytest.approx(float(drafted.double().mean()))


@pytest.mark.parametrize(("inputs", "estimates"), [
    ("before", [0.9, 0.9, 0.5, 0.9]), ("after", [0.9, 0.5, 0.9, 0.9]),
])  # fmt: skip
def test_a_threshold_counts_the_candidate_that_stops(inputs: str, estimates: list[float]) -> None:
    """The verdict of a head that judges "after" comes with the next candidate, so one more is drafted."""
    rows = {"index": torch.arange(4), "label": torch.ones(4), "scalars": torch.zeros(4, 6)}
    true, judged = survivals(rows, {"head": torch.tensor(estimates)}, inputs)
    assert lengths(0.5, true, judged["head"]).tolist() == [3]
    assert [lengths(k, true, true).tolist() for k in (2, 9)] == [[2], [4]]
