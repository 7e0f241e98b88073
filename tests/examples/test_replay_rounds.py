"""Replayed rounds: greedy ones are the live rounds, and sampled ones count what the verifier accepts on average."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rounds import RoundReplay, ends_at, replay_rounds, round_table
from support.enumeration.exact_distribution import Replay, exact_distribution
from support.enumeration.toy_rounds import Models
from support.enumeration.toy_trees import ToyTree
from support.files.repos import head_for
from support.targets.models import assistant_for, assistant_of, configured, prompt, quiet_later_layers, tiny
from support.targets.tree_generation import sharp
from texts import Text

from hf_specdecpp.benchmark.contestants import Contestant
from hf_specdecpp.benchmark.questions import Benchmark, RunLog
from hf_specdecpp.cli_options import BenchmarkConfig
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.sampling.randomness import TorchRandomness
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.verification import Verification

LENGTH, NEW_TOKENS = 12, 60
KINDS: dict[str, dict[str, Any]] = {
    "dyspec": {"tree": "dyspec", "tree_budget": 10},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 6},
    "static": {"tree": [3, 2, 1]},
    "fixed": {"rule": "fixed", "num_tokens": 3},
    "threshold": {"rule": "threshold", "threshold": 0.8, "max_tokens": 6},
}


def text_of(target: Any, **sampling: Any) -> Text:
    ids = target.generate(prompt(LENGTH), max_new_tokens=NEW_TOKENS, **sampling)[0].tolist()
    return Text(ids, LENGTH, LENGTH + NEW_TOKENS)


@pytest.mark.daily("dyspec-False", "static-True")
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_replays_are_the_live_rounds(kind: str, with_head: bool) -> None:
    target = sharp(tiny("llama"))
    assistant = assistant_for(target, mix=0.9)
    assistant.head = head_for(assistant.drafter.model, inputs="before")
    text = text_of(target, do_sample=False)
    contestant = Contestant(kind, kind, SpeculationConfig(**{"rule": "threshold", **KINDS[kind]}), with_head)
    with contestant.arguments(assistant, target):
        rounds = list(RoundReplay(text, assistant, target, Sampling(0.0), 0).rounds(assistant.setup()))
    if not with_head:
        assistant.head = None
    configured(assistant, **KINDS[kind])
    live = target.generate(prompt(LENGTH), max_new_tokens=NEW_TOKENS, assistant_model=assistant, do_sample=False)
    stats = assistant.stats
    assert live[0].tolist() == text.ids
    assert (len(rounds), sum(len(each.tree) for each in rounds)) == (stats.rounds, stats.drafted)
    assert sum(each.accepted for each in rounds) == sum(each.by_token for each in rounds) == stats.accepted > 5
    lines = []
    for memory in (assistant.memory, contestant.memory):
        lines.append([each.rates.line.tolist() for each in memory.learned.get(target, {}).values()])
    assert lines[0] == lines[1], "both learned the same"
    assert bool(lines[0]) == (kind in ("dyspec", "dyspec-exact", "threshold"))


@pytest.mark.parametrize("kind", ["dyspec", "threshold"])
@pytest.mark.parametrize("draft", ["conditioned", "eagle3"])
def test_greedy_replays_of_drafts_that_read_states(draft: str, kind: str) -> None:
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of(draft, target)
    configured(assistant, **KINDS[kind], adapt=False, draft_successors=False)
    text = text_of(target, do_sample=False)
    rounds = list(RoundReplay(text, assistant, target, Sampling(0.0), 0).rounds(assistant.setup()))
    target.generate(prompt(LENGTH), max_new_tokens=NEW_TOKENS, assistant_model=assistant, do_sample=False)
    assert len(rounds) == assistant.stats.rounds
    assert [each.tree.tokens for each in rounds]
    assert sum(len(each.tree) for each in rounds) == assistant.stats.drafted
    assert sum(each.accepted for each in rounds) == assistant.stats.accepted > 0


def accepted_path(program: ToyTree, tree: DraftTree, randomness: Replay) -> tuple[int, ...]:
    return tuple(program.verify(tree, randomness, ())[0])


@pytest.mark.parametrize("algorithm", ["dyspec", "static"])
@pytest.mark.parametrize("verification", ["block", "token"])
def test_chances_are_those_of_the_verifier(verification: Verification, algorithm: str) -> None:
    """Against the enumerated outcomes of the verifier on trees drawn once."""
    accepted = set()
    for seed in range(4):
        models = Models("plain", 4, seed)
        program = ToyTree(models, algorithm, "draft probability", budget=5, seed=seed, verifier=verification)
        torch.manual_seed(seed)
        tree = program.draft(TorchRandomness(), ())
        p = torch.stack([program.models.p(tuple(tree.path(node))) for node in range(len(tree.tokens))])
        ends, probs = ends_at(tree, p, verification), exact_distribution(partial(accepted_path, program, tree))
        for node in range(len(tree.tokens)):
            expected = sum(chance for path, chance in probs.items() if path == tuple(tree.nodes_to(node)))
            assert float(ends[node]) == pytest.approx(expected, abs=1e-9)
        accepted |= {len(path) for path in probs}
    assert len(accepted) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "static" else [pytest.mark.slow]) for kind in KINDS]
)
def test_sampled_replays_agree_with_live_rounds_on_average(kind: str) -> None:
    target = tiny("llama")
    assistant = assistant_for(target, mix=0.7)
    configured(assistant, **KINDS[kind])
    live, replayed, by_token = [0.0, 0.0], [0.0, 0.0], 0.0
    contestant = Contestant(kind, kind, assistant.speculation)
    for seed in range(12):
        torch.manual_seed(seed)
        replay = RoundReplay(text_of(target, do_sample=True, top_k=0), assistant, target, Sampling(1.0), seed)
        with contestant.arguments(assistant, target):
            for each in replay.rounds(assistant.setup()):
                replayed[0] += 1
                replayed[1] += each.accepted
                by_token += each.by_token
        target.generate(prompt(LENGTH), max_new_tokens=NEW_TOKENS, assistant_model=assistant, do_sample=True, top_k=0)
        live[0] += assistant.stats.rounds
        live[1] += assistant.stats.accepted
    assert replayed[1] / replayed[0] == pytest.approx(live[1] / live[0], rel=0.12)
    assert by_token < replayed[1], "block verification accepts more"


def test_the_table_of_rounds() -> None:
    row = {"temperature": 1.0, "contestant": "fixed 3", "rounds": 10, "drafted": 30, "draft_passes": 30}
    rows = [
        {**row, "set": "code", "prompt": "one", "accepted": 20.0, "by_token": 15.0},
        {**row, "set": "talk", "prompt": "two", "accepted": 10.0, "by_token": 5.0},
    ]
    lines = [line.split(" | ") for line in round_table(rows).splitlines()[2:]]
    assert [line[0] for line in lines] == ["| all", "| code", "| talk"]
    tokens, by_token, leads = zip(*((line[3][:4], line[4], line[5][:6]) for line in lines), strict=True)
    assert (tokens, by_token) == (("2.50", "3.00", "2.00"), ("2.00", "2.50", "1.50"))
    assert leads == ("+25.0%", "+20.0%", "+33.3%")
    assert lines[0][6:8] == [f"{2.5 / 1.15:.3f}", f"{2.5 / 1.57:.3f}"], "three draft steps of 0.05 or 0.19 passes"
    assert len(round_table(rows[:1]).splitlines()) == 3


def test_rows_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = sharp(tiny("llama"))
    assistant, text = assistant_for(target, mix=0.9), text_of(target, do_sample=False)
    contestants = [
        Contestant(name, name, SpeculationConfig(**{"rule": "threshold", **knobs})) for name, knobs in KINDS.items()
    ]
    contestants += [Contestant("other", "other", SpeculationConfig("throughput", tree="dyspec"))]
    config = BenchmarkConfig("target", output=tmp_path)

    def count(names: list[Contestant]) -> list[dict[str, Any]]:
        benchmark = Benchmark(config, target, assistant, names, [])
        return replay_rounds(benchmark, RunLog(tmp_path, {}, "rounds.jsonl"), [("set", {"one": text}, Sampling(0.0))])

    first = count(contestants[:2])
    monkeypatch.setattr(RoundReplay, "rounds", None)
    assert count(contestants[:2]) == first
    monkeypatch.undo()
    assert [row["contestant"] for row in count(contestants)] == list(KINDS), "throughput depends on other texts"
    assert all(row["accepted"] > 0 for row in first)
