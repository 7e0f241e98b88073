"""What captured rounds draft, beside the growth of uncaptured trees: passes that are wrong would be noticed, a changed
draft is seen."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.devices.capturing import CHAIN, drawn, generate
from support.devices.whole_rounds import TREE
from support.enumeration.toy_rounds import HIDDEN_SIZE, make_estimator
from support.targets.models import assistant_for, assistant_of, quiet_later_layers, tiny
from torch import Tensor, nn

from hf_specdecpp.caches.masks import Nodes
from hf_specdecpp.cuda_graphs import captured_draft, on_device
from hf_specdecpp.cuda_graphs.captured_draft import CapturedDraft, RoundRules
from hf_specdecpp.cuda_graphs.fixed_cache import pass_inputs
from hf_specdecpp.drafting import model_steps
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import EDGES, AcceptanceRates, DraftStep, Estimator
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import Ranked
from hf_specdecpp.trees.growth import Growth, Slots

VOCAB, WIDTH, SEEDS = 30, 3, 12


class Contents:
    """What a draft says after each node of two levels, and the numbers that its children are drawn with."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.scores = [2.0 * torch.randn(1, count, VOCAB) for count in (1, WIDTH)]
        self.hidden = [torch.randn(1, count, HIDDEN_SIZE) for count in (1, WIDTH)]
        self.times = [torch.empty(1, count, VOCAB).exponential_() for count in (1, WIDTH)]
        self.embed = nn.Embedding(VOCAB, HIDDEN_SIZE)


SecondLevel = list[tuple[int, int, float]]  # of the second level: place of the parent, token, chance that it stands


def rates(seed: int) -> AcceptanceRates:
    """What rounds in which estimates meant little have taught; of the first seed nothing yet."""
    found, numbers = AcceptanceRates(), random.Random(seed)
    for _ in range(64 * (seed > 0)):
        families = [([numbers.random() for _ in range(WIDTH)], numbers.choice([0, 1, None])) for _ in range(4)]
        found.observe_tree(families)
    return found


def captured(contents: Contents, estimator: Estimator, greedy: bool, learned: AcceptanceRates) -> SecondLevel:
    rules = RoundRules(greedy, Processing([]), Processing([]), estimator, None, 0, "token")
    draft: Any = SimpleNamespace(
        device=torch.device("cpu"), shift=torch.zeros(len(EDGES) + 1), _shift=None, edges=torch.tensor(EDGES)
    )
    draft._calibrated = partial(CapturedDraft._calibrated, draft)
    CapturedDraft.calibrate(draft, learned)
    values = torch.ones(1, 1)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        for level in range(2):
            patch.setattr(captured_draft, "exponential", lambda *_, level=level, **__: contents.times[level])
            step = DraftStep(level, contents.scores[level], contents.hidden[level], contents.embed, greedy)
            level_drawn = CapturedDraft._draw(draft, step, values, rules, WIDTH)
            values = level_drawn.values
    return list(zip(level_drawn.parents[0].tolist(), level_drawn.tokens[0].tolist(), values[0].tolist(), strict=True))


def uncaptured(contents: Contents, estimator: Estimator, greedy: bool, learned: AcceptanceRates) -> SecondLevel:
    def expand(tree: Any, nodes: list[int]) -> tuple[Tensor, Tensor]:
        return contents.scores[tree.levels][0], contents.hidden[tree.levels][0]

    randomness: Any = SimpleNamespace(siblings=lambda q: Ranked(q, q / contents.times[len(q) > 1][0]))
    how = Slots(estimator, None if greedy else randomness, rates=learned, embed=contents.embed)
    growth = Growth(expand, how, root=0, max_depth=3)
    growth.expand([0])
    firsts = [growth.draw_best() for _ in range(WIDTH)]
    growth.open.clear()  # a level has as many nodes as the others
    growth.expand([node for node in firsts if node is not None])
    found = [growth.draw_best() for _ in range(WIDTH)]
    return [(firsts.index(growth.tree.parents[node]), growth.tree.tokens[node], growth.leaves[node])
            for node in found if node is not None]  # fmt: skip


def differing(judge: str, greedy: bool) -> int:
    """How many of some trees have other second levels than uncaptured ones."""
    count = 0
    for seed in range(SEEDS):
        contents, estimator = Contents(seed), make_estimator(judge, seed)
        ours, theirs = (grow(contents, estimator, greedy, rates(seed)) for grow in (captured, uncaptured))
        values = [torch.tensor([each[2] for each in nodes]) for nodes in (ours, theirs)]
        is_same = [each[:2] for each in ours] == [each[:2] for each in theirs]
        count += not (is_same and torch.allclose(values[0], values[1]))
    return count


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("judge", ["q", "before", "path"])
def test_slots_are_valued_as_in_uncaptured_trees(judge: str, greedy: bool) -> None:
    assert differing(judge, greedy) == 0


def told_of_q(head: AcceptanceHead, step: DraftStep, tokens: Tensor, left: Tensor, mass: Tensor) -> Tensor:
    """A mutant: what earlier siblings have taken is not left out."""
    return JUDGE(head, step, tokens, step.q[..., None, :].expand_as(left), mass)


def told_of_no_siblings(head: AcceptanceHead, step: DraftStep, tokens: Tensor, left: Tensor, mass: Tensor) -> Tensor:
    """A mutant: their mass is not told."""
    return JUDGE(head, step, tokens, left, torch.zeros_like(mass))


JUDGE = AcceptanceHead.estimate_siblings


@pytest.mark.daily(
    "by all of q-sampled", "by q alone-greedy", "no siblings-greedy", "nothing learned-sampled",
    "not calibrated-greedy", "siblings do not count-sampled",
)  # fmt: skip
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (RoundRules, "head_of_slots", None),
        (AcceptanceHead, "estimate_siblings", told_of_q),
        (AcceptanceHead, "estimate_siblings", told_of_no_siblings),
        (on_device, "slot_values", lambda values, chances: values[..., None].expand_as(chances)),
        (CapturedDraft, "calibrate", lambda *_: None),
        (CapturedDraft, "_calibrated", lambda _, estimates: estimates),
    ],
    ids=["by q alone", "by all of q", "no siblings", "siblings do not count", "nothing learned", "not calibrated"],
)
def test_mutants_are_noticed(owner: Any, name: str, mutant: Any, greedy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, mutant)
    assert differing("before", greedy) > SEEDS / 2


# Steps and passes of drafts. ------------------------------------------------------------------------------------------


def forgets_nothing(draft: CapturedDraft, *arguments: Any, **drafted: Any) -> None:
    """What was emitted is read behind what the draft has read of candidates."""
    draft.context.cache.length.add_(1)
    SETTLE(draft, *arguments, **drafted)


SETTLE = CapturedDraft.settle


def sees_siblings(model: Any, room: Any, nodes: Nodes, *rest: Any) -> dict[str, Any]:
    siblings = Nodes(nodes.seen.cummax(dim=1).values, nodes.depths, nodes.places)
    return pass_inputs(model, room, siblings, *rest)


def stands_behind_all(*args: Any) -> dict[str, Any]:
    found = pass_inputs(*args)
    ids = found["position_ids"]
    return found | {"position_ids": ids + torch.arange(ids.shape[1])}


@pytest.mark.daily("sees siblings", "forgets nothing")
@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(("settings", "owner", "name", "mutant"), [
    (CHAIN, CapturedDraft, "settle", forgets_nothing),
    (TREE, model_steps, "pass_inputs", sees_siblings),
    (TREE, model_steps, "pass_inputs", stands_behind_all),
], ids=["forgets nothing", "sees siblings", "stands behind all"])  # fmt: skip
def test_passes_that_are_wrong_are_noticed(
    settings: dict[str, Any], owner: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what is drafted: texts are verified."""
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("independent", target, adapt=False, **settings)
    monkeypatch.setattr("support.devices.capturing.LENGTHS", (3, 12))
    expected, rounds = drawn(target, assistant, sampled=False)
    monkeypatch.setattr(owner, name, mutant)
    assistant.ready_drafter().captured = None  # what is captured knows nothing of the mutant
    found, other_rounds = drawn(target, assistant, sampled=False)
    assert assistant.stats.decided["rounds"] == "captured"
    assert all(map(torch.equal, found, expected))
    assert other_rounds != rounds


@pytest.mark.usefixtures("pretended")
def test_a_changed_draft_gets_other_steps() -> None:
    """A graph does not look again at the modules that it was captured of."""
    target = tiny("llama", num_hidden_layers=1)
    assistant = assistant_of("independent", target, **CHAIN)
    generate(target, assistant)
    for layer in assistant.ready_drafter().model.model.layers:
        layer.mlp = torch.nn.Identity()
    assert torch.equal(generate(target, assistant), generate(target, None))
    found = []
    for graphs in ("auto", "off"):
        assistant.speculation.graphs = graphs
        found.append(generate(target, assistant))
        found.append(assistant.stats.accepted)
    assert torch.equal(found[0], found[2])
    assert found[1] == found[3] > 0


def test_one_draft_for_two_targets(pretended: Counter[str]) -> None:
    first, second = (tiny("llama", seed, num_hidden_layers=1) for seed in (0, 3))
    assistant = assistant_for(first, attached=False, mix=0.9, **CHAIN)
    for turn in range(2):
        before = pretended["captured"]
        for target in (first, second):
            assistant.attach(target)
            assert torch.equal(generate(target, assistant), generate(target, None))
        assert (pretended["captured"] > before) == (turn == 0)
