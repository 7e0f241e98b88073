"""Answers from OpenAI-compatible servers: every dialect, every failure, and a real one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny
from support.openai_server import Reply, refuse, serving
from support.repos import WORDS, save_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

pytest.importorskip("datasets", reason="needs the [train] extra")

from support.rollout_files import EOS, NUM_PROMPTS, files, rows_of, small_run

from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.texts import answers
from hf_specdecpp.training.rollouts import server_target
from hf_specdecpp.training.rollouts import stage as rollouts

TEMPLATE = (
    "{% for message in messages %}w1 {{ message.content }} {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
)
Answer = Callable[[str, dict[str, Any]], Reply]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target on disk, with a chat template, that ends some of its answers."""
    folder = tmp_path_factory.mktemp("target")
    # No special tokens, since servers leave those out of what they answer; this model says any of its words.
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}))
    inner.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE).save_pretrained(folder)
    return save_model(tiny("llama", seed=4, eos_token_id=EOS), folder, words=None)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_target, "FIRST_DELAY", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


class Model:
    """What a server does with the target: greedy answers as text, without the token that ends them."""

    def __init__(self, target: str) -> None:
        self.model: CausalLM = AutoModelForCausalLM.from_pretrained(target)

    def __call__(self, path: str, body: dict[str, Any]) -> Reply:
        prompt = body.get("prompt") or f"w1 {body['messages'][0]['content']} w3"
        ids = prompt if isinstance(prompt, list) else [WORDS.index(word) for word in prompt.split()]
        output = self.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=body["max_tokens"])
        tokens = output[0, len(ids) :].tolist()
        ended = tokens[-1] == EOS
        text = " ".join(WORDS[token] for token in (tokens[:-1] if ended else tokens))
        content = {"text": text} if path == "/v1/completions" else {"message": {"role": "assistant", "content": text}}
        return 200, {"choices": [{**content, "index": 0, "finish_reason": "stop" if ended else "length"}]}


def picky(answer: Answer, *, ids: bool = True, text: bool = True, fields: bool = True, config: bool = True) -> Answer:
    """A server that refuses prompts as token ids, or as text, or fields that are not OpenAI's."""

    def reply(path: str, body: dict[str, Any]) -> Reply:
        kind = type(body.get("prompt"))
        if (kind is list and not ids) or (kind is str and not text):
            return refuse(f"no {kind.__name__}")
        if ("top_k" in body and not fields) or ("generation_config" in body and not config):
            return refuse("Unexpected fields")
        return answer(path, body)

    return reply


@pytest.mark.parametrize(
    ("form", "limits"),
    [
        ("token ids", {}),
        ("text", {"ids": False, "fields": False}),
        ("messages", {"ids": False, "text": False, "fields": False, "config": False}),
    ],
)
def test_rows_are_those_of_the_local_target(tmp_path: Path, target: str, form: str, limits: dict[str, bool]) -> None:
    config = small_run(tmp_path, target)
    rollouts.run(config)
    expected = rows_of(config)
    assert {row["finished"] for row in expected} == {True, False}
    config.work_dir = str(tmp_path / "served")
    with serving(picky(Model(target), **limits)) as server:
        config.rollouts.server = server.url + "/v1/"
        rollouts.run(config)
        requests = server.requests
    assert rows_of(config) == expected
    path, body, key = requests[-1]
    assert path == ("/v1/chat/completions" if form == "messages" else "/v1/completions")
    assert type(body.get("prompt")) is {"token ids": list, "text": str, "messages": type(None)}[form]
    assert ("top_k" in body, "generation_config" in body) == (form == "token ids", form == "text")
    assert (body["model"], body["max_tokens"], key) == (target, 12, None)
    seeds = [body["seed"] for _, body, _ in requests if body["max_tokens"] > 1]
    assert len(set(seeds)) == len(seeds) == NUM_PROMPTS, "each answer has its own, in every shard"


def test_what_is_asked_for(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    config = small_run(tmp_path, target, temperatures=[0.7], top_k=0, server_model="served-name", batch_size=4)
    with serving(Model(target)) as server:
        config.rollouts.server = server.url
        rollouts.run(config)
        _, body, key = server.requests[-1]
    assert key == "Bearer sesame"
    assert (body["model"], body["temperature"], body["top_k"]) == ("served-name", 0.7, server_target.EVERY_TOKEN)
    # Nothing but temperature and top-k may shape p, whatever the server's or the model's defaults.
    assert (body["top_p"], body["min_p"], body["repetition_penalty"], body["repeat_penalty"]) == (1.0, 0.0, 1.0, 1.0)


def test_requests_are_in_flight_together(tmp_path: Path, target: str) -> None:
    meeting = threading.Barrier(4, timeout=20)
    answer = Model(target)

    def reply(path: str, body: dict[str, Any]) -> Reply:
        if body["max_tokens"] > 1:  # not the first question, which form the server takes
            meeting.wait()
        return answer(path, body)

    config = small_run(tmp_path, target, batch_size=4, heldout=0.0)
    data = Path(config.rollouts.data[0])
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:12]))  # three full shards
    with serving(reply) as server:
        config.rollouts.server = server.url
        rollouts.run(config)
    assert len(answers.load(config.work, "train")) == 12


@pytest.mark.parametrize("failures", [[500], [429, 503, 0], [0, 500, 500, 500, 500]])
def test_failures_that_pass(tmp_path: Path, target: str, failures: list[int]) -> None:
    config = small_run(tmp_path, target, batch_size=1)
    rollouts.run(config)
    expected = rows_of(config)
    config.work_dir = str(tmp_path / "served")
    with serving(Model(target)) as server:
        server.failures = list(failures)
        config.rollouts.server = server.url
        rollouts.run(config)
        assert not server.failures
        assert len(server.requests) == NUM_PROMPTS + 1 + len(failures)
    assert rows_of(config) == expected


def test_a_server_that_dies_and_comes_back(tmp_path: Path, target: str) -> None:
    config = small_run(tmp_path, target, batch_size=1)
    with serving(Model(target)) as server:
        config.rollouts.server = server.url
        answer, asked = server.answer, []

        def failing(path: str, body: dict[str, Any]) -> Reply:
            asked.append(path)
            return answer(path, body) if len(asked) <= 6 else (500, {"error": "out of memory"})

        server.answer = failing
        with pytest.raises(ConnectionError, match="did not answer after 6 attempts.*HTTP 500.*out of memory.*go on"):
            rollouts.run(config)
    kept = ["rollouts.json", "train/shard-0-0-00000.parquet", "train/unfinished-shard-0-0-00001.json"]
    assert files(config) == kept
    with pytest.raises(ConnectionError, match=r"did not answer after 6 attempts.*refused.*Is it running"):
        rollouts.run(config)
    assert files(config) == kept
    with serving(Model(target)) as other:
        config.rollouts.server = other.url  # another address is no other setting
        rollouts.run(config)
        assert len(other.requests) == NUM_PROMPTS - 5 + 1, "but those of the shard, and the first one of the next"
    assert "unfinished" not in "".join(files(config))
    assert len(rows_of(config)) == NUM_PROMPTS


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda path, body: (404, {"error": "no such model"}), ValueError, "refused every form.*no such model"),
        (lambda path, body: (401, {"error": "who?"}), ValueError, "asks for an API key.*who.*OPENAI_API_KEY"),
        (lambda path, body: (200, {"choices": []}), ValueError, "which is not what OpenAI's API answers"),
        (lambda path, body: (200, {"hello": "world"}), ValueError, "answered {'hello': 'world'}, which is not"),
    ],
)
def test_servers_that_cannot_be_used(
    tmp_path: Path, target: str, answer: Answer, error: type[Exception], message: str
) -> None:
    config = small_run(tmp_path, target)
    with serving(answer) as server:
        config.rollouts.server = server.url
        with pytest.raises(error, match=f"(?s){message}"):
            rollouts.run(config)
    assert files(config) == ["rollouts.json"]


def test_top_k_is_not_dropped_in_silence(tmp_path: Path, target: str) -> None:
    config = small_run(tmp_path, target, temperatures=[1.0], top_k=5)
    with serving(picky(Model(target), fields=False, config=False)) as server:
        config.rollouts.server = server.url
        with pytest.raises(ValueError, match="refused every form.*or set top_k to 0"):
            rollouts.run(config)


def test_each_shard_is_asked_for_at_its_temperature(tmp_path: Path, target: str) -> None:
    config = small_run(tmp_path, target, temperatures=[0.0, 0.8], top_k=5)
    with serving(Model(target)) as server:
        config.rollouts.server = server.url
        rollouts.run(config)
        asked = [body["temperature"] for _, body, _ in server.requests if body["max_tokens"] > 1]
    assert sorted(asked) == [0.0] * NUM_PROMPTS + [0.8] * NUM_PROMPTS
    assert sorted(round(row["temperature"], 6) for row in rows_of(config)) == sorted(asked)


def test_top_k_is_not_dropped_where_greedy_answers_come_first(tmp_path: Path, target: str) -> None:
    config = small_run(tmp_path, target, temperatures=[0.0, 1.0], top_k=5)
    with serving(picky(Model(target), fields=False, config=False)) as server:
        config.rollouts.server = server.url
        with pytest.raises(ValueError, match="refused every form.*or set top_k to 0"):
            rollouts.run(config)
    assert files(config) == ["rollouts.json"]


def test_a_server_must_be_a_url(tmp_path: Path, target: str) -> None:
    config = small_run(tmp_path, target, server="localhost:8000")
    with pytest.raises(ValueError, match="'localhost:8000' is not a URL such as http"):
        rollouts.run(config)


def test_answers_cut_inside_a_character(tmp_path: Path, target: str) -> None:
    cut = {"choices": [{"text": "w5 w6\ufffd", "finish_reason": "length"}]}
    config = small_run(tmp_path, target)
    with serving(lambda path, body: (200, cut)) as server:
        config.rollouts.server = server.url
        rollouts.run(config)
    assert {tuple(row["input_ids"][row["prompt_length"] :]) for row in rows_of(config)} == {(5, 6)}


@contextmanager
def transformers_serve(log: Path) -> Iterator[str]:
    """A `transformers serve` process, ready to answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            for _ in range(240):
                assert process.poll() is None, log.read_text()
                try:
                    urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5)
                    break
                except OSError:
                    time.sleep(0.5)
            yield f"http://localhost:{port}"
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.slow
def test_a_real_server(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        pytest.skip("`transformers serve` needs pip install transformers[serving]")
    monkeypatch.setattr(server_target, "FIRST_DELAY", 1.0)
    config = small_run(tmp_path, target)
    rollouts.run(config)
    expected = rows_of(config)
    with transformers_serve(tmp_path / "server.log") as url:
        config.work_dir, config.rollouts.server = str(tmp_path / "served"), url
        rollouts.run(config)
        assert rows_of(config) == expected
        config.work_dir, config.rollouts.temperatures, config.rollouts.top_k = str(tmp_path / "sampled"), [1.0], 5
        rollouts.run(config)
        sampled = rows_of(config)
    assert len(sampled) == NUM_PROMPTS
    assert sampled != expected
    first = json.loads((config.work / "rollouts" / "rollouts.json").read_text())
    assert first["settings"]["answered_by"] == "server"
    check_top_k(target, sampled, 5)


def check_top_k(target: str, rows: list[dict[str, Any]], top_k: int) -> None:
    """Each token of each answer is among the target's likeliest ones."""
    model = AutoModelForCausalLM.from_pretrained(target)
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            best = model(ids).logits[0].topk(top_k).indices
        for place in range(row["prompt_length"], ids.shape[1]):
            assert ids[0, place] in best[place - 1]
