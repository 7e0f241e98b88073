"""Configs of EAGLE-3 checkpoints that others trained: names, numbers, relatives, shards, and the layers they mean."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.files.checkpoints import edited, in_shards, written
from support.files.eagle3_files import HIDDEN, READS, VARIANTS, VOCAB, Checkpoint
from support.files.eagle3_loading import PLAIN, drafted, load, refused, settings_of
from support.files.repos import change_json
from support.targets.models import tiny
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.draft_kinds.eagle3.config_eagle3 import meanings


@pytest.mark.parametrize(("changed", "match"), [
    ({"eagle_config": [1]}, "eagle_config=.* must be a mapping"),
    ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc and fc_norm are both set and exclude one another"),
    ({"partial_rotary_factor": 0.5}, r"rotates a part of each head only \(partial_rotary_factor=0.5\)"),
    ({"rope_theta": "big"}, "rope_theta='big'.*eagle3="),
    ({"rope_scaling": {"rope_type": "linear"}}, "No EAGLE-3 draft can be built as it is described"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 5}}}, "rotary parameters make no sense"),
    ({"layer_types": ["sliding_attention"]}, r"sliding window \(layer_types\)"),
    ({"model_type": "gemma", "architectures": ["GemmaEagle3"]}, "layers of type 'gemma'; EAGLE-3 drafts with"),
    ({"model_type": "deepseek_v3", "architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "layers of type 'deepseek_v3'"),
    ({"model_type": "qwen3_moe", "architectures": ["Eagle3"]}, "layers of type 'qwen3_moe'"),
    ({"speculators_model_type": "mtp"}, "holds a draft of speculators of type 'mtp', which hf_specdecpp cannot draft"),
])  # fmt: skip
def test_a_config_that_makes_no_sense(tmp_path: Path, changed: dict[str, Any], match: str) -> None:
    refused(PLAIN.save(tmp_path, **changed), match)


def small_llama(folder: Path, tensors: dict[str, Tensor]) -> Path:
    PLAIN.save(folder, draft_vocab_size=..., eagle_config=..., architectures=["LlamaForCausalLM"])
    save_file(tensors, folder / "model.safetensors")
    return folder


def of_plain_layer(**others: Tensor) -> dict[str, Tensor]:
    """Tensors of a layer whose attention reads states alone."""
    found = {name.replace("midlayer", "layers.0"): tensor for name, tensor in PLAIN.tensors().items() if "mid" in name}
    narrow = {name: tensor[:, :HIDDEN].clone() for name, tensor in found.items() if name[14:19] in ("attn.",)}
    kept = {name: tensor for name, tensor in {**found, **narrow}.items() if "hidden_norm" not in name}
    return {**kept, **others}


def test_other_drafts_are_refused_by_their_tensors(tmp_path: Path) -> None:
    """The sentence names what is missing and what is unexpected."""
    wide, no_mark = PLAIN.tensors(), "missing midlayer.hidden_norm.weight"
    for name, tensors, match in (
        ("eagle", of_plain_layer(**{"fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}), no_mark),
        ("mla", {**wide, "midlayer.self_attn.kv_a_proj.weight": torch.ones(2)}, "unexpected midlayer.self_attn.kv_a"),
        ("experts", {**wide, "midlayer.mlp.experts.0.up_proj.weight": torch.ones(2)}, "unexpected midlayer.mlp.expert"),
        ("parallel", {**wide, "mask_hidden": torch.ones(1, 1, 96)}, "unexpected mask_hidden"),
        ("quantised", {**wide, "fc.weight_scale": torch.ones(1)}, "unexpected fc.weight_scale"),
        ("medusa", {"0.0.linear.weight": torch.ones(2, 2), "0.1.weight": torch.ones(2, 2)}, no_mark),
    ):
        said = f"this is not an EAGLE-3 draft of the form that this package reads: {match}.*Load an EAGLE-3 or DFlash"
        refused(small_llama(tmp_path / name, tensors), said)
    refused(tmp_path / "eagle", "It is an EAGLE-1 or EAGLE-2 draft")


@pytest.mark.parametrize("said", [{"speculators_model_type": "peagle"}, {"ptd_token_id": 5}, {"pard_token": 5}])
def test_p_eagle_is_refused_by_name(said: dict[str, Any], tmp_path: Path) -> None:
    refused(PLAIN.save(tmp_path, **said), "holds a P-EAGLE draft .EAGLE-3 that proposes several tokens with one pass")


DEEPSPEC = Checkpoint(qwen3=True, vocab=VOCAB, own_embeddings=True, num_reads=2)


def deepspec(folder: Path, **changes: Any) -> Path:
    """A draft of DeepSpec: the target's config, changed in place, and tensors under `layers.0`."""
    config = {name: value for name, value in DEEPSPEC.config("original").items() if name != "eagle_config"}
    config |= {"architectures": ["Qwen3Eagle3Model"], "draft_num_hidden_layers": 1, "ttt_length": 7,
               "target_layer_ids": [2, 1], "num_target_layers": 3, "draft_vocab_size": ...}  # fmt: skip
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in DEEPSPEC.tensors().items()}
    return written(folder, tensors, {**config, **changes})


def test_layer_ids_of_deepspec_count_outputs(tmp_path: Path) -> None:
    """Ids that others would count from inputs; and it drafts as the same weights in the original dialect."""
    original, ids, target = (tmp_path / "original", {"eagle_aux_hidden_state_layer_ids": [2, 1]}, tiny("llama"))
    made = [
        SpecDecPPAssistant.from_pretrained(deepspec(tmp_path / "deepspec"), target),
        SpecDecPPAssistant.from_pretrained(DEEPSPEC.save(original), target, eagle3={"reads": [2, 1]}),
        SpecDecPPAssistant.from_pretrained(DEEPSPEC.save(tmp_path / "inputs", eagle_config=ids), target),
    ]
    reads = [each.ready_drafter().model.settings.reads for each in made]
    assert reads == [[2, 1], [2, 1], [1, 0]]
    theirs, same, others = (drafted(each, target) for each in made)
    assert torch.equal(theirs, same)
    assert not torch.allclose(theirs, others)


@pytest.mark.parametrize("ids", [[1, "2"], "12", [-1, 2], [True, 2]])
def test_layer_ids_of_deepspec_that_make_no_sense(ids: Any, tmp_path: Path) -> None:
    refused(deepspec(tmp_path, target_layer_ids=ids), "target_layer_ids=.* must list layers of the target")


def test_layers_are_counted_in_the_file(tmp_path: Path) -> None:
    assert settings_of(PLAIN.save(tmp_path / "a", num_hidden_layers=40)).layer["num_hidden_layers"] == 1
    folder = VARIANTS["two layers"].save(tmp_path / "b", num_hidden_layers=1)
    assert settings_of(folder).layer["num_hidden_layers"] == 2
    folder = VARIANTS["qwen3"].save(tmp_path / "c", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert load(folder).settings.layer["layer_types"] == ["full_attention"]


@pytest.mark.parametrize("kind", ["qwen2", "phi3", "qwen3", "llama"])
@pytest.mark.parametrize("variant", ["plain", "qwen3"])
def test_tensors_decide_what_a_layer_is(tmp_path: Path, variant: str, kind: str) -> None:
    """Beside the architecture of a Llama, `model_type` is the target's in some exports; windows there are its, too."""
    said: dict[str, Any] = {
        "model_type": kind, "sliding_window": 32, "use_sliding_window": False, "max_window_layers": 28,
    }  # fmt: skip
    if kind in ("qwen2", "phi3"):
        said["layer_types"] = ["sliding_attention", "linear_attention"]
    one, other = load(VARIANTS[variant].save(tmp_path / "a")), load(VARIANTS[variant].save(tmp_path / "b", **said))
    assert other.settings.layer["model_type"] == ("qwen3" if variant == "qwen3" else "llama")
    assert other.settings.layer["model_type"] == one.settings.layer["model_type"]
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    if variant == "plain":
        assert other.settings == one.settings


def test_fc_may_be_left_over(tmp_path: Path) -> None:
    """Beside `use_aux_hidden_state: false`, which says that the final state is read as it is."""
    one = load(VARIANTS["final state"].save(tmp_path / "a"))
    folder = VARIANTS["final state"].save(tmp_path / "b")
    other = load(edited(folder, **{"fc.weight": torch.ones(HIDDEN, 3 * HIDDEN)}))
    assert (one.settings, one.state_dict().keys()) == (other.settings, other.state_dict().keys())


def test_the_target_s_embeddings_may_be_wanted(tmp_path: Path) -> None:
    folder, target = VARIANTS["own embeddings"].save(tmp_path / "draft"), tiny("llama")
    assert load(folder, target).get_input_embeddings() is not target.get_input_embeddings()
    model = load(folder, target, eagle3={"own_embeddings": False})
    assert not model.settings.own_embeddings
    assert model.get_input_embeddings() is target.get_input_embeddings()
    refused(VARIANTS["another width"].save(tmp_path / "wide"), "cannot take the target's embeddings",
            eagle3={"own_embeddings": False}, target=tiny("llama", hidden_size=24, head_dim=8))  # fmt: skip


def test_tied_embeddings_do_not_hide_a_head(tmp_path: Path) -> None:
    model = load(VARIANTS["own embeddings"].save(tmp_path, tie_word_embeddings=True))
    head = VARIANTS["own embeddings"].tensors()["lm_head.weight"]
    assert torch.equal(model.get_output_embeddings().weight, head.to(model.dtype))


@pytest.mark.parametrize(("said", "theta", "kind"), [
    ({}, 10000.0, "default"),
    ({"rope_theta": 500.0}, 500.0, "default"),
    ({"rope_theta": 500.0, "rope_parameters": {"rope_theta": 700.0, "rope_type": "default"}}, 700.0, "default"),
    ({"rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}}, 500.0, "default"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, "linear"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500}, 500, "linear"),
    ({"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 2.0}}, 10000.0, "linear"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 500.0}, 500.0, "default"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, 10000.0, "default"),
])  # fmt: skip
def test_rotary_frequencies(tmp_path: Path, said: dict[str, Any], theta: float, kind: str) -> None:
    """The draft's own: rope_parameters, else rope_theta, else 10000, whatever the target has."""
    folder = PLAIN.save(tmp_path, **said)
    target = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    model = load(folder, target)
    rope = model.settings.layer["rope_parameters"]
    assert (rope["rope_theta"], rope["rope_type"]) == (theta, kind)
    expected = theta ** -(torch.arange(0, 8, 2).float() / 8) / (2 if kind == "linear" else 1)
    torch.testing.assert_close(model.decoder.rotary_emb.inv_freq.float(), expected)
    assert settings_of(folder, eagle3={"rope_theta": 99.0}).layer["rope_parameters"] == {**rope, "rope_theta": 99.0}


@pytest.mark.parametrize(("overrides", "match"), [
    ({"norm_ouput": True}, "eagle3 has norm_ouput, which is not known. It may have norm_before_residual, .*reads"),
    ({"rope_theta": -1.0}, "eagle3.rope_theta=-1.0 must be above 0"),
    ({"reads": [1, -2, 3]}, r"eagle3.reads=\[1, -2, 3\] must list layers of the target, counted from 0"),
    ({"reads": []}, r"eagle3.reads=\[\] must list layers"),
    ([1], r"eagle3=\[1\] must be a mapping"),
])  # fmt: skip
def test_overrides_that_make_no_sense(tmp_path: Path, overrides: Any, match: str) -> None:
    refused(PLAIN.save(tmp_path), match, eagle3=overrides)


@pytest.mark.parametrize(("variant", "pairs"), [
    ("plain", [("midlayer.", "layers.0.")]),
    ("plain", [("midlayer.", "model.layers.0.")]),
    ("plain", [("fc.", "model.fc."), ("midlayer.", "model.midlayer."), ("norm.w", "norm.w")]),
    ("plain", [("d2t", "draft_id_to_target_id")]),
    ("fc_norm", [("fc_norm.0", "aux_norm_low"), ("fc_norm.1", "aux_norm_mid"), ("fc_norm.2", "aux_norm_high")]),
    ("two layers", [("layers.1.input_layernorm", "layers.1.hidden_norm")]),
    ("own embeddings", [("embed_tokens", "model.embed_tokens")]),
])  # fmt: skip
def test_other_names_of_the_same_tensors(tmp_path: Path, variant: str, pairs: list[tuple[str, str]]) -> None:
    one, folder = load(VARIANTS[variant].save(tmp_path / "a")), VARIANTS[variant].save(tmp_path / "b")
    found = load_file(folder / "model.safetensors")
    renamed = {functools.reduce(lambda name, pair: name.replace(*pair), pairs, each): found[each] for each in found}
    other = load(edited(folder, **{**dict.fromkeys(found), **renamed}))
    assert one.settings == other.settings
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    assert one.token_ids.tolist() == other.token_ids.tolist()


def test_buffers_are_ignored(tmp_path: Path) -> None:
    names = ("midlayer.self_attn.rotary_emb.inv_freq", "rotary_emb.cos_cached", "model.rotary_emb.sin_cached")
    load(edited(PLAIN.save(tmp_path), **{name: torch.ones(3) for name in names}))


def test_older_names_of_flags(tmp_path: Path) -> None:
    checkpoint = VARIANTS["fc_norm"]
    assert settings_of(checkpoint.save(tmp_path / "a", fc_norm=..., use_aux_norm=True)).fc_norm
    assert settings_of(checkpoint.save(tmp_path / "b", fc_norm=...)).fc_norm, "the tensors say it"
    nested: dict[str, Any] = {"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": READS}}
    assert settings_of(VARIANTS["norm_before_fc"].save(tmp_path / "c", norm_before_fc=..., **nested)).norm_before_fc


def test_ids_may_stand_on_top(tmp_path: Path) -> None:
    folder = PLAIN.save(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": None},
                        eagle_aux_hidden_state_layer_ids=[1, 2, 2])  # fmt: skip
    assert load(folder).reader.reads == [1, 2, 2]


def test_shards_that_are_no_whole(tmp_path: Path) -> None:
    folder = in_shards(PLAIN.save(tmp_path))
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    for weight_map, match in (
        ({**listed, "more.weight": listed["d2t"]}, "lists other tensors than its files contain"),
        (
            {name: shard for name, shard in listed.items() if name != "d2t"},
            "lists other tensors than its files contain",
        ),
        ({**listed, "d2t": "../model.safetensors"}, "does not map tensors to safetensors files in its folder"),
        ({**listed, "d2t": "pytorch_model.bin"}, "does not map tensors to safetensors files in its folder"),
        ([], "does not map tensors"),
    ):
        change_json(index, weight_map=weight_map)
        refused(folder, match)
    change_json(index, weight_map=listed)
    second = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(second), "d2t": torch.zeros(20, dtype=torch.int64)}, second)
    assert listed["d2t"] != second.name
    refused(folder, "lists other tensors than its files contain")
    second.unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors is missing"):
        load(folder)


@pytest.mark.parametrize(("ids", "depth", "expected"), [
    (None, 32, [[1, 15, 28]]),
    ([1, 15, 28], 32, [[1, 15, 28]]),  # the first is 1: outputs
    ([1, 46, 90], 94, [[1, 46, 90]]),
    ([2, 16, 29], 32, [[1, 15, 28]]),  # the usual list of inputs
    ([2, 30, 58], 61, [[1, 29, 57]]),
    ([2, 18, 30], 32, [[1, 17, 29], [2, 18, 30]]),  # of either kind
    ([2, 18, 32], 32, [[1, 17, 31]]),  # there is no output of a layer 32
    ([0, 15, 28], 32, [[0, 15, 28]]),  # nor of a layer -1
    ([1, 21, 43], 43, [[0, 20, 42]]),  # outputs would be too many
    ([30, 18, 2], 32, [[29, 17, 1], [30, 18, 2]]),  # in their order
])  # fmt: skip
def test_which_layers_ids_mean(ids: list[int] | None, depth: int, expected: list[list[int]], tmp_path: Path) -> None:
    assert meanings(replace(settings_of(PLAIN.save(tmp_path)), layer_ids=ids), depth) == expected


def test_ids_of_speculators_count_inputs(tmp_path: Path) -> None:
    """Unless the list begins with 1: it was converted, and counts outputs."""
    for ids, reads in (([3, 1, 2], [2, 0, 1]), ([1, 2, 2], [1, 2, 2])):
        folder = PLAIN.save(tmp_path / str(ids), "speculators", eagle_aux_hidden_state_layer_ids=ids)
        assert load(folder).reader.reads == reads


def test_without_a_tokenizer_ids_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = PLAIN.save(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 2, 1]})
    with caplog.at_level("WARNING", "hf_specdecpp"):
        assert load(folder).reader.reads == [1, 1, 0]
    assert "It may be eagle3={'reads': [1, 1, 0]}, or eagle3={'reads': [2, 2, 1]}. Taken is" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", "hf_specdecpp"):
        assert load(folder, eagle3={"reads": [2, 2, 1]}).reader.reads == [2, 2, 1]
    assert "It may be" not in caplog.text


def test_overrides_win(tmp_path: Path) -> None:
    folder = VARIANTS["eagle-3.1"].save(tmp_path)
    said = {"norm_output": False, "norm_before_residual": False, "rope_theta": 9, "reads": [0, 0, 1]}
    settings = settings_of(folder, eagle3=said)
    assert (settings.norm_output, settings.norm_before_residual) == (False, False)
    assert (settings.reads, settings.fc_norm, settings.layer["rope_parameters"]["rope_theta"]) == ([0, 0, 1], True, 9)
