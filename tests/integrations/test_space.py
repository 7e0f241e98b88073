"""The Space of `hub_cards/space` as a program that is asked over HTTP.

gradio is no dependency: `make test-space` installs it beside this package."""

import base64
import html
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.repos import save_model, tokenizer
from support.runs.free_port import free_port
from support.targets.families import informed_draft
from support.targets.models import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

pytest.importorskip("gradio", reason="make test-space installs it")

from gradio_client import Client
from gradio_client.exceptions import AppError

pytestmark = pytest.mark.takes(60)

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass
class Space:
    """A running one: where, a question, and what its target says to it, in 48 tokens or fewer."""

    url: str
    question: str
    answer: str


def answer_of(folder: str | Path, question: str) -> str:
    model, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    inputs: Any = words.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=48, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(words.decode(output, skip_special_tokens=True))


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    target, assistant = small_pair(tmp_path_factory.mktemp("space"))
    question = "w1 w2 w3 w4 w5"
    port = str(free_port())
    settings = {"TARGET": target, "ASSISTANT": assistant, "GRADIO_SERVER_PORT": port}
    quiet = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
    app = subprocess.Popen([sys.executable, ROOT / "hub_cards" / "space" / "app.py"], env=os.environ | settings | quiet)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, app)
        yield Space(url, question, answer_of(target, question))
    finally:
        app.terminate()
        app.wait()


def small_pair(folder: Path) -> tuple[str, str]:
    """A target that takes chats, and a draft that knows what it will say to the question, but for each fourth word."""
    model = tiny("llama").float()
    target, words = save_model(model, folder / "target", None), tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(target)
    text = model.generate(torch.tensor([[1, 2, 3, 4, 5]]), max_new_tokens=48, do_sample=False)
    draft = save_model(informed_draft(text).float(), folder / "draft")
    settings = SpeculationConfig("fixed", num_tokens=4, tree_budget=8)
    SpecDecPPAssistant.from_draft(draft, model, speculation=settings).save_pretrained(folder / "assistant")
    return target, str(folder / "assistant")


def wait_for(url: str, app: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end and app.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310 - ours
        except OSError:
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"the Space did not start: exit code {app.poll()}")


def text_of(pane: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", pane))


def test_over_http(space: Space) -> None:
    """Both answers grow, the plain one first; what was accepted is marked, and two pictures are drawn."""
    *before, last = Client(space.url, verbose=False).submit(space.question, 48, True, api_name="/write")
    lengths = [(len(text_of(each[0])), len(text_of(each[2]))) for each in before]
    assert lengths == sorted(lengths)
    plain, plain_rate, assisted, assisted_rate, both, tree = last
    assert text_of(plain) == text_of(assisted) == space.answer
    assert "<mark" in assisted
    assert "<mark" not in plain
    assert re.fullmatch(r"\d+ tokens in [\d.]+ s, [\d.]+ tokens/s", plain_rate)
    assert re.fullmatch(r"\*\*[\d.]+ times as fast\*\*: \d+ tokens in [\d.]+ s, [\d.]+ tokens/s", assisted_rate)
    for picture in (both, tree):
        svg = base64.b64decode(re.findall(r'base64,([^"]+)"', picture)[0])
        assert b"<svg" in svg[:500]


def test_chains_have_no_tree(space: Space) -> None:
    *_, tree = Client(space.url, verbose=False).predict(space.question, 16, False, api_name="/write")
    assert tree.startswith("No tree")


@pytest.mark.parametrize(("question", "length"), [(" ", 0), ("w1 " * 2000, 5999)], ids=["nothing", "a book"])
def test_questions_that_are_none(space: Space, question: str, length: int) -> None:
    with pytest.raises(AppError, match=f"between 1 and 2000 characters; this one has {length}"):
        Client(space.url, verbose=False).predict(question, 16, True, api_name="/write")
