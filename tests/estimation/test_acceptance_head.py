"""Estimates: the paper's head against an independent copy of it, the token head, calibration, rates, metrics."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.files.released_heads import ReleasedHead
from torch import Tensor, nn
from torch.testing import assert_close

from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import (
    NUM_SCALARS,
    AcceptanceRates,
    DraftProbability,
    DraftStep,
    scalar_features,
)
from hf_specdecpp.estimation.metrics import auc, binary_kl, ece

SIZE, VOCAB = 6, 9


def make_step(
    index: int = 0, token: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32, greedy: bool = False
) -> DraftStep:
    generator = torch.Generator().manual_seed(seed)
    scores = 2.0 * torch.randn(VOCAB, generator=generator)
    hidden = torch.randn(SIZE, generator=generator).to(dtype)
    table = torch.randn(VOCAB, SIZE, generator=generator).to(dtype)
    return DraftStep(index, scores, hidden, lambda each: table[each], greedy, torch.tensor(token))


def make_head(**arguments: Any) -> AcceptanceHead:
    """A head whose every weight matters to its verdict (an untrained token head only repeats q(y))."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        head = AcceptanceHead(SIZE, **arguments)
        for parameter in head.parameters():
            parameter.normal_(std=0.5)
    return head


def probability(head: AcceptanceHead, step: DraftStep) -> float:
    answer = head.estimate(step)
    assert answer is not None
    return answer.item()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("depth", range(5))
def test_the_after_head_is_the_papers(depth: int, tied: bool) -> None:
    paper, ours = ReleasedHead(depth, tied, SIZE, depth).model, AcceptanceHead(SIZE, num_blocks=depth, tied=tied)
    with torch.no_grad():
        for index in range(depth):
            block: Any = paper[index]
            ours.blocks[0 if tied else index].load_state_dict(block.state_dict())
        ours.output.load_state_dict(paper[-1].state_dict())
    step = make_step(index=2)
    assert_close(ours.estimate(step), paper(step.hidden).softmax(dim=-1)[1])
    assert sum(each.numel() for each in ours.parameters()) == sum(each.numel() for each in paper.parameters())


def test_the_after_head_has_no_verdict_on_the_first_candidate() -> None:
    assert make_head().estimate(make_step(index=0)) is None


@pytest.mark.parametrize("inputs", ["after", "before", "path"])
@pytest.mark.parametrize("size", [1e20, 3e38])
def test_estimates_are_probabilities_even_if_the_head_overflows(inputs: str, size: float) -> None:
    """Finite weights whose products are not: inf - inf is no number, and nothing that compares it comes to an end."""
    head = make_head(num_blocks=3, inputs=inputs)
    with torch.no_grad():
        for place, parameter in enumerate(head.parameters()):
            parameter.copy_(size * (-1.0) ** torch.arange(place, place + parameter.numel()).view(parameter.shape))
    assert 0.0 <= probability(head, make_step(index=1, token=3)) <= 1.0


@pytest.mark.parametrize("token", [None, 3])
def test_a_path_head_is_one_layer_and_needs_no_candidate(token: int | None) -> None:
    """Of a state that may hold more than the head reads."""
    head, step = make_head(inputs="path", num_blocks=3), make_step(index=2)
    step.token = None if token is None else torch.tensor(token)  # type: ignore[assignment]
    expected = (head.output.weight[0] @ step.hidden + head.output.bias[0]).sigmoid()
    assert_close(head.estimate(step), expected)
    step.hidden = torch.cat((step.hidden, torch.ones(2)))
    assert_close(head.estimate(step), expected)
    assert sum(each.numel() for each in head.parameters()) == SIZE + 1
    assert probability(AcceptanceHead(SIZE, inputs="path"), step) == 0.5


@pytest.mark.parametrize("token", range(VOCAB))
def test_an_untrained_before_head_says_q(token: int) -> None:
    step, head = make_step(token=token), AcceptanceHead(SIZE, num_blocks=2, inputs="before", rank=4)
    assert_close(head.estimate(step), DraftProbability().estimate(step), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("rank", [1, 4, 64])
@pytest.mark.parametrize("greedy", [False, True])
def test_the_before_head_is_q_plus_scalars_plus_correction(blocks: int, rank: int, greedy: bool) -> None:
    head, step = make_head(num_blocks=blocks, inputs="before", rank=rank), make_step(token=4, greedy=greedy)
    weights, silu = dict(head.state_dict()), nn.functional.silu

    def linear(name: str, x: Tensor) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0.0)

    top, entropy = step.q.sort(descending=True).values, -(step.q * step.q.log()).sum()
    no_siblings = torch.zeros(2)
    scalars = torch.stack((step.q[4].log(), entropy, top[0] - top[1], *no_siblings, torch.tensor(float(greedy))))
    x = silu(linear("from_hidden", step.hidden) + linear("from_embedding", step.embed(torch.tensor(4))))
    assert x.shape == (rank,)
    for index in range(blocks):
        x = x + silu(linear(f"blocks.{index}.linear", x))
    correction = linear("output", x)[0]
    trunk = linear("from_scalars.2", silu(linear("from_scalars.0", scalars)))[0]
    assert_close(head.estimate(step), (step.q[4].logit() + trunk + correction).sigmoid(), rtol=1e-4, atol=1e-6)


def test_scalar_features() -> None:
    q = torch.tensor([0.5, 0.25, 0.25, 0.0])
    features = scalar_features(q, torch.tensor(1), False, torch.tensor(0.5), torch.tensor(1))
    entropy = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert_close(features, torch.tensor([math.log(0.25), entropy, 0.25, 0.5, 1.0, 0.0]))
    alone = scalar_features(q, torch.tensor(1), greedy=True)
    assert_close(alone, torch.tensor([math.log(0.25), entropy, 0.25, 0.0, 0.0, 1.0]))
    assert features.shape == (NUM_SCALARS,)
    rows = scalar_features(torch.stack((q, q.flip(0))), torch.tensor([1, 2]))
    assert_close(rows[0, :3], features[:3])
    assert_close(rows[0], rows[1])
    assert bool(scalar_features(q, torch.tensor(3)).isfinite().all())
    assert float(scalar_features(torch.ones(1), torch.tensor(0))[2]) == 0.0  # a vocabulary of one has no runner-up


CALIBRATION = {"sampled": {"bias": 0.3, "temperatures": [2.0, 0.5]}, "greedy": {"bias": -1.0, "temperatures": [0.7]}}


@pytest.mark.parametrize(("inputs", "first"), [("after", 1), ("before", 0)])
@pytest.mark.parametrize("modes", [["sampled", "greedy"], ["sampled"], ["greedy"], []])
def test_each_mode_is_calibrated_by_position(inputs: str, first: int, modes: list[str]) -> None:
    """`first` is the step in which the head judges the candidate at position 0. A mode without one stays as it is."""
    calibration = {mode: CALIBRATION[mode] for mode in modes}
    plain, calibrated = (make_head(inputs=inputs, rank=4, calibration=each) for each in (None, calibration))
    for mode in CALIBRATION:
        bias = {"sampled": 0.3, "greedy": -1.0}[mode] if mode in modes else 0.0
        temperatures = {"sampled": [2.0, 0.5, 0.5, 0.5], "greedy": [0.7] * 4}[mode] if mode in modes else [1.0] * 4
        for position, temperature in enumerate(temperatures):
            step = make_step(index=first + position, greedy=mode == "greedy")
            log_odds = torch.tensor(probability(plain, step), dtype=torch.float64).logit()
            expected = float(((log_odds + bias) / temperature).sigmoid())
            assert probability(calibrated, step) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("inputs", ["after", "before"])
@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_casting_leaves_a_head_in_float32(cast: Any, inputs: str) -> None:
    head = make_head(inputs=inputs, rank=4)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    parent = cast(nn.Sequential(head))
    for name, tensor in head.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])
    assert parent[0] is head
    assert probability(head, make_step(index=1, dtype=torch.bfloat16)) > 0.0  # a half-precision draft's states
    assert head.to("meta").output.weight.device.type == "meta"


@pytest.mark.parametrize("inputs", ["after", "before"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_rebuilt_from_its_config(inputs: str, tied: bool) -> None:
    head = make_head(inputs=inputs, tied=tied, num_blocks=2, rank=3, calibration=CALIBRATION)
    again = AcceptanceHead(**head.to_config())
    again.load_state_dict(head.state_dict())
    for greedy in (False, True):
        step = make_step(index=1, greedy=greedy)
        assert probability(again, step) == probability(head, step)
    assert json.loads(json.dumps(head.to_config())) == again.to_config()
    assert len(head.blocks) == (1 if tied else 2)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"inputs": "during"}, "inputs='during' must be one of path, before, after"),
    ({"hidden_size": 0}, "hidden_size=0 must be a whole number from 1 to 1048576"),
    ({"hidden_size": 8.0}, r"hidden_size=8\.0 must be a whole number"),
    ({"hidden_size": None}, "hidden_size=None must be a whole number"),
    ({"hidden_size": 10**15}, "hidden_size=1000000000000000 must be a whole number"),
    ({"num_blocks": -1}, "num_blocks=-1 must be a whole number from 0 to 64"),
    ({"num_blocks": True}, "num_blocks=True must be a whole number"),
    ({"rank": 0}, "rank=0 must be a whole number from 1 to 1048576"),
    ({"rank": "64"}, "rank='64' must be a whole number"),
    ({"embedding_size": -1}, "embedding_size=-1 must be a whole number from 1 to 1048576"),
    ({"embedding_size": 0}, "embedding_size=0 must be a whole number"),
    ({"siblings": 0}, "siblings=0 must be a whole number from 1 to 1024"),
    ({"siblings": 1.5}, r"siblings=1\.5 must be a whole number"),
    ({"calibration": {"sampled": {"temperatures": []}}}, "must be positive numbers"),
    ({"calibration": {"greedy": {"temperatures": [1.0, 0.0]}}}, "must be positive numbers"),
    ({"calibration": {"beams": {}}}, "calibration has .'beams'.; it knows sampled and greedy targets"),
])  # fmt: skip
def test_senseless_heads_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AcceptanceHead(**{"hidden_size": SIZE, **arguments})


# What rounds teach about estimates. -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "truth", [lambda e: e, lambda e: e**3, lambda e: 0.1 + 0.0 * e], ids=["right", "high", "noise"]
)
def test_estimates_are_calibrated(truth: Callable[[float], float]) -> None:
    rng, rates = np.random.default_rng(0), AcceptanceRates()
    for _ in range(5000):
        estimate = rng.beta(1.0, 0.4)
        rates.record_chain([estimate], 1, int(rng.random() < truth(estimate)))
    rates.fit()
    for estimate in (0.3, 0.6, 0.85, 0.95):
        assert rates.calibrated(estimate) == pytest.approx(truth(estimate), abs=0.08)
    assert 0.0 < rates.calibrated(0.0) < rates.calibrated(1.0) < 1.0


def judged(rates: AcceptanceRates, rounds: int, truth: Callable[[float], float], seed: int = 0) -> list[float]:
    """Observe rounds of one candidate each; how far the calibrated estimates were from the truth before each."""
    rng, errors = np.random.default_rng(seed), []
    for _ in range(rounds):
        estimate = rng.beta(1.0, 0.4)
        errors.append(abs(rates.calibrated(estimate) - truth(estimate)))
        rates.record_chain([estimate], 1, int(rng.random() < truth(estimate)))
    return errors


def test_it_begins_with_the_line_that_is_given_and_moves_with_evidence() -> None:
    def truth(estimate: float) -> float:  # log-odds + 1
        return 1.0 / (1.0 + (1.0 - estimate) / estimate / math.e)

    informed, untaught = AcceptanceRates((1.0, 1.0)), AcceptanceRates()
    for estimate in (0.2, 0.5, 0.9):
        assert informed.calibrated(estimate) == pytest.approx(truth(estimate), abs=1e-3)
        assert untaught.calibrated(estimate) == pytest.approx(estimate, abs=1e-3)
    first, later = np.split(np.array(judged(untaught, 2000, truth)), 2)
    assert later.mean() < 0.5 * first[:8].mean()
    assert untaught.line == pytest.approx([1.0, 1.0], abs=0.3)


def test_it_follows_a_text_that_changes() -> None:
    rates = AcceptanceRates()
    judged(rates, 3000, lambda e: e)
    judged(rates, 1500, lambda e: 0.3 * e, seed=1)
    assert rates.calibrated(0.9) == pytest.approx(0.27, abs=0.1)
    assert rates.judged < 1000, "old counts fade"


# Metrics of estimates against their definitions, written as loops. ----------------------------------------------------


def some(seed: int, n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    estimate, label = torch.rand(2, n, generator=generator, dtype=torch.float64)
    return (estimate * 10).round() / 10, label  # with ties


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_auc(seed: int, hard: bool) -> None:
    estimate, label = some(seed)
    label = label.round() if hard else label
    won = total = 0.0
    for e, y in zip(estimate.tolist(), label.tolist(), strict=True):
        for other, z in zip(estimate.tolist(), label.tolist(), strict=True):
            total += y * (1 - z)
            won += y * (1 - z) * (1.0 if e > other else 0.5 if e == other else 0.0)
    assert auc(estimate, label) == pytest.approx(won / total)


@pytest.mark.parametrize("seed", range(3))
def test_ece(seed: int) -> None:
    estimate, label = some(seed)
    error = 0.0
    for b in range(15):
        inside = [i for i, e in enumerate(estimate.tolist()) if min(int(e * 15), 14) == b]
        if inside:
            gap = sum(float(estimate[i] - label[i]) for i in inside) / len(inside)
            error += abs(gap) * len(inside) / len(label)
    assert ece(estimate, label) == pytest.approx(error)


@pytest.mark.parametrize("seed", range(3))
def test_binary_kl(seed: int) -> None:
    estimate, label = some(seed)
    estimate = estimate.clamp(0.05, 0.95)
    pairs = list(zip(estimate.tolist(), label.tolist(), strict=True))
    expected = sum(y * math.log(y / e) + (1 - y) * math.log((1 - y) / (1 - e)) for e, y in pairs) / len(pairs)
    assert binary_kl(estimate, label) == pytest.approx(expected)
    assert binary_kl(label.round(), label.round()) == pytest.approx(0.0, abs=1e-5)
