"""An ordinary or published draft given by its Hub id, with the options for downloads, which are those of
`from_pretrained`. Against a Hub of our own."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from support.files import repos
from support.files.eagle3_files import VARIANTS, Checkpoint
from support.files.eagle3_loading import publish
from support.runs.hub_server import HubServer
from support.targets.models import partly_agreeing, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.inspection import inspect

FIXED = SpeculationConfig("fixed", num_tokens=4)
MAKE: dict[str, Callable[..., SpecDecPPAssistant]] = {
    "assist": lambda target, name, **options: assist(target, name, default=False, **options),
    "from_draft": lambda target, name, **options: SpecDecPPAssistant.from_draft(name, target, **options),
}
WAYS = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())


def committed(hub: HubServer, folder: Path, seed: int = 1, words: list[str] | None = repos.WORDS) -> str:
    """The commit of a new state of `org/small`."""
    files = repos.files_of(repos.save_model(partly_agreeing(tiny("llama"), seed=seed), folder, words))
    return hub.commit("org/small", files)


@pytest.mark.daily("v1-assist", "dev-from_draft", "the hash-assist")
@WAYS
@pytest.mark.parametrize("revision", ["v1", "dev", "the hash"])
def test_the_revision_is_stored_as_its_commit(
    make: Callable[..., SpecDecPPAssistant], revision: str, hub: HubServer, target: PreTrainedModel, tmp_path: Path
) -> None:
    """So the assistant that is saved, pushed, inspected and loaded drafts the same when the branch has gone on."""
    commit = committed(hub, tmp_path / "old")
    if revision == "dev":
        commit = hub.commit("org/small", {"note.txt": b""}, "dev")
    hub.tag("org/small", "v1")
    committed(hub, tmp_path / "new", seed=2)
    revision = commit if revision == "the hash" else revision
    assistant = make(target, "org/small", revision=revision, speculation=FIXED)
    assert (assistant.config.draft_id, assistant.config.draft_revision) == ("org/small", commit)
    drafted = repos.estimates(assistant)
    assert not torch.equal(repos.estimates(make(target, "org/small")), drafted), "the test can tell them apart"
    asked = {path.split("/")[4] for _, path, _ in hub.requests if path.startswith("/org/small/resolve/")}
    assert asked <= {revision, commit, "main", hub._repos["org/small"].at("main").oid}
    assistant.push_to_hub("org/ours")
    assistant.save_pretrained(tmp_path / "saved")
    shutil.rmtree(tmp_path / "cache")  # another machine
    assert inspect(Repository("org/ours")).sound
    for source in ("org/ours", tmp_path / "saved"):
        again = SpecDecPPAssistant.from_pretrained(source, target)
        assert again.config.draft_revision == commit
        assert torch.equal(repos.estimates(again), drafted)
        assert repos.greedy(target, again) == repos.greedy(target)


@WAYS
def test_of_a_published_draft(
    make: Callable[..., SpecDecPPAssistant], hub: HubServer, target: PreTrainedModel, tmp_path: Path
) -> None:
    commit = publish(hub, VARIANTS["plain"].save(tmp_path / "draft"))
    hub.tag("org/eagle", "v1")
    publish(hub, Checkpoint(seed=5).save(tmp_path / "newer"))
    for token, cache in ((None, None), ("theirs", tmp_path / "other")):
        hub.private("org/eagle", token) if token else None
        old = make(target, "org/eagle", revision="v1", token=token, cache_dir=cache)
        assert (old.config.draft_id, old.config.draft_revision) == ("org/eagle", commit)
        old.detach()
    assert [path.name for path in (tmp_path / "other").glob("models--*")] == ["models--org--eagle"]


@WAYS
def test_token_and_cache_reach_every_read(
    make: Callable[..., SpecDecPPAssistant], hub: HubServer, target: PreTrainedModel, tmp_path: Path
) -> None:
    """Those of the draft and of its adapter, and later those without a connection."""
    committed(hub, tmp_path / "draft")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    hub.commit("org/adapter", repos.files_of(repos.save_adapter(model, tmp_path / "peft")))
    for repository in ("org/small", "org/adapter"):
        hub.private(repository, "theirs")
    options: dict[str, Any] = {"adapter": "org/adapter", "cache_dir": tmp_path / "other"}
    with pytest.raises(RepositoryNotFoundError):
        make(target, "org/small", **options)
    with pytest.raises(LocalEntryNotFoundError):
        make(target, "org/small", **options, local_files_only=True)
    expected = repos.estimates(make(target, "org/small", **options, token="theirs"))
    files = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and ".no_exist" not in path.parts]
    assert not set(files) - {"adapter_config.json"}
    hub.requests.clear()
    again = make(target, "org/small", **options, local_files_only=True)
    assert hub.requests == []
    assert torch.equal(repos.estimates(again), expected)


@pytest.mark.daily("at once-both", "later-another cache", "from a saved assistant-another revision")
@pytest.mark.parametrize("place", ["another cache", "another revision", "both"])
@pytest.mark.parametrize("attach", ["at once", "later", "from a saved assistant"])
def test_tokenizers_are_compared_wherever_they_are(
    attach: str, place: str, hub: HubServer, target: PreTrainedModel, tmp_path: Path
) -> None:
    """The latest commit of the draft has the target's tokenizer, the tagged one another."""
    committed(hub, tmp_path / "old", words=["<unk>", *(f"v{i}" for i in range(1, 48))])
    hub.tag("org/small", "v1")
    options: dict[str, Any] = {} if place == "another revision" else {"cache_dir": tmp_path / "other"}
    if place != "another cache":
        committed(hub, tmp_path / "new")
        options["revision"] = "v1"
    if attach == "from a saved assistant":
        SpecDecPPAssistant.from_draft("org/small", **options).save_pretrained(tmp_path / "saved")
        options.pop("revision", None)
    meet: Any
    if attach == "at once":
        meet = partial(assist, target, "org/small", **options)
    elif attach == "later":
        AutoTokenizer.from_pretrained("org/small", **options)  # without a target nobody needs it
        meet = partial(SpecDecPPAssistant.from_draft("org/small", **options).attach, target)
    else:
        meet = partial(SpecDecPPAssistant.from_pretrained, tmp_path / "saved", target, **options)
    with pytest.raises(ValueError, match="have different tokenizers: 47 ids"):
        meet()


def test_a_folder_of_a_repository(hub: HubServer, target: PreTrainedModel, tmp_path: Path) -> None:
    repos.save_model(partly_agreeing(target), tmp_path / "drafts/small")
    commit = hub.commit("org/drafts", repos.files_of(tmp_path / "drafts"))
    named: dict[str, dict[str, Any]] = {
        "org/drafts": {"subfolder": "small", "revision": "main"},
        "org/drafts/small": {},
    }
    for name, options in named.items():
        assistant = assist(target, name, **options)
        assert (assistant.config.draft_id, assistant.config.draft_revision) == ("org/drafts/small", commit)
        assistant.detach()
    assistant = SpecDecPPAssistant.from_draft(tmp_path / "drafts", target, subfolder="small")
    assert assistant.config.draft_id == str(tmp_path / "drafts/small")


def test_options_that_concern_no_repository(target: PreTrainedModel) -> None:
    cases: dict[str, dict[str, Any]] = {"auto": {"revision": "v1"}, "lookup": {"cache_dir": "x"}}
    for draft, options in cases.items():
        with pytest.raises(TypeError, match=f"There is no option {next(iter(options))} for draft='{draft}'. There are"):
            assist(target, draft, **options)
    with pytest.raises(TypeError, match="revision, subfolder: for a draft given by name, not a model object"):
        assist(target, partly_agreeing(target), revision="v1")
    with pytest.raises(TypeError, match=r"There is no option revison\. Did you mean revision\?"):
        SpecDecPPAssistant.from_draft("org/small", target, revison="v1")  # type: ignore[call-arg]
