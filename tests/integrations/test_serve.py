"""`examples/serve.py`: transformers' server, asked over HTTP, answers with the assistant as it does without."""

import runpy
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.enumeration.mutants import accept_everything
from support.files.repos import save_chat_model
from support.runs.free_port import free_port
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.generation.entry import attached

pytest.importorskip("fastapi", reason="`transformers serve` needs pip install transformers[serving]")
pytest.importorskip("openai", reason="`transformers serve` needs pip install transformers[serving]")

from openai import OpenAI
from transformers.cli.serving import model_manager

pytestmark = pytest.mark.takes(60)

MESSAGES: Any = [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w4"},
                 {"role": "user", "content": "w5 w6"}]  # fmt: skip


class Served:
    """A server on a thread of this process, and a client of it."""

    def __init__(self, folder: str, assistant: str | None) -> None:
        port = free_port()
        serve = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "serve.py"))["serve"]
        options = {"host": "127.0.0.1", "port": port, "device": "cpu", "non_blocking": True}
        self.folder, self.server = folder, serve(folder, assistant, **options)
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        self.client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        self.assistant = attached.default_of(self.server._model_manager.assisted)

    def ask(self, **how: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.folder, messages=MESSAGES, **{"temperature": 0, "max_tokens": 24, **how}
        )

    def answer(self) -> str:
        return self.ask().choices[0].message.content


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(model_manager, "ModelManager", model_manager.ModelManager)  # which the example replaces
    verbosity, folder = logging.get_verbosity(), save_chat_model(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(folder)
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=SpeculationConfig("fixed", num_tokens=3))
    assistant.save_pretrained(tmp_path / "assistant")
    made = Served(folder, str(tmp_path / "assistant"))
    yield made
    made.server.kill_server()
    logging.set_verbosity(verbosity)


def test_answers_are_those_without_it(served: Served) -> None:
    ours = served.answer()
    assert served.assistant.stats.accepted > 0
    before = served.assistant.stats
    assert "".join([part.choices[0].delta.content or "" for part in served.ask(stream=True)]) == ours
    assert served.assistant.stats is not before
    assert served.assistant.stats.accepted > 0
    with served.assistant.paused():
        assert served.answer() == ours


def test_a_wrong_verification_would_be_seen(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = served.answer()
    accept_everything(monkeypatch)
    assert served.answer() != ours
