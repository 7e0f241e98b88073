"""`pipeline("text-generation", ..., assistant_model=...)`: an assistant object, or the name of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_server import HubServer
from support.models import tiny
from support.repos import TEXT, WORDS, files_of, head_for, publish_pair, save_adapter, save_model, tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    pipeline,
)

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


@pytest.mark.every(2)
@pytest.mark.parametrize("local", [True, False])
def test_name_of_an_early_exit(hub: HubServer, tmp_path: Path, local: bool) -> None:
    name = publish(hub, tmp_path, "early exit")
    assisted, plain = by_name(tmp_path / "head" if local else name)
    message = (
        r"drafts with layers 0, 1 of 'org/target', so it must be attached to it.*"
        r"In a pipeline pass the assistant object made in this way, not its name"
    )
    with pytest.raises(ValueError, match=message):
        say(assisted)
    assisted.assistant_model.attach(assisted.model)
    assert say(assisted) == say(plain)


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
