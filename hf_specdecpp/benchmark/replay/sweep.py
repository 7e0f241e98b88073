"""The replayed half of a benchmark: every chain rule with every setting on the same records, and the bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from hf_specdecpp.benchmark.contestants import changed
from hf_specdecpp.benchmark.live import answer, neutralise
from hf_specdecpp.benchmark.loading import RECORDS, Benchmark, RunLog
from hf_specdecpp.benchmark.replay.chains import (
    BASELINES,
    ChainReplay,
    MakeRule,
    Outcomes,
    oracle,
    recorded_estimator,
    replay_all,
)
from hf_specdecpp.benchmark.replay.record import MAX_TOKENS, Texts, record, text_sets
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.figures import ratio_of_sums
from hf_specdecpp.files import read_json
from hf_specdecpp.generation.setup import make_rule, plan_for, plan_of
from hf_specdecpp.sampling.randomness import seed_of
from hf_specdecpp.texts.sampling import Sampling

TIMED_TEXTS, TIMED_TOKENS = 4, 96  # of which rounds are timed, with each number of candidates in turn
LENGTHS = range(1, 15)
THRESHOLDS = [round(i / 20, 2) for i in range(1, 20)] + [0.97, 0.99]
FIXED, INFORMED, ORACLE = "fixed", "informed bound", "oracle"
BOUNDS = (INFORMED, ORACLE)
# The paper's, digitised from its figures: the draft's step and the target's pass, whatever its length.
PAPER = Costs(draft=0.0214, verify=(0.116,))


def replay(benchmark: Benchmark, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every rule on records of the target's texts (of `runs`, or of rollouts): `costs` and `replays` of the results."""
    config, assistant = benchmark.config, benchmark.assistant
    neutralise(benchmark.target)
    costs = read_costs(config.costs, partial(timed_costs, benchmark))
    replays, log = [], RunLog(config.output, benchmark.settings, RECORDS)
    for temperature in config.temperatures:
        for name, texts, sampling in text_sets(benchmark, runs, temperature):
            if chains := _chains(benchmark, log, name, texts, sampling):
                found = sweep(chains, assistant.head, sampling.greedy, costs)
                replays.append({"set": name, "temperature": temperature, **found})
    return {"costs": {name: each.to_dict() for name, each in costs.items()}, "replays": replays}


def _chains(benchmark: Benchmark, log: RunLog, name: str, texts: Texts, sampling: Sampling) -> list[ChainReplay]:
    """The records of a set's texts, each made once; of sampled texts several, with other draws."""
    config, chains = benchmark.config, []
    for prompt, text in logging.tqdm(texts.items(), desc=f"records of {name}", unit="text"):
        if text.first >= len(text.ids):
            continue  # too short for a round
        for draw in range(1 if sampling.greedy else config.draws):
            seed = seed_of(config.seed, name, prompt, sampling.temperature, draw, text.ids)
            made = partial(record, text, benchmark.assistant, benchmark.target, sampling, seed)
            chains.append(ChainReplay(text, log.once({"seed": seed}, made)))
    return chains


def read_costs(names: Iterable[str], measured: Callable[[], Costs]) -> dict[str, Costs]:
    """The costs that `--costs` names: measured ones, the paper's, those of a JSON file, or a ratio to a target pass."""
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


def timed_costs(benchmark: Benchmark) -> Costs:
    """What rounds cost here, by those of a few texts, in which each length is tried."""
    target, assistant = benchmark.target, benchmark.assistant
    speculation = replace(assistant.speculation, rule="throughput", max_tokens=MAX_TOKENS, tree=None, costs=None)
    options = {"max_new_tokens": TIMED_TOKENS, "assistant_model": assistant}
    with changed(assistant, speculation=speculation):
        plan: Any = plan_of(assistant.setup(), target, GenerationConfig(do_sample=False), captures=False)
        for question in islice(cycle(benchmark.questions), TIMED_TEXTS):
            plan.asked = list(range(MAX_TOKENS, -1, -1))
            answer(target, question.ids, 0.0, 0, options)
    return plan.costs


def sweep(
    replays: list[ChainReplay], head: AcceptanceHead | None, greedy: bool, costs: Mapping[str, Costs]
) -> dict[str, Any]:
    """Every rule on the records of one set and temperature.

    Returns:
        `rows`: one for each rule and setting, with its rates and its speed at each of the `costs` that it is for.
        `best`: for each of the costs, the best setting of each family, with its gain over the best fixed length and its
        share of the bounds' speeds. Settings are chosen on the very texts that they are shown for.
    """
    outcomes = {key: replay_all(replays, rule) for key, rule in _rules(head, greedy, costs)}
    outcomes |= {(ORACLE, None, name): oracle(replays, each) for name, each in costs.items()}
    rows = [
        {"family": family, "setting": setting, **found.rates,
         "speeds": {name: found.speed(each) for name, each in costs.items() if only in (None, name)}}
        for (family, setting, only), found in outcomes.items()
    ]  # fmt: skip
    best = {name: _best(name, each, outcomes) for name, each in costs.items()}
    return {"texts": len(replays), "tokens": sum(replay.generated for replay in replays), "rows": rows, "best": best}


Key = tuple[str, "float | None", "str | None"]  # family, setting, the costs that it is for (all by default)


def _rules(head: AcceptanceHead | None, greedy: bool, costs: Mapping[str, Costs]) -> Iterator[tuple[Key, MakeRule]]:
    """Every rule with every setting; what an assistant learns goes on from text to text."""
    for length in LENGTHS:
        config = SpeculationConfig(rule="fixed", num_tokens=length)
        yield (FIXED, length, None), partial(make_rule, config, DraftProbability())
    for family, baseline in BASELINES.items():
        for bound in THRESHOLDS:
            yield (family, bound, None), partial(baseline, bound, MAX_TOKENS)
    for by in ("q", "truth") if head is None else ("head", "q", "truth"):
        estimator = recorded_estimator(by, head, greedy)
        families = {f"threshold ({by})": False, f"threshold ({by} online)": True}
        if by == "truth":
            families = {INFORMED: False}
        for (family, adapts), h in product(families.items(), THRESHOLDS):
            config = SpeculationConfig(rule="threshold", threshold=h, max_tokens=MAX_TOKENS)
            rates = AcceptanceRates() if adapts else None
            yield (family, h, None), partial(make_rule, config, estimator, rates=rates)
        for name, each in costs.items():
            config = SpeculationConfig(rule="throughput", max_tokens=MAX_TOKENS, costs=each.to_dict())
            plan = plan_for(config, estimator)
            yield (f"throughput ({by})", None, name), partial(make_rule, config, estimator, plan)


def _best(name: str, costs: Costs, outcomes: Mapping[Key, Outcomes]) -> list[dict[str, Any]]:
    """The best setting of each family at these costs, fastest first."""
    families: dict[str, list[tuple[float | None, Outcomes]]] = {}
    for (family, setting, only), found in outcomes.items():
        if only in (None, name):
            families.setdefault(family, []).append((setting, found))
    chosen = {family: max(each, key=lambda one: one[1].speed(costs)) for family, each in families.items()}
    seconds = {family: found.seconds(costs) for family, (_, found) in chosen.items()}
    rows = []
    for family, (setting, found) in chosen.items():
        gain, low, high = ratio_of_sums(seconds[FIXED].tolist(), seconds[family].tolist())
        rows.append({
            "family": family, "setting": setting, **found.rates, "tokens_per_second": found.speed(costs),
            "speedup": found.speed(costs) * float(costs.round_seconds(0)[0]),
            "gain_over_fixed": gain - 1.0, "interval": [low - 1.0, high - 1.0],
            **{f"of_{bound.split()[0]}": float(seconds[bound].sum() / seconds[family].sum()) for bound in BOUNDS},
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["tokens_per_second"])
