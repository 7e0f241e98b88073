"""DFlash checkpoints: how they are loaded, stored and described, and what is refused, with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import edited
from support.dflash_files import VARIANTS, target_for
from support.repos import save_model

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.drafts.dflash.config import read_settings, usual_reads
from hf_specdecpp.drafts.known import ready_made
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.throughput.known_costs import Rounds

PLAIN = VARIANTS["plain"]


def load(folder: Path, **options: Any) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_pretrained(folder, target=target_for(), **options)


def test_an_object_without_a_name_is_stored_whole(tmp_path: Path) -> None:
    theirs = PLAIN.theirs()
    theirs.config.name_or_path = ""
    assistant = SpecDecPPAssistant.from_draft(theirs, target=target_for())
    assert assistant.kind.describe(assistant.config) == "DFlash blocks, which read states of the target"
    assistant.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.draft_id is None
    stored, kept = (each.ready_drafter().model.state_dict() for each in (again, assistant))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in stored.items())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dflash": None}))
    with pytest.raises(ValueError, match="does not describe .dflash. what is in dflash.safetensors"):
        load(tmp_path)


def test_a_block_is_one_price(tmp_path: Path) -> None:
    assistant = load(PLAIN.save(tmp_path))
    draft = assistant.ready_drafter()
    costs = Rounds(target_for(), draft, DraftProbability(), draft.places, trees=True).assumed()
    assert (costs.block, costs.start) == (4, 0.0)
    one, *_, four = costs.round_seconds(4)[1:] - costs.verify_seconds(4)[1:]
    assert four < 2.0 * one
    assert costs.read > 0.0


def test_the_usual_layers() -> None:
    assert usual_reads(36, 5) == [1, 9, 17, 25, 33]
    assert usual_reads(36, 1) == [18]
    raw = PLAIN.config()
    del raw["dflash_config"]["target_layer_ids"]
    assert read_settings({**raw, "num_target_layers": 8}).reads == [1, 5]


def test_the_layers_own_frequencies() -> None:
    """However the config says them; positions are those of text."""
    for said in ({"rope_theta": 77.0}, {"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}},
                 {"rope_theta": 77.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}):  # fmt: skip
        raw = {name: value for name, value in PLAIN.config().items() if name != "rope_theta"}
        assert read_settings({**raw, **said}).layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 77.0}


# Refused. -------------------------------------------------------------------------------------------------------------

WITH = {"dflash_config": {**PLAIN.config()["dflash_config"], "markov_rank": 8}}
RELATIVES: dict[str, tuple[dict[str, Any], str]] = {
    "DSpark": ({"architectures": ["DSparkDraftModel"]}, "holds DSpark.*Markov"),
    "DSpark, by a value": (WITH, "holds DSpark"),
    "DSpark of speculators": ({"speculators_model_type": "dspark"}, "holds DSpark"),
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, "holds DFlash2"),
    "DFlash2 of speculators": ({"speculators_model_type": "dflash2"}, "holds DFlash2"),
    "another layer": ({"model_type": "glm4"}, "layers of type 'glm4'"),
    "a part of each head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id is missing"),
    "text": ({"block_size": "16"}, "block_size='16'"),
    "no layers": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, "reads layers \\[\\]"),
    "a block of one": ({"block_size": 1}, "block_size=1.*proposes\\s+nothing"),
    "kinds of layers": ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types="),
    "no kind at all": ({"layer_types": ["full_attention", "chunked"]}, "must be a list, each item one of"),
    "heads": ({"num_key_value_heads": "2"}, "num_key_value_heads='2' must be a whole number"),
    "another depth": ({"num_target_layers": 9}, "was made for 9 layers, and there are 4"),
    "another target": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 7]}}, "\\[0, 1, 7\\].*are 4"),
    "a mask beyond it": ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": [0, 1, 2]}}, "mask token 99"),
}


@pytest.mark.parametrize("name", RELATIVES)
def test_configs(name: str, tmp_path: Path) -> None:
    changes, reason = RELATIVES[name]
    with pytest.raises(ValueError, match=reason):
        load(PLAIN.save(tmp_path, **changes))


def test_a_reduced_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="proposes 8 of 12 tokens"):
        load(PLAIN.save(tmp_path, "speculators", draft_vocab_size=8))


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "Markov": ({"markov_head.markov_w1.weight": torch.zeros(2, 2)}, "holds DSpark"),
    "selector": ({"candidate_selector.successor_codebook": torch.zeros(2, 2)}, "holds DFlash2"),
    "convolution": ({"layers.0.mlp_conv.weight": torch.zeros(2, 2)}, "holds DFlash2"),
    "mask": ({"mask_hidden": torch.zeros(1, 1, 96)}, "holds P-EAGLE"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, tmp_path: Path) -> None:
    changes, reason = TENSORS[name]
    with pytest.raises(ValueError, match=reason):
        load(edited(PLAIN.save(tmp_path), **changes))


@pytest.mark.usefixtures("hub")  # it answers at once
def test_ordinary_drafts_are_still_ordinary(tmp_path: Path) -> None:
    for draft in (target_for(seed=1), save_model(target_for(seed=1), tmp_path / "draft")):
        assistant = SpecDecPPAssistant.from_draft(draft, target=target_for())
        assert assistant.config.draft_kind == "independent"
    assert ready_made("org/does-not-exist/at-all") is None
