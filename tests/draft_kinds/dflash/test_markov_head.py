"""The rounds of DSpark drafts beside the published formulas (`dspark_files.Formulas`), in every dialect."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.dspark_files import BLOCK, GREEDY, IDS, START, VARIANTS, VOCAB, Checkpoint, Formulas, target_for
from support.targets.formulas import close, states_of
from support.targets.models import configured, prompt
from support.targets.rounds_anew import begun
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.tree import DraftTree

TEXT = 1 + prompt(17) % (VOCAB - 2)  # neither padding nor the mask token
ROUNDS = (9, 10, 14, 17)  # lengths of the text, its last token included, as rounds begin
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": BLOCK, "draft_successors": False}


def loaded(checkpoint: Checkpoint, folder: Path, **settings: Any) -> tuple[SpecDecPPAssistant, CausalLM]:
    target = target_for()
    assistant = SpecDecPPAssistant.from_pretrained(checkpoint.save(folder), target=target)
    return configured(assistant, **{**FIXED, **settings}), target


def session_at(draft: Any, target: CausalLM, count: int = 1) -> Any:
    """Where round `count` of `ROUNDS` begins."""
    return begun(draft, TEXT, ROUNDS[:count], VOCAB, states_of(target, draft, TEXT))


def same(actual: Tensor, expected: Tensor) -> None:
    """Logits that are -inf at the same tokens, and elsewhere close."""
    assert torch.equal(actual.isfinite(), expected.isfinite())
    close(actual[actual.isfinite()], expected[expected.isfinite()], 1e-5)


PRODUCT = {
    f"{dialect} {head} {own} {fills_in}": Checkpoint(
        dialect, head=head, own=own, fills_in=fills_in, says="field", reduced=dialect == "speculators" and own
    )
    for dialect in ("deepspec", "speculators", "specforge", "liquid")
    for head in ("vanilla", "gated", "rnn")
    for own in (False, True)
    for fills_in in (False, True)
}


@pytest.mark.daily(
    "deepspec", "deepspec, gated", "deepspec, plain", "minicpm", "gemma4", "liquid", "specforge, fills in",
    "speculators, rnn", "speculators, silent",
)  # fmt: skip
@pytest.mark.parametrize("name", [*VARIANTS, *PRODUCT])
@torch.no_grad()
def test_every_round(name: str, tmp_path: Path) -> None:
    """Of the path drawn, whatever it is: candidates, q and confidences."""
    checkpoint = {**VARIANTS, **PRODUCT}[name]
    assistant, target = loaded(checkpoint, tmp_path)
    draft = assistant.ready_drafter()
    assert draft.places == checkpoint.places
    for count in range(1, len(ROUNDS) + 1):
        session, formulas = session_at(draft, target, count), Formulas(checkpoint, target, TEXT[:, : ROUNDS[count - 1]])
        path = [int(token) for token in 1 + 5 * torch.arange(BLOCK) % (VOCAB - 3)]
        for place in range(checkpoint.places):
            logits, hidden = session.propose_next([torch.tensor(token) for token in path[:place]]) or (None, None)
            assert logits is not None
            assert hidden is not None
            same(logits, formulas.logits(path[:place]))
            if checkpoint.confidence != "none":
                previous = path[place - 1] if place else formulas.anchor
                assert assistant.head is not None
                close(assistant.head(hidden), formulas.confidence(place, previous), 1e-5)
        assert session.propose_next([torch.tensor(1)] * checkpoint.places) is None
        assert session.passes == 1


def simulated(checkpoint: Checkpoint, target: CausalLM, text: Tensor, start: int, mutant: str = "") -> list[list[int]]:
    """Greedy rounds along a text that the target wrote: `drafted_at` and `accepted_at`."""
    drafted, accepted, length = [0] * checkpoint.places, [0] * checkpoint.places, start + 1
    while length < text.shape[1]:
        room = text.shape[1] - length - 1
        chain = Formulas(checkpoint, target, text[:, :length], mutant).chain()[:room]
        for place in range(len(chain)):
            drafted[place] += 1
        count = 0
        while count < len(chain) and chain[count] == int(text[0, length + count]):
            accepted[count] += 1
            count += 1
        length += count + 1
    return [drafted, accepted]


def counted(assistant: SpecDecPPAssistant, places: int) -> list[list[int]]:
    stats = assistant.stats
    return [(each + [0] * places)[:places] for each in (stats.drafted_at, stats.accepted_at)]


@pytest.mark.daily("deepspec, rnn", "liquid", "speculators, fills in", takes=3)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "speculators, silent"])
def test_greedy_rounds(name: str, tmp_path: Path) -> None:
    checkpoint = VARIANTS[name]
    assistant, target = loaded(checkpoint, tmp_path)
    text = target.generate(START, **GREEDY)
    assert torch.equal(target.generate(START, assistant_model=assistant, **GREEDY), text)
    expected = simulated(checkpoint, target, text, START.shape[1])
    assert counted(assistant, checkpoint.places) == expected
    if checkpoint.rank:
        assert min(expected[1][:2]) > 0, "a wrong place 2 would not be seen"
        assert sum(expected[1]) < sum(expected[0]) - 3


MUTANTS = {
    "rows off by one": "specforge, fills in",
    "the token before, one step late": "deepspec",
    "the first token only": "deepspec",
    "draft ids": "speculators, fills in",
    "d2t as ids": "speculators, fills in",
    "input norm on the context": "deepspec",
    "layer ids off by one": "deepspec",
    "the other pairs of dimensions": "liquid",
    "causal": "deepspec",
    "the bias capped": "gemma4",
    **dict.fromkeys(
        ("unscaled embeddings", "no cap", "values without a norm", "scaled queries", "no factor", "all pairs"),
        "gemma4, plain",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@torch.no_grad()
def test_each_fact_can_fail(mutant: str, tmp_path: Path) -> None:
    """The formulas, computed wrongly on purpose, are another distribution than that of the draft."""
    checkpoint = VARIANTS[MUTANTS[mutant]]
    assistant, target = loaded(checkpoint, tmp_path)
    session, text = session_at(assistant.ready_drafter(), target, 2), TEXT[:, : ROUNDS[1]]
    path = [int(IDS[3]), int(IDS[8])]
    right, wrong = (Formulas(checkpoint, target, text, name) for name in ("", mutant))
    found: Any = session.propose_next(list(torch.tensor(path)))
    assert float((found[0].double().softmax(-1) - right.logits(path).softmax(-1)).abs().max()) < 1e-5
    assert float((found[0].double().softmax(-1) - wrong.logits(path).softmax(-1)).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["deepspec", "deepspec, gated", "specforge", "speculators, rnn", "deepspec, plain"])
@torch.no_grad()
def test_a_node_of_a_tree_has_the_bias_of_its_own_path(name: str, tmp_path: Path) -> None:
    checkpoint = VARIANTS[name]
    assistant, target = loaded(checkpoint, tmp_path)
    session, tree = session_at(assistant.ready_drafter(), target), DraftTree(int(TEXT[0, ROUNDS[0] - 1]))
    formulas, level = Formulas(checkpoint, target, TEXT[:, : ROUNDS[0]]), [0]
    for depth in range(checkpoint.places + 1):
        logits, hidden = session.expand(tree, level)
        for node, row, state in zip(level, logits, hidden, strict=True):
            if depth < checkpoint.places:
                same(row, formulas.logits(tree.path(node)))
                close(state[: formulas.h.shape[1]], formulas.h[depth], 1e-5)
            else:
                assert not row.isfinite().any()
        # Two children each of the last two nodes: nodes of equal depth and token, with other tokens before.
        level = [tree.add(node, token) for node in level[-2:] for token in (4, 9)]
    assert session.passes == 1
    if checkpoint.rank:
        assert float((formulas.logits([4, 9]) - formulas.logits([9, 9])).abs().nan_to_num().max()) > (
            1e-3 if checkpoint.head == "rnn" else -1.0
        )
        assert float((formulas.logits([4]) - formulas.logits([9])).abs().nan_to_num().max()) > 1e-2


def test_tokens_that_the_draft_does_not_know(tmp_path: Path) -> None:
    """A target with more ids than the draft embeds: they are read as 0, and never proposed."""
    assistant, target = loaded(VARIANTS["deepspec"], tmp_path)
    draft = assistant.ready_drafter()
    session = draft.session(VOCAB + 3)
    session.read_verified(torch.tensor([[1, VOCAB + 1]]), 0, torch.ones(1, 1, draft.reads.width, dtype=torch.float64))
    logits: Any = session.propose_next([])
    assert logits[0].shape == (VOCAB + 3,)
    assert not logits[0][VOCAB:].isfinite().any()
    again: Any = session.propose_next([torch.tensor(VOCAB + 2)])
    other: Any = session.propose_next([torch.tensor(0)])
    assert torch.equal(again[0], other[0])
