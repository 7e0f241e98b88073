"""Multi-token layers: where they are read from, stored assistants, generations of every family, and the commands."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.checkpoints import edited, in_shards
from support.files.mtp_files import DEPTH, FAMILIES, HIDDEN, HYBRID, VOCAB, Files, dense, load
from support.files.repos import WORDS, change_json, files_of, tokenizer
from support.runs.hub_server import HubServer
from support.targets.models import configured, prompt, tiny
from support.targets.rounds_anew import check_rounds
from support.targets.watchers import heard
from transformers.generation import candidate_generator
from typer.testing import CliRunner, Result

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.cli import app
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.draft_kinds.mtp.loading_mtp import layers_among
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.models.causal_lm import CausalLM

TEXT = 1 + prompt(9) % (VOCAB - 1)
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 4, "draft_successors": False}  # every text is drafted alike


def shards_of(folder: Path) -> list[str]:
    """Three files in the place of one, of which the last has the multi-token layers."""
    return [path.name for path in sorted(in_shards(folder, last=rf"layers\.[{DEPTH}-9]\.").glob("model-*"))]


def accepted(target: CausalLM, assistant: SpecDecPPAssistant) -> list[int]:
    """What was accepted at each place, of a text that is the target's own."""
    configured(assistant, **FIXED)
    output = target.generate(TEXT, assistant_model=assistant, max_new_tokens=30, do_sample=False)
    assert torch.equal(output, target.generate(TEXT, max_new_tokens=30, do_sample=False))
    return assistant.stats.accepted_at


def test_the_files_are_read_once(tmp_path: Path) -> None:
    """transformers' own generator reads them in each `generate()`."""
    target = dense().load(tmp_path)
    assistant = assist(target, "mtp", default=False)
    expected = accepted(target, assistant)
    for file in tmp_path.iterdir():
        file.unlink()
    assert accepted(target, assistant) == expected
    assistant.detach()
    assistant.attach(target)
    assert accepted(target, assistant) == expected


def test_elsewhere_than_the_target(tmp_path: Path) -> None:
    """Quantised and finetuned models often lack the layers that the original has."""
    files = dense()
    files.save(tmp_path / "original")
    target = load(files.save(tmp_path / "without", with_layers=False))
    assistant = assist(target, "mtp", source=tmp_path / "original", default=False)
    expected = accepted(target, assistant)
    assert assistant.config.draft_id == str(tmp_path / "original")
    in_memory = files.model(files.seed, 0.6)
    in_memory.load_state_dict(target.state_dict())
    other = assist(in_memory, "mtp", source=str(tmp_path / "original"), default=False)
    assert accepted(in_memory, other) == expected
    other.config.draft_id = "org/cannot-be-reached"
    other.save_pretrained(tmp_path / "stored")
    moved = SpecDecPPAssistant.from_pretrained(tmp_path / "stored", target=target, draft=tmp_path / "original")
    assert accepted(target, moved) == expected


def test_of_several_files_those_with_the_layers_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = dense().load(tmp_path)
    expected, files = accepted(target, assist(target, "mtp", default=False)), shards_of(tmp_path)
    asked: list[str] = []

    heard(monkeypatch, Repository, "file", lambda _, filename, *rest: asked.append(filename))
    assert accepted(target, assist(target, "mtp", default=False)) == expected
    assert asked.count(files[2]) == 1, "a file is opened once, whatever it holds"
    assert not {files[0], files[1]} & set(asked)


def test_the_commit_of_the_hub_is_stored(hub: HubServer, tmp_path: Path) -> None:
    """What is committed later is not read, and of several files the target's own are not downloaded again."""
    files, folder = dense(), tmp_path / "files"
    files.save(folder)
    shards, commit = shards_of(folder), hub.commit("org/target", files_of(folder))
    target = load("org/target")
    assistant = assist(target, "mtp", default=False)
    expected = accepted(target, assistant)
    assert (assistant.config.draft_id, assistant.config.draft_revision) == ("org/target", commit)
    assistant.push_to_hub("org/assistant")
    hub.commit("org/target", dict.fromkeys([*shards, "model.safetensors.index.json"], b"nothing"))
    shutil.rmtree(tmp_path / "cache")  # another machine
    hub.requests.clear()
    again = SpecDecPPAssistant.from_pretrained("org/assistant")
    asked = [path.split("/resolve/")[1] for _, path, _ in hub.requests if path.startswith("/org/target/resolve/")]
    assert set(asked) == {f"{commit}/{name}" for name in ("config.json", "model.safetensors.index.json", shards[2])} | (
        {f"{commit}/model.safetensors"}  # which is not there
    )
    assistant.detach()
    again.attach(target)
    assert accepted(target, again) == expected
    with pytest.raises(ValueError, match="is not valid JSON"):
        assist(target, "mtp", source="org/target", default=False)


def test_what_is_announced_beside_the_text_of_a_multimodal_config(tmp_path: Path) -> None:
    """`text_config` says how many layers the target has, and names begin further out."""
    names = [f"model.language_model.layers.{DEPTH}.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "x.y")]
    found = layers_among([*names, f"model.language_model.layers.{DEPTH}.shared_head.norm.weight"], DEPTH, "org/x")
    assert found[0]["block.x.y.weight"] == names[3]
    assert layers_among(["model.visual.layers.30.mlp.weight", "model.layers.2.enorm.weight"], DEPTH, "org/x") == []


def test_a_config_that_announces_more_than_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = dense().load(tmp_path)
    change_json(tmp_path / "config.json", num_nextn_predict_layers=3)
    assist(target, "mtp", default=False)
    assert "announces 3 multi-token layers (num_nextn_predict_layers) and holds 1" in caplog.text


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_files_without_what_their_config_announces(family: str, tmp_path: Path) -> None:
    target = load(Files(family).save(tmp_path, with_layers=False))
    name = "mtp_num_hidden_layers" if family.startswith("qwen") else "num_nextn_predict_layers"
    change_json(tmp_path / "config.json", **{name: 1})
    message = rf"announces multi-token layers \({name}=1\), and its files hold no.*quantised.*source=ID"
    with pytest.raises(ValueError, match=message):
        assist(target, "mtp", default=False)


def test_targets_without_any(tmp_path: Path) -> None:
    target = tiny("llama")
    with pytest.raises(ValueError, match=r"was made in memory.*source=ID_OR_FOLDER"):
        assist(target, "mtp", default=False)
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no multi-token layers: its config.json announces none.*EAGLE-3"):
        assist(target, "mtp", source=tmp_path, default=False)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor.*pickle"):
        assist(target, "mtp", source=tmp_path, default=False)


BLOCK, OTHER = f"model.layers.{DEPTH}.", torch.zeros(3)
DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "a norm is missing": ({f"{BLOCK}hnorm.weight": None}, "a form that hf_specdecpp does not know.*without hnorm"),
    "a part of the layer is missing": ({f"{BLOCK}mlp.up_proj.weight": None}, "missing: layers.0.mlp.up_proj"),
    "a part is unknown": ({f"{BLOCK}mlp.secret.weight": OTHER}, "unexpected: layers.0.mlp.secret.weight"),
    "a part has another shape": ({f"{BLOCK}mlp.up_proj.weight": OTHER}, "is not like the layers of Glm4MoeModel"),
    "of another width": ({f"{BLOCK}enorm.weight": OTHER}, r"enorm of shape \[3\].*needs \[32\].*another model"),
    "in eight bits": (
        {f"{BLOCK}mlp.up_proj.weight": torch.zeros(48, HIDDEN, dtype=torch.float8_e4m3fn)},
        "holds float8_e4m3fn.*quantised.*bfloat16",
    ),
    "whole numbers": ({f"{BLOCK}mlp.up_proj.weight": torch.zeros(48, HIDDEN, dtype=torch.int32)}, "holds int32"),
    "not finite": ({f"{BLOCK}enorm.weight": torch.full((HIDDEN,), float("nan"))}, "holds NaN or infinite.*enorm"),
}
FORMS = {
    "DeepSeek-V4": "mtp.0.e_proj.weight",
    "MiMo": "model.mtp.layers.0.enorm.weight",
    "several layers with one projection": "mtp.layers.1.mlp.up_proj.weight",
    "Ernie": "model.mtp_block.0.input_layernorm.weight",
}
UNKNOWN = r"multi-token layers of a form that hf_specdecpp does not know \(.*mtp[._]"
DAMAGE |= {form: ({name: OTHER}, UNKNOWN) for form, name in FORMS.items()}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_layers(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGE[damage]
    target = load(dense().save(tmp_path, with_layers=damage not in FORMS))
    edited(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        assist(target, "mtp", default=False)


def test_stored_assistants_that_cannot_be_loaded(tmp_path: Path) -> None:
    target = dense().load(tmp_path / "target")
    assist(target, "mtp", default=False).save_pretrained(tmp_path / "stored")
    with pytest.raises(ValueError, match="drops multi-token layers when it loads one.*folder"):
        SpecDecPPAssistant.from_pretrained(tmp_path / "stored", draft=target)
    change_json(tmp_path / "stored" / "config.json", draft_id=None)
    with pytest.raises(ValueError, match="names no draft"):
        SpecDecPPAssistant.from_pretrained(tmp_path / "stored")


def test_they_are_not_exported(tmp_path: Path) -> None:
    assist(dense().load(tmp_path), "mtp", default=False).save_pretrained(tmp_path / "stored")
    with pytest.raises(ValueError, match="from the target itself, as `vllm serve org/target"):
        export(tmp_path / "stored", tmp_path / "out", "org/target")


CHAIN: dict[str, Any] = {"rule": "fixed", "num_tokens": 5}
DYSPEC: dict[str, Any] = {"rule": "threshold", "tree": "dyspec", "tree_budget": 8}


def assisted(target: CausalLM, **settings: Any) -> SpecDecPPAssistant:
    return assist(target, "mtp", speculation=SpeculationConfig(**(settings or CHAIN)), default=False)


@pytest.mark.daily("deepseek_v3")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_every_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chains; and in trees, where the target reads trees. Each round begins as if it read the whole text anew."""
    target = Files(family, seed=1).load(tmp_path)
    for settings in (CHAIN, DYSPEC)[: 1 if family in HYBRID else 2]:
        assistant = assisted(target, **settings)
        assistant.decisions = Decisions(draft_successors=False)
        check_rounds(target, assistant, TEXT, monkeypatch)
        assert assistant.stats.accepted > 0


@pytest.mark.skipif(
    not hasattr(candidate_generator, "MTPCandidateGenerator"), reason="this transformers has no use_mtp to refuse"
)
def test_transformers_own_is_left_alone_but_not_mixed_in(tmp_path: Path) -> None:
    target = Files("glm4_moe", seed=1).load(tmp_path)
    assistant = assisted(target)
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with pytest.raises(ValueError, match="use_mtp=True is transformers' own speculation.*assist"):
        target.generate(TEXT, assistant_model=assistant, use_mtp=True, **how)
    assert torch.equal(target.generate(TEXT, use_mtp=True, **how), target.generate(TEXT, **how))
    assert assistant.stats.rounds == 0


# `--mtp`: the commands draft with the target's own multi-token layers. ------------------------------------------------


QUICK = ["--max_new_tokens", "8"]


@pytest.fixture
def target(tmp_path: Path) -> str:
    folder = dense(dtype=torch.float32).save(tmp_path / "target")
    tokenizer(WORDS[:VOCAB]).save_pretrained(folder)
    return str(folder)


def run(*arguments: str, said: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=said)


@pytest.mark.parametrize(
    "options", [("--mtp",), ("--mtp", "--lookup"), ()], ids=["alone", "with lookups", "by default"]
)
def test_demo(target: str, options: tuple[str, ...]) -> None:
    result = run("demo", "--target", target, *options, *QUICK, "--prompt", "w1 w2 w3")
    assert result.exit_code == 0, result.output
    assert f"assistant  multi-token layers of {target}, and lookups\n" in result.output
    assert "equal: all 8 tokens" in result.output
    assert f"specdecpp bench --target {target} --mtp --quick" in result.output


@pytest.mark.parametrize("options", [("--mtp",), ()], ids=["asked for", "by default"])
def test_bench(target: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "w1 w2 w3"}))
    result = run(
        "bench", "--target", target, *options, *QUICK, "--data", str(tmp_path / "questions.jsonl"), "--temperatures",
        "0", "--contestants", "plain,fixed 3", "--output", str(tmp_path / "bench"), "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert not json.loads((tmp_path / "bench" / "results.json").read_text())["mismatches"]
    assert f"multi-token layers of {target}" in (tmp_path / "bench" / "report.md").read_text()
