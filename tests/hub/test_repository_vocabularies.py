"""A draft whose tokens are not the target's is refused before its weights are downloaded or read."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.files import dflash_files, dspark_files, eagle3_files, gemma4_files
from support.files.repos import change_json, save_model, tokenizer
from support.runs.hub_server import HubServer, point_client_at
from support.targets.models import partly_agreeing, prompt, tiny
from transformers import AutoModelForCausalLM

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist, files
from hf_specdecpp.models import loading

OTHER_WORDS = ["<unk>", *(f"v{i}" for i in range(1, 48))]
FIXED = SpeculationConfig("fixed", num_tokens=4)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called: from here on reading weights by name is an error of the test."""

    def forbid() -> None:
        def load(*_: Any, **__: Any) -> Any:
            raise AssertionError("weights were read")

        monkeypatch.setattr(loading, "load_model", load)
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)

    return forbid


def saved_target(folder: Path, **sizes: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(save_model(tiny("llama", **sizes), folder))


def saved_assistant(folder: Path, words: list[str]) -> str:
    """An assistant with a draft of its own, made for a target of these tokens."""
    target = AutoModelForCausalLM.from_pretrained(save_model(tiny("llama"), folder / "of", words))
    draft = save_model(partly_agreeing(target), folder / "draft", words)
    made = SpecDecPPAssistant.from_draft(draft, target)
    made.save_pretrained(folder / "assistant")
    made.detach()
    return str(folder / "assistant")


USES: dict[str, Callable[[Any, str], Any]] = {
    "assist": assist,
    "from_pretrained": lambda target, repo: SpecDecPPAssistant.from_pretrained(repo, target),
    "from_pretrained, a copy": lambda target, repo: SpecDecPPAssistant.from_pretrained(
        repo, target, draft=str(Path(repo).parent / "draft")
    ),
}


@pytest.mark.parametrize("use", USES)
def test_an_assistant_for_other_tokens(use: str, tmp_path: Path, no_weights: Callable[[], None]) -> None:
    target, repo = saved_target(tmp_path / "target"), saved_assistant(tmp_path, OTHER_WORDS)
    no_weights()
    with pytest.raises(ValueError, match="was trained for '.*of', whose tokenizer differs from that of '.*target'"):
        USES[use](target, repo)


@pytest.mark.parametrize("by", ["assist", "from_draft"])
@pytest.mark.parametrize(("draft", "says"), [
    ({"words": OTHER_WORDS}, "have different tokenizers: 47 ids stand for different tokens"),
    ({"vocab_size": 20, "words": None}, r"has 20 token ids, and the target '.*target' 48: .*draft_vocab=range\(20\)"),
    ({"vocab_size": 20, "words": [*(f"w{i}" for i in range(20))]}, "has 20 token ids"),
])  # fmt: skip
def test_a_model_with_other_tokens(
    by: str, draft: dict[str, Any], says: str, tmp_path: Path, no_weights: Callable[[], None]
) -> None:
    target, words = saved_target(tmp_path / "target"), draft["words"]
    folder = save_model(tiny("llama", vocab_size=draft.get("vocab_size", 48)), tmp_path / "draft", words)
    no_weights()
    with pytest.raises(ValueError, match=says):
        (assist if by == "assist" else lambda t, d: SpecDecPPAssistant.from_draft(d, t))(target, folder)


@pytest.mark.parametrize("what", ["other words", "few"])
def test_of_the_hub_small_files_are_enough(
    what: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_client_at(monkeypatch, hub, tmp_path / "cache")
    target = saved_target(tmp_path / "target")
    words = OTHER_WORDS if what == "other words" else OTHER_WORDS[:20]
    folder = Path(save_model(tiny("llama", vocab_size=len(words)), tmp_path / "draft", words))
    hub.commit("org/draft", {each.name: each.read_bytes() for each in folder.iterdir()})
    with pytest.raises(ValueError, match="have different tokenizers" if what == "other words" else "has 20 token ids"):
        assist(target, "org/draft")
    assert not [path for _, path, _ in hub.requests if path.endswith(".safetensors")]


PUBLISHED: dict[str, tuple[Callable[[Path], Any], Callable[..., Any], str | None]] = {
    "eagle3": (eagle3_files.VARIANTS["plain"].save, lambda: tiny("llama"), None),
    "dflash": (dflash_files.VARIANTS["plain"].save, dflash_files.target_for, None),
    "dspark": (dspark_files.VARIANTS["deepspec"].save, dspark_files.target_for, None),
    "gemma4": (
        lambda to: gemma4_files.VARIANTS["plain"].theirs().save_pretrained(to), gemma4_files.target_for, "text_config"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_draft_with_other_tokens_is_not_downloaded(
    kind: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, target_for, part = PUBLISHED[kind]
    save(tmp_path / "draft")
    sizes: dict[str, Any] = {"vocab_size": 5000}
    raw = files.read_json(tmp_path / "draft/config.json")
    change_json(tmp_path / "draft/config.json", **({part: {**raw[part], **sizes}} if part else sizes))
    point_client_at(monkeypatch, hub, tmp_path / "cache")
    hub.commit("org/draft", {each.name: each.read_bytes() for each in (tmp_path / "draft").iterdir()})
    with pytest.raises(ValueError, match="was made for 5000 token ids, and there are .*"):
        SpecDecPPAssistant.from_pretrained("org/draft", target_for())
    assert not [path for _, path, _ in hub.requests if path.endswith(".safetensors")]


@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("what", ["another target", "another form"])
def test_of_a_published_draft_that_is_refused_only_headers_are_read(
    what: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, target_for, _ = PUBLISHED[kind]
    save(tmp_path)
    if what == "another form":
        save_file(
            {**files.load_tensors(tmp_path / "model.safetensors"), "x": torch.ones(1)}, tmp_path / "model.safetensors"
        )
    sizes: dict[str, Any] = {"hidden_size": 24, **({"head_dim": 8} if kind == "eagle3" else {})}
    target = (
        target_for() if what == "another form" else tiny("llama", **sizes) if kind == "eagle3" else target_for(**sizes)
    )
    monkeypatch.setattr(files, "load_tensors", lambda path: pytest.fail(f"{path} was read"))
    with pytest.raises(ValueError, match="unexpected x" if what == "another form" else "is 32 wide|of 32 numbers"):
        SpecDecPPAssistant.from_pretrained(tmp_path, target)


def small(target: Any, num_ids: int) -> Any:
    """A draft in memory with the first of the target's ids, which mean the same."""
    draft = partly_agreeing(target)
    draft.resize_token_embeddings(num_ids, mean_resizing=False)
    return draft


@pytest.mark.parametrize(("num_ids", "is_refused"), [(8, True), (23, True), (24, False), (47, False), (100, False)])
def test_less_than_half_of_the_tokens(num_ids: int, is_refused: bool) -> None:
    """Unless they are chosen, the text being plain generate()'s either way."""
    target, ids = tiny("llama"), prompt(8)
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    draft = small(target, num_ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if is_refused:
            for attach in (assist, lambda t, d: SpecDecPPAssistant.from_draft(d).attach(t)):
                with pytest.raises(ValueError, match=rf"The draft 'in memory' has {num_ids} token ids"):
                    attach(target, draft)
            assistant = assist(target, draft, draft_vocab=range(num_ids), speculation=FIXED)
        else:
            assistant = assist(target, draft, speculation=FIXED)
        assert torch.equal(target.generate(ids, max_new_tokens=12, do_sample=False), plain)
    assert assistant.stats.drafted > 0
    assist(target, None)


def test_a_chosen_vocabulary_may_be_small(tmp_path: Path) -> None:
    """Also once it is stored and loaded again."""
    target = saved_target(tmp_path / "target")
    draft = save_model(small(target, 16), tmp_path / "draft", None)
    assistant = SpecDecPPAssistant.from_draft(draft, target, draft_vocab=torch.arange(16))
    assistant.save_pretrained(tmp_path / "assistant")
    assistant.detach()
    again = assist(target, str(tmp_path / "assistant"))
    assert again.drafter.draft_vocab.tolist() == list(range(16))
    again.detach()


def test_a_draft_that_fits_is_looked_at_once(tmp_path: Path) -> None:
    """Padding is warned of once, not before loading and again after it."""
    target = saved_target(tmp_path / "target", vocab_size=64)
    folder = save_model(tiny("llama"), tmp_path / "draft", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assist(target, folder)
    assert len([each for each in caught if "64 token ids and the draft 48" in str(each.message)]) == 1
    assert tokenizer().vocab_size == 48
    assist(target, None)
