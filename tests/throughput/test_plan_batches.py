"""The throughput rule in batches, whose rows share passes."""

from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.enumeration.plans import chain_plan, tell
from support.targets.models import assistant_for, prompt, tiny

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.chain import should_continue
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.throughput.known_costs import KnownCosts, length_class
from hf_specdecpp.throughput.plan import BatchPlan, ChainPlan, Throughput

ROWS, LENGTH, MOST = 8, 64, 6
# Milliseconds of passes over 1 to 7 tokens of each row: of one row, and of eight.
ALONE = np.array([30.0, 33.0, 34.0, 35.0, 36.0, 37.0, 38.0])
ALL = np.array([44.0, 65.0, 80.0, 90.0, 101.0, 112.0, 123.0])


def batch_plan(costs: Costs, most: int) -> BatchPlan:
    return BatchPlan(KnownCosts(costs, follows=False), most, 0)


class Row(Throughput):
    def __init__(self, survival: float, critical: float) -> None:
        plan: Any = SimpleNamespace(most=MOST, lag=0, trial=None, critical=lambda *_: critical)
        super().__init__(DraftProbability(), plan)
        self._survival = survival


def test_rows_go_on_together_where_that_pays_for_all() -> None:
    assert should_continue([Row(0.9, 0.3), Row(0.5, 0.3)], rows=4), "the example of the docstring"
    assert not should_continue([Row(0.9, 0.3), Row(0.2, 0.3)], rows=4)
    assert should_continue([Row(0.4, 0.3)], rows=1)
    assert not should_continue([Row(0.3, 0.3)], rows=1), "a row alone stops as it does without a batch"


def test_rows_of_a_batch_never_stop_by_themselves() -> None:
    costs = Costs(0.5, (1.0, 1.0, 1.0, 1.7, 1.75, 1.8, 1.85, 1.9))
    alone, row = (Throughput(DraftProbability(), plan(costs, 6)) for plan in (chain_plan, batch_plan))
    assert alone.stops(0.01)
    assert not row.stops(0.01)
    assert row.worth <= 1.0


class Batches:
    """Batches of rows that end after `LENGTH` tokens.

    `rates`: the chance of each row that a candidate is accepted, which is its estimate, too."""

    def __init__(self, rates: list[float]) -> None:
        self.rates, self.rng = rates, np.random.default_rng(0)
        self.plan = batch_plan(Costs(9.0, tuple(ALL)).scaled(1 / ROWS), MOST)

    def run(self) -> float:
        """The speed of a batch relative to plain decoding."""
        rules = [Throughput(DraftProbability(), self.plan) for _ in self.rates]
        lengths, seconds = [0] * ROWS, 0.0
        while active := [row for row, length in enumerate(lengths) if length < LENGTH]:
            drafted = self._draft([rules[row] for row in active], [self.rates[row] for row in active])
            for row in active:
                failures = self.rng.random(drafted) > self.rates[row]
                accepted = int(failures.argmax()) if failures.any() else drafted
                tell(rules[row], drafted, accepted)
                lengths[row] += accepted + 1
            part = (len(active) - 1) / (ROWS - 1)  # of the way from one row to all of them
            seconds += (1.0 - part) * ALONE[drafted] + part * ALL[drafted] + (1.0 + len(active)) * drafted
        return float(LENGTH * ALL[0] / seconds)

    def _draft(self, rules: list[Throughput], estimates: list[float]) -> int:
        self.plan.weigh_reading(unread=1)
        for rule in rules:
            rule.begin_round()
        drafted = 0
        if all(rule.should_draft(1) for rule in rules):
            while drafted < MOST and (not drafted or should_continue(rules, len(rules))):
                drafted += 1
                for rule, estimate in zip(rules, estimates, strict=True):
                    rule.stops(estimate)
        return drafted


@pytest.mark.parametrize(("rates", "least"), [
    ([0.3] * 8, 0.97),  # candidates do not pay
    ([0.8] * 8, 0.98),  # they hardly pay
    ([0.9] * 8, 1.1),
    ([0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.4, 0.2], 0.96),  # a batch takes as long as its slowest row
])  # fmt: skip
def test_rows_that_accept_more_and_less_lose_little(rates: list[float], least: float) -> None:
    batches = Batches(rates)
    assert mean(batches.run() for _ in range(20)) > least


def test_a_text_to_read_is_weighed_against_what_drafting_gains() -> None:
    """Rows begin together: by what the draft has to read in the row with most, and 64 rounds of what is gained."""
    costs = Costs(0.1, (1.0, 1.0, 1.0, 1.0), read=0.01).scaled(1 / ROWS)
    plan = batch_plan(costs, MOST)
    assert plan.pays
    most = int(64 * (plan.rate * plan.plain - 1.0) * plan.plain / costs.read)
    rows = [Throughput(DraftProbability(), plan) for _ in range(2)]
    for unread, starts in ((1, True), (most - 1, True), (most + 2, False)):
        plan.weigh_reading(unread)
        assert [row.should_draft(own) for row, own in zip(rows, (1, unread), strict=True)] == [starts, starts]
        assert plan.unread == unread


@pytest.mark.parametrize("rows", [1, 2])
def test_a_prompt_is_not_read_for_an_answer_of_four_tokens(rows: int) -> None:
    target, drafted = tiny("llama"), list[int]()
    costs: dict[str, Any] = {"draft": 0.2, "verify": [1.0, 1.02, 1.04, 1.06], "read": 0.5}
    for length in (4, 100):
        assistant = assistant_for(target, mix=1.0, rule="throughput", costs=costs)
        ids = prompt(12).repeat(rows, 1)
        target.generate(ids, assistant_model=assistant, max_new_tokens=length, do_sample=False, pad_token_id=0)
        drafted.append(assistant.stats.draft_passes)
    assert drafted[0] == 0 < drafted[1]


def test_lengths_that_do_not_pay_are_not_tried_out_in_batches() -> None:
    """Only drafting nothing is, also once that was confirmed."""
    known = KnownCosts(Costs(0.1, (1.0, 1.9, 2.8, 3.7)))
    for kind, tried in ((BatchPlan, {0}), (ChainPlan, {0, 1, 2, 3})):
        plan, lengths = kind(known, 3, 0), set()
        for _ in range(20):
            plan.begin_text()
            plan.set_length(10)
            lengths |= set(plan.trials)
            plan._confirmed |= {(length_class(10), 1): plan._texts}
        assert 0 in lengths
        assert lengths <= tried
        assert kind is BatchPlan or len(lengths) > 1
