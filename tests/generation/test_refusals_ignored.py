"""transformers' own settings of speculation do nothing with an assistant, and that is said, once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.targets.models import assistant_for, prompt, tiny
from transformers import GenerationConfig
from transformers.utils.logging import warning_once

from hf_specdecpp.choosing import assist
from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(12)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}


@contextmanager
def heard() -> Iterator[list[str]]:
    """What our logger says, as if it had said nothing before."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    warning_once.cache_clear()
    logger = logging.getLogger("hf_specdecpp")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny("llama", num_hidden_layers=2)


@pytest.mark.parametrize("where", ["given", "a config", "the model's"])
@pytest.mark.parametrize("door", ["named", "default", "batch"])
@pytest.mark.parametrize(("name", "value", "instead"), [
    ("num_assistant_tokens", 12, "SpeculationConfig(rule='fixed', num_tokens=12)"),
    ("num_assistant_tokens_schedule", "heuristic", "assistant.speculation.rule"),
    ("assistant_confidence_threshold", 0.9, "SpeculationConfig(rule='threshold'"),
])  # fmt: skip
@pytest.mark.daily(
    "num_assistant_tokens-12-SpeculationConfig(rule='fixed', num_tokens=12)-named-given",
    "num_assistant_tokens-12-SpeculationConfig(rule='fixed', num_tokens=12)-batch-a config",
    "num_assistant_tokens_schedule-heuristic-assistant.speculation.rule-default-the model's",
    "assistant_confidence_threshold-0.9-SpeculationConfig(rule='threshold'-default-given",
)  # fmt: skip
def test_said_once(
    door: str, name: str, value: Any, instead: str, where: str, target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = target.generate(PROMPT, **GREEDY)
    assistant = assistant_for(target)
    assistant.attach(target, default=True) if door == "default" else None
    arguments: dict[str, Any] = {} if door == "default" else {"assistant_model": assistant}
    if where == "given":
        arguments[name] = value
    elif where == "a config":
        arguments["generation_config"] = GenerationConfig(**{name: value})
    else:
        monkeypatch.setattr(target.generation_config, name, value)
    rows = 2 if door == "batch" else 1
    with heard() as said:
        for _ in range(2):
            text = target.generate(PROMPT.repeat(rows, 1), **GREEDY, **arguments)
    assert torch.equal(text[:1], plain)
    assert assistant.stats.drafted > 0
    told = [each for each in said if name in each]
    assert len(told) == 1
    assert f"{name}={value!r}, given to generate() or in the model's generation_config, has no effect" in told[0]
    assert instead in told[0]
    assistant.detach()


def test_nothing_is_said_of_what_transformers_fills_in(target: CausalLM) -> None:
    assistant = assistant_for(target)
    with heard() as said:
        target.generate(PROMPT, **GREEDY, assistant_model=assistant)
        target.generate(PROMPT, **GREEDY, assistant_model=assistant, num_assistant_tokens=20)
    assert said == []
    assistant.detach()


@pytest.mark.parametrize(("name", "value"), [("prompt_lookup_num_tokens", 5), ("assistant_early_exit", 1)])
@pytest.mark.parametrize("where", ["given", "the model's"])
def test_transformers_own_speculation_in_the_place_of_the_default(
    name: str, value: int, where: str, target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = target.generate(PROMPT, **GREEDY)
    assistant = assist(target, "lookup")
    if where == "the model's":
        monkeypatch.setattr(target.generation_config, name, value)
    arguments = {name: value} if where == "given" else {}
    with heard() as said:
        for _ in range(2):
            assert torch.equal(target.generate(PROMPT, **GREEDY, **arguments), plain)
    place = "given to generate()" if where == "given" else "in the model's generation_config"
    assert f"{name}={value}, {place}, asks for transformers' own speculation" in str(assistant.stats.refusal)
    assert "set it to None" in assistant.stats.verdict
    # Who asks for it knows.
    assert len([each for each in said if name in each]) == (where != "given")
    with assistant.paused(), heard() as said:
        target.generate(PROMPT, **GREEDY, **arguments)
    assert said == []
    # Who names the assistant has it, and is told that the other does nothing.
    with heard() as said:
        assert torch.equal(target.generate(PROMPT, **GREEDY, **arguments, assistant_model=assistant), plain)
    assert assistant.stats.refusal is None
    assert [f"{name}={value}" in each for each in said] == [True]
    assist(target, None)
