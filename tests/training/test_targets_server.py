"""Answers from OpenAI-compatible servers, and every failure."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.files.repos import WORDS, save_model
from support.runs.openai_server import Reply, serving
from support.runs.rollout_files import EOS, NUM_PROMPTS, files, greedy, rows_of, small_run
from support.targets.models import tiny

from hf_specdecpp.texts import answers
from hf_specdecpp.training import rollouts, targets

Answer = Callable[[str, dict[str, Any]], Reply]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target on disk that ends some of its answers."""
    return save_model(tiny("llama", seed=4, eos_token_id=EOS), tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "FIRST_DELAY", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def model(path: str, body: dict[str, Any], target: str) -> Reply:
    """What a server does with the target: greedy answers as text, without the token that ends them."""
    tokens = greedy(target, body["prompt"], max_new_tokens=body["max_tokens"])[len(body["prompt"]) :]
    ended = tokens[-1] == EOS
    text = " ".join(WORDS[token] for token in (tokens[:-1] if ended else tokens))
    return 200, {"choices": [{"text": text, "index": 0, "finish_reason": "stop" if ended else "length"}]}


@pytest.mark.daily("failures3")
@pytest.mark.parametrize("failures", [[], [500], [429, 503, 0], [0, 500, 500, 500, 500]])
def test_rows_are_those_of_the_local_target(tmp_path: Path, target: str, failures: list[int]) -> None:
    """Also after failures that pass."""
    config = small_run(tmp_path, target, batch_size=1)
    rollouts.run(config)
    expected = rows_of(config)
    assert {row["finished"] for row in expected} == {True, False}
    config.work_dir = str(tmp_path / "served")
    with serving(partial(model, target=target)) as server:
        server.failures = list(failures)
        config.rollouts.server = server.url + "/v1/"
        rollouts.run(config)
        requests = server.requests
        assert not server.failures
    assert (rows_of(config), len(requests)) == (expected, NUM_PROMPTS + len(failures))
    assert {path for path, _, _ in requests} == {"/v1/completions"}
    _, body, key = requests[-1]
    assert (body["model"], body["max_tokens"], key) == (target, 12, None)
    assert len({body["seed"] for _, body, _ in requests}) == NUM_PROMPTS, "each answer has its own, in every shard"


def test_what_is_asked_for(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    config = small_run(tmp_path, target, temperatures=[0.0, 0.7], top_k=0, server_model="served-name", batch_size=4)
    with serving(partial(model, target=target)) as server:
        config.rollouts.server = server.url
        rollouts.run(config)
        _, body, key = server.requests[-1]
        asked = sorted(each["temperature"] for _, each, _ in server.requests)
    assert key == "Bearer sesame"
    assert asked == [0.0] * NUM_PROMPTS + [0.7] * NUM_PROMPTS
    assert sorted(round(row["temperature"], 6) for row in rows_of(config)) == asked
    assert (body["model"], body["top_k"]) == ("served-name", targets.EVERY_TOKEN)
    # Nothing but temperature and top-k may shape p, whatever the server's or the model's defaults.
    assert (body["top_p"], body["min_p"], body["repetition_penalty"], body["repeat_penalty"]) == (1.0, 0.0, 1.0, 1.0)


def test_requests_are_in_flight_together(tmp_path: Path, target: str) -> None:
    meeting, answer = threading.Barrier(4, timeout=20), partial(model, target=target)

    def reply(path: str, body: dict[str, Any]) -> Reply:
        meeting.wait()
        return answer(path, body)

    config = small_run(tmp_path, target, batch_size=4, heldout=0.0)
    data = Path(config.rollouts.data[0])
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:12]))  # three full shards
    with serving(reply) as server:
        config.rollouts.server = server.url
        rollouts.run(config)
    assert len(answers.load(config.work, "train")) == 12


def test_a_server_that_dies_and_comes_back(tmp_path: Path, target: str) -> None:
    config = small_run(tmp_path, target, batch_size=1)
    with serving(partial(model, target=target)) as server:
        config.rollouts.server = server.url
        answer, asked = server.answer, []

        def failing(path: str, body: dict[str, Any]) -> Reply:
            asked.append(path)
            return answer(path, body) if len(asked) <= 6 else (500, {"error": "out of memory"})

        server.answer = failing
        with pytest.raises(ConnectionError, match="did not answer after 6 attempts.*HTTP 500.*memory.*to continue"):
            rollouts.run(config)
    kept = ["rollouts.json", "train/shard-0-0-00000.parquet"]
    assert files(config) == kept
    with pytest.raises(ConnectionError, match=r"did not answer after 6 attempts.*refused.*Is it running"):
        rollouts.run(config)
    assert files(config) == kept
    with serving(partial(model, target=target)) as other:
        config.rollouts.server = other.url  # another address is no other setting
        rollouts.run(config)
        assert len(other.requests) == NUM_PROMPTS - 4, "but those of the shard"
    assert len(rows_of(config)) == NUM_PROMPTS


@pytest.mark.parametrize(("answer", "error", "message"), [
    (lambda path, body: (404, {"error": "no such model"}), ValueError, "refused a request.*no such model"),
    (lambda path, body: (401, {"error": "who?"}), ValueError, "refused a request.*who.*OPENAI_API_KEY"),
    (lambda path, body: (200, {"choices": []}), ValueError, "which is not an answer of OpenAI's API"),
    (lambda path, body: (200, {"hello": "world"}), ValueError, "answered {'hello': 'world'}, which is not"),
])  # fmt: skip
def test_unusable_servers(tmp_path: Path, target: str, answer: Answer, error: type[Exception], message: str) -> None:
    config = small_run(tmp_path, target)
    with serving(answer) as server:
        config.rollouts.server = server.url
        with pytest.raises(error, match=f"(?s){message}"):
            rollouts.run(config)
    assert files(config) == ["rollouts.json"]


def test_a_server_must_be_a_url(tmp_path: Path, target: str) -> None:
    config = small_run(tmp_path, target, server="localhost:8000")
    with pytest.raises(ValueError, match="'localhost:8000' is not a URL such as http"):
        rollouts.run(config)


def test_answers_cut_inside_a_character(tmp_path: Path, target: str) -> None:
    cut, config = {"choices": [{"text": "w5 w6\ufffd", "finish_reason": "length"}]}, small_run(tmp_path, target)
    with serving(lambda path, body: (200, cut)) as server:
        config.rollouts.server = server.url
        rollouts.run(config)
    assert {tuple(row["input_ids"][row["prompt_length"] :]) for row in rows_of(config)} == {(5, 6)}
