"""A damaged, foreign or hostile repository is refused with the file, what is wrong with it, and what to do."""

import copy
import itertools
import json
import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support.files import repos
from support.files.assistant_files import FILES
from support.runs.hub_server import HubServer
from support.targets.models import tiny
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant
from hf_specdecpp.files import Repository, replacing, save_tensors, save_text
from hf_specdecpp.hub.inspection import inspect
from hf_specdecpp.models.early_exit import early_exit

HEAD, VOCAB, ADAPTER = "acceptance_head.safetensors", "draft_vocab.safetensors", "adapter/adapter_model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An assistant with every kind of file."""
    root, target = tmp_path_factory.mktemp("sound"), tiny("llama")
    adapter = repos.save_adapter(early_exit(target, 2), root / "peft")
    assistant = SpecDecPPAssistant.from_early_exit(
        target, 2, adapter=adapter, head=repos.head_for(target), draft_vocab=list(range(40))
    )
    assistant.config.target_id = "org/target"
    assistant.save_pretrained(root / "assistant")
    return root / "assistant"


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "assistant"))


def load(folder: Path | str, **arguments: Any) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_pretrained(folder, **{"target": tiny("llama"), **arguments})


def problems(folder: Path) -> dict[str, str]:
    """What `inspect` says is wrong, by file."""
    return {file.name: file.problem for file in inspect(Repository(str(folder))).files if file.problem is not None}


def assert_refused(folder: Path, name: str, message: str) -> None:
    """By loading, also without a target, which an adapter's config waits for, and by `inspect`: this one file."""
    for target in (tiny("llama"), None)[: 1 if name == "adapter/adapter_config.json" else 2]:
        with pytest.raises(ValueError, match=message):
            load(folder, target=target)
    found = problems(folder)
    assert list(found) == [name]
    assert re.search(message, found[name])


def change_tensors(path: Path, **changes: Tensor | None) -> None:
    tensors = {**load_file(path), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_the_folder_is_sound_before_it_is_damaged(folder: Path) -> None:
    target = tiny("llama")
    assistant = load(folder, target=target)
    assert assistant.head is not None
    assert (repos.greedy(target, assistant), problems(folder)) == (repos.greedy(target), {})


BROKEN = "is incomplete or not a safetensors file.*Delete it.*force_download=True|is not valid JSON"
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda content: content[:-8], BROKEN),
    "empty": (lambda _: b"", BROKEN),
    "zero": (lambda _: b"\x00", BROKEN),
    "text": (lambda _: b"garbage" * 99, BROKEN),
    "bytes": (lambda _: b"\xff" * 99, BROKEN),
    "pointer": (lambda _: POINTER, "is a git-LFS pointer.*git lfs pull"),
}


@pytest.mark.daily(
    "acceptance_head.safetensors-truncated", "adapter/adapter_config.json-empty",
    "adapter/adapter_model.safetensors-zero", "config.json-text", "draft_vocab.safetensors-bytes",
)  # fmt: skip
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file(folder: Path, name: str, damage: str) -> None:
    change, message = DAMAGE[damage]
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    assert_refused(folder, name, rf"{name.rpartition('/')[2]}.*({message})")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(hub: HubServer, folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing.*not a complete assistant"):
        load(folder)
    found = problems(folder)
    assert list(found) == [name]
    assert found[name].startswith(f"{name} is missing, so ")
    hub.commit("org/head", repos.files_of(folder))
    with pytest.raises(errors.EntryNotFoundError, match=name):
        load("org/head")


TENSORS: list[tuple[str, dict[str, Any], str]] = [
    (HEAD, {"blocks__1__linear__weight": None}, "lacks blocks.1.linear.weight. It does"),
    (HEAD, {"extra": torch.zeros(1)}, f"{HEAD} has unexpected extra"),
    (
        HEAD,
        {"output__weight": torch.zeros(2, 16)},
        r"output\.weight has shape \[2, 16\], not \[2, 32\].*trained for draft layers 0, 1 of 'org/target'",
    ),
    (VOCAB, {"token_ids": torch.arange(7)}, r"token_ids has shape \[7\], not \[40\].*draft_vocab_size=40"),
    (VOCAB, {"token_ids": torch.arange(40.0)}, "holds float32, but token ids are integers"),
]


@pytest.mark.parametrize(("name", "changes", "message"), TENSORS)
def test_other_tensors(folder: Path, name: str, changes: dict[str, Any], message: str) -> None:
    change_tensors(folder / name, **changes)
    assert_refused(folder, name, message)


def test_blocks_are_tied_as_the_config_says(folder: Path) -> None:
    tied = repos.head_for(tiny("llama"), tied=True)
    repos.change_json(folder / "config.json", head={**repos.head_for(tiny("llama")).to_config(), "tied": True})
    assert_refused(folder, HEAD, r"has unexpected blocks\.1\.linear\.bias")
    save_file(tied.state_dict(), folder / HEAD)
    repos.change_json(folder / "config.json", head=repos.head_for(tiny("llama")).to_config())
    assert_refused(folder, HEAD, r"lacks blocks\.1\.linear\.bias, blocks\.1\.linear\.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [HEAD, ADAPTER])
def test_not_finite(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / name)
    broken = next(iter(tensors))
    tensors[broken].view(-1)[-1] = value
    save_file(tensors, folder / name)
    assert_refused(folder, name, f"holds NaN or infinite values in {re.escape(broken)}")


@pytest.mark.parametrize("token_id", [-1, 0, len(repos.WORDS), 2**40])
def test_draft_vocab_out_of_bounds_or_twice(folder: Path, token_id: int) -> None:
    change_tensors(folder / VOCAB, token_ids=torch.tensor([*range(39), token_id]))
    with pytest.raises(ValueError, match="draft_vocab must list distinct token ids from 0 to 47"):
        load(folder)
    assert "draft_vocab must list distinct token ids from 0 to 47" in problems(folder)[VOCAB]


def test_released_head_is_sent_to_the_converter(folder: Path) -> None:
    """The layout of the paper's code: blocks shared, the other names in the metadata."""
    block = {f"model.0.linear.{kind}": torch.zeros(32, 32) for kind in ("weight", "bias")}
    save_file(block, folder / HEAD, {"model.1.linear.weight": "model.0.linear.weight"})
    with pytest.raises(ValueError, match=r"lacks blocks\.0\.linear\.bias.* and has unexpected model\.0\.linear\.bias"):
        load(folder)
    (folder / "config.json").write_text('{"hidden_size": 32, "num_layers": 2}')
    with pytest.raises(ValueError, match="not an hf_specdecpp assistant.*specdecpp inspect FOLDER --convert OUT"):
        load(folder)


def test_unknown_fields_are_named(folder: Path) -> None:
    repos.change_json(folder / "config.json", tree_budget=64, speculation={"rule": "fixed", "budget": 64})
    said = [r"config\.json has fields .* ignores: tree_budget\.", "speculation has fields .* ignores: budget"]
    with pytest.warns(UserWarning, match="pip install -U hf-specdecpp") as warned:
        assert load(folder).speculation.rule == "fixed"
    report = inspect(Repository(str(folder)))
    assert report.sound
    for found in ([str(each.message) for each in warned], report.traps):
        assert [bool(re.search(*pair)) for pair in zip(said, found, strict=True)] == [True, True]


def test_head_of_another_draft(folder: Path) -> None:
    wide = AcceptanceHead(64, num_blocks=2)
    save_file(wide.state_dict(), folder / HEAD)
    repos.change_json(folder / "config.json", head=wide.to_config())
    expected = (
        r"trained for \{'hidden_size': 64\} but the draft, layers 0, 1 of 'org/target', has \{'hidden_size': 32\}"
    )
    with pytest.raises(ValueError, match=expected):
        load(folder)


def test_ignored_fields_have_no_effect(folder: Path) -> None:
    """transformers would load code from the Hub for the first, cast for the second, and make labels for the third."""
    fields = {"attn_implementation": "org/kernel", "dtype": "float16", "num_labels": 10**5, "architectures": ["GPT2"]}
    repos.change_json(folder / "config.json", **fields, experts_implementation="org/kernel", tie_word_embeddings=1)
    target = tiny("llama")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not know and ignores")
        assistant, config = load(folder, target=target), AutoConfig.from_pretrained(folder)
    assert repos.greedy(target, assistant) == repos.greedy(target)
    for made in (assistant.config, config):
        assert made.architectures == ["SpecDecPPAssistant"]
        assert made.dtype is None
        assert made.num_labels == 2
        assert made._attn_implementation_internal in (None, "sdpa")
        assert not hasattr(made, "tie_word_embeddings")


BEFORE_HEAD = {"hidden_size": 32, "inputs": "before"}
NO_HEAD = "No acceptance head can be built as it is described"
SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, "has model_type 'llama', not 'specdecpp'"),
    ({"format_version": 99}, "stored in format 99.*pip install -U"),
    ({"draft_kind": "medusa"}, "draft_kind='medusa' must be one of independent, early_exit, conditioned"),
    ({"speculation": {"threshold": 7}}, "threshold=7 must be a number from 0 to 1"),
    ({"speculation": [1]}, r"speculation=\[1\] must be a mapping"),
    ({"head": [8]}, r"head=\[8\] must be a mapping"),
    ({"head": {"hidden_size": 32, "depth": 3}}, f"{NO_HEAD}: .*depth"),
    ({"head": {"hidden_size": -1}}, f"{NO_HEAD}: hidden_size=-1"),
    ({"head": {"hidden_size": "32"}}, NO_HEAD),
    # Sizes that would take all memory, or for ever. What they belong to is not made before they are seen to fit.
    ({"head": {"hidden_size": 10**12}}, f"{NO_HEAD}|has shape"),
    ({"draft_layers": 10**400}, "draft_layers=a number of more than 63 bits must be a list"),
    ({"head": {**BEFORE_HEAD, "hidden_size": 10**9, "rank": 10**4}}, f"{NO_HEAD}: hidden_size=1000000000"),
    ({"head": {**BEFORE_HEAD, "rank": 10**12}}, "lacks|No acceptance head can be built"),
    ({"head": {**BEFORE_HEAD, "embedding_size": 10**12}}, f"{NO_HEAD}: embedding_size=1000000000000"),
    (
        {"head": {"hidden_size": 32, "num_blocks": 10**7, "tied": True}},
        "num_blocks=10000000 must be a whole number from 0 to 64",
    ),
    ({"head": {**BEFORE_HEAD, "siblings": 10**15}}, "siblings=1000000000000000 must be a whole number from 1 to 1024"),
    (
        {"head": {"hidden_size": 32, "calibration": {"greedy": {"temperatures": [1.0] * 2000}}}},
        "2000 temperatures, .* 1024 at most",
    ),
    ({"draft_vocab_size": 10**18}, "draft_vocab_size=1000000000000000000 must be a whole number from 1 to 4194304"),
    ({"draft_vocab_size": 10**6}, "has shape .* not .1000000."),
    ({"acceptance_by_rank": {"greedy": [0.1] * 5000}}, "acceptance_by_rank has 5000 ranks; 32 are the most"),
    ({"speculation": {"tree": [1] * 9_000}}, "tree has 9000 nodes or more; 1 to"),
    ({"speculation": {"tree": []}}, "1 to 1024 are possible: choose"),
    ({"speculation": {"rule": "confidence"}}, "rule='confidence' must be one of"),
    ({"speculation": {"tree_budget": 10**9}}, "tree_budget=1000000000 must be a whole number from 2 to 1024"),
    ({"vocab_hash": "a" * 2**18}, "config.json has 26.,.* bytes, more than the maximum of 262,144"),
]


@pytest.mark.parametrize(("changes", "message"), SENSELESS)
def test_a_config_that_makes_no_sense(folder: Path, changes: dict[str, Any], message: str) -> None:
    repos.change_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load(folder, target=None)
    (problem,) = problems(folder).values()
    assert re.search(message, problem)


@pytest.mark.parametrize(("changes", "message"), [
    ({"draft_layers": [0, 3]}, r"ascending layer indices from 0 to 2: the target has 3 layers"),
    ({"draft_kind": "independent", "draft_id": None}, "names no draft"),
])  # fmt: skip
def test_a_config_that_does_not_fit_the_target(folder: Path, changes: dict[str, Any], message: str) -> None:
    repos.change_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load(folder)


ODD: list[Any] = [
    None, True, -1, 0, 1.5, float("nan"), 10**400, "x", [], [1], ["x"], [None], {}, {"greedy": 1}, {"greedy": [None]},
]  # fmt: skip


def places(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Where values stand in a config, such as `("head", "calibration", "greedy", "bias")`."""
    inner = {name: places(value) if isinstance(value, dict) else [] for name, value in config.items()}
    return [(name, *rest) for name, below in inner.items() for rest in [(), *below]]


def refusal(folder: Path, target: Any = None) -> ValueError | FileNotFoundError | None:
    """What loading says; any other exception is one too many."""
    try:
        load(folder, target=target).detach()
    except (ValueError, FileNotFoundError) as error:
        return error
    return None


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_inspect_calls_sound_can_be_loaded(folder: Path, every: int) -> None:
    """Whatever the type of a value in `config.json`; `every` n-th case."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["acceptance_by_rank"] = {"greedy": [0.5, 0.25], "sampled": [0.5]}
    config["head"]["calibration"] = {"greedy": {"bias": 0.5, "temperatures": [1.0, 2.0]}}
    path.write_text(json.dumps(config))
    assert inspect(Repository(str(folder))).sound
    assert refusal(folder) is None
    for place, value in list(itertools.product(places(config), ODD))[::every]:
        changed = copy.deepcopy(config)
        inner = changed
        for name in place[:-1]:
            inner = inner[name]
        inner[place[-1]] = value
        path.write_text(json.dumps(changed))
        refused = refusal(folder)
        assert refused is None or not inspect(Repository(str(folder))).sound, (place, value, refused)


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_adapters_that_inspect_calls_sound_can_be_loaded(folder: Path, every: int) -> None:
    path, target = folder / "adapter" / "adapter_config.json", tiny("llama")
    adapter = json.loads(path.read_text())
    for name, value in list(itertools.product(adapter, ODD))[::every]:
        path.write_text(json.dumps({**adapter, name: value}))
        refused = refusal(folder, target)
        fits = "does not fit" not in str(refused)  # which modules there are is not known to `inspect`
        assert refused is None or not fits or not inspect(Repository(str(folder))).sound, (name, value, refused)


def test_unknown_argument(folder: Path) -> None:
    with pytest.raises(TypeError, match="There is no option revison. Did you mean revision"):
        load(folder, revison="v1")


def test_what_the_hub_refuses(hub: HubServer, folder: Path) -> None:
    hub.commit("org/private", repos.files_of(folder))
    with pytest.raises(errors.RevisionNotFoundError, match="v9"):
        load("org/private", revision="v9")
    hub.private("org/private", "theirs")
    with pytest.raises(errors.RepositoryNotFoundError, match="org/private"):
        load("org/private")
    hub.commit("org/gated", repos.files_of(folder))
    hub.gate("org/gated", "theirs")
    with pytest.raises(errors.GatedRepoError, match="org/gated"):
        load("org/gated")
    with pytest.raises(errors.GatedRepoError, match="org/gated"):
        SpecDecPPAssistant.from_early_exit(tiny("llama"), 2, adapter="org/gated")
    assert load("org/gated", token="theirs").head is not None


def test_the_draft_is_gated(hub: HubServer, tmp_path: Path) -> None:
    repos.publish_pair(hub)
    hub.gate("org/draft")
    repos.commit_head_of_a_draft(hub, tmp_path)
    with pytest.raises(OSError, match="gated repo.*org/draft") as caught:
        load("org/head")
    assert isinstance(caught.value.__cause__, errors.GatedRepoError)


def test_target_with_another_tokenizer(tmp_path: Path, folder: Path) -> None:
    theirs = repos.save_model(tiny("llama"), tmp_path / "theirs", repos.WORDS[::-1])
    ours = repos.save_model(tiny("llama"), tmp_path / "ours")
    config = load(folder, target=AutoModelForCausalLM.from_pretrained(ours)).config
    assert config.vocab_hash is None, "the folder was saved without a tokenizer"
    assistant = SpecDecPPAssistant.from_early_exit(AutoModelForCausalLM.from_pretrained(ours), 2)
    assistant.save_pretrained(tmp_path / "hashed")
    load(tmp_path / "hashed", target=AutoModelForCausalLM.from_pretrained(ours))
    with pytest.raises(ValueError, match="trained for '.*ours', whose tokenizer differs from that of '.*theirs'.*hash"):
        load(tmp_path / "hashed", target=AutoModelForCausalLM.from_pretrained(theirs))


def test_target_of_another_commit(hub: HubServer, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    old, _ = repos.publish_pair(hub)
    target = AutoModelForCausalLM.from_pretrained("org/target")
    SpecDecPPAssistant.from_early_exit(target, 2).save_pretrained(tmp_path / "a")
    load(tmp_path / "a", target=AutoModelForCausalLM.from_pretrained("org/target"))
    assert not [w for w in recwarn if "commit" in str(w.message)]

    new = hub.commit("org/target", {"note.txt": b"new weights, say"})
    shutil.rmtree(tmp_path / "cache")  # another machine
    drifted = AutoModelForCausalLM.from_pretrained("org/target")
    with pytest.warns(UserWarning, match=f"'org/target' at commit {old}, but commit {new} was.*revision='{old}'"):
        assistant = load(tmp_path / "a", target=drifted)
    assert repos.greedy(drifted, assistant) == repos.greedy(drifted)

    recwarn.clear()
    load(tmp_path / "a", target=AutoModelForCausalLM.from_pretrained("org/target", revision=old))
    assert not [w for w in recwarn if "commit" in str(w.message)], "the advice of the warning silences it"


@pytest.mark.parametrize("save", [partial(save_text, "text"), partial(save_tensors, {"a": torch.ones(2)})])
def test_two_write_one_file(save: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def overtaken(unfinished: Path, place: Path) -> Path:
        """The other process begins after this one, and ends before it."""
        with monkeypatch.context() as other:
            other.setattr(Path, "replace", replace)
            other.setattr("os.getpid", lambda: 0)
            save(place)
        return replace(unfinished, place)

    monkeypatch.setattr(Path, "replace", overtaken)
    save(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("(os error 28)")])
def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, error: Exception) -> None:
    save_text("before", tmp_path / "a.json")
    said = re.escape(f"a.json could not be written ({error}). Earlier contents are kept: make room on the disk")
    with pytest.raises(OSError, match=said), replacing(tmp_path / "a.json"):
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "before"
