"""Replay every stopping rule with every setting on the same recorded texts, and compute bounds for all rules.

    python examples/replay/sweep.py --target org/model --assistant org/assistant --data chat.jsonl --output replay/chat
    python examples/replay/sweep.py --target org/model --assistant org/assistant --rollouts my-assistant-work

The draft's proposals along each text of the target are recorded once (`record.py`). Each rule of this package, and
transformers' confidence, SVIP and AdaEDL, then runs on the record without the models (`chains.py`). Time is a sum over
rounds with the costs of `--costs`. `report.md` shows the best setting of each rule, and a picture of all settings.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from chains import BASELINES, ChainReplay, MakeRule, Outcomes, oracle, recorded_estimator, replay_all
from drawing import COLOURS, MARKERS, new_figure, save
from record import MAX_TOKENS, record
from texts import Text, load, once, options, text_sets, write
from transformers.utils import logging

from hf_specdecpp.benchmark.questions import Benchmark, RunLog
from hf_specdecpp.benchmark.report import markdown_table, mode
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import AcceptanceRates, DraftProbability
from hf_specdecpp.figures import ratio_of_sums
from hf_specdecpp.generation.setup import make_rule, plan_for
from hf_specdecpp.texts.sampling import Sampling, seed_of

LENGTHS = range(1, 15)
THRESHOLDS = [round(i / 20, 2) for i in range(1, 20)] + [0.97, 0.99]
FIXED, INFORMED, ORACLE = "fixed", "informed bound", "oracle"
BOUNDS = (INFORMED, ORACLE)
# The paper's costs, digitised from its figures: a draft step, and a target pass of any length.
PAPER = Costs(draft=0.0214, verify=(0.116,))
Row = dict[str, Any]


def main(words: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--costs", action="append", help="`paper` or a ratio t_draft / t_target; may be repeated")
    parser.add_argument("--draws", type=int, default=1, help="records made of each sampled text")
    arguments = parser.parse_args(words)
    costs = {name: costs_of(name) for name in arguments.costs or ["paper"]}
    benchmark = load(arguments)
    drafter = benchmark.assistant.ready_drafter()
    if drafter.model is None or drafter.reads is not None:
        raise SystemExit(
            "A record has one q a place, and this draft has several or none: what it reads of the target depends on "
            "where the round began, or nothing drafts. Use examples/replay/rounds.py."
        )
    log, found, parts = RunLog(benchmark.config.output, benchmark.settings, "records.jsonl"), [], []
    for name, texts, sampling in text_sets(benchmark, arguments.rollouts):
        if chains := records(benchmark, log, texts, sampling, arguments.draws):
            swept = sweep(chains, benchmark.assistant.head, sampling.greedy, costs)
            found.append({"set": name, "temperature": sampling.temperature, **swept})
            parts += described(name, mode(sampling.temperature), swept, costs, benchmark.config.output)
    write(benchmark, {"replays": found}, parts)


def costs_of(name: str) -> Costs:
    if name == "paper":
        return PAPER
    try:
        return Costs(draft=float(name), verify=(1.0,))
    except ValueError:
        raise SystemExit(f"--costs {name} is neither `paper` nor a ratio such as 0.1.") from None


def records(
    benchmark: Benchmark, log: RunLog, texts: Mapping[str, Text], sampling: Sampling, draws: int
) -> list[ChainReplay]:
    """The records of a set's texts, each made once; of sampled texts several, with other draws."""
    chains = []
    for prompt, text in logging.tqdm(texts.items(), desc="records", unit="text"):
        if text.first >= len(text.ids):
            continue  # too short for a round
        for draw in range(1 if sampling.greedy else draws):
            seed = seed_of(benchmark.config.seed, prompt, sampling.temperature, draw, text.ids)
            made = partial(record, text, benchmark.assistant, benchmark.target, sampling, seed)
            chains.append(ChainReplay(text, once(log, {"seed": seed}, made)))
    return chains


def sweep(replays: list[ChainReplay], head: AcceptanceHead | None, greedy: bool, costs: Mapping[str, Costs]) -> Row:
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


Key = tuple[str, "float | None", "str | None"]  # family, setting, costs (all by default)


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
            config = SpeculationConfig(rule="throughput", max_tokens=MAX_TOKENS, costs=asdict(each))
            plan = plan_for(config, estimator)
            yield (f"throughput ({by})", None, name), partial(make_rule, config, estimator, plan)


def _best(name: str, costs: Costs, outcomes: Mapping[Key, Outcomes]) -> list[Row]:
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


# The report -----------------------------------------------------------------------------------------------------------


def described(name: str, how: str, swept: Row, costs: Mapping[str, Costs], folder: Path) -> list[str]:
    """The parts of the report about one set and temperature, whose picture is drawn."""
    picture = f"pareto-{name}-{how.replace(' ', '-')}.png"
    plot_pareto(swept["rows"], folder / picture, f"{name}, {how}")
    tables = [table(each, swept["best"][each], costs[each]) for each in costs]
    texts = f"{swept['texts']} texts, {swept['tokens']} tokens."
    return [f"## {name}, {how}, replayed", texts, f"![{name}, {how}]({picture})", *tables]


def table(name: str, best: Sequence[Row], costs: Costs) -> str:
    price = costs.draft / costs.verify[0]
    title = f"Costs **{name}**: a draft step takes {costs.draft * 1e3:.4g} ms, {price:.3f} target passes."
    if costs.verify == (1.0,):
        title = f"Costs **{name}**: a draft step takes {price:g} target passes, which are the unit of time."
    header = ("rule", "best setting", "tokens/s", "speed-up", "over best fixed", "95 % interval", "of informed bound",
              "of the oracle", "discard rate", "verification rate")  # fmt: skip
    lines = []
    for row in best:
        low, high = row["interval"]
        setting = "none" if row["setting"] is None else f"{row['setting']:g}"
        lines.append(
            (row["family"], setting, f"{row['tokens_per_second']:.2f}", f"{row['speedup']:.2f}",
             f"{row['gain_over_fixed']:+.1%}", f"{low:+.1%} to {high:+.1%}", f"{row['of_informed']:.1%}",
             f"{row['of_oracle']:.1%}", f"{row['discard_rate']:.3f}", f"{row['verification_rate']:.4f}")
        )  # fmt: skip
    return f"{title}\n\n{markdown_table(header, lines)}"


def plot_pareto(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Discard over verification rate, a line a rule, and the front of all rules (SpecDec++, figure 4)."""
    families: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["setting"] is not None:
            families[row["family"]].append((row["verification_rate"], row["discard_rate"]))
    front: list[tuple[float, float]] = []  # points that no other point dominates
    for point in sorted(point for family, points in families.items() if family != INFORMED for point in points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    figure, axes = new_figure(7.5, 5.5)
    for number, (family, points) in enumerate(families.items()):
        style: dict[str, Any] = {"color": COLOURS[number % 8], "marker": MARKERS[number % 8], "markersize": 4}
        how = "--" if family in (FIXED, INFORMED) else "-"
        axes.plot(*zip(*points, strict=True), linestyle=how, label=family, **style)
    axes.grid(alpha=0.3)
    axes.plot(*zip(*front, strict=True), color="#BBBBBB", linewidth=6, zorder=0, label="front of all rules")
    axes.set(xlabel="verification rate: target passes per generated token", title=f"Where to stop drafting ({title})")
    axes.set_ylabel("discard rate: discarded candidates per generated token")
    axes.set_ylim(0, min(axes.get_ylim()[1], 2.5))
    axes.legend(frameon=False, title="down and left is better")
    save(figure, path)


if __name__ == "__main__":
    main()
