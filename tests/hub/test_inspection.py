"""`inspect` finds what a repository holds, every file that is damaged, and what could surprise somebody."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from support.files.assistant_files import FILES, edit_config, write_assistant
from support.files.released_heads import Payload
from support.files.repos import files_of
from support.runs.hub_server import HubServer, point_client_at

from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.files import Repository, save_tensors
from hf_specdecpp.hub.inspection import RepositoryReport, inspect


def problems(report: RepositoryReport) -> dict[str, str]:
    return {file.name: file.problem for file in report.files if file.problem is not None}


def look(folder: Path) -> RepositoryReport:
    return inspect(Repository(str(folder)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_assistant(tmp_path / "assistant")


def test_a_sound_assistant(folder: Path) -> None:
    report = look(folder)
    assert report.sound
    assert (problems(report), report.traps) == ({}, [])
    contents = {file.name: file.content for file in report.files}
    assert sorted(contents) == FILES
    assert contents["acceptance_head.safetensors"].endswith("bytes, 162 parameters")  # 2 (8 * 8 + 8) + 2 * 8 + 2
    assert contents["draft_vocab.safetensors"].endswith("bytes, 10 token ids")
    assert contents["adapter/adapter_config.json"].endswith("LORA, rank 2, on q_proj, v_proj")
    assert contents["adapter/adapter_model.safetensors"].endswith("bytes, 1 items")
    assert report.config is not None
    assert report.config.target_id == "org/target"


def test_all_problems_are_collected(folder: Path) -> None:
    edit_config(folder, head=AcceptanceHead(9, num_blocks=2).to_config(), draft_vocab_size=11)
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    found = problems(look(folder))
    assert sorted(found) == [name for name in FILES if name != "config.json"]
    assert "has shape [8, 8], not [9, 9]" in found["acceptance_head.safetensors"]
    assert "'org/draft'" in found["acceptance_head.safetensors"]
    assert "draft_vocab_size=11" in found["draft_vocab.safetensors"]
    assert "describes a None adapter" in found["adapter/adapter_config.json"]


def test_files_are_checked_even_if_the_config_cannot_be_read(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    (folder / "acceptance_head.safetensors").write_bytes(b"")
    assert sorted(problems(look(folder))) == ["acceptance_head.safetensors", "config.json"]


@pytest.mark.parametrize(("changed", "message"), [
    ({"kasa_config": {"beta": 1e-4}}, "has kasa_config=.*overwrites the model's own weights"),
    ({"init_lora_weights": "pissa"}, "has init_lora_weights=pissa"),
    ({"peft_type": "PROMPT_TUNING"}, "describes a 'PROMPT_TUNING' adapter"),
    ({"r": 5_000_000}, "adapter_model.safetensors has rank 2 .* says r=5000000"),
    ({"r": "8"}, r"has ranks \['8'\]"),
    ({"lora_alpha": [8]}, r"has lora_alpha \[\[8\]\]"),
    ({"alpha_pattern": {"(x+x+)+y": 8}}, "Regular expressions are not read"),
    ({"rank_pattern": [8]}, "must map names"),
])  # fmt: skip
def test_an_adapter_that_no_draft_takes(folder: Path, changed: dict[str, Any], message: str) -> None:
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    (problem,) = problems(look(folder)).values()
    assert re.search(message, problem)


@pytest.mark.parametrize("tensors", [
    {"A.weight": torch.ones(2, 8)},
    {"A.weight": torch.ones(2, 8), "B.weight": torch.ones(8, 3)},
    {"A.weight": torch.ones(2), "B.weight": torch.ones(2)},
    {"A.weight": torch.ones(2, 8).int(), "B.weight": torch.ones(8, 2).int()},
])  # fmt: skip
def test_an_adapter_of_other_matrices(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "adapter" / "adapter_model.safetensors"
    place = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_tensors({place + name: tensor for name, tensor in tensors.items()}, path)
    found = problems(look(folder))
    assert list(found) == ["adapter/adapter_model.safetensors"]
    assert "for model.layers.0.self_attn.q_proj" in found["adapter/adapter_model.safetensors"]


def test_an_adapter_in_the_root_hijacks_auto_classes(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    report = look(folder)
    assert not report.sound
    assert "Move both files to adapter/" in problems(report)["adapter_config.json"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "adapter/adapter_model.bin"])
def test_pickles_are_named_not_opened(folder: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(Payload(tmp_path / "proof"), folder / name)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("opened a pickle"))
    report = look(folder)
    assert report.sound
    assert report.traps == [f"{name} looks like a pickle, which can run code. We never open it."]
    assert not (tmp_path / "proof").exists()


def test_code(folder: Path, tmp_path: Path) -> None:
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    report = look(folder)
    assert report.sound
    assert [trap.split()[0] for trap in report.traps] == ["config.json", "modeling.py"]
    assert "auto_map" in report.traps[0]
    assert not (tmp_path / "proof").exists()


def test_unused_files(folder: Path) -> None:
    edit_config(folder, head=None, adapter=False, draft_vocab_size=None)
    report = look(folder)
    assert report.sound
    assert [trap.split()[0] for trap in report.traps] == [
        "acceptance_head.safetensors",
        "draft_vocab.safetensors",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    ]


@pytest.mark.parametrize(("changed", "message"), [
    ({"draft_id": None, "draft_revision": None}, "config.json has no draft_id, but a head fits one draft only."),
    (
        {"draft_kind": "early_exit", "draft_layers": [0], "target_id": None},
        "config.json has no target_id, but a head fits one target only.",
    ),
])  # fmt: skip
def test_models_without_a_name(folder: Path, changed: dict[str, Any], message: str) -> None:
    edit_config(folder, **changed)
    (trap,) = look(folder).traps
    assert trap.startswith(message)


@pytest.mark.parametrize("subfolder", [None, "heads/small"])
def test_on_the_hub(folder: Path, hub: HubServer, tmp_path: Path, subfolder: str | None) -> None:
    torch.save(Payload(tmp_path / "proof"), folder / "pytorch_model.bin")
    prefix = f"{subfolder}/" if subfolder else ""
    commit = hub.commit("org/head", {prefix + name: content for name, content in files_of(folder).items()})
    hub.tag("org/head", "v1")
    hub.commit("org/head", {"config.json": b"{}"})
    report = inspect(Repository("org/head", "v1", subfolder))
    assert report.sound
    assert (report.name, report.commit) == ("org/head", commit)
    assert sorted(file.name for file in report.files) == FILES
    assert [trap.split()[0] for trap in report.traps] == ["pytorch_model.bin"]  # named, but:
    downloads = [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert downloads
    assert not any(path.endswith(".bin") for path in downloads)


def test_offline(folder: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("org/head", files_of(folder))
    inspect(Repository("org/head"))
    point_client_at(monkeypatch, hub, tmp_path / "cache", offline=True)
    before = len(hub.requests)
    assert inspect(Repository("org/head")).sound
    with pytest.raises(LocalEntryNotFoundError, match="offline mode is on"):
        inspect(Repository("org/other"))
    assert len(hub.requests) == before
