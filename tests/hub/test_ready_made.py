"""Assistants on an EAGLE-3 draft of others: saved as a pinned reference, loaded again, shared, with a card."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import RepositoryNotFoundError
from support.eagle3_files import VARIANTS, Checkpoint
from support.eagle3_loading import DIALECTS, drafted, publish
from support.hub_server import HubServer
from support.models import tiny
from support.repos import files_of, greedy, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.config.speculation import Decisions

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


# Saved ----------------------------------------------------------------------------------------------------------------


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


# On the Hub -----------------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@DIALECTS
def test_both_repositories_are_read_at_their_commits(hub: HubServer, tmp_path: Path, dialect: str) -> None:
    target = tiny("llama")
    commit = publish(hub, VARIANTS["plain"].save(tmp_path / "draft", dialect))
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
    newer = SpecDecPPAssistant.from_pretrained("org/eagle", target=target)
    assert not torch.equal(drafted(newer, target), expected)


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
    SpecDecPPAssistant.from_pretrained(tmp_path / "saved", target=target, token="theirs")  # noqa: S106
    with pytest.raises(ValueError, match="is a model, and an EAGLE-3 draft is none by itself.*folder or Hub id"):
        SpecDecPPAssistant.from_pretrained(tmp_path / "saved", draft=target)


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
    with pytest.raises(OSError, match="'org/heads/large' is no folder here|Entry Not Found"):
        SpecDecPPAssistant.from_pretrained("org/heads/large", target=target)


def test_card(hub: HubServer, tmp_path: Path) -> None:
    commit = publish(hub, VARIANTS["plain"].save(tmp_path / "draft"))
    hub.commit("org/target", files_of(save_model(tiny("llama"), tmp_path / "target")))
    target = AutoModelForCausalLM.from_pretrained("org/target")
    with_head("org/eagle", target, eagle3={"norm_output": True}).push_to_hub("org/ours")
    card = ModelCard.load("org/ours")
    card.validate()
    assert card.data.base_model == ["org/target", "org/eagle"]
    assert f"| draft | EAGLE-3 org/eagle at {commit}, read with norm_output=True |" in card.text
    assert "None" not in card.text
    assert "draft vocabulary" not in card.text
