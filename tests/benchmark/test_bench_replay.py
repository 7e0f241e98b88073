"""Replays against live runs on tiny models, and the oracle against every other way to stop."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from support.models import VOCAB_SIZE, Rounds, assistant_for, prompt, tiny, told
from torch import Tensor

from hf_specdecpp import AcceptanceHead, SpeculationConfig
from hf_specdecpp.benchmark.replay.chains import ChainReplay, Outcomes, Seen, oracle, recorded_estimator, replay_all
from hf_specdecpp.benchmark.replay.record import KNOWN, Text, record
from hf_specdecpp.benchmark.replay.sweep import PAPER, sweep
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.estimation.acceptance_head import Calibration
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.generation.setup import make_rule
from hf_specdecpp.texts.sampling import Sampling

NEW_TOKENS, PROMPT_LENGTH = 48, 12
LABEL = KNOWN.index("label")
COSTS = {"draft": 0.02, "verify": [0.1, 0.1, 0.1, 0.16], "read": 0.001}
RULES: list[dict[str, Any]] = [
    {"rule": "fixed", "num_tokens": 3},
    {"rule": "threshold", "threshold": 0.7, "min_tokens": 2, "max_tokens": 5},
    {"rule": "throughput", "costs": COSTS},
]


def head(inputs: str, hidden_size: int = 32) -> AcceptanceHead:
    """With weights and a calibration that matter."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        made = AcceptanceHead(hidden_size, num_blocks=1, inputs=inputs, rank=8)
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    made.calibration = {mode: Calibration(0.3, [0.8, 1.5, 2.0]) for mode in ("sampled", "greedy")}
    return made


@pytest.mark.every(3)
@pytest.mark.parametrize("judged_by", ["q", "before", "after"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_greedy_replays_are_the_live_runs(family: str, judged_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(family)
    assistant = assistant_for(target)
    assistant.head = None if judged_by == "q" else head(judged_by)
    ids = target.generate(prompt(PROMPT_LENGTH), max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    answer = ids[PROMPT_LENGTH:]
    end = next((token for token in answer if answer.index(token) > NEW_TOKENS // 2), None)
    target.generation_config.eos_token_id = end  # candidates may end a text, too
    ids = target.generate(prompt(PROMPT_LENGTH), max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    text = Text(ids, PROMPT_LENGTH, PROMPT_LENGTH + NEW_TOKENS, frozenset() if end is None else frozenset([end]))
    replay, lengths = ChainReplay(text, record(text, assistant, target, Sampling(0.0, 0), seed=0)), set()
    for knobs in RULES:
        told(assistant, **knobs)
        assistant.memory.clear()
        with monkeypatch.context() as patch:
            rounds = Rounds(patch)
            live = target.generate(
                prompt(PROMPT_LENGTH), max_new_tokens=NEW_TOKENS, assistant_model=assistant, do_sample=False
            )
        estimator = recorded_estimator("q" if judged_by == "q" else "head", assistant.head, greedy=True)
        replayed = replay.rounds(
            make_rule(
                assistant.speculation, estimator, rates=AcceptanceRates(), min_tokens=assistant.decisions.min_tokens
            )
        )
        assert live[0].tolist() == ids
        assert [(drafted, accepted) for drafted, accepted, _ in replayed] == rounds.outcomes, knobs
        lengths |= {drafted for drafted, _ in rounds.outcomes}
    assert len(lengths) > 2


def test_labels_are_those_of_the_verifier() -> None:
    target = tiny("llama")
    assistant = assistant_for(target)
    torch.manual_seed(1)
    ids = target.generate(prompt(PROMPT_LENGTH), max_new_tokens=20, do_sample=True, top_k=0)[0].tolist()
    recorded = record(Text(ids, PROMPT_LENGTH, PROMPT_LENGTH + 20), assistant, target, Sampling(1.0, 0), 0, length=3)
    draft = assistant.drafter.model
    chains = iter([[int(seen[0]) for seen in chain] for chain in recorded["off_text"]])
    labels = iter([[seen[LABEL] for seen in chain] for chain in recorded["off_text"]])
    for number, place in enumerate(range(PROMPT_LENGTH + 1, len(ids))):
        p, q = (law_after(model, ids[:place]) for model in (target, draft))
        label = min(1.0, float(p[ids[place]] / q[ids[place]]))
        assert float(recorded["on_text"][number][LABEL]) == pytest.approx(label, rel=1e-4)
        if not recorded["stands"][number]:
            chain, found = next(chains), next(labels)
            for i, token in enumerate(chain):
                p, q = (law_after(model, ids[:place] + chain[:i]) for model in (target, draft))
                assert found[i] == pytest.approx(min(1.0, float(p[token] / q[token])), rel=1e-4)
    assert next(chains, None) is None
    assert len(recorded["off_text"]) > 1


def law_after(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float().softmax(-1)


# Bounds, on made-up records -------------------------------------------------------------------------------------------


def made_up(seed: int, length: int = 40, chain: int = 20) -> ChainReplay:
    """A text whose candidates stand by chance."""
    draw, replay = random.Random(seed), ChainReplay.__new__(ChainReplay)
    replay.text = Text(list(range(1, length + 2)), 1, length + 1)

    def seen(token: int, label: float) -> Seen:
        return Seen(token, min(1.0, label * draw.uniform(0.8, 1.2)), draw.random(), label, 0.0)

    labels = [draw.betavariate(3, 1) for _ in range(length)]
    replay.on_text = [seen(place, label) for place, label in enumerate(labels[:-1])]
    replay.off_text = {
        place: [seen(VOCAB_SIZE, draw.random() * 0.8) for _ in range(chain)]
        for place, label in enumerate(labels[:-1])
        if draw.random() > label
    }
    return replay


@pytest.mark.parametrize("costs", [PAPER, Costs(0.05, (0.1, 0.1, 0.1, 0.18)), Costs(0.2, (0.1,), 0.01)])
def test_no_rule_is_faster_than_the_oracle(costs: Costs) -> None:
    replays = [made_up(seed) for seed in range(12)]
    bound, found = oracle(replays, costs).speed(costs), sweep(replays, None, False, {"these": costs})
    assert {row["family"] for row in found["best"]["these"]} >= {"oracle", "informed bound", "throughput (q)", "fixed"}
    for row in found["best"]["these"]:
        assert row["tokens_per_second"] <= bound * (1.0 + 1e-9), row
        assert row["of_oracle"] == pytest.approx(row["tokens_per_second"] / bound)


def test_oracle_drafts_exactly_what_stands_where_passes_cost_the_same() -> None:
    replay = made_up(3)
    outcomes = oracle([replay], PAPER)
    start, rounds, end = replay.text.first, 0, len(replay.text.ids)
    while start < end:
        start, rounds = start + replay.run_of(start) + 1, rounds + 1
    assert (outcomes.rounds, outcomes.rates["discard_rate"]) == (rounds, 0.0)
    assert outcomes.drafted == outcomes.accepted == outcomes.generated - rounds


def test_informed_bound_beats_the_drafts_own_probability() -> None:
    replays = [made_up(seed) for seed in range(30)]
    best = {row["family"]: row for row in sweep(replays, None, False, {"paper": PAPER})["best"]["paper"]}
    assert best["informed bound"]["tokens_per_second"] > best["threshold (q)"]["tokens_per_second"]
    assert best["fixed"]["gain_over_fixed"] == 0.0


def test_outcomes_count_every_token_once() -> None:
    replays = [made_up(seed) for seed in range(5)]
    for length in (1, 4):
        config = SpeculationConfig(rule="fixed", num_tokens=length)
        outcomes = replay_all(replays, partial(make_rule, config, recorded_estimator("q", None, False)))
        assert outcomes.generated == outcomes.accepted + outcomes.rounds
        times = outcomes.seconds(Costs(1.0, (10.0,)))
        assert float(times.sum()) == pytest.approx(outcomes.drafted + 10.0 * outcomes.rounds)


def test_pauses_cost_the_draft_its_reading() -> None:
    outcomes = Outcomes([[(0, 0, 5), (0, 0, 6), (2, 1, 7), (2, 2, 1), (1, 0, 2)]], [8])
    assert float(outcomes.seconds(Costs(1.0, (10.0,), read=0.5))[0]) == 5 * 10.0 + 5 * 1.0 + 3.5
