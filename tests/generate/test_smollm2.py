"""The real thing: SmolLM2-135M-Instruct in float32, from `.models/smollm2` (`make demo` leaves it there)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

FOLDER = Path(__file__).parents[2] / ".models" / "smollm2"
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


@pytest.mark.parametrize("layers", [20, [0, 1, 2, 29]])
def test_greedy_text_is_the_same(target: Any, inputs: Any, layers: Any) -> None:
    """Twenty of the thirty layers guess a few tokens right even untrained."""
    plain = target.generate(**inputs, max_new_tokens=48, do_sample=False)
    knobs = SpeculationConfig(rule="fixed", num_tokens=3)
    assistant = SpecDecPPAssistant.from_early_exit(target, layers, speculation=knobs)
    assisted = target.generate(**inputs, max_new_tokens=48, do_sample=False, assistant_model=assistant)
    assert torch.equal(plain, assisted)
    assert assistant.stats.rounds > 0
    assistant.detach()


def test_draft_by_name_accepts_everything_of_itself(target: Any, tokenizer: Any, inputs: Any) -> None:
    """The target's own folder as the draft: real tokenizers are compared, and all candidates stand."""
    assistant = SpecDecPPAssistant.from_draft(FOLDER, target)
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
