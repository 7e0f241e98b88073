"""Assistants on an EAGLE-3 draft of others: saved as a pinned reference, loaded again, shared, with a card."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file
from support.files.checkpoints import in_shards
from support.files.eagle3_files import VARIANTS, Checkpoint
from support.files.eagle3_loading import DIALECTS, drafted, publish
from support.files.repos import files_of, greedy, save_model
from support.runs.hub_server import HubServer
from support.targets.models import tiny
from transformers import PreTrainedModel
from typer.testing import CliRunner

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant
from hf_specdecpp.cli import app
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.conversion import convert
from hf_specdecpp.hub.inspection import RepositoryReport, inspect

FIXED = SpeculationConfig("fixed", num_tokens=3)
OURS = {"README.md", "config.json", "acceptance_head.safetensors"}


def with_head(folder: str | Path, target: PreTrainedModel, **options: Any) -> SpecDecPPAssistant:
    assistant = SpecDecPPAssistant.from_pretrained(folder, target=target, speculation=FIXED, **options)
    torch.manual_seed(3)
    assistant.head = AcceptanceHead(32, num_blocks=1)
    return assistant


def assert_same(again: SpecDecPPAssistant, before: SpecDecPPAssistant, target: PreTrainedModel) -> None:
    assert torch.equal(drafted(again, target), drafted(before, target))
    for each in (again, before):
        each.decisions = Decisions(draft_successors=False)
    assert greedy(target, again) == greedy(target, before) == greedy(target)
    counts = [(each.stats.drafted, each.stats.accepted) for each in (again, before)]
    assert counts[0] == counts[1]
    assert counts[0][0] > 0
    assert before.head is not None
    assert again.head is not None
    assert all(torch.equal(value, again.head.state_dict()[name]) for name, value in before.head.state_dict().items())


def test_overrides_are_saved(tmp_path: Path) -> None:
    target, overrides = tiny("llama"), {"norm_output": True, "rope_theta": 77.0, "reads": [2, 1, 0]}
    folder = VARIANTS["plain"].save(tmp_path / "draft")
    before = with_head(folder, target, eagle3=overrides)
    before.save_pretrained(tmp_path / "saved")
    again = SpecDecPPAssistant.from_pretrained(tmp_path / "saved", target=target)
    assert again.config.eagle3 == overrides
    assert_same(again, before, target)
    plain = SpecDecPPAssistant.from_pretrained(folder, target=target)
    assert not torch.equal(drafted(plain, target), drafted(again, target)), "the test can tell them apart"
    reset = SpecDecPPAssistant.from_pretrained(tmp_path / "saved", target=target, eagle3={})
    assert torch.equal(drafted(plain, target), drafted(reset, target))


@pytest.mark.daily("original")
@DIALECTS
def test_both_repositories_are_read_at_their_commits(hub: HubServer, tmp_path: Path, dialect: str) -> None:
    target, commit = tiny("llama"), publish(hub, VARIANTS["plain"].save(tmp_path / "draft", dialect))
    before = with_head("org/eagle", target)
    expected = drafted(before, target)
    before.push_to_hub("org/ours")
    assert set(hub.files("org/ours")) == OURS
    config = json.loads(hub.files("org/ours")["config.json"])
    assert (config["draft_id"], config["draft_revision"]) == ("org/eagle", commit)
    publish(hub, Checkpoint(seed=5).save(tmp_path / "newer", dialect))
    shutil.rmtree(tmp_path / "cache")  # another machine
    hub.requests.clear()
    again = SpecDecPPAssistant.from_pretrained("org/ours", target=target)
    assert torch.equal(drafted(again, target), expected)
    assert_same(again, before, target)
    asked = [path.split("/resolve/")[1] for _, path, _ in hub.requests if path.startswith("/org/eagle/resolve/")]
    assert {path.split("/")[0] for path in asked} == {commit}
    assert {path.split("/")[1] for path in asked} == {"config.json", "model.safetensors"}
    assert not torch.equal(drafted(SpecDecPPAssistant.from_pretrained("org/eagle", target=target), target), expected)


def test_weights_that_are_not_in_the_cache_are_not_called_a_pickle(hub: HubServer, tmp_path: Path) -> None:
    publish(hub, VARIANTS["plain"].save(tmp_path / "draft"))
    with_head("org/eagle", tiny("llama")).save_pretrained(tmp_path / "saved")
    for path in (tmp_path / "cache").rglob("model.safetensors"):
        path.unlink()
    with pytest.raises(OSError, match="outgoing traffic has been disabled"):
        SpecDecPPAssistant.from_pretrained(tmp_path / "saved", local_files_only=True)


@pytest.mark.takes(2)
def test_a_subfolder(hub: HubServer, tmp_path: Path) -> None:
    """Of a folder, and of a repository, whose name goes on with it: `org/heads/small`."""
    VARIANTS["plain"].save(tmp_path / "heads/small")
    target = tiny("llama")
    before = with_head(tmp_path / "heads", target, subfolder="small")
    before.save_pretrained(tmp_path / "saved")
    assert_same(SpecDecPPAssistant.from_pretrained(tmp_path / "saved", target=target), before, target)
    commit = hub.commit("org/heads", files_of(tmp_path / "heads"))
    for name, place in (("org/heads", {"subfolder": "small"}), ("org/heads/small", {})):
        published = with_head(name, target, **place)
        assert (published.config.draft_id, published.config.draft_revision) == ("org/heads/small", commit)
        assert_same(published, before, target)
    published.save_pretrained(tmp_path / "ours")
    assert_same(SpecDecPPAssistant.from_pretrained(tmp_path / "ours", target=target), before, target)
    assert ModelCard.load(tmp_path / "ours/README.md").data.base_model == ["org/heads"]
    with pytest.raises(OSError, match="There is no folder 'org/heads/large'|Entry Not Found"):
        SpecDecPPAssistant.from_pretrained("org/heads/large", target=target)


def look(folder: Path) -> RepositoryReport:
    return inspect(Repository(str(folder)))


def contents(report: RepositoryReport) -> dict[str, str]:
    return {file.name: file.problem or file.content for file in report.files}


@DIALECTS
def test_inspected(tmp_path: Path, dialect: str) -> None:
    report = look(VARIANTS["eagle-3.1"].save(tmp_path, dialect))
    assert report.sound
    assert report.traps == []
    assert report.is_foreign
    assert list(contents(report)) == ["config.json", "model.safetensors"]
    assert contents(report)["config.json"].endswith("of a draft that others trained")
    count = sum(t.numel() for name, t in VARIANTS["eagle-3.1"].tensors().items() if name not in ("d2t", "t2d"))
    assert contents(report)["model.safetensors"].endswith(f"bytes, {count:,} parameters")
    shown = {name: report.settings[name] for name in ("norm_output", "draft_vocab_size", "own_embeddings")}
    assert shown == {"norm_output": True, "draft_vocab_size": 20, "own_embeddings": False}
    assert report.settings["reads" if dialect == "speculators" else "layer_ids"] == [1, 0, 2]
    assert report.settings["layer"]["rope_parameters"]["rope_theta"] == 10_000


def test_inspected_on_the_hub_in_several_files(hub: HubServer, tmp_path: Path) -> None:
    commit = publish(hub, in_shards(VARIANTS["plain"].save(tmp_path / "draft", "speculators")))
    report = inspect(Repository("org/eagle"))
    assert report.sound, contents(report)
    assert (report.name, report.commit) == ("org/eagle", commit)
    assert list(contents(report)) == ["config.json", "model.safetensors.index.json"]
    assert report.settings["draft_vocab_size"] == 20


def test_weights_of_other_models_are_not_downloaded(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("org/model", files_of(save_model(tiny("llama"), tmp_path / "model", None)))
    assert not inspect(Repository("org/model")).sound
    assert not any("safetensors" in path for _, path, _ in hub.requests if "/resolve/" in path)


def as_pickle(checkpoint: Checkpoint, folder: Path, dialect: str = "original", **others: Any) -> Path:
    """As EAGLE's own repositories are: no safetensors."""
    path = checkpoint.save(folder, dialect) / "model.safetensors"
    torch.save({**load_file(path), **others}, folder / "pytorch_model.bin")
    path.unlink()
    return folder


@DIALECTS
def test_a_pickle_is_converted(tmp_path: Path, dialect: str) -> None:
    target, out = tiny("llama"), tmp_path / "out"
    folder = as_pickle(VARIANTS["fc_norm"], tmp_path / "pickle", dialect)
    report = look(folder)
    assert "has neither model.safetensors nor" in contents(report)["model.safetensors"]
    assert f"specdecpp inspect {folder} --convert FOLDER" in contents(report)["model.safetensors"]
    assert report.traps == ["pytorch_model.bin looks like a pickle, which can run code. We never open it."]
    convert(folder, out)
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    assert (out / "config.json").read_text() == (folder / "config.json").read_text()
    assert look(out).sound
    original = SpecDecPPAssistant.from_pretrained(VARIANTS["fc_norm"].save(tmp_path / "a", dialect), target=target)
    converted = SpecDecPPAssistant.from_pretrained(out, target=target)
    assert torch.equal(drafted(original, target), drafted(converted, target))


def test_tensors_that_share_memory_are_converted(tmp_path: Path) -> None:
    one = torch.ones(32)
    shared: dict[str, Any] = {"norm.weight": one, "midlayer.hidden_norm.weight": one}
    convert(as_pickle(VARIANTS["plain"], tmp_path / "in", **shared), tmp_path / "out")
    assert look(tmp_path / "out").sound


@pytest.mark.parametrize(("others", "match"), [
    ({"norm.weight": torch.full((32,), torch.inf)}, "NaN or infinite values in norm.weight"),
    ({"more.weight": torch.ones(2)}, "not an EAGLE-3 draft of the form .*: unexpected more.weight"),
    ({"fc.weight": torch.ones(32, 95)}, r"fc.weight has shape \[32, 95\]"),
    ({"mask_hidden": torch.ones(1, 1, 96)}, "this is not an EAGLE-3 draft of the form .*: unexpected mask_hidden"),
])  # fmt: skip
def test_what_is_no_draft_is_not_converted(tmp_path: Path, others: dict[str, Any], match: str) -> None:
    folder = as_pickle(VARIANTS["plain"], tmp_path / "in", **others)
    with pytest.raises(ValueError, match=match):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_to_convert(tmp_path: Path) -> None:
    folder = VARIANTS["plain"].save(tmp_path / "in")
    with pytest.raises(FileNotFoundError, match=r"no pytorch_model\.bin.*Safetensors files need no conversion"):
        convert(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="has a draft: --draft and --target are for SpecDec"):
        convert(as_pickle(VARIANTS["plain"], folder), tmp_path / "out", target_id="org/target")
    with pytest.raises(FileExistsError, match="Choose a new folder"):
        convert(folder, folder)


def test_a_draft_beside_a_target_of_the_hub_at_a_commit(hub: HubServer, tmp_path: Path) -> None:
    publish(hub, VARIANTS["plain"].save(tmp_path / "draft"))
    commit = hub.commit("org/target", files_of(save_model(tiny("llama"), tmp_path / "target")))
    hub.commit("org/target", {"config.json": b"{}"})
    result = CliRunner().invoke(app, ["inspect", "org/eagle", "--target", f"org/target@{commit}"])
    assert result.exit_code == 0, result.output
    assert "It is probably for another target" in " ".join(result.stdout.split())


def test_a_revision_is_pinned(hub: HubServer, tmp_path: Path) -> None:
    commit = publish(hub, VARIANTS["plain"].save(tmp_path / "draft"))
    hub.tag("org/eagle", "v1")
    publish(hub, Checkpoint(seed=5).save(tmp_path / "newer"))
    target = tiny("llama")
    old = SpecDecPPAssistant.from_pretrained("org/eagle", target=target, revision="v1")
    assert old.config.draft_revision == commit
    folder = SpecDecPPAssistant.from_pretrained(tmp_path / "draft", target=target)
    assert torch.equal(drafted(old, target), drafted(folder, target))


def test_a_copy_in_the_place_of_a_draft_that_cannot_be_reached(hub: HubServer, tmp_path: Path) -> None:
    target = tiny("llama")
    publish(hub, VARIANTS["plain"].save(tmp_path / "draft"))
    before = with_head("org/eagle", target)
    before.save_pretrained(tmp_path / "saved")
    shutil.rmtree(tmp_path / "cache")
    hub.private("org/eagle", "theirs")
    with pytest.raises(RepositoryNotFoundError):
        SpecDecPPAssistant.from_pretrained(tmp_path / "saved", target=target)
    again = SpecDecPPAssistant.from_pretrained(tmp_path / "saved", target=target, draft=tmp_path / "draft")
    assert_same(again, before, target)
    assert again.config.draft_id == "org/eagle", "what is saved again names the repository, not the copy"
    SpecDecPPAssistant.from_pretrained(tmp_path / "saved", target=target, token="theirs")
    with pytest.raises(ValueError, match="is a model, and an EAGLE-3 draft is none by itself.*folder or Hub id"):
        SpecDecPPAssistant.from_pretrained(tmp_path / "saved", draft=target)
