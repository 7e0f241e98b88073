"""The target answers on an OpenAI-compatible server that takes prompts as token ids: vLLM, SGLang, llama.cpp, ..."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from transformers.utils import logging

from hf_specdecpp.files import parse_json
from hf_specdecpp.texts.encoding import Codec, Encoded
from hf_specdecpp.training.configuration import TrainingConfig

logger = logging.get_logger(__name__)

ATTEMPTS = 6
FIRST_DELAY = 1.0  # seconds; doubles from attempt to attempt
TIMEOUT = 600.0  # seconds for one answer
EVERY_TOKEN = 2**20  # as top_k: servers do not agree on 0 or -1 for "all"
PATH = "/v1/completions"


class ServerTarget:
    """Answers prompts with requests to a server, `batch_size` of them in flight.

    A prompt goes as its token ids, so that no other chat template or tokenizer comes between.
    """

    def __init__(self, config: TrainingConfig, codec: Codec) -> None:
        self.settings, self.codec = config.rollouts, codec
        self.model = config.rollouts.server_model or config.target
        self.url = str(config.rollouts.server).rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"The server {self.url!r} is not a URL such as http://localhost:8000.")

    def __call__(
        self, items: list[Encoded], temperature: float, seed: int, done: Set[int] = frozenset()
    ) -> Iterator[tuple[int, list[int], bool]]:
        """As `LocalTarget`; `done` are not asked.

        Raises:
            ConnectionError: the server cannot be reached, or fails again and again.
            ValueError: it refuses the requests.
        """
        with ThreadPoolExecutor(self.settings.batch_size) as pool:
            asked = {
                pool.submit(self._ask, item, temperature, seed + index): index
                for index, item in enumerate(items)
                if index not in done
            }
            try:
                for future in as_completed(asked):
                    index = asked[future]
                    text, finished = future.result()
                    yield index, *self.codec.read_answer(items[index], text, finished)
            finally:
                pool.shutdown(cancel_futures=True)

    def _ask(self, item: Encoded, temperature: float, seed: int) -> tuple[str, bool]:
        """The text of an answer, and whether the target ended it."""
        body = {
            "model": self.model,
            "prompt": item.input_ids,
            "max_tokens": self.codec.room(item, self.settings.max_new_tokens),
            "seed": seed,
            # Temperature and top-k alone: servers have defaults for all the rest, or take the model's own.
            "temperature": temperature,
            "top_k": self.settings.top_k or EVERY_TOKEN,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "repeat_penalty": 1.0,  # as llama.cpp calls it
        }
        reply = self._post(body)
        try:
            choice = reply["choices"][0]
            text, finished = choice["text"], choice["finish_reason"] == "stop"
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"{self.url}{PATH} answered {str(reply)[:300]}, which is not what OpenAI's API answers."
            ) from None
        # An answer cut inside a character ends in the sign for it, which the target never wrote.
        return text if finished else text.rstrip("\ufffd"), finished

    def _post(self, body: dict[str, Any]) -> Any:
        request = Request(  # noqa: S310 - the scheme was checked
            self.url + PATH, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        if key := os.environ.get("OPENAI_API_KEY"):
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                logger.warning_once(f"{self.url} does not answer ({problem}). Trying again for half a minute.")
                time.sleep(FIRST_DELAY * 2 ** (attempt - 1))
            try:
                with urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310 - the scheme was checked
                    return parse_json(response.read())
            except HTTPError as error:
                problem = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code in (401, 403):
                    raise ValueError(
                        f"{self.url} asks for an API key ({problem}). Set the environment variable OPENAI_API_KEY."
                    ) from None
                if error.code < 500 and error.code not in (408, 429):
                    raise ValueError(
                        f"The server {self.url} refused a request for model {self.model!r}: {problem}. Check the "
                        "model's name (rollouts.server_model), and that the server takes a prompt of token ids and a "
                        "top_k, as vLLM, SGLang and llama.cpp do; otherwise leave the server out, so that the target "
                        "answers here."
                    ) from None
            except (OSError, HTTPException, ValueError) as error:  # unreachable, cut off, or half an answer
                problem = f"{type(error).__name__}: {error}"
        raise ConnectionError(
            f"The server {self.url} did not answer after {ATTEMPTS} attempts. The last one: {problem}. Is it running, "
            "and has it memory for that many requests at once (rollouts.batch_size)? Finished shards are kept: run the "
            "same command to go on."
        )
