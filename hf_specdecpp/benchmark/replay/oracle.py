"""Bounds: what is possible with the same draft."""

from __future__ import annotations

from hf_specdecpp.benchmark.replay.chains import ChainReplay, Outcomes
from hf_specdecpp.config.costs import Costs


def oracle(replays: list[ChainReplay], costs: Costs) -> Outcomes:
    """The hindsight oracle: it knows what will be accepted, drafts no other candidate, and spends the least time.

    No rule can be faster on these records: any round can be cut back to the candidates that stand without changing what
    it emits. Where a draft step costs less than a target pass and passes cost the same whatever their length, it drafts
    exactly what will be accepted, as in the paper (Lemma 2.1); it is not bound by a rule's most candidates.
    """
    outcomes = Outcomes()
    for replay in replays:
        outcomes.add(_fastest(replay, costs), len(replay.text.ids) - replay.text.first)
    return outcomes


def _fastest(replay: ChainReplay, costs: Costs) -> list[tuple[int, int, int]]:
    """Rounds of least total time, found from the end of the text backwards."""
    first, end = replay.text.first, len(replay.text.ids)
    runs = {start: replay.run_of(start) for start in range(first, end)}
    seconds = costs.round_seconds(max(runs.values(), default=0)).tolist()
    least: dict[int, float] = {}
    choice: dict[int, int] = {}
    for start in reversed(range(first, end)):
        totals = [seconds[count] + least.get(start + count + 1, 0.0) for count in range(runs[start] + 1)]
        choice[start] = min(range(len(totals)), key=totals.__getitem__)
        least[start] = totals[choice[start]]
    rounds, start = [], first
    while start < end:
        rounds.append((choice[start], choice[start], 1))
        start += choice[start] + 1
    return rounds
