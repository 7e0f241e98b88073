"""The target answers on an OpenAI-compatible server: vLLM, SGLang, llama.cpp, `transformers serve`, ..."""

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


# The ways to put a request, in the order in which they are tried:
# token ids with sampling fields beyond OpenAI's, which is exact (vLLM, SGLang, llama.cpp);
# text with a generation_config (`transformers serve`);
# messages with OpenAI's own fields, which cannot say top-k (any other server).
FORMS = ("token ids", "text", "messages")


class ServerTarget:
    """Answers prompts with requests to a server, `batch_size` of them in flight.

    Attributes:
        form: one of `FORMS`; `None` until the server has taken one.
    """

    def __init__(self, config: TrainingConfig, codec: Codec) -> None:
        self.settings, self.codec = config.rollouts, codec
        self.model = config.rollouts.server_model or config.target
        self.url = str(config.rollouts.server).rstrip("/").removesuffix("/v1")
        self.form: str | None = None
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"The server {self.url!r} is not a URL such as http://localhost:8000.")

    def __call__(
        self, items: list[Encoded], temperature: float, seed: int, done: Set[int] = frozenset()
    ) -> Iterator[tuple[int, list[int], bool]]:
        """Index of an item, the new tokens, and whether the target ended them; in any order.

        Args:
            done: indices of items that need no answer.

        Raises:
            ConnectionError: the server cannot be reached, or fails again and again.
            ValueError: it refuses the requests.
        """
        form = self.form = self.form or self._agree(items[0], temperature)
        with ThreadPoolExecutor(self.settings.batch_size) as pool:
            asked = {
                pool.submit(self._ask, item, form, temperature, seed + index): index
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

    def _agree(self, item: Encoded, temperature: float) -> str:
        """The first form of a request that the server takes: asks for one token in each until then."""
        refusals = []
        for form in FORMS:
            if form == "messages" and max(self.settings.temperatures) > 0 and self.settings.top_k > 0:
                continue  # also if this request is greedy: the others are to have the same form
            try:
                self._ask(item, form, temperature, 0, max_tokens=1)
            except _RefusedError as refusal:
                refusals.append(f"prompt as {form}: {refusal}")
                continue
            logger.info(f"{self.url} takes the prompt as {form}.")
            if form == "messages":
                logger.warning(
                    f"{self.url} takes no /v1/completions, so it applies its own chat template, which must be that of "
                    f"{self.model!r}: otherwise the answers belong to other prompts than those recorded."
                )
            return form
        raise ValueError(
            f"The server {self.url} refused every form of a request for model {self.model!r}. Check the model's name "
            "(rollouts.server_model), and that it takes a top_k, or set top_k to 0 (all tokens). It said:\n"
            + "\n".join(refusals)
        )

    def _ask(
        self, item: Encoded, form: str, temperature: float, seed: int, max_tokens: int | None = None
    ) -> tuple[str, bool]:
        """The text of an answer, and whether the target ended it."""
        wanted = max_tokens or self.codec.room(item, self.settings.max_new_tokens)
        body = {"model": self.model, "max_tokens": wanted, "seed": seed, **self._sampling(form, temperature, wanted)}
        if form == "messages":
            path, body["messages"] = "/v1/chat/completions", item.prompt.messages
        else:
            path, body["prompt"] = "/v1/completions", item.input_ids if form == "token ids" else self._text(item)
        reply = self._post(path, body)
        try:
            choice = reply["choices"][0]
            text = choice["message"]["content"] or "" if form == "messages" else choice["text"]
            finished = choice["finish_reason"] == "stop"
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"{self.url}{path} answered {str(reply)[:300]}, which is not what OpenAI's API answers."
            ) from None
        # An answer cut inside a character ends in the sign for it, which the target never wrote.
        return text if finished else text.rstrip("\ufffd"), finished

    def _sampling(self, form: str, temperature: float, max_tokens: int) -> dict[str, Any]:
        """Temperature and top-k alone: servers have defaults for all the rest, or take the model's own."""
        if form == "messages":
            return {"temperature": temperature, "top_p": 1.0}
        neutral = {"top_k": self.settings.top_k or EVERY_TOKEN, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        if form == "token ids":
            return {"temperature": temperature, "repeat_penalty": 1.0, **neutral}
        wanted: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_tokens}
        if temperature > 0:
            wanted |= {"do_sample": True, "temperature": temperature, **neutral}
        if self.codec.eos:
            wanted["eos_token_id"] = self.codec.eos
        return {"generation_config": json.dumps(wanted)}

    def _text(self, item: Encoded) -> str:
        """The text of a prompt, less the first special token where the server adds it by itself."""
        first = self.codec.tokenizer.bos_token
        doubled = bool(first) and self.codec.tokenizer(item.text).input_ids != item.input_ids
        return item.text.removeprefix(str(first)) if doubled else item.text

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = Request(  # noqa: S310 - the scheme was checked
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
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
                    raise _RefusedError(problem) from None
            except (OSError, HTTPException, ValueError) as error:  # unreachable, cut off, or half an answer
                problem = f"{type(error).__name__}: {error}"
        raise ConnectionError(
            f"The server {self.url} did not answer after {ATTEMPTS} attempts. The last one: {problem}. Is it running, "
            "and has it memory for that many requests at once (rollouts.batch_size)? Finished shards are kept: run the "
            "same command to go on."
        )


class _RefusedError(ValueError):
    """The server says that the request is wrong."""
