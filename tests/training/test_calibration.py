"""Calibration: it finds what was done to estimates, and the recorded chains are those of generation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import VOCAB_SIZE
from support.training_files import evaluated, training_run
from torch.testing import assert_close

from hf_specdecpp.estimation.acceptance_head import Calibration
from hf_specdecpp.estimation.metrics import ece
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training import calibration, chains
from hf_specdecpp.training import head as head_fitting
from hf_specdecpp.training.calibration import calibrate, survival
from hf_specdecpp.training.models import Trained, load_head


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


def test_survival() -> None:
    table = survival(torch.tensor([0.5, 0.5, 0.2, 0.9]), torch.tensor([0, 1, 0, 0]))
    expected = torch.tensor([[0.5, 0.25], [0.2, float("nan")], [0.9, float("nan")]], dtype=torch.float64)
    assert_close(table, expected, equal_nan=True, rtol=1e-6, atol=0)


# Recorded chains ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", ["before", "after"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_labels_of_chains_are_conditioned_on_own_candidates(tmp_path: Path, temperature: float, inputs: str) -> None:
    """Every chain, read anew in one pass without any cache."""
    config = training_run(tmp_path, num_texts=2, mix=0.9)
    made = Trained.load(config)
    target, drafter = made.target, made.drafter
    ids = answers.load(config.work, "train")[0]["input_ids"]
    recorder = chains.Recorder(made.assistant, target, Sampling(temperature, 0), inputs)
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
    recorder = chains.Recorder(made.assistant, made.target, Sampling(), "before")
    rows = recorder.of_text(ids, [6, 9], torch.Generator().manual_seed(0))
    ends = torch.cat((rows["index"][1:] == 0, torch.tensor([True])))
    assert (rows["token"][ends] % 2 == 0).all() or len(rows["token"]) == 40
    assert (rows["token"][~ends] % 2 == 1).all()


# The stage ------------------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
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
        rows = chains.record(made, "heldout", sampling)
        assert set(rows["scalars"][:, 5].tolist()) == {float(temperature == 0.0)}
        half = calibration.calibration_half(made, sampling, rows["text"])
        log_odds = chains.head_estimates(calibrated, rows, made.drafter)
        expected = calibrate(log_odds[half], rows["label"][half], rows["index"][half])
        assert calibrated.calibration[mode] == expected
        assert expected.bias == report[f"{temperature:g}"]["bias"]
    labels = chains.record(made, "heldout", Sampling(0.0, 0))["label"]
    assert set(labels.unique().tolist()) == {0.0, 1.0}, "of greedy targets: agreed or not"


def test_calibration_needs_answers_at_each_temperature(tmp_path: Path) -> None:
    config = training_run(tmp_path, temperatures=(1.0,))
    head_fitting.run(config)
    config.rollouts.temperatures = [1.0, 0.5]
    with pytest.raises(ValueError, match="No rollouts were written at temperature 0.5"):
        calibration.run(config)
    assert not (config.work / chains.FOLDER).exists(), "which it says before it drafts"


def test_calibration_needs_two_prompts(tmp_path: Path) -> None:
    made = Trained.load(training_run(tmp_path, num_texts=2))
    with pytest.raises(ValueError, match=r"Only 1 held-out prompt .* rollouts.heldout"):
        calibration.calibration_half(made, Sampling(), torch.tensor([0, 0, 1]))
    halves = calibration.calibration_half(made, Sampling(), torch.tensor([0, 1, 2, 3, 4]))
    assert halves.tolist() == [True, True, False, False, True], "samples of one prompt stay together"


def test_chains_are_of_texts_spread_over_the_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MEASURED", 4)
    monkeypatch.setattr(chains, "TEXTS_PER_SHARD", 3)
    config = training_run(tmp_path, num_texts=10)
    rows = chains.record(Trained.load(config), "train", Sampling())
    assert (rows["text"].unique().tolist(), len(rows["text"])) == ([0, 3, 6, 9], 4 * chains.STARTS * 20)
    assert len(list((config.work / "chains" / "train-1").glob("*.safetensors"))) == 2
