"""The confidence head of DSpark drafts, as an estimator that is known before a candidate is drawn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.dspark_files import VOCAB, Checkpoint, Formulas, target_for
from support.targets.models import prompt
from torch import Tensor
from torch.testing import assert_close

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.estimators import DraftStep
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.distillation.unrolling import in_blocks
from hf_specdecpp.training.recorded_chains import Drawing, draft_chains, target_states
from hf_specdecpp.trees.tree import DraftTree

TEXT = prompt(9) % 21
CASES = {
    "vanilla": Checkpoint(), "gated": Checkpoint(head="gated"),
    "rnn": Checkpoint(head="rnn", fills_in=True, says="field"),
    "state alone": Checkpoint(confidence="state"), "no bias": Checkpoint(rank=0, confidence="state"),
    "reduced": Checkpoint(dialect="speculators", reduced=True, says="tokens"),
}  # fmt: skip


def loaded(checkpoint: Checkpoint, folder: Path, **settings: Any) -> tuple[SpecDecPPAssistant, CausalLM]:
    target = target_for()
    speculation = SpeculationConfig(**settings) if settings else None
    return SpecDecPPAssistant.from_pretrained(checkpoint.save(folder), target=target, speculation=speculation), target


def begun(assistant: SpecDecPPAssistant, target: CausalLM) -> Any:
    draft = assistant.ready_drafter()
    session = draft.session(VOCAB)
    states = target_states(target, draft, TEXT[0].tolist())
    assert states is not None
    session.read_verified(TEXT, 0, states[:, :-1])
    return session


@torch.inference_mode()
def chances(assistant: SpecDecPPAssistant, target: CausalLM, path: list[int]) -> Tensor:
    """c_k along a chain, which is the path."""
    session, found = begun(assistant, target), []
    for place in range(len(path)):
        scores, hidden = session.propose_next(list(torch.tensor(path[:place])))
        step = DraftStep(place, scores, hidden, session.embed)
        assert assistant.head is not None
        found.append(assistant.head.estimate(step))
    return torch.stack(found)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_it_is_the_published_formula(name: str, tmp_path: Path) -> None:
    checkpoint = CASES[name]
    assistant, target = loaded(checkpoint, tmp_path)
    formulas, path = Formulas(checkpoint, target, TEXT), [4, 9, 2][: checkpoint.places]
    before = [formulas.anchor, *path]
    expected = torch.stack([formulas.confidence(place, before[place]) for place in range(len(path))]).sigmoid()
    assert_close(chances(assistant, target, path), expected.float(), rtol=1e-4, atol=1e-5)
    # In a tree each node has that of its own path.
    tree = DraftTree(formulas.anchor)
    session = begun(assistant, target)
    nodes = [tree.add(0, token, 1.0, 1.0) for token in (4, 9)]
    session.expand(tree, [0])
    head: Any = assistant.head
    in_tree = head(session.expand(tree, nodes)[1])
    assert_close(
        in_tree, torch.stack([formulas.confidence(1, token) for token in (4, 9)]).float(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["vanilla", "state alone"])
def test_it_depends_on_the_token_before_and_not_on_the_candidate(name: str, tmp_path: Path) -> None:
    assistant, target = loaded(CASES[name], tmp_path)
    first, other, earlier = (chances(assistant, target, path) for path in ([4, 9, 2], [4, 9, 5], [4, 3, 2]))
    assert torch.equal(first, other)
    assert torch.equal(first[:2], earlier[:2])
    assert torch.equal(first[2], earlier[2]) == (name == "state alone")


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_training_sees_what_rounds_see(name: str, tmp_path: Path) -> None:
    """States and logits of a text in blocks, and of recorded chains."""
    checkpoint = CASES[name]
    assistant, target = loaded(checkpoint, tmp_path)
    draft, formulas = assistant.ready_drafter(), Formulas(checkpoint, target, TEXT[:, :6])
    states, head = target_states(target, draft, TEXT[0].tolist()), assistant.head
    assert states is not None
    assert head is not None
    tokens, places = TEXT[0].tolist(), checkpoint.places
    along, begin = in_blocks(draft, TEXT, states), 1 + places  # the second block
    rounds = Formulas(checkpoint, target, TEXT[:, : begin + 1])
    for place in range(min(places, len(tokens) - 1 - begin)):
        row = along[0, begin + place]
        assert_close(head(row), rounds.confidence(place, tokens[begin + place]).float(), rtol=1e-4, atol=1e-5)
        expected = rounds.logits(tokens[begin + 1 : begin + 1 + place]).float()
        assert_close(draft.logits(row, VOCAB), expected, rtol=1e-4, atol=1e-4)
    drawing = Drawing(Sampling(0.0), VOCAB)
    drafted = draft_chains(draft, tokens, states, torch.tensor([6]), checkpoint.places, drawing)
    assert drafted.tokens[0].tolist() == formulas.chain()
    last = len(formulas.h) - 1
    expected = formulas.confidence(last, formulas.chain()[last - 1])
    assert_close(head(drafted.hidden[0, last]), expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.daily("settings0", "settings2")
@pytest.mark.parametrize("settings", [
    {"rule": "threshold", "threshold": 0.4}, {"rule": "throughput"},
    {"rule": "fixed", "tree": "dyspec", "tree_budget": 6},
])  # fmt: skip
def test_texts_stay_the_same_and_statistics_say_whose_estimates(settings: dict[str, Any], tmp_path: Path) -> None:
    assistant, target = loaded(CASES["vanilla"], tmp_path / "draft", **settings)
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(TEXT, **options)
    assert torch.equal(target.generate(TEXT, assistant_model=assistant, **options), plain)
    assert assistant.stats.decided["estimates"] == "confidence head of the draft"
    assistant.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "acceptance_head.safetensors").exists(), "it is in the draft's own repository"
    assistant.head = None
    assert torch.equal(target.generate(TEXT, assistant_model=assistant, **options), plain)
    assert assistant.stats.decided["estimates"] == "q"


def test_a_draft_without_one_falls_back_to_q(tmp_path: Path) -> None:
    assistant, target = loaded(Checkpoint(confidence="none"), tmp_path)
    assert assistant.head is None
    target.generate(TEXT, assistant_model=assistant, max_new_tokens=8, do_sample=False)
    assert assistant.stats.decided["estimates"] == "q"
