"""Evaluation and calibration on a tiny run: their rules against the code that generation uses."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.enumeration.toy_rounds import draft_chain
from support.runs.training_files import evaluated, training_run
from support.targets.models import VOCAB_SIZE
from torch import Tensor
from torch.testing import assert_close

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.drafter import DraftSession
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead, Calibration
from hf_specdecpp.estimation.estimators import DraftProbability, DraftStep
from hf_specdecpp.estimation.metrics import ece
from hf_specdecpp.generation.setup import make_rule
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training import calibration, evaluation, recorded_chains
from hf_specdecpp.training import head as head_fitting
from hf_specdecpp.training.calibration import calibrate
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.evaluation import Outcome, equal_verification, outcome, stop_lengths, survivals
from hf_specdecpp.training.models import HEAD_WEIGHTS, Trained, load_head, save_module

JUDGES = {"head", "draft probability", "draft probability, calibrated"}


@pytest.fixture(scope="module", params=["before", pytest.param("after", marks=pytest.mark.slow)])
def fitted(request: pytest.FixtureRequest) -> TrainingConfig:
    return evaluated(request.param)


@pytest.fixture(scope="module")
def report(fitted: TrainingConfig) -> Any:
    return json.loads((fitted.work / "evaluation" / "evaluation.json").read_text())


def test_the_report(report: Any) -> None:
    assert (report["dtype"], report["device"].split()[0]) == ("float32", "CPU")
    temperatures_of = {name: list(temperatures) for name, temperatures in report["sets"].items()}
    assert temperatures_of == dict.fromkeys(("heldout", "sums"), ["1", "0"])
    for temperatures in report["sets"].values():
        for part in temperatures.values():
            assert set(part["estimators"]) == JUDGES
            assert all(0 <= e["ece"] <= 1 and 0 <= e["auc"] <= 1 for e in part["estimators"].values())
            assert set(part["curves"]) == set(part["speeds"]) == JUDGES | {"fixed"}
            assert part["speeds"]["fixed"] == max(point["speed"] for point in part["curves"]["fixed"])
            assert set(part["equal_verification"]["at_best"]["fewer_discards"]) == set(part["curves"]) - {"fixed"}


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
        rows = recorded_chains.record(made, "sums", Sampling(temperature, 0))
        raw = recorded_chains.head_estimates(made.head, rows, made.drafter)
        ours = evaluation.all_estimates(made, rows, Sampling(temperature, 0))["head"]
        expected = made.head.calibration[mode].apply(raw, rows["index"]).sigmoid().double()
        torch.testing.assert_close(ours, expected.clamp(1e-6, 1 - 1e-6))


def test_the_rival_is_calibrated_like_the_head(fitted: Any) -> None:
    """q, with a bias and temperatures from the half of the held-out prompts that the head was calibrated on."""
    made, sampling = Trained.load(fitted), Sampling(1.0, 0)
    rows = recorded_chains.record(made, "heldout", fitted.sampling(1.0))
    estimates = evaluation.all_estimates(made, rows, sampling)
    q = rows["scalars"][:, 0].exp()
    assert_close(estimates["draft probability"].float(), q.clamp(1e-6, 1 - 1e-6), rtol=1e-3, atol=1e-6)
    half = calibration.calibration_half(made, fitted.sampling(1.0), rows["text"])
    found = calibrate(q.logit(1e-6)[half], rows["label"][half], rows["index"][half])
    expected = found.apply(q.logit(1e-6), rows["index"]).sigmoid().double()
    assert_close(estimates["draft probability, calibrated"], expected, rtol=1e-3, atol=1e-5)
    assert float((expected - q).abs().max()) > 1e-2, "another estimate than q itself"


@pytest.mark.daily("before-head-0.95")
@pytest.mark.parametrize(("judge", "threshold"), [("head", 0.95), ("draft probability", 0.99)])
def test_chains_stop_where_generation_would(fitted: Any, judge: str, threshold: float) -> None:
    """Greedy drafts of both: same tokens, so the lengths must agree."""
    made = Trained.load(fitted)
    estimator = made.head if judge == "head" else DraftProbability()
    config = SpeculationConfig(rule="threshold", threshold=threshold, max_tokens=recorded_chains.MAX_TOKENS)
    texts, found = made.texts("train", Sampling()), set()
    recorder = recorded_chains.Recorder(made.assistant, made.target, Sampling(0.0), fitted.head.inputs)
    for row in range(6):
        ids, starts = texts[row]["input_ids"], [6, 12, 20]
        rows = recorder.of_text(ids, starts, torch.Generator())
        rows["text"] = torch.zeros_like(rows["start"])
        estimates = evaluation.all_estimates(made, rows, Sampling(0.0))
        true, judged = survivals(rows, estimates, fitted.head.inputs)
        for start, length in zip(starts, lengths(threshold, true, judged[judge]).tolist(), strict=True):
            assert length == live_length(made.drafter, torch.tensor([ids[:start]]), make_rule(config, estimator))
            found.add(length)
    assert len(found) > 1


@torch.inference_mode()
def live_length(drafter: Any, prefix: Tensor, rule: Any) -> int:
    session = DraftSession(drafter, VOCAB_SIZE)
    session.read_verified(prefix, 0)

    def step(candidates: list[Tensor]) -> DraftStep:
        return DraftStep(len(candidates), *session.propose_next(candidates), session.embed, greedy=True)

    return len(draft_chain(step, rule, None, recorded_chains.MAX_TOKENS))


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


@pytest.mark.parametrize("has_head", [False, True])
def test_evaluation_needs_a_calibrated_head(has_head: bool, tmp_path: Path) -> None:
    config = training_run(tmp_path, num_texts=2)
    if has_head:
        head = AcceptanceHead(32, inputs="after")
        save_module(head, head.state_dict(), config.work / "head" / HEAD_WEIGHTS)
    with pytest.raises(ValueError, match=r"calibration\.json is missing: run 'head' and 'calibrate' before 'eval'"):
        evaluation.run(config)
    assert not (config.work / "evaluation").exists()


def test_discards_at_equal_verification_rate() -> None:
    fixed = [Outcome(1, 0.2, 0.6, 1.0, 1.4), Outcome(2, 0.6, 0.4, 3.0, 1.7), Outcome(3, 1.2, 0.38, 4.8, 1.6)]
    head = [Outcome(0.1, 0.1, 0.6, 0.8, 1.4), Outcome(0.2, 0.3, 0.4, 2.2, 1.9)]
    found = [equal_verification({"head": head, "fixed": points})["at_best"] for points in (fixed, fixed[2:])]
    assert found[0]["fewer_discards"]["head"] == pytest.approx(0.5)
    assert found[1]["fewer_discards"]["head"] is None
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


SECONDS = Costs(0.2, (1.0, 1.1, 1.3), block=5).round_seconds(20)


@pytest.mark.parametrize("rule", [4, 0.6])
def test_expected_rates_are_what_coins_give(rule: float) -> None:
    labels, true, judged = recorded(0)
    drafted = lengths(rule, true, judged)
    exact = outcome(drafted, true, 0.0, SECONDS)
    discard_rate, verification_rate = simulated(drafted.tolist(), labels, coins=3000)
    assert exact.discard_rate == pytest.approx(discard_rate, rel=0.02)  # about eight standard deviations
    assert exact.verification_rate == pytest.approx(verification_rate, rel=0.02)
    assert exact.mean_length == pytest.approx(float(drafted.double().mean()))
    spent = sum(SECONDS[length] for length in drafted.tolist())
    assert exact.speed == pytest.approx(len(labels) / exact.verification_rate / spent)


@pytest.mark.parametrize(("inputs", "estimates"), [
    ("before", [0.9, 0.9, 0.5, 0.9]), ("after", [0.9, 0.5, 0.9, 0.9]), ("path", [0.9, 0.9, 0.9, 0.5]),
])  # fmt: skip
def test_a_threshold_counts_the_candidate_that_stops(inputs: str, estimates: list[float]) -> None:
    """The verdict of a head that judges "after" comes with the next candidate, so one more is drafted; that of one that
    knows the "path" comes before the draw, so one less."""
    rows = {"index": torch.arange(4), "label": torch.ones(4), "scalars": torch.zeros(4, 6)}
    true, judged = survivals(rows, {"head": torch.tensor(estimates)}, inputs)
    assert lengths(0.5, true, judged["head"]).tolist() == [3]
    assert [lengths(k, true, true).tolist() for k in (2, 9)] == [[2], [4]]


# Calibration finds what was done to estimates, and the recorded chains are those of generation. -----------------------


def test_what_is_perfectly_told_apart_stays_finite() -> None:
    score, label = torch.tensor([-1.0, 1.0] * 200), torch.tensor([0.0, 1.0] * 200)
    found = calibrate(score, label, torch.zeros(400, dtype=torch.long))
    assert abs(found.bias) <= 8.0
    assert 0.0 < found.temperatures[0] < 0.1


def test_a_bias_and_temperatures_are_found_again() -> None:
    generator, index = torch.Generator().manual_seed(0), torch.arange(3).repeat(3000)
    true = 2.0 * torch.randn(9000, generator=generator, dtype=torch.float64)
    spoilt = true * torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[index] - 1.7
    found = calibrate(spoilt, true.sigmoid(), index)
    assert found.bias == pytest.approx(1.7, abs=0.02)
    assert found.temperatures == pytest.approx([0.5, 1.0, 2.0], rel=0.03)
    assert ece(found.apply(spoilt, index).sigmoid(), true.sigmoid()) < 0.005 < ece(spoilt.sigmoid(), true.sigmoid())


def test_positions_with_few_candidates_share_a_temperature() -> None:
    index = torch.cat([torch.arange(5).repeat(250), torch.arange(9).repeat(50)])
    assert len(calibrate(torch.randn(len(index)), torch.rand(len(index)), index).temperatures) == 5
    values = Calibration(0.0, [1.0, 2.0]).apply(torch.ones(4), torch.arange(4))
    assert_close(values, torch.tensor([1.0, 0.5, 0.5, 0.5]))


@pytest.mark.parametrize("inputs", ["before", "after"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_labels_of_chains_are_conditioned_on_own_candidates(tmp_path: Path, temperature: float, inputs: str) -> None:
    """Every chain, read anew in one pass without any cache."""
    config = training_run(tmp_path, num_texts=2, mix=0.9)
    made = Trained.load(config)
    target, drafter = made.target, made.drafter
    ids = answers.load(config.work, "train")[0]["input_ids"]
    recorder = recorded_chains.Recorder(made.assistant, target, Sampling(temperature, 0), inputs)
    rows = recorder.of_text(ids, [6, 7, 15, 25], torch.Generator().manual_seed(0))
    assert rows["index"].tolist() == list(range(20)) * 4
    assert 0.0 < float(rows["label"].mean()) < 1.0
    for start in (6, 7, 15, 25):
        here = rows["start"] == start
        tokens = rows["token"][here]
        text = torch.cat((torch.tensor(ids[:start]), tokens))[None]
        with torch.no_grad():
            p, q = (model(text).logits[0, start - 1 : -1].float() for model in (target, drafter.model))
            hidden = drafter.hidden_states(text)[0]
        places = torch.arange(20)
        if temperature:
            expected = (p.softmax(-1)[places, tokens] / q.softmax(-1)[places, tokens]).clamp_max(1.0)
        else:
            assert_close(tokens, q.argmax(-1))
            expected = (p.argmax(-1) == tokens).float()
        assert_close(rows["label"][here], expected, rtol=1e-3, atol=1e-4)
        states = hidden[start - 1 : -1] if inputs == "before" else hidden[start:]
        assert_close(rows["hidden"][here].float(), states, rtol=1e-2, atol=1e-2)
        assert_close(rows["scalars"][here][:, 0].exp(), q.softmax(-1)[places, tokens], rtol=1e-3, atol=1e-5)


def test_chains_end_with_the_text(tmp_path: Path) -> None:
    config = training_run(tmp_path, num_texts=2)
    made = Trained.load(config)
    made.target.generation_config.eos_token_id = list(range(0, VOCAB_SIZE, 2))
    ids = answers.load(config.work, "train")[0]["input_ids"]
    recorder = recorded_chains.Recorder(made.assistant, made.target, Sampling(), "before")
    rows = recorder.of_text(ids, [6, 9], torch.Generator().manual_seed(0))
    ends = torch.cat((rows["index"][1:] == 0, torch.tensor([True])))
    assert (rows["token"][ends] % 2 == 0).all() or len(rows["token"]) == 40
    assert (rows["token"][~ends] % 2 == 1).all()


@pytest.mark.daily("before")
@pytest.mark.parametrize("inputs", ["before", "after"])
def test_the_stage_calibrates_the_head_on_disk(tmp_path: Path, inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MIN_CANDIDATES", 20)
    config = training_run(tmp_path, mix=0.9, inputs=inputs, rejection_weight=6.0, epochs=6.0, learning_rate=1e-2)
    head_fitting.run(config)
    fitted = load_head(config.work / "head")
    report: Any = calibration.run(config)
    calibrated = load_head(config.work / "head")
    assert list(report) == ["1"]
    before, after = report["1"]["before"], report["1"]["after"]
    assert after["binary_kl"] < before["binary_kl"]
    assert abs(after["survival_bias"]) < abs(before["survival_bias"])
    assert before["survival_bias"] < 0, "w_rej = 6 makes the head pessimistic"
    found = {"bias": report["1"]["bias"], "temperatures": report["1"]["temperatures"]}
    assert (fitted.to_config()["calibration"], calibrated.to_config()["calibration"]) == ({}, {"sampled": found})
    for name, weight in fitted.state_dict().items():
        assert torch.equal(calibrated.state_dict()[name], weight), "calibration is beside the weights"
    assert calibration.run(config) == report, "again, and not on top of the first time"


def test_greedy_and_sampled_targets_are_calibrated_on_texts_of_their_own() -> None:
    config = evaluated("before")
    report = json.loads((config.work / "head" / "calibration.json").read_text())
    calibrated = load_head(config.work / "head")
    assert list(report) == ["1", "0"]
    assert report["1"]["bias"] != report["0"]["bias"]
    made = Trained.load(config)
    for mode, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        # Once more from the recorded chains, in the half that is for fitting.
        sampling = Sampling(temperature, 0)
        rows = recorded_chains.record(made, "heldout", sampling)
        assert set(rows["scalars"][:, 5].tolist()) == {float(temperature == 0.0)}
        half = calibration.calibration_half(made, sampling, rows["text"])
        log_odds = recorded_chains.head_estimates(calibrated, rows, made.drafter)
        expected = calibrate(log_odds[half], rows["label"][half], rows["index"][half])
        assert calibrated.calibration[mode] == expected
        assert expected.bias == report[f"{temperature:g}"]["bias"]
    labels = recorded_chains.record(made, "heldout", Sampling(0.0, 0))["label"]
    assert set(labels.unique().tolist()) == {0.0, 1.0}, "of greedy targets: agreed or not"


def test_calibration_needs_two_prompts(tmp_path: Path) -> None:
    made = Trained.load(training_run(tmp_path, num_texts=2))
    with pytest.raises(ValueError, match=r"Only 1 held-out prompt .* rollouts.heldout"):
        calibration.calibration_half(made, Sampling(), torch.tensor([0, 0, 1]))
    halves = calibration.calibration_half(made, Sampling(), torch.tensor([0, 1, 2, 3, 4]))
    assert halves.tolist() == [True, True, False, False, True], "samples of one prompt stay together"
