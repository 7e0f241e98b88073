"""The real thing: SmolLM2-135M-Instruct in float32, from `.models/smollm2` (`make demo` leaves it there)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.pretend_devices import on_device, pretend_devices
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".models" / "smollm2"
PUBLISHED = ROOT / "hub_cards" / "specdecpp-smollm2-135m-instruct"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "config.json").exists(), reason=f"{FOLDER} is missing: run `make demo` once"),
]
QUESTION = "Write a Python function that returns the n-th Fibonacci number."


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def inputs(tokenizer: Any) -> Any:
    messages = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def test_draft_by_name_accepts_everything_of_itself(target: Any, tokenizer: Any, inputs: Any) -> None:
    """The target's own folder as the draft: real tokenizers are compared, and all candidates stand."""
    assistant = SpecDecPPAssistant.from_draft(FOLDER, target, speculation=SpeculationConfig("fixed"))
    plain = target.generate(**inputs, max_new_tokens=32, do_sample=False, stop_strings=["return"], tokenizer=tokenizer)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    assisted = target.generate(
        **inputs, max_new_tokens=32, do_sample=False, assistant_model=assistant, stop_strings=["return"],
        tokenizer=tokenizer, streamer=streamer,
    )  # fmt: skip
    assert torch.equal(plain, assisted)
    assert "".join(streamer) == tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :])
    assert assistant.stats.accepted == assistant.stats.drafted > 0
    assistant.detach()


@pytest.mark.parametrize("speculation", [{"rule": "threshold"}, {"tree": "dyspec", "tree_budget": 8}], ids=str)
def test_the_published_assistant_on_a_pretended_device(inputs: Any, speculation: dict[str, Any]) -> None:
    ids = inputs["input_ids"]
    target: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    assistant = SpecDecPPAssistant.from_pretrained(PUBLISHED, speculation=SpeculationConfig(**speculation))
    with pretend_devices(), torch.no_grad():
        on_device(target), on_device(assistant)
        assistant.attach(target)
        text = target.generate(on_device(ids), max_new_tokens=16, do_sample=False, assistant_model=assistant)
        assert torch.equal(text.host, plain)
        assert assistant.stats.drafted > 0
