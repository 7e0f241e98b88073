"""Answers of the target, generated here in batches or by an OpenAI-compatible server (vLLM, SGLang, llama.cpp)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils import logging

from hf_specdecpp.files import parse_json
from hf_specdecpp.models.causal_lm import CACHE, takes_positions
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.texts.encoding import Codec, Encoded, padded
from hf_specdecpp.texts.sampling import Sampling, draw_rows, seed_of
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.models import load

logger = logging.get_logger(__name__)

ATTEMPTS = 6
FIRST_DELAY = 1.0  # seconds; doubles from attempt to attempt
TIMEOUT = 600.0  # seconds for one answer
EVERY_TOKEN = 2**20  # top_k for all tokens: some servers take 0 for that, others -1
PATH = "/v1/completions"
SHRINK_AT = 0.85  # if fewer rows than this share are unfinished, finished rows are removed from the batch


class LocalTarget:
    """Generates answers in batches with temperature and top-k only, the same for the same prompts, seed and batch size.

    It is two to three times as fast as `generate()`: finished rows leave the batch, and no vocabulary is sorted."""

    def __init__(self, config: TrainingConfig, codec: Codec) -> None:
        self.settings, self.codec = config.rollouts, codec
        self.model = load(config.target, config.dtype)
        check_target(self.model)
        self.takes_positions = takes_positions(self.model)

    def __call__(self, items: list[Encoded], temperature: float, seed: int) -> Iterator[tuple[int, list[int], bool]]:
        """Yield in any order the index of an item, new tokens, and whether an end-of-sequence token ended them."""
        order = sorted(range(len(items)), key=lambda index: len(items[index].input_ids))  # little padding
        for start in range(0, len(order), self.settings.batch_size):
            batch = order[start : start + self.settings.batch_size]
            torch.manual_seed(seed_of(seed, start))
            sampling = Sampling(temperature, self.settings.top_k)
            for row, tokens, finished in self._answer([items[index] for index in batch], sampling):
                yield batch[row], tokens, finished

    @torch.inference_mode()
    def _answer(self, batch: list[Encoded], sampling: Sampling) -> Iterator[tuple[int, list[int], bool]]:
        """Answer one batch, with indices into `batch`; otherwise as `__call__`."""
        room = [self.codec.num_fitting(item, self.settings.max_new_tokens) for item in batch]
        answers: list[list[int]] = [[] for _ in batch]
        cache, rows = DynamicCache(config=self.model.config.get_text_config(decoder=True)), list(range(len(batch)))
        prompts = padded([item.input_ids for item in batch])
        ids, mask = (prompts[name].to(self.model.device) for name in ("input_ids", "attention_mask"))
        writing = set(rows)
        while writing:
            positions: dict[str, Any] = {}
            if self.takes_positions:
                # Clamped, because an answer that has filled the context may stay in the batch for a while.
                last = self.codec.context - 1 if self.codec.context else None
                positions["position_ids"] = (mask.cumsum(-1) - 1).clamp(0, last)[:, -ids.shape[1] :]
            past: dict[str, Any] = {CACHE: cache, "use_cache": True, "logits_to_keep": 1}
            logits = self.model(ids, attention_mask=mask, **past, **positions).logits[:, -1]
            ids = self._draw(logits, sampling)[:, None]
            mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=1)
            for row, token in zip(rows, ids[:, 0].tolist(), strict=True):
                if row not in writing:
                    continue
                answers[row].append(token)
                if token in self.codec.eos or len(answers[row]) == room[row]:
                    writing.remove(row)
                    yield row, answers[row], token in self.codec.eos
            if writing and len(writing) < SHRINK_AT * len(rows):
                kept = torch.tensor([place for place, row in enumerate(rows) if row in writing], device=ids.device)
                cache.batch_select_indices(kept)
                ids, mask, rows = ids[kept], mask[kept], [row for row in rows if row in writing]

    def _draw(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Draw tokens `[batch]` from logits `[batch, vocab]`. `ValueError` for NaN logits."""
        if bool(logits.sum().isnan()):  # also for infinities of both signs
            raise ValueError(
                f"The target {self.model.config.name_or_path!r} computed NaN logits in {self.model.dtype} on "
                f"{self.model.device}, so its answers would mean nothing. Check its weights; a model that overflows in "
                "float16 needs bfloat16 or float32. Finished shards are kept."
            )
        if sampling.greedy:
            return logits.argmax(-1)
        if not sampling.top_k:
            return draw_rows((logits.float() / sampling.temperature).softmax(-1))
        best, tokens = logits.float().topk(min(sampling.top_k, logits.shape[-1]), dim=-1)
        return tokens.gather(-1, torch.multinomial((best / sampling.temperature).softmax(-1), 1))[:, 0]


# A server -------------------------------------------------------------------------------------------------------------


class ServerTarget:
    """Sends prompts to a server as token ids, `batch_size` at a time, so without its template and tokenizer."""

    def __init__(self, config: TrainingConfig, codec: Codec) -> None:
        self.settings, self.codec = config.rollouts, codec
        self.model = config.rollouts.server_model or config.target
        self.url = str(config.rollouts.server).rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"The server {self.url!r} is not a URL such as http://localhost:8000.")

    def __call__(self, items: list[Encoded], temperature: float, seed: int) -> Iterator[tuple[int, list[int], bool]]:
        """Yield as `LocalTarget` does. `ConnectionError` if the server fails six times, `ValueError` if it refuses."""
        with ThreadPoolExecutor(self.settings.batch_size) as pool:
            asked = {pool.submit(self._ask, item, temperature, seed + index): index for index, item in enumerate(items)}
            try:
                for future in as_completed(asked):
                    index = asked[future]
                    text, finished = future.result()
                    yield index, *self.codec.read_answer(items[index], text, finished)
            finally:
                pool.shutdown(cancel_futures=True)

    def _ask(self, item: Encoded, temperature: float, seed: int) -> tuple[str, bool]:
        """Return the text of an answer, and whether an end-of-sequence token ended it."""
        body = {
            "model": self.model,
            "prompt": item.input_ids,
            "max_tokens": self.codec.num_fitting(item, self.settings.max_new_tokens),
            "seed": seed,
            # Other settings are turned off: servers have defaults, or read those of the model.
            "temperature": temperature,
            "top_k": self.settings.top_k or EVERY_TOKEN,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "repeat_penalty": 1.0,  # llama.cpp's name
        }
        reply = self._post(body)
        try:
            choice = reply["choices"][0]
            text, finished = choice["text"], choice["finish_reason"] == "stop"
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"{self.url}{PATH} answered {str(reply)[:300]}, which is not an answer of OpenAI's API."
            ) from None
        # An answer that stops within a character ends with a replacement character, which is not the target's.
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
                if error.code < 500 and error.code not in (408, 429):
                    raise ValueError(
                        f"The server {self.url} refused a request for model {self.model!r}: {problem}. Check the "
                        "model's name (rollouts.server_model), the API key (the environment variable OPENAI_API_KEY), "
                        "and that the server takes token ids as prompt and a top_k, as vLLM, SGLang and llama.cpp do."
                    ) from None
            except (OSError, HTTPException, ValueError) as error:  # unreachable, cut off, or half an answer
                problem = f"{type(error).__name__}: {error}"
        raise ConnectionError(
            f"The server {self.url} did not answer after {ATTEMPTS} attempts. The last one: {problem}. Is it running, "
            "and does it have memory for that many requests at once (rollouts.batch_size)? Finished shards are kept: "
            "run the same command to continue."
        )
