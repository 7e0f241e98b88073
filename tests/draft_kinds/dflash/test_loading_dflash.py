"""DFlash checkpoints: how they are loaded, stored and described, and what is refused, with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.checkpoints import edited
from support.files.dflash_files import FULL, HIDDEN, MASK, VARIANTS, VOCAB, Checkpoint, target_for
from support.targets.models import prompt
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.draft_kinds.dflash.config_dflash import DFlashSettings, read_block, usual_reads
from hf_specdecpp.draft_kinds.dflash.modeling_dflash import DFlashModel
from hf_specdecpp.draft_kinds.known import DFLASH, recognise

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


def test_the_usual_layers() -> None:
    assert (usual_reads(36, 5), usual_reads(36, 1)) == ([1, 9, 17, 25, 33], [18])
    raw = PLAIN.config()
    del raw["dflash_config"]["target_layer_ids"]
    assert read_block({**raw, "num_target_layers": 8}).reads == [1, 5]


def test_the_layers_own_frequencies() -> None:
    """However the config says them; positions are those of text."""
    for said in ({"rope_theta": 77.0}, {"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}},
                 {"rope_theta": 77.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}):  # fmt: skip
        raw = {name: value for name, value in PLAIN.config().items() if name != "rope_theta"}
        assert read_block({**raw, **said}).layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 77.0}


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "DFlash2 of speculators": ({"speculators_model_type": "dflash2"}, "holds a DFlash2 draft"),
    "another layer": ({"model_type": "glm4"}, "layers of type 'glm4'"),
    "a part of each head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id=None must be a whole number"),
    "no layers": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, "reads layers \\[\\]"),
    "a block of one": ({"block_size": 1}, "block_size=1.*proposes\\s+nothing"),
    "another depth": ({"num_target_layers": 9}, "was made for 9 layers, and there are 4"),
    "another target": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 7]}}, "\\[0, 1, 7\\].*are 4"),
    "a mask beyond it": ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": [0, 1, 2]}}, "mask token 99"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str, tmp_path: Path) -> None:
    changes, reason = CONFIGS[name]
    with pytest.raises(ValueError, match=reason):
        load(PLAIN.save(tmp_path, **changes))


def test_a_reduced_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draft_vocab_size=8, and by the draft.s tensors that is 12"):
        load(PLAIN.save(tmp_path, "speculators", draft_vocab_size=8))


# What DFlash checkpoints of others say in several ways, and what of their target is in their files. -------------------


WINDOWS = VARIANTS["windows"]


def said(checkpoint: Checkpoint, nested: dict[str, Any], **above: Any) -> DFlashSettings:
    """What a config says with these values in `dflash_config`, and with those beside it; `...` takes one out."""
    raw = checkpoint.config()
    raw = {**raw, **above, "dflash_config": {**raw["dflash_config"], **nested}}
    return read_block({name: value for name, value in raw.items() if value is not ...})


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ["is_causal", "causal", "dflash_config.causal", "dflash_config.is_causal",
                                  "dflash_config.causal_head"])  # fmt: skip
@pytest.mark.parametrize("checkpoint", [PLAIN, WINDOWS])
def test_wherever_it_is_said(checkpoint: Checkpoint, name: str, is_causal: bool) -> None:
    """By z-lab above, by vLLM, Model Optimizer and NeMo below, by JetSpec in another word: of all layers."""
    place, _, word = name.rpartition(".")
    value = {word: is_causal}
    settings = said(checkpoint, value) if place else said(checkpoint, {}, **value)
    assert settings.is_causal is is_causal
    assert [causal for _, causal in DFlashModel(settings).views] == [is_causal, is_causal]


def test_unless_it_is_said_windows_are_causal() -> None:
    assert [causal for _, causal in DFlashModel(said(WINDOWS, {"causal": None})).views] == [True, False]


@pytest.mark.parametrize("values", [{"causal": "no"}, {"causal": 1}, {"causal": True, "is_causal": False}])
def test_nonsense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="causal=.*must say in one way, true or false"):
        said(PLAIN, values)


@pytest.mark.parametrize("types", [[FULL, FULL], ...])
@pytest.mark.parametrize("above", [{}, {"sliding_window": 9}, {"use_sliding_window": False, "sliding_window": None}])
def test_windows_for_all_layers(types: Any, above: dict[str, Any]) -> None:
    """MiMo's drafts: `use_swa` beside layers that are called full; rows see later ones unless that is said."""
    settings = said(PLAIN, {"use_swa": True, "swa_window_size": 4}, **{"layer_types": types, **above})
    assert DFlashModel(settings).views == [(3, False), (3, False)]
    settings = said(PLAIN, {"use_swa": True, "swa_window_size": 4, "causal": True}, **{"layer_types": types, **above})
    assert DFlashModel(settings).views == [(3, True), (3, True)]


def test_named_windows_stay_where_they_are() -> None:
    assert DFlashModel(said(WINDOWS, {"use_swa": True, "swa_window_size": 4})).views == [(3, True), (None, False)]
    assert DFlashModel(said(WINDOWS, {}, use_sliding_window=...)).views == [(5, True), (None, False)], "nobody says no"


@pytest.mark.parametrize("size", ["4", None, 2.5])
def test_a_window_of_no_size(size: Any) -> None:
    with pytest.raises(ValueError, match="sliding_window|swa_window_size"):
        said(PLAIN, {"use_swa": True, "swa_window_size": size}, sliding_window=None).layer_config()


def test_domino_by_its_architecture_alone() -> None:
    assert recognise({"architectures": ["DominoDraftModel"]}) is DFLASH
    with pytest.raises(ValueError, match="holds a Domino draft .DFlash with a recurrent network"):
        read_block({"architectures": ["DominoDraftModel"]})


@pytest.mark.parametrize(("changes", "name"), [
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2 draft .DFlash with grouped dynamic causal conv.*selector"),
    ({"speculators_model_type": "dflash2"}, "DFlash2 draft"),
    ({"dflash_config": {"projector_type": "domino"}}, "Domino draft"),
    ({"speculators_model_type": "peagle", "dflash_config": {}}, "P-EAGLE draft"),
])  # fmt: skip
def test_relatives_are_refused_by_name(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"holds a {name}.*hf_specdecpp cannot draft with. Load an EAGLE-3"):
        load(PLAIN.save(tmp_path, **changes))


def parts_of(target: Any) -> dict[str, Tensor]:
    """As `speculators` writes them with every draft."""
    own = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
    return {f"{name}.weight": module.weight.detach().clone() for name, module in own.items()}


def drafted(folder: Path, target: Any) -> tuple[Any, SpecDecPPAssistant]:
    """The first block's logits after a prompt, and the assistant."""
    speculation = SpeculationConfig("fixed", num_tokens=4)
    assistant = SpecDecPPAssistant.from_pretrained(folder, target=target, speculation=speculation)
    reading = assistant.ready_drafter().session(VOCAB)
    states = torch.ones(1, 5, assistant.ready_drafter().reads.width, dtype=torch.float64)
    reading.read_verified(prompt(6) % VOCAB, 0, states)
    with torch.no_grad():
        return reading.propose_next([])[0], assistant


@pytest.mark.parametrize("dialect", ["original", "speculators"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_copies_of_the_target_s_are_left_out(dialect: str, prefix: str, tmp_path: Path) -> None:
    target = target_for()
    expected, without = drafted(PLAIN.save(tmp_path / "without", dialect), target)
    parts = {f"{prefix}{name}": tensor for name, tensor in parts_of(target).items()}
    found, assistant = drafted(edited(PLAIN.save(tmp_path / "with", dialect), **parts), target)
    assert torch.equal(found, expected)
    drafter, other = assistant.ready_drafter(), without.ready_drafter()
    assert drafter.embeddings is target.get_input_embeddings()
    assert drafter.head is target.get_output_embeddings()
    assert drafter.model.state_dict().keys() == other.model.state_dict().keys()
    assert drafter.settings == other.settings


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_parts_of_its_own_are_used(name: str, tmp_path: Path) -> None:
    target = target_for()
    plain = target.generate(prompt(6) % VOCAB, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    before, _ = drafted(PLAIN.save(tmp_path / "without"), target)
    own = 2.0 * parts_of(target)[name] + 0.1 * torch.arange(VOCAB)[:, None]
    found, assistant = drafted(edited(PLAIN.save(tmp_path / "with"), **{name: own}), target)
    assert not torch.allclose(found, before)
    drafter = assistant.ready_drafter()
    assert torch.equal((drafter.embeddings if name.startswith("embed") else drafter.head).weight, own)
    text = target.generate(prompt(6) % VOCAB, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0,
                           assistant_model=assistant)  # fmt: skip
    assert torch.equal(text, plain)
    assert assistant.stats.drafted > 0
    assistant.save_pretrained(tmp_path / "saved")
    assert torch.equal(drafted(tmp_path / "saved", target)[0], found)


def test_a_mask_token_of_its_own_embeddings(tmp_path: Path) -> None:
    """Rows that training added are in the file alone."""
    changes: dict[str, Any] = {
        "vocab_size": VOCAB + 1,
        "dflash_config": {**PLAIN.config()["dflash_config"], "mask_token_id": MASK + 1},
    }
    folder = PLAIN.save(tmp_path, **changes)
    with pytest.raises(ValueError, match="the mask token 12, and there are 12 embeddings"):
        drafted(folder, target_for())
    drafted(edited(folder, **{"embed_tokens.weight": torch.ones(VOCAB + 1, HIDDEN)}), target_for())
