"""PARD drafts beside their formula: one pass over text and mask tokens without a cache; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.repos import save_model
from support.targets.models import of_pard, partly_agreeing, prompt, tiny
from support.targets.rounds_anew import begun, block_of, check_rounds
from support.targets.zoo import tiny_of
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.draft_kinds.pard import BLOCK, ParallelDrafter, mask_token_of
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.training import models as training_models
from hf_specdecpp.training.configuration import RolloutConfig, TrainingConfig
from hf_specdecpp.trees.tree import DraftTree

VOCAB, MASK, PLACES = 48, 7, 4
TEXT = prompt(20)
ROUNDS = (9, 10, 14, 20)  # lengths of the text as rounds begin
FAMILIES = ["llama", "qwen3", "gpt2", "gemma3_text"]  # the last has windows of 8 tokens


def formula(model: CausalLM, length: int, places: int = PLACES, mask: int = MASK) -> Tensor:
    """Logits `[places, vocab]` after `length` tokens: the rows of the last token and of the masks behind it."""
    ids = torch.cat((TEXT[:, :length], torch.full((1, places - 1), mask)), dim=1)
    return model(ids, use_cache=False).logits[0, length - 1 :].float()


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_every_round(family: str) -> None:
    model = tiny(family)
    drafter = ParallelDrafter(model, None, MASK, PLACES)
    for count in range(1, len(ROUNDS) + 1):
        found = block_of(begun(drafter, TEXT, ROUNDS[:count], VOCAB), PLACES)
        torch.testing.assert_close(found, formula(model, ROUNDS[count - 1]), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_the_formula_can_fail() -> None:
    """Another mask token, masks that stay in the text, and rows one place off are other numbers."""
    model = tiny("llama")
    found = block_of(begun(ParallelDrafter(model, None, MASK, PLACES), TEXT, ROUNDS[:2], VOCAB), PLACES)
    kept = torch.cat((TEXT[:, :9], torch.full((1, 3), MASK), TEXT[:, 9:10], torch.full((1, 3), MASK)), dim=1)
    wrong = [formula(model, 10, mask=MASK + 1)[1:], formula(model, 10, PLACES + 1)[2:], model(kept).logits[0, -3:]]
    assert all(float((found[1:] - each).abs().max()) > 1e-2 for each in wrong)


@torch.inference_mode()
def test_a_tree_has_the_rows_by_depth() -> None:
    model, tree = tiny("llama"), DraftTree(2)
    session, expected = begun(ParallelDrafter(model, None, MASK, 2), TEXT, ROUNDS, VOCAB), formula(model, ROUNDS[-1], 2)
    nodes = [tree.add(0, 3), tree.add(0, 4)]
    below = tree.add(nodes[0], 5)
    logits, hidden = session.expand(tree, [0, *nodes, below])
    torch.testing.assert_close(logits[:3], expected[[0, 1, 1]], rtol=1e-5, atol=1e-5)
    assert logits[3].isneginf().all()
    assert (len(hidden), session.passes) == (4, 1)


@pytest.mark.daily("44", "52")
@pytest.mark.filterwarnings("ignore:The target has")
@pytest.mark.parametrize("size", [VOCAB - 4, VOCAB, VOCAB + 4])
def test_one_draft_for_targets_with_other_padding(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama", vocab_size=size)
    assistant = assist(target, of_pard(tiny("llama")), rule="fixed", num_tokens=3)
    assert type(assistant.ready_drafter()) is ParallelDrafter
    assert assistant.ready_drafter().places == BLOCK
    assistant.decisions = type(assistant.decisions)(draft_successors=False)
    check_rounds(target, assistant, TEXT % 40, monkeypatch)


def test_positions_end_before_the_block() -> None:
    """A table of 24 positions has none for all mask tokens of the last rounds."""
    target = tiny("gpt2", n_positions=40)
    draft = of_pard(tiny("gpt2", n_positions=24))
    assistant = assist(target, draft, rule="fixed", num_tokens=3)
    text = target.generate(TEXT, max_new_tokens=12, do_sample=False)
    assert assistant.stats.drafted > 0
    assistant.detach()
    assert torch.equal(text, target.generate(TEXT, max_new_tokens=12, do_sample=False))


# Configs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, True, "7", 7.0, [7], VOCAB, 10**12, ...])
def test_a_mask_token_that_is_none(token: Any, tmp_path: Path) -> None:
    folder = Path(save_model(of_pard(tiny("llama")), tmp_path / "draft", None))
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in {**config, "pard_token": token}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="pard_token=.*(must be a whole number|Use another draft)"):
        assist(tiny("llama"), folder)


def test_an_ordinary_model_is_none() -> None:
    assert mask_token_of({"model_type": "llama", "pard_token": None}) is None
    assert type(assist(tiny("llama"), partly_agreeing(tiny("llama"))).ready_drafter()) is Drafter


@pytest.mark.parametrize("changes", [{"spd_type": "pard2"}, {"pard2": True}, {"pard2_target_layers": [-1]}])
def test_pard_2_is_refused_before_its_weights_are_read(changes: dict[str, Any], tmp_path: Path) -> None:
    of_pard(tiny("llama"), **changes).config.save_pretrained(tmp_path)  # without weights
    with pytest.raises(ValueError, match=r"a PARD-2 draft.*weights from a pickle \(warp_model.bin\)"):
        assist(tiny("llama"), tmp_path)


def test_recurrent_states_cannot_drop_mask_tokens() -> None:
    with pytest.raises(ValueError, match="recurrent states cannot drop mask tokens"):
        ParallelDrafter(tiny_of("qwen3_5_text"), None, MASK)


def test_what_is_made_of_it(tmp_path: Path) -> None:
    """Nothing is trained for it, or exported: both would be of a model that drafts token by token."""
    folder = save_model(of_pard(tiny("llama")), tmp_path / "draft", None)
    SpecDecPPAssistant.from_draft(folder).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="a PARD draft, for which nothing is trained or exported.*parallel_drafting"):
        export(tmp_path / "ours", tmp_path / "out")
    target = save_model(tiny("llama"), tmp_path / "target", None)
    config = TrainingConfig(target=str(target), output="o", draft=str(folder), rollouts=RolloutConfig(data=["x"]))
    with pytest.raises(ValueError, match="a PARD draft, for which nothing is trained"):
        training_models.check(config)
