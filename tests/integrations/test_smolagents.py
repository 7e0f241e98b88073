"""smolagents' `TransformersModel` with a default assistant, and with one among its arguments.

It is no dependency: `make test-integrations` installs it beside this package."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from support.enumeration.mutants import accept_everything
from support.files.repos import save_chat_model
from transformers import AutoModelForCausalLM

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

smolagents = pytest.importorskip("smolagents", reason="make test-integrations installs it")

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"
FIXED = SpeculationConfig("fixed", num_tokens=3)
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "w1 w2 w3 w4 w5"}]}]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "device_map": "cpu"}

# The second of how it calls transformers.
pytestmark = [pytest.mark.takes(60), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_chat_model(tmp_path / "target")


@pytest.fixture
def model(folder: str) -> Any:
    return smolagents.TransformersModel(folder, **GREEDY)


def early_exit(model: Any, **how: Any) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_early_exit(model.model, 2, speculation=FIXED, **how)


def say(model: Any) -> str:
    return model.generate(MESSAGES).content


def test_a_default_assistant(model: Any) -> None:
    plain, assistant = say(model), early_exit(model, default=True)
    assert say(model) == plain
    assert assistant.stats.accepted > 0
    assert "".join([part.content for part in model.generate_stream(MESSAGES)]) == plain
    assert assistant.stats.accepted > 0
    stop = plain.split()[6]
    assert say_until(model, stop) in plain
    assert assistant.stats.refusal is None
    with assistant.paused():
        assert say_until(model, stop) == plain.partition(stop)[0]
    json.dumps(model.to_dict())


def say_until(model: Any, stop: str) -> str:
    """Stopped by a criterion of smolagents' own."""
    return model.generate(MESSAGES, stop_sequences=[stop]).content


def test_among_the_arguments(model: Any, folder: str) -> None:
    """They go on to `generate()`. The assistant is made for a model that is loaded already."""
    plain, assistant = say(model), early_exit(model)
    model.kwargs["assistant_model"] = assistant
    assert say(model) == plain
    assert assistant.stats.accepted > 0
    assistant.detach()
    independent = SpecDecPPAssistant.from_draft(AutoModelForCausalLM.from_pretrained(folder), speculation=FIXED)
    other = smolagents.TransformersModel(folder, assistant_model=independent, **GREEDY)
    assert say(other) == plain
    assert independent.stats.accepted > 0
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(other.to_dict())  # as the example says


def test_a_wrong_verification_would_be_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = say(model)
    accept_everything(monkeypatch)
    early_exit(model, default=True)
    assert say(model) != plain


class Short(smolagents.TransformersModel):  # type: ignore[name-defined]
    """Says little, which is noted."""

    said: list[str] = []

    def __init__(self, name: str, **how: Any) -> None:
        super().__init__(name, **{**how, "max_new_tokens": 12, "device_map": "cpu"})

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        message = super().generate(*args, **kwargs)
        self.said.append(message.content)
        return message


def test_the_example(
    folder: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random weights write no code, so that the agent asks until its last step, and says what it has."""
    early_exit(model).save_pretrained(tmp_path / "assistant")
    monkeypatch.setattr(smolagents, "TransformersModel", Short)
    monkeypatch.setattr(sys, "argv", ["agent.py", "w1 w2 w3", folder, str(tmp_path / "assistant")])
    monkeypatch.setattr(Short, "said", [])
    runpy.run_path(str(EXAMPLE))
    assert capsys.readouterr().out.splitlines()[-1].startswith("verdict")
    assisted, Short.said = Short.said, []
    agent = smolagents.CodeAgent(tools=[], model=Short(folder, do_sample=False), max_steps=4, verbosity_level=0)
    agent.run("w1 w2 w3")
    assert (assisted, len(assisted)) == (Short.said, 5)
