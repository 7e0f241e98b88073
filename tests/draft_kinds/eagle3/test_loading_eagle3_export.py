"""An EAGLE-3 draft as other engines read it: written, and loaded again, it is the same draft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.files.checkpoints import edited
from support.files.eagle3_files import DRAFT_VOCAB, HIDDEN, VARIANTS, VOCAB, Checkpoint
from support.files.eagle3_loading import DIALECTS, PLAIN, load, refused
from support.files.repos import save_model
from support.runs.distillation_files import prepare
from support.targets.formulas import states_of
from support.targets.models import prompt, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.training import models
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.distillation.unrolling import unrolled

LLAMA = [name for name in VARIANTS if name != "qwen3"]


def logits(assistant: SpecDecPPAssistant, target: CausalLM, steps: int = 2) -> list[Tensor]:
    """Along a text, as the first candidate of a round and as the second."""
    drafter, text = assistant.ready_drafter(), prompt(9)
    with torch.no_grad():
        rows = enumerate(unrolled(drafter, text, states_of(target, drafter, text), steps), 1)
        return [drafter.logits(hidden[0, step:], 48) for step, hidden in rows]


@pytest.mark.daily(
    "plain-original", "norm_before_fc-speculators", "eagle-3.1-original", "head_dim-speculators",
    "all tokens-original", "final state-speculators",
)  # fmt: skip
@pytest.mark.parametrize("dialect", ["original", "speculators"])
@pytest.mark.parametrize("name", LLAMA)
def test_what_is_exported_is_the_draft(name: str, dialect: str, tmp_path: Path) -> None:
    """In bfloat16, which is what the checkpoint holds then: exported again it does not change."""
    checkpoint = VARIANTS[name]
    target = tiny("llama", hidden_size=checkpoint.target_size, head_dim=8)
    saved, folder = save_model(target, tmp_path / "target"), checkpoint.save(tmp_path / "theirs", dialect)
    exported = export(folder, tmp_path / "out", saved)
    export(tmp_path / "out", tmp_path / "again", saved)
    first, again = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "again"))
    theirs = checkpoint.tensors()
    assert first.keys() == theirs.keys() == again.keys()
    for tensor_name, tensor in first.items():
        wanted = theirs[tensor_name]
        assert torch.equal(tensor, wanted.bfloat16() if wanted.is_floating_point() else wanted), tensor_name
        assert torch.equal(tensor, again[tensor_name])
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("out", "again")]
    assert (configs[0], list(exported.commands)) == (configs[1], ["vLLM", "SGLang", "llama.cpp"])
    assert str(tmp_path / "out") in exported.commands["vLLM"][0]
    half = SpecDecPPAssistant.from_pretrained(tmp_path / "out", target=target)
    whole = SpecDecPPAssistant.from_pretrained(folder, target=target)
    for ours, loaded in zip(logits(whole, target), logits(half, target), strict=True):
        assert torch.equal(ours.isinf(), loaded.isinf())
        kept = ~ours.isinf()
        assert float((ours - loaded)[kept].abs().max()) < 0.1 * float(ours[kept].abs().max())


@pytest.mark.takes(3)
def test_a_trained_layer(tmp_path: Path) -> None:
    """What training stores is in half precision already, so what is exported in bfloat16 is it to the bit."""
    config = prepare(tmp_path, "eagle3", draft_vocab_size=40, epochs=1)
    config.distill.bf16 = True
    distillation.run(config)
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    assistant = models.load_assistant(config, target)
    assistant.save_pretrained(tmp_path / "repo")
    export(tmp_path / "repo", tmp_path / "out", config.target)
    exported = SpecDecPPAssistant.from_pretrained(tmp_path / "out", target=target)
    for ours, loaded in zip(logits(assistant, target), logits(exported, target), strict=True):
        assert torch.equal(ours, loaded)
    assert exported.ready_drafter().draft_vocab.tolist() == assistant.ready_drafter().draft_vocab.tolist()


def described(checkpoint: Checkpoint, folder: Path, depth: int, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    target = save_model(tiny("llama", num_hidden_layers=depth), folder / "target")
    checkpoint.save(folder / "theirs", **changes)
    exported = export(folder / "theirs", folder / "out", target)
    return json.loads((folder / "out" / "config.json").read_text()), exported.notes


def test_the_usual_layers_are_not_named(tmp_path: Path) -> None:
    """Of 8 layers 1, 3 and 4, which are the ids 2, 4 and 5."""
    config, notes = described(Checkpoint(), tmp_path, 8, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    assert not {"eagle_config", "eagle_aux_hidden_state_layer_ids"} & set(config)
    assert not any("are usual" in note for note in notes)


def test_other_layers_stand_there_twice(tmp_path: Path) -> None:
    config, notes = described(Checkpoint(), tmp_path, 8, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 7]})
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 7]}
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 8]
    assert any("llama.cpp" in note and "[1, 3, 4] are usual" in note for note in notes)


def test_frequencies_are_written_as_older_readers_know_them(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    config, _ = described(Checkpoint(), tmp_path, 3, rope_theta=500.0, rope_scaling=rope)
    assert (config["rope_theta"], config["rope_scaling"]) == (500.0, rope)


def test_refusals(tmp_path: Path) -> None:
    target = save_model(tiny("llama"), tmp_path / "target")
    VARIANTS["qwen3"].save(tmp_path / "qwen3", "speculators")
    with pytest.raises(ValueError, match="layers of type 'qwen3', which only vLLM serves"):
        export(tmp_path / "qwen3", tmp_path / "out", target)
    assert not (tmp_path / "out").exists()
    Checkpoint().save(tmp_path / "theirs")
    with pytest.raises(ValueError, match="names no target.*--target ID"):
        export(tmp_path / "theirs", tmp_path / "out")


# Tensors of EAGLE-3 checkpoints that others trained: what is refused, and the targets that they fit. ------------------


def test_a_flag_without_its_tensor(tmp_path: Path) -> None:
    refused(PLAIN.save(tmp_path / "a", norm_before_fc=True), r"missing input_norm\.weight")
    refused(PLAIN.save(tmp_path / "b", fc_norm=True), r"missing fc_norm\.0\.weight, fc_norm\.1\.weight")


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    folder = edited(PLAIN.save(tmp_path), **{"layers.0.hidden_norm.weight": torch.ones(HIDDEN)})
    refused(folder, r"has midlayer\.hidden_norm\.weight twice")


OFFSETS = torch.tensor(PLAIN.ids) - torch.arange(DRAFT_VOCAB)
KEPT = torch.isin(torch.arange(VOCAB), torch.tensor(PLAIN.ids))


def changed_at(tensor: Tensor, place: int, value: int) -> Tensor:
    return tensor.clone().index_fill_(0, torch.tensor([place]), value)


@DIALECTS
@pytest.mark.parametrize(("changed", "match"), [
    ({"d2t": changed_at(OFFSETS, 3, 99), "t2d": None}, rf"ids from \d+ to 102, .*vocab_size={VOCAB}"),
    ({"d2t": changed_at(OFFSETS, 0, -1), "t2d": None}, "ids from -1 to"),
    ({"d2t": changed_at(OFFSETS, 1, int(OFFSETS[0]) - 1), "t2d": None}, "19 different ones of 20"),
    ({"d2t": OFFSETS.float()}, r"d2t is \[20\] of float32, and must be \[20\] whole numbers"),
    ({"d2t": OFFSETS[:-1].clone()}, r"d2t is \[19\] of int64, and must be \[20\]"),
    ({"d2t": OFFSETS[:, None].clone()}, r"d2t is \[20, 1\]"),
    ({"d2t": None}, r"no d2t, which says what its 20 tokens are among the target's 48"),
    ({"t2d": ~KEPT}, r"d2t and t2d name different tokens \(20 in d2t, 28 in t2d\)"),
])  # fmt: skip
def test_token_ids_that_make_no_sense(tmp_path: Path, dialect: str, changed: dict[str, Any], match: str) -> None:
    refused(edited(PLAIN.save(tmp_path, dialect), **changed), match)


def test_token_ids_need_no_mask_and_no_order(tmp_path: Path) -> None:
    ids = torch.tensor(PLAIN.ids).flip(0)
    folder = edited(PLAIN.save(tmp_path), d2t=(ids - torch.arange(DRAFT_VOCAB)).int())
    assert load(folder).token_ids.tolist() == ids.tolist()
    assert load(edited(folder, t2d=None)).token_ids.tolist() == ids.tolist()


def test_all_tokens(tmp_path: Path) -> None:
    """Offsets of zero change nothing; a permutation does."""
    folder = VARIANTS["all tokens"].save(tmp_path)
    assert load(folder).token_ids is None
    assert load(edited(folder, d2t=torch.zeros(VOCAB, dtype=torch.int64))).token_ids is None
    turned = torch.arange(VOCAB).flip(0)
    assert load(edited(folder, d2t=turned - torch.arange(VOCAB))).token_ids.tolist() == turned.tolist()


def test_without_a_head_it_takes_the_targets(tmp_path: Path) -> None:
    folder, target = VARIANTS["all tokens"].save(tmp_path), tiny("llama")
    assert load(edited(folder, **{"lm_head.weight": None}), target).get_output_embeddings() is target.lm_head


@DIALECTS
def test_a_target_with_other_tokens(tmp_path: Path, dialect: str) -> None:
    folder = PLAIN.save(tmp_path, dialect)
    refused(folder, r"proposes token ids up to \d+, and there are 12 in Llama", target=tiny("llama", vocab_size=12))
    load(folder, tiny("llama", vocab_size=56))  # padding, maybe


@pytest.mark.parametrize(("ids", "overrides", "match"), [
    ([2, 3, 9], {}, r"reads layers \[2, 3, 9\] of its target, and this one has 3.*another target"),
    ([2, 3], {}, r"layer_ids=\[2, 3\] must name 3 layers of the target.*eagle3=\{'reads'"),
    ([], {}, "names no layers, and a target of 3 layers is too small for the usual ones"),
    ([1, 2.5, 3], {}, r"layer_ids=\[1, 2.5, 3\] must list layers"),
    ([1, 0, 2], {"reads": [0, 1, 7]}, r"outputs of layers \[0, 1, 7\], counted from 0, and there are 3 in LlamaFor"),
    ([1, 0, 2], {"reads": [0, 1]}, r"reads=\[0, 1\] must name 3 layers"),
])  # fmt: skip
def test_layers_that_the_target_lacks(tmp_path: Path, ids: Any, overrides: dict[str, Any], match: str) -> None:
    folder = PLAIN.save(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    refused(folder, match, eagle3=overrides)


def test_two_states_and_no_ids(tmp_path: Path) -> None:
    folder = Checkpoint(num_reads=2).save(tmp_path, eagle_config=...)
    refused(folder, "layer_ids=None must name 2 layers")
    assert load(folder, eagle3={"reads": [0, 2]}).reader.reads == [0, 2]
