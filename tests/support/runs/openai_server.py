"""An OpenAI-compatible server for tests, as unreliable as told."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, Any]]


class OpenAIServer(ThreadingHTTPServer):
    """Answers with `answer(path, body)`, after the failures that are queued.

    `failures`: status codes for the next requests; 0 hangs up in the middle of an answer."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str, dict[str, Any]], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.failures: list[int] = []
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, body, self.headers.get("Authorization")))
            failure = self.server.failures.pop(0) if self.server.failures else None
        status, reply = (failure, {"error": "boom"}) if failure else self.server.answer(self.path, body)
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if failure == 0 else data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(answer: Callable[[str, dict[str, Any]], Reply]) -> Iterator[OpenAIServer]:
    server = OpenAIServer(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
