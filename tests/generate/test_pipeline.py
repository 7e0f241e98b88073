"""`pipeline(..., assistant_model=...)`, an assistant object or the name of one, and `generate(custom_generate=...)`."""

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.enumeration.mutants import accept_everything
from support.files.repos import (
    TEXT,
    WORDS,
    files_of,
    head_for,
    publish_pair,
    save_adapter,
    save_assistant,
    save_model,
    tokenizer,
)
from support.runs.hub_server import HubServer
from support.targets.models import assistant_for, prompt, tiny
from support.targets.watchers import runs_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, dynamic_module_utils, pipeline
from transformers.utils import hub as transformers_hub

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

FIXED = SpeculationConfig("fixed", num_tokens=4)


def pipe(target: PreTrainedModel, assistant: Any = None, **arguments: Any) -> Any:
    named = {} if assistant is None else {"assistant_model": assistant}
    return pipeline("text-generation", model=target, tokenizer=tokenizer(), **named, **arguments)


def say(pipeline: Any, prompt: Any = TEXT, **arguments: Any) -> Any:
    """New text only, greedy unless told otherwise."""
    known = {"return_full_text": False, "do_sample": False, "max_new_tokens": 24, **arguments}
    return [answer["generated_text"] for answer in pipeline(prompt, **known)]


def test_an_object_with_other_tokens() -> None:
    """A base model as the draft of an instruct model: transformers alone cannot run that pair in a pipeline."""
    target = tiny("llama", vocab_size=72, eos_token_id=7, pad_token_id=0)
    target.generation_config.eos_token_id = 7
    draft = tiny("llama", vocab_size=64, eos_token_id=[9, 11])
    with pytest.raises(ValueError, match="different tokenizer than the main model"):
        pipe(target, SpecDecPPAssistant.from_draft(draft, speculation=FIXED))
    with pytest.warns(UserWarning, match="72 token ids and the draft 64"):
        assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=FIXED)
    assert say(pipe(target, assistant)) == say(pipe(target))
    assert assistant.stats.drafted > 0


# --- by name ---


def publish(hub: HubServer, folder: Path, kind: str) -> str:
    """Publish a target with an assistant for it; the name of the assistant."""
    publish_pair(hub)
    target = AutoModelForCausalLM.from_pretrained("org/target")
    if kind == "independent":
        adapter = save_adapter(AutoModelForCausalLM.from_pretrained("org/draft"), folder / "peft")
        assistant = SpecDecPPAssistant.from_draft(
            "org/draft", target, adapter=adapter, head=head_for(target), speculation=FIXED
        )
    else:
        assistant = SpecDecPPAssistant.from_early_exit(target, 2, head=head_for(target), speculation=FIXED)
    assistant.push_to_hub("org/head")
    assistant.save_pretrained(folder / "head")
    return "org/head"


def by_name(name: str | Path) -> tuple[Any, Any]:
    """With and without the assistant, everything given by name."""
    plain = pipeline("text-generation", model="org/target", tokenizer="org/target")
    return pipeline("text-generation", model="org/target", tokenizer="org/target", assistant_model=str(name)), plain


@pytest.mark.daily("True")
@pytest.mark.parametrize("local", [True, False])
def test_name_of_an_early_exit(hub: HubServer, tmp_path: Path, local: bool) -> None:
    name = publish(hub, tmp_path, "early exit")
    assisted, plain = by_name(tmp_path / "head" if local else name)
    assert say(assisted) == say(plain)
    assert assisted.assistant_model.stats.drafted > 0


@pytest.mark.daily("80")
@pytest.mark.parametrize("rows", [64, 80])
def test_name_where_tokens_differ_in_config_only(hub: HubServer, tmp_path: Path, rows: int) -> None:
    """Other padding and another end-of-sequence id than the draft's: the assistant's config shows the target's."""
    words = [*WORDS, *(f"x{i}" for i in range(16))]
    files = {
        "org/target": save_model(tiny("llama", vocab_size=72, eos_token_id=7), tmp_path / "target", words),
        "org/draft": save_model(tiny("llama", vocab_size=rows, eos_token_id=9), tmp_path / "draft", words),
    }
    for name, folder in files.items():
        hub.commit(name, files_of(folder))
        AutoTokenizer.from_pretrained(name)
    target = AutoModelForCausalLM.from_pretrained("org/target")
    SpecDecPPAssistant.from_draft("org/draft", target, speculation=FIXED).push_to_hub("org/head")
    assisted, plain = by_name("org/head")
    assert say(assisted) == say(plain)
    assert assisted.assistant_model.stats.drafted > 0


# --- device and dtype ---


def dtypes(module: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in module.parameters()}


def test_dtype_of_the_target(hub: HubServer, tmp_path: Path) -> None:
    """A pipeline casts an assistant given by name; the head judges in float32 all the same."""
    publish(hub, tmp_path, "independent")
    for dtype in (torch.float32, torch.bfloat16):
        target = AutoModelForCausalLM.from_pretrained("org/target", dtype=dtype)
        assisted: Any = pipe(target, "org/head")
        assistant = assisted.assistant_model
        assert (dtypes(assistant.drafter), dtypes(assistant.head)) == ({dtype}, {torch.float32})
        say(assisted)
        assert assistant.stats.drafted > 0


# The repository hub_cards/custom_generate, loaded by transformers: `custom_generate="org/specdecpp"`. -----------------


RECIPE, PROMPT = Path(__file__).parents[2] / "hub_cards" / "custom_generate", prompt(12)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The code of a repository is copied here, and imported from here."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    return runs_of(monkeypatch)


def generate(model: PreTrainedModel, recipe: Any = RECIPE, **arguments: Any) -> Any:
    options = {"input_ids": PROMPT, "trust_remote_code": True, **GREEDY, **arguments}
    return model.generate(custom_generate=str(recipe), **options)  # type: ignore[operator]


def test_with_an_assistant_by_name(target: PreTrainedModel, tmp_path: Path, ran: list[Any]) -> None:
    kind, plain = type(target), target.generate(PROMPT, **GREEDY)  # type: ignore[operator]
    head = save_assistant(tmp_path / "head", speculation={"rule": "fixed", "num_tokens": 3})
    assert torch.equal(generate(target, assistant=str(head)), plain)
    [(_, stats)] = ran
    assert stats.drafted > 0
    assert len(stats.drafted_at) == 3
    assert type(target) is kind
    generate(target, assistant=str(head), speculation={"rule": "fixed", "num_tokens": 5})
    assert len(ran[1][1].drafted_at) == 5
    ran.clear()
    target.generate(PROMPT, **GREEDY)  # type: ignore[operator]
    assert ran == []


def test_wrong_verification_is_seen(target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant accepts everything, so the text has to change."""
    plain = target.generate(PROMPT, **GREEDY)  # type: ignore[operator]
    accept_everything(monkeypatch)
    head = save_assistant(tmp_path / "head", speculation={"rule": "fixed"})
    assert not torch.equal(generate(target, assistant=str(head)), plain)


def test_without_one_candidates_are_looked_up(target: PreTrainedModel, ran: list[Any]) -> None:
    """A prompt that repeats itself; nothing drafts, so all candidates are found."""
    ids = PROMPT.repeat(1, 4)
    expected = target.generate(ids, **GREEDY)  # type: ignore[operator]
    speculation = {"rule": "fixed", "lookup": True}
    assert torch.equal(generate(target, input_ids=ids, speculation=speculation), expected)
    [(drafter, stats)] = ran
    assert drafter.model is None
    assert 0 < stats.looked_up == stats.drafted


def test_it_is_loaded_once_and_goes_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(side_effect=SpecDecPPAssistant.from_pretrained)
    monkeypatch.setattr(SpecDecPPAssistant, "from_pretrained", load)
    target, head = tiny("llama"), str(save_assistant(tmp_path / "head"))
    generate(target)
    for _ in range(2):
        generate(target, assistant=head)
    assert load.call_count == 1
    load.reset_mock()
    lives = weakref.ref(target)
    del target
    gc.collect()
    assert lives() is None


def test_errors_leave_the_model_as_it_was(target: PreTrainedModel) -> None:
    kind = type(target)
    with pytest.raises(ValueError, match="assistant_model= needs no custom_generate="):
        generate(target, assistant_model=assistant_for(tiny("llama"), attached=False))
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(target, max_new_tokens=-1)
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate(target, trust_remote_code=False)
    assert type(target) is kind


def test_from_the_hub(hub: HubServer, tmp_path: Path, ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_hub, "HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    publish_pair(hub)
    hub.commit("org/specdecpp", files_of(RECIPE))
    hub.commit("org/head", files_of(save_assistant(tmp_path / "head", speculation={"rule": "fixed"})))
    target = AutoModelForCausalLM.from_pretrained("org/target")
    plain = target.generate(PROMPT, **GREEDY)
    assert torch.equal(generate(target, "org/specdecpp", assistant="org/head"), plain)
    assert ran[0][1].drafted > 0


def test_a_model_whose_repository_has_it(tmp_path: Path, ran: list[Any]) -> None:
    """transformers then puts it in the place of the model's own `generate`."""
    folder = tmp_path / "model"
    save_model(tiny("llama"), folder)
    for name, content in files_of(RECIPE).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    plain = AutoModelForCausalLM.from_pretrained(folder).generate(PROMPT, **GREEDY)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
    assert torch.equal(model.generate(input_ids=PROMPT, **GREEDY), plain)
    assert len(ran) == 2
