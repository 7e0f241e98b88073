"""Every chain rule with every setting on the same records, and the bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hf_specdecpp.benchmark.replay.baselines import BASELINES
from hf_specdecpp.benchmark.replay.chains import ChainReplay, Outcomes, recorded_estimator, replay_all
from hf_specdecpp.benchmark.replay.oracle import oracle
from hf_specdecpp.benchmark.replay.record import MAX_TOKENS
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.files import read_json
from hf_specdecpp.generation.setup import make_rule, plan_for
from hf_specdecpp.intervals import ratio_of_sums

LENGTHS = range(1, 15)
THRESHOLDS = [round(i / 20, 2) for i in range(1, 20)] + [0.97, 0.99]
FIXED, INFORMED, ORACLE = "fixed", "informed bound", "oracle"
BOUNDS = (INFORMED, ORACLE)
# The paper's, digitised from its figures: the draft's step and the target's pass, whatever its length.
PAPER = Costs(draft=0.0214, verify=(0.116,))


def read_costs(names: Iterable[str], measured: Callable[[], Costs]) -> dict[str, Costs]:
    """The costs that `--costs` names: measured ones, the paper's, those of a JSON file, or a ratio t_draft / t_target.

    With a ratio, target passes cost the same whatever their length and are the unit of time.

    Raises:
        ValueError: a file does not hold costs.
        FileNotFoundError: it is not there.
    """
    costs = {}
    for name in names:
        if name in ("measured", "paper"):
            costs[name] = PAPER if name == "paper" else measured()
        elif Path(name).is_file():
            costs[Path(name).stem] = Costs.from_dict(read_json(Path(name)))
        else:
            try:
                costs[name] = Costs(draft=float(name), verify=(1.0,))
            except ValueError:
                message = f"--costs {name} is neither 'measured', 'paper', a ratio such as 0.1, nor a file."
                raise FileNotFoundError(message) from None
    return costs


def sweep(replays: list[ChainReplay], head: AcceptanceHead | None, costs: Mapping[str, Costs]) -> dict[str, Any]:
    """Every rule on the records of one set and temperature.

    Returns:
        `rows`: one for each rule and setting, with its rates and its speed at each of the `costs` that it is for.
        `best`: for each of the costs, the best setting of each family, with its gain over the best fixed length and its
        share of the bounds' speeds. Settings are chosen on the very texts that they are shown for.
    """
    outcomes = dict(_outcomes(replays, head, costs))
    rows = [
        {
            "family": family, "setting": setting, "discard_rate": found.discard_rate,
            "verification_rate": found.verification_rate, "drafted_per_round": found.drafted / max(found.rounds, 1),
            "speeds": {name: found.speed(each) for name, each in costs.items() if only in (None, name)},
        }
        for (family, setting, only), found in outcomes.items()
    ]  # fmt: skip
    best = {name: _best(name, each, outcomes) for name, each in costs.items()}
    generated = sum(len(replay.text.ids) - replay.text.first for replay in replays)
    return {"texts": len(replays), "tokens": generated, "rows": rows, "best": best}


Key = tuple[str, "float | None", "str | None"]  # family, setting, the costs that it is for (all by default)


def _outcomes(
    replays: list[ChainReplay], head: AcceptanceHead | None, costs: Mapping[str, Costs]
) -> Iterator[tuple[Key, Outcomes]]:
    greedy = replays[0].greedy
    for length in LENGTHS:
        config = SpeculationConfig(rule="fixed", num_tokens=length)
        yield (
            (FIXED, length, None),
            replay_all(replays, partial(make_rule, config, recorded_estimator("q", None, greedy))),
        )
    for family, by, adapts in _families(head):
        for setting in THRESHOLDS:
            config = SpeculationConfig(rule="threshold", threshold=setting, max_tokens=MAX_TOKENS)
            rates = AcceptanceRates() if adapts else None  # one for all texts, as an assistant has it
            make = partial(make_rule, config, recorded_estimator(by, head, greedy), rates=rates)
            yield (family, setting, None), replay_all(replays, make)
    for family, baseline in BASELINES.items():
        for setting in THRESHOLDS:
            yield (family, setting, None), replay_all(replays, partial(baseline, setting, MAX_TOKENS))
    for name, each in costs.items():
        yield (ORACLE, None, name), oracle(replays, each)
        for by in (*_judges(head), "truth"):
            yield (f"throughput ({by})", None, name), replay_all(replays, _throughput(each, by, head, greedy))


def _families(head: AcceptanceHead | None) -> list[tuple[str, str, bool]]:
    """Of the threshold rule: name, who judges, and whether estimates are calibrated while running."""
    judged = [
        (f"threshold ({by}{' online' if adapts else ''})", by, adapts)
        for by in _judges(head)
        for adapts in (False, True)
    ]
    return [*judged, (INFORMED, "truth", False)]


def _judges(head: AcceptanceHead | None) -> Sequence[str]:
    return ("q",) if head is None else ("head", "q")


def _throughput(costs: Costs, by: str, head: AcceptanceHead | None, greedy: bool) -> Callable[[], StoppingRule]:
    """The rule with a memory from text to text, as an assistant has it."""
    config = SpeculationConfig(rule="throughput", max_tokens=MAX_TOKENS, costs=costs.to_dict())
    estimator = recorded_estimator(by, head, greedy)
    return partial(make_rule, config, estimator, plan_for(config, estimator))


def _best(name: str, costs: Costs, outcomes: Mapping[Key, Outcomes]) -> list[dict[str, Any]]:
    """The best setting of each family at these costs, fastest first."""
    chosen: dict[str, tuple[float | None, Outcomes]] = {}
    for (family, setting, only), found in outcomes.items():
        faster = family not in chosen or found.speed(costs) > chosen[family][1].speed(costs)
        if only in (None, name) and faster:
            chosen[family] = setting, found
    plain = 1.0 / float(costs.round_seconds(0)[0])
    seconds = {family: found.seconds(costs) for family, (_, found) in chosen.items()}
    rows = []
    for family, (setting, found) in chosen.items():
        gain, low, high = ratio_of_sums(seconds[FIXED].tolist(), seconds[family].tolist())
        rows.append(
            {
                "family": family, "setting": setting, "tokens_per_second": found.speed(costs),
                "speedup": found.speed(costs) / plain,
                "gain_over_fixed": gain - 1.0, "interval": [low - 1.0, high - 1.0],
                "discard_rate": found.discard_rate, "verification_rate": found.verification_rate,
                **{f"of_{bound.split()[0]}": float(seconds[bound].sum() / seconds[family].sum()) for bound in BOUNDS},
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row["tokens_per_second"])
