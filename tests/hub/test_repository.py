"""One Hub id is a whole assistant: downloads, offline use, Auto classes, uploads. Against a Hub of our own."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import get_session, hf_raise_for_status
from support.files import repos
from support.runs.hub_server import HubServer, hub_env
from support.targets.models import partly_agreeing, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.models.loading import load_model_config, load_tokenizer

SPECULATION = SpeculationConfig("threshold", threshold=0.3, max_tokens=7)


@pytest.fixture
def target(hub: HubServer, tmp_path: Path) -> PreTrainedModel:
    """The target of a published pair."""
    repos.publish_pair(hub)
    AutoTokenizer.from_pretrained("org/target")
    return AutoModelForCausalLM.from_pretrained("org/target")


@pytest.fixture
def assistant(target: PreTrainedModel, tmp_path: Path) -> SpecDecPPAssistant:
    """One with everything that a repository can hold."""
    adapter = repos.save_adapter(AutoModelForCausalLM.from_pretrained("org/draft"), tmp_path / "peft")
    return SpecDecPPAssistant.from_draft(
        "org/draft",
        target,
        adapter=adapter,
        head=repos.head_for(target),
        draft_vocab=list(range(40)),
        speculation=SPECULATION,
    )


def paths(hub: HubServer, repo: str) -> list[str]:
    """What was asked of a repository's files."""
    return [path for _, path, _ in hub.requests if path.startswith((f"/{repo}/", f"/api/models/{repo}"))]


def test_what_a_repository_is_depends_on_the_revision(
    hub: HubServer, target: PreTrainedModel, assistant: SpecDecPPAssistant, tmp_path: Path
) -> None:
    """Its latest commit is an ordinary model, the tagged one an assistant."""
    assistant.save_pretrained(tmp_path / "assistant")
    hub.commit("org/changed", repos.files_of(tmp_path / "assistant"))
    hub.tag("org/changed", "v1")
    hub.commit("org/changed", repos.files_of(repos.save_model(tiny("llama"), tmp_path / "model")))
    loaded = assist(target, "org/changed", revision="v1", default=False)
    assert repos.greedy(target, loaded) == repos.greedy(target)
    assert loaded.config.draft_id == "org/draft"


@pytest.mark.daily("True")
@pytest.mark.parametrize("attached", [True, False])
def test_push_and_load(
    hub: HubServer, target: PreTrainedModel, assistant: SpecDecPPAssistant, tmp_path: Path, attached: bool
) -> None:
    assistant.push_to_hub("org/head")
    before, tokens = repos.estimates(assistant), repos.greedy(target, assistant)
    counts = assistant.stats.drafted, assistant.stats.accepted
    shutil.rmtree(tmp_path / "cache")  # another machine
    shutil.rmtree(tmp_path / "peft")

    again = SpecDecPPAssistant.from_pretrained("org/head", target if attached else None)
    assert torch.equal(repos.estimates(again), before)
    assert again.speculation == SPECULATION
    assert repos.greedy(target, again) == tokens == repos.greedy(target)
    if attached:
        assert (again.stats.drafted, again.stats.accepted) == counts
    assert (again.config.target_id, again.config.name_or_path) == ("org/target", "org/head")


def test_revision(hub: HubServer, target: PreTrainedModel, assistant: SpecDecPPAssistant, tmp_path: Path) -> None:
    for threshold, branch in ((0.1, "main"), (0.2, "dev")):
        assistant.speculation = SpeculationConfig(rule="threshold", threshold=threshold)
        assistant.save_pretrained(tmp_path / branch)
        commit = hub.commit("org/head", repos.files_of(tmp_path / branch), branch)
    hub.tag("org/head", "v1", "main")
    for revision, threshold in ((None, 0.1), ("main", 0.1), ("v1", 0.1), ("dev", 0.2), (commit, 0.2)):
        hub.requests.clear()
        again = SpecDecPPAssistant.from_pretrained("org/head", target, revision=revision, force_download=True)
        assert again.speculation.threshold == threshold
        asked = {path.split("/")[4] for path in paths(hub, "org/head") if "/resolve/" in path}
        assert asked <= {revision or "main", commit if revision == "dev" else revision or "main"}
        assert {name for name in repos.files_of(tmp_path / "main") if name != "README.md"} == {
            path.split("/", 5)[5] for path in paths(hub, "org/head") if "/resolve/" in path
        }
        wanted = {path.split("/")[4] for path in paths(hub, "org/draft") if "/resolve/" in path}
        assert wanted == {assistant.config.draft_revision}, "the draft has commits of its own"


def test_an_ordinary_draft_in_a_folder_of_a_repository(hub: HubServer, target: PreTrainedModel, tmp_path: Path) -> None:
    repos.save_model(partly_agreeing(target), tmp_path / "drafts/small")
    hub.commit("org/drafts", repos.files_of(tmp_path / "drafts"))
    assistant = SpecDecPPAssistant.from_draft("org/drafts/small", target, speculation=SpeculationConfig("fixed"))
    assert assistant.config.draft_id == "org/drafts/small"
    expected = repos.greedy(target)
    assert repos.greedy(target, assistant) == expected
    assistant.save_pretrained(tmp_path / "ours")
    again = SpecDecPPAssistant.from_pretrained(tmp_path / "ours", target)
    assert repos.greedy(target, again) == expected
    assert (again.stats.drafted, again.stats.accepted) == (assistant.stats.drafted, assistant.stats.accepted)
    assert load_tokenizer("org/drafts/small").vocab_size == target.config.vocab_size
    assert load_model_config("org/drafts/small").vocab_size == target.config.vocab_size


def test_token(hub: HubServer, target: PreTrainedModel, assistant: SpecDecPPAssistant, tmp_path: Path) -> None:
    assistant.push_to_hub("org/head")
    for repo in ("org/head", "org/draft"):
        hub.private(repo, "theirs")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(RepositoryNotFoundError):
        SpecDecPPAssistant.from_pretrained("org/head", target)
    SpecDecPPAssistant.from_pretrained("org/head", target, token="theirs")
    AutoModelForCausalLM.from_pretrained("org/head", token="theirs")
    AutoTokenizer.from_pretrained("org/head", token="theirs")


def test_cache_dir(hub: HubServer, target: PreTrainedModel, assistant: SpecDecPPAssistant, tmp_path: Path) -> None:
    assistant.push_to_hub("org/head")
    shutil.rmtree(tmp_path / "cache")
    SpecDecPPAssistant.from_pretrained("org/head", target, cache_dir=tmp_path / "other")
    assert {path.name for path in (tmp_path / "other").glob("models--*")} == {"models--org--head", "models--org--draft"}
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {path.name for path in files} <= {"adapter_config.json"}, "transformers' note that the draft is no adapter"
    hub.requests.clear()
    SpecDecPPAssistant.from_pretrained("org/head", target, cache_dir=tmp_path / "other", local_files_only=True)
    assert hub.requests == []


@pytest.mark.apart
def test_offline(hub: HubServer, assistant: SpecDecPPAssistant, target: PreTrainedModel, tmp_path: Path) -> None:
    """In a process that cannot open a connection, from before its first import."""
    assistant.push_to_hub("org/head")
    SpecDecPPAssistant.from_pretrained("org/head", target)
    AutoTokenizer.from_pretrained("org/draft", revision=assistant.config.draft_revision)
    code = f"""
        import socket
        def refuse(*args, **kwargs):
            raise AssertionError(f"a connection was tried: {{args}}")
        socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse

        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
        from hf_specdecpp import SpecDecPPAssistant
        target = AutoModelForCausalLM.from_pretrained("org/target")
        ids = torch.tensor({repos.PROMPT.tolist()})
        for assistant in (SpecDecPPAssistant.from_pretrained("org/head", target),
                          SpecDecPPAssistant.from_pretrained("org/head"),
                          AutoModelForCausalLM.from_pretrained("org/head")):
            print(target.generate(ids, assistant_model=assistant, do_sample=False, max_new_tokens=24)[0].tolist())
        pipe = pipeline("text-generation", model=target, tokenizer=AutoTokenizer.from_pretrained("org/target"),
                        assistant_model="org/head")
        pipe("w1 w2", do_sample=False, max_new_tokens=4)
    """
    env = hub_env(hub, tmp_path / "cache", offline=True) | {"PYTHONPATH": ":".join(sys.path)}
    program = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [str(repos.greedy(target))] * 3


def test_auto_model(hub: HubServer, target: PreTrainedModel, assistant: SpecDecPPAssistant, tmp_path: Path) -> None:
    assistant.push_to_hub("org/head")
    assistant.save_pretrained(tmp_path / "a")
    commit = hub.commit("org/head", {"note.txt": b""}, "dev")
    for arguments in ({}, {"revision": "dev"}, {"revision": commit}, {"dtype": torch.float64}, {"dtype": "auto"}):
        loaded: Any = AutoModelForCausalLM.from_pretrained("org/head", **arguments)
        assert type(loaded) is SpecDecPPAssistant
        assert repos.greedy(target, loaded) == repos.greedy(target)
        assert loaded.stats.drafted > 0
        assert torch.equal(repos.estimates(loaded), repos.estimates(assistant))
    from_folder: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert type(from_folder) is SpecDecPPAssistant
    assert AutoModelForCausalLM.from_pretrained("org/head", dtype=torch.float32).dtype == torch.float32


def test_auto_tokenizer(hub: HubServer, target: PreTrainedModel, tmp_path: Path) -> None:
    """It is the draft's, or the target's for an early exit; at the commit that this revision of the assistant names."""
    words = [f"v{i}" for i in range(8)]
    hub.commit("org/small", repos.files_of(repos.save_model(tiny("llama", vocab_size=8), tmp_path / "small", words)))
    small = repos.save_assistant(tmp_path / "a", draft_kind="independent", draft_id="org/small")
    hub.commit("org/head", repos.files_of(small), "dev")
    hub.commit("org/head", repos.files_of(repos.save_assistant(tmp_path / "b")))
    target_words = AutoTokenizer.from_pretrained("org/target").get_vocab()
    assert AutoTokenizer.from_pretrained("org/head").get_vocab() == target_words
    assert AutoTokenizer.from_pretrained(tmp_path / "b").get_vocab() == target_words
    assert AutoTokenizer.from_pretrained("org/head", revision="dev").convert_ids_to_tokens(3) == "v3"


def test_uploaded_files_and_their_card(hub: HubServer, assistant: SpecDecPPAssistant) -> None:
    assert assistant.push_to_hub("org/head", commit_message="Better head").commit_message == "Better head"
    weights = {"acceptance_head.safetensors", "draft_vocab.safetensors", "adapter/adapter_model.safetensors"}
    assert hub.lfs_files("org/head") == weights
    assert set(hub.files("org/head")) == weights | {"README.md", "config.json", "adapter/adapter_config.json"}
    card = ModelCard.load("org/head")
    contents = {"repoType": "model", "content": str(card)}  # `card.validate()` of the oldest client asks the real Hub
    hf_raise_for_status(get_session().post(f"{hub.endpoint}/api/validate-yaml", json=contents))
    assert (card.data.library_name, card.data.base_model) == ("hf_specdecpp", ["org/target", "org/draft"])
    assert {"speculative-decoding", "assisted-generation", "specdecpp"} <= set(card.data.tags)
    assert card.data.pipeline_tag == "text-generation"
    for text in (
        'assist(model, "org/head")',
        f"| target | org/target at {assistant.config.target_revision} |",
        f"| draft | org/draft at {assistant.config.draft_revision} |",
        "| adapter | PEFT adapter in `adapter/` |",
        "| draft vocabulary | 40 of 48 token ids |",
        "| stopping rule | threshold, h = 0.3 |",
    ):
        assert text in card.text
    assert "{{" not in card.text
    assert "None" not in card.text


def test_nothing_that_is_pushed_names_a_folder_of_this_machine(hub: HubServer, tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(repos.save_model(tiny("llama"), tmp_path / "my-target"))
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "my-target", num_hidden_layers=2)
    adapter = repos.save_adapter(draft, tmp_path)
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, adapter=adapter, head=repos.head_for(target))
    assistant.save_pretrained(tmp_path / "saved")
    assistant.push_to_hub("org/head")
    for name in ("README.md", "adapter/adapter_config.json", "config.json"):
        pushed = Path(HfApi().hf_hub_download("org/head", name)).read_text()
        assert str(tmp_path) not in pushed, name
        assert "my-target" in pushed, name
        if name != "config.json":  # a local folder may: there the tokenizer is
            assert str(tmp_path) not in (tmp_path / "saved" / name).read_text()
    assert ModelCard.load("org/head").data.base_model is None, "a folder's name is no Hub id"
    assert repos.greedy(target, SpecDecPPAssistant.from_pretrained("org/head", target)) == repos.greedy(target)


def test_card_that_is_there_is_kept(hub: HubServer, assistant: SpecDecPPAssistant, tmp_path: Path) -> None:
    hub.commit("org/head", {"README.md": b"# Measured"})
    assistant.push_to_hub("org/head")
    assert hub.files("org/head")["README.md"] == b"# Measured"
    (tmp_path / "a").mkdir()
    (tmp_path / "a/README.md").write_text("# Measured")
    assistant.save_pretrained(tmp_path / "a")
    assert (tmp_path / "a/README.md").read_text() == "# Measured"


def test_private_and_branch(hub: HubServer, assistant: SpecDecPPAssistant) -> None:
    assistant.push_to_hub("org/mine", private=True)
    with pytest.raises(RepositoryNotFoundError):
        HfApi().model_info("org/mine", token="theirs")
    assert SpecDecPPAssistant.from_pretrained("org/mine").head is not None
    HfApi().create_branch("org/mine", branch="dev")
    assistant.speculation = SpeculationConfig("fixed")
    assistant.push_to_hub("org/mine", revision="dev")
    assert SpecDecPPAssistant.from_pretrained("org/mine", revision="dev").speculation.rule == "fixed"
    assert SpecDecPPAssistant.from_pretrained("org/mine").speculation == SPECULATION
    with pytest.raises(RevisionNotFoundError):
        assistant.push_to_hub("org/mine", revision="no-such-branch")
    with pytest.raises(TypeError, match="comit_message"):
        assistant.push_to_hub("org/mine", comit_message="typo")  # type: ignore[call-arg]


def test_saving_over_an_old_assistant(target: PreTrainedModel, assistant: SpecDecPPAssistant, tmp_path: Path) -> None:
    folder, before = tmp_path / "a", assistant.config.to_dict()
    assistant.save_pretrained(folder)
    assert assistant.config.to_dict() == before
    again = SpecDecPPAssistant.from_pretrained(folder, target)
    again.save_pretrained(folder)  # over the very files that it was loaded from
    assert torch.equal(repos.estimates(SpecDecPPAssistant.from_pretrained(folder, target)), repos.estimates(assistant))

    plain = SpecDecPPAssistant.from_draft("org/draft", target)
    plain.save_pretrained(folder)
    loaded = SpecDecPPAssistant.from_pretrained(folder, target)
    assert (loaded.head, loaded.parts.adapter, loaded.parts.draft_vocab) == (None, None, None)
    assert torch.equal(repos.estimates(loaded), repos.estimates(plain))


def test_pushing_over_an_old_assistant(hub: HubServer, target: PreTrainedModel, assistant: SpecDecPPAssistant) -> None:
    assistant.push_to_hub("org/head")
    assistant.head = None
    assistant.push_to_hub("org/head")
    loaded = SpecDecPPAssistant.from_pretrained("org/head", target)
    assert loaded.head is None
    assert torch.equal(repos.estimates(loaded), repos.estimates(assistant))


def test_hub_is_down(hub: HubServer, target: PreTrainedModel, assistant: SpecDecPPAssistant) -> None:
    assistant.push_to_hub("org/head")
    SpecDecPPAssistant.from_pretrained("org/head", target)
    hub.__exit__()
    again = SpecDecPPAssistant.from_pretrained("org/head", target)
    assert torch.equal(repos.estimates(again), repos.estimates(assistant))
