"""`vllm serve` in a process of its own: started, awaited, asked over localhost, and stopped."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.runs.free_port import free_port

START = 600.0  # seconds until a server must be ready; on a busy machine it loads for more than a minute
STOP = 30.0  # seconds until a server that was told to end is killed
OPTIONS = "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 8 --host 127.0.0.1"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # each server imports thousands of modules, which are compiled once only
}
# The program `vllm` of vllm-cpu 0.32.0 ends at once, because it asks for the version of a package `vllm`.
PROGRAM = """
import sys
from importlib import metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total\{[^}]*\} (\S+)$", re.M)


class Server:
    """A server that is ready. `model`: the name of its model."""

    def __init__(self, port: int, model: str) -> None:
        self.url, self.model = f"http://127.0.0.1:{port}", model

    def get(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300.0) -> str:
        """Return the answer to a GET, or with a body to a POST; `OSError` if there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 - to this machine
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310 - to this machine
            answer: str = response.read().decode()
        return answer

    def greedy(self, prompt: list[int], length: int) -> tuple[str, list[int]]:
        """Return the text and the token ids of the greedy answer to a prompt of token ids."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": length, "temperature": 0.0}
        (choice,) = json.loads(self.get("/v1/completions", {**body, "return_token_ids": True}))["choices"]
        return choice["text"], choice["token_ids"]

    def counts(self) -> dict[str, float]:
        """Return the numbers of `drafts`, `draft_tokens` and `accepted_tokens` so far; empty without a draft.

        The last step of an answer is counted after the answer is sent, so the numbers are read until they rest."""
        found: dict[str, float] = {}
        while True:
            before, found = found, {name: float(value) for name, value in COUNTER.findall(self.get("/metrics"))}
            if found == before:
                return found
            time.sleep(0.5)


@contextmanager
def served(command: str, log: Path) -> Iterator[Server]:
    """Run a command as `specdecpp export` prints it, with `OPTIONS`, and yield the server once it is ready.

    The output goes to the file `log`. `RuntimeError` with its errors if the server ends or is not ready in time."""
    port = free_port()
    program, serve, model, *words = shlex.split(command)
    assert (program, serve) == ("vllm", "serve")
    started = [sys.executable, "-c", PROGRAM, serve, model, *words, *OPTIONS.split(), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            started, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        )
    try:
        server = Server(port, model)
        _await(server, process, log)
        yield server
    finally:
        _stop(process)


def _await(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START
    while True:
        try:
            server.get("/health", timeout=5.0)
            return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > end:
            errors = [line for line in log.read_text("utf-8", "replace").splitlines() if "error" in line.lower()]
            how = f"is not ready after {START:.0f} s" if process.returncode is None else f"ended ({process.returncode})"
            raise RuntimeError("\n".join([f"vLLM {how}:", *errors[-8:]]))
        time.sleep(1.0)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server with all its processes."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            continue
