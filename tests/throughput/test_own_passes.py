"""Costs of captured passes, which are measured in the text itself. Clocks and graphs are pretended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import assistant_of, partly_agreeing, prompt, tiny
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, files
from hf_specdecpp.caches.static import width_of
from hf_specdecpp.captured import target as captured_target
from hf_specdecpp.captured.target import CapturedTarget
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.generation import candidate_generator
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput import chains, measuring, trees
from hf_specdecpp.throughput.own_passes import OwnPasses
from hf_specdecpp.throughput.round_times import RoundTimes

WIDTHS = {1: 1.0, 2: 1.5, 4: 2.0, 8: 2.25}  # seconds of captured passes, which are pretended
UNCAPTURED = 20.0


class PretendedClock:
    """Goes on only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self, *_: object) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def slow(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: Any) -> None:
        """Let a function take so many seconds more; of a captured pass by its width."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.wait(seconds if isinstance(seconds, float) else seconds[width_of(args[1].shape[1])])
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, timed)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PretendedClock:
    """Of measurements and of rounds. No costs are known."""
    clock = PretendedClock()
    for module in (measuring, candidate_generator):
        monkeypatch.setattr(module, "computing_clock", lambda *_: clock)
    monkeypatch.setattr(measuring, "_known", {})
    monkeypatch.setattr(measuring, "TARGET_SECONDS", 60.0)
    monkeypatch.setattr(measuring, "_time_draft", lambda *_: {"start": 0.1, "draft": 0.1, "read": 0.01})
    monkeypatch.setattr(measuring, "_time_growing", lambda *_: {"start": 0.1, "draft": 0.1, "branch": 0.01})
    monkeypatch.setattr(files, "cached_assets_path", lambda *_: tmp_path)
    return clock


def test_the_passes_that_fill_a_width_are_made() -> None:
    made: list[int] = []

    def make(count: int) -> Tensor:
        made.append(count)
        return torch.zeros(count + 1, 4)

    assert OwnPasses(make, 100, {}).counts(4) == [0, 1, 3, 7]
    assert OwnPasses(make, 100, {}).counts(3) == [0, 1, 3]
    assert OwnPasses(make, 6, {}).counts(20) == [0, 1, 3], "seven candidates have no room"
    OwnPasses(make, 100, {}).settle(3)
    assert made == [0, 1, 3]


def test_costs_are_those_of_the_passes(clock: PretendedClock) -> None:
    target = tiny("llama")

    def make(count: int) -> Tensor:
        clock.now += WIDTHS[count + 1]
        return torch.zeros(count + 1, 128)

    own = OwnPasses(make, 100, {"captured": True})
    known = measuring.costs_of(
        measuring.Rounds(target, Drafter(partly_agreeing(target)), DraftProbability(), 5, own=own)
    )
    assert known.measured.verify == pytest.approx((1.0, 1.5, 1.75, 2.0, 2.0625, 2.125, 2.1875, 2.25))
    assert known.first.verify == pytest.approx((1.0, 1.5, 2.0, 2.0, 2.25, 2.25))


LOOKUP: dict[str, Any] = {"lookup": True, "lookup_tokens": 6}


class Texts:
    """Generations of an assistant under `rule="throughput"`, whose passes take pretended times."""

    def __init__(self, **settings: Any) -> None:
        self.target = tiny("llama", num_hidden_layers=1)
        self.assistant: SpecDecPPAssistant = assistant_of(
            "independent", self.target, rule="throughput", **{"max_tokens": 6, **settings}
        )

    def __call__(self, **options: Any) -> Tensor:
        options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **options}
        found: Tensor = self.target.generate(prompt(), assistant_model=self.assistant, **options)
        return found


# Chains that are looked up as well are not captured as whole rounds.
GROWTHS: dict[str, dict[str, Any]] = {"chain": LOOKUP, "tree": {"tree": "dyspec", "tree_budget": 6, "tree_depth": 3}}


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.usefixtures("pretended")
def test_captured_passes_are_measured_where_they_are_captured(
    growth: str, clock: PretendedClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the first text, and in no other; uncaptured ones, which take longer, are other costs, on disk, too."""
    texts = Texts(**GROWTHS[growth])
    plain = texts.target.generate(prompt(), max_new_tokens=40, do_sample=False, pad_token_id=0)
    clock.slow(monkeypatch, CapturedTarget, "read", WIDTHS)
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "_time_target", lambda *_: pytest.fail("measured over a cache that grows"))
        for _ in range(2):
            assert torch.equal(texts(), plain)
            (known,) = measuring._known.values()
            assert [known.measured.verify[width - 1] for width in WIDTHS] == pytest.approx(list(WIDTHS.values()))
    texts.assistant.speculation.graphs = "off"
    with texts.target.register_forward_pre_hook(lambda *_: clock.wait(UNCAPTURED)):
        assert torch.equal(texts(), plain)
    assert list(measuring._known.values())[0] is known
    uncaptured = list(measuring._known.values())[1]
    assert min(uncaptured.measured.verify) > UNCAPTURED / 2
    kept = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    passes = {each["of"]["passes"] is None: each["costs"]["measured"]["verify"][0] for each in kept}
    assert passes[True] > UNCAPTURED / 2 > passes[False] == pytest.approx(1.0)


@pytest.mark.usefixtures("pretended")
def test_what_is_done_once_a_text_is_no_cost_of_a_round(clock: PretendedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at the target, and making plans. The rounds take what their passes take, to the last digit."""
    taken: list[RoundTimes] = []
    texts = Texts(**LOOKUP)
    clock.slow(monkeypatch, CapturedTarget, "read", WIDTHS)
    clock.slow(monkeypatch, captured_target, "identity", 100.0)
    clock.slow(monkeypatch, chains, "solve", 100.0)
    learn = chains.ThroughputState.learn

    def note(state: chains.ThroughputState, times: RoundTimes) -> None:
        taken.append(times)
        learn(state, times)

    monkeypatch.setattr(chains.ThroughputState, "learn", note)
    begin = clock.now
    for _ in range(3):
        texts()
    assert clock.now - begin > 3 * 100.0 + 5 * 100.0, "both were done"
    for times in taken:
        for passes in times.passes.values():
            for width, seconds in passes.items():
                assert seconds == pytest.approx([WIDTHS[width]] * len(seconds))
        assert all(seconds == pytest.approx(0.0) for each in times.drafts.values() for _, seconds in each)


@pytest.mark.usefixtures("pretended")
def test_plans_of_trees_are_made_between_rounds(clock: PretendedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[RoundTimes] = []
    texts = Texts(**GROWTHS["tree"])
    clock.slow(monkeypatch, CapturedTarget, "read", WIDTHS)
    clock.slow(monkeypatch, trees, "solve", 100.0)
    monkeypatch.setattr(trees.TreeThroughput, "learn", lambda _, times: taken.append(times))
    begin = clock.now
    texts()
    assert clock.now - begin > 300.0
    assert all(sum(each) < 100.0 for times in taken for passes in times.passes.values() for each in passes.values())


def test_no_candidates_before_there_is_room_to_measure(clock: PretendedClock) -> None:
    """A static cache that is full but for the next token: the text is plain, and nothing is known of costs."""
    texts = Texts()
    assert texts(max_new_tokens=1, cache_implementation="static").shape[1] == prompt().shape[1] + 1
    assert not measuring._known
    assert texts.assistant.stats.drafted == 0
    assert clock.now == 0.0


@pytest.mark.usefixtures("pretended")
def test_warming_up_measures_the_captured_passes(clock: PretendedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts(**LOOKUP)
    clock.slow(monkeypatch, CapturedTarget, "read", WIDTHS)
    texts.assistant.warm_up(80)
    (known,) = measuring._known.values()
    assert known.first.verify == pytest.approx((1.0, 1.5, 2.0, 2.0, 2.25, 2.25, 2.25))
    texts(max_new_tokens=20)
    assert list(measuring._known.values()) == [known]


class Growing:
    """A draft whose round takes 2 s to begin, a pass over a level 3 s, and each further node in it 0.5 s."""

    def __init__(self, clock: PretendedClock, session: Any) -> None:
        self.clock, self.session = clock, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def begin_round(self, *arguments: Any) -> None:
        self.clock.now += 2.0
        self.session.begin_round(*arguments)

    def expand(self, tree: Any, nodes: list[int]) -> Any:
        self.clock.now += 3.0 + 0.5 * (len(nodes) - 1)
        return self.session.expand(tree, nodes)


def test_drafting_of_trees_is_measured_by_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PretendedClock()
    monkeypatch.setattr(measuring, "computing_clock", lambda *_: clock)
    monkeypatch.setattr(measuring, "_time_target", lambda *_: (1.0,))
    monkeypatch.setattr(measuring, "_time_draft", lambda *_: {"start": 7.0, "draft": 8.0, "read": 0.0})
    target: CausalLM = tiny("llama")
    drafter = Drafter(partly_agreeing(target))
    session = drafter.tree_session
    monkeypatch.setattr(drafter, "tree_session", lambda *arguments: Growing(clock, session(*arguments)))
    measured: Any = measuring.measure(measuring.Rounds(target, drafter, DraftProbability(), 4, trees=True))
    assert (measured.start, measured.draft, measured.branch) == pytest.approx((2.0, 3.0, 0.5))
    assert measured.tree_seconds(2, 9, 0.0) == pytest.approx(2.0 + 3.0 + 3.0 + 7 * 0.5)
