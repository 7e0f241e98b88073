"""Prompts from JSON Lines files and `datasets`, and the split into training and held-out prompts."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_specdecpp.files import parse_json

logger = logging.get_logger(__name__)

COLUMNS = ("prompt", "instruction", "messages", "question", "turns")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


@dataclass
class Prompt:
    """A conversation that the target continues."""

    id: str  # from the file, or file name and line number
    source: str  # name of the file or data set
    messages: list[dict[str, str]]  # `role` and `content` of each turn; the last turn is not the assistant's

    @property
    def opening(self) -> str:
        """The user's first message with normalised spaces, on which the split depends."""
        first = next((message for message in self.messages if message["role"] == "user"), self.messages[0])
        return " ".join(first["content"].split())


def read_prompts(source: str) -> list[Prompt]:
    """Return the prompts of a JSON Lines file, or of a data set `name` or `name:split` (split `train` by default).

    The first of these columns in a row is used: `prompt` (text or messages), `instruction` (with an optional `input`),
    `messages` (without answers at the end), `question`, or the first of several `turns`; `id` is optional. `ValueError`
    if there are no prompts, or for a malformed row; `OSError` or `ValueError` if the file or data set is missing."""
    path = Path(source)
    if path.is_file():
        prompts = _read_file(path)
    elif path.suffix in JSON_SUFFIXES:
        raise FileNotFoundError(f"There is no file {source}. Give JSON Lines files, or ids of data sets.")
    else:
        prompts = _read_dataset(source)
    if not prompts:
        raise ValueError(f"{source} has no prompts, so there is nothing to answer. Give data with at least one.")
    return prompts


def named_sources(sources: Sequence[str], *taken: str) -> dict[str, str]:
    """Return files and data sets by name: `folder/sums.jsonl` is named "sums", and `org/sums:test` "sums-test".
    `ValueError` if two have the same name, or a name is `taken`."""
    named = {Path(source).stem.replace(":", "-"): source for source in sources}
    if len(named) < len(sources) or not named.keys().isdisjoint(taken):
        others = f", other than {' and '.join(taken)}" if taken else ""
        raise ValueError(
            f"The sets {list(sources)} need different names, which are those of their files{others}. Rename the files."
        )
    return named


def split_prompts(
    sources: Iterable[str], heldout: float, limit: int | None = None, seed: int = 0, unseen: Collection[str] = ()
) -> dict[str, list[Prompt]]:
    """Split all distinct prompts into `train` and `heldout`. `ValueError` if there are too few prompts, all are in
    `unseen`, or as in `read_prompts`.

    A hash of `Prompt.opening` decides, so both sets have different openings, and new prompts hardly move old ones. At
    least two openings are held out unless `heldout` is 0: one to calibrate the head, one to evaluate it.

    Args:
        heldout: share of the prompts to hold out.
        limit: maximum number of prompts per source, chosen by `seed`.
        unseen: openings that are excluded from both sets.
    """
    distinct: dict[str, Prompt] = {}
    total = 0
    for source in sources:
        prompts = sample_prompts(read_prompts(source), limit, seed)
        total += len(prompts)
        for prompt in prompts:
            turns = [[message["role"], " ".join(message["content"].split())] for message in prompt.messages]
            distinct.setdefault(json.dumps(turns), prompt)
    if not distinct:
        raise ValueError("No prompts were given. Set rollouts.data to JSON Lines files or ids of data sets (--data).")
    if len(distinct) < total:
        logger.warning(f"{total - len(distinct)} of {total} prompts are duplicates and were left out.")
    kept = [prompt for prompt in distinct.values() if prompt.opening not in unseen]
    if len(kept) < len(distinct):
        logger.warning(f"{len(distinct) - len(kept)} prompts are also in a test set and are not trained on.")
    if not kept:
        raise ValueError(
            f"All {len(distinct)} prompts of rollouts.data are in a test set (evaluation.data), so nothing is left to "
            "train on. Give other prompts, or another test set."
        )
    hashes = [hashlib.sha256(prompt.opening.encode()).digest() for prompt in kept]
    places, bound = [int.from_bytes(digest[:6], "big") / 2**48 for digest in hashes], heldout
    if heldout > 0:
        if len(set(places)) < 3:
            raise ValueError(
                f"Different first messages of users: {len(set(places))}, but three are needed: one to train on, one to "
                "calibrate the head, and one to evaluate it. Give more prompts."
            )
        bound = min(max(bound, sorted(set(places))[2]), max(places))
    split: dict[str, list[Prompt]] = {"train": [], "heldout": []}
    for prompt, place in zip(kept, places, strict=True):
        split["heldout" if place < bound else "train"].append(prompt)
    return split


def sample_prompts(prompts: list[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """Choose at most `limit` of the prompts by `seed`."""
    if limit is None or limit >= len(prompts):
        return prompts
    return random.Random(seed).sample(prompts, limit)  # noqa: S311 - no secret


def _read_file(path: Path) -> list[Prompt]:
    prompts = []
    # Only \n ends a line: JSON strings may contain other separators of `splitlines`.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = parse_json(line.decode("utf-8-sig"))
        except ValueError as error:  # UnicodeDecodeError is one, too
            raise ValueError(
                f"{where} is not JSON ({error}). Each line must be an object with a prompt, such as "
                '{"prompt": "What is 2 + 2?"}.'
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f'{where} is a {type(row).__name__} and not an object such as {{"prompt": "..."}}.')
        prompts.append(_prompt(row, where, f"{path.stem}-{number}", path.stem))
    return prompts


def _read_dataset(source: str) -> list[Prompt]:
    from datasets import load_dataset

    name, _, split = source.partition(":")
    dataset = load_dataset(name, split=split or "train")
    filled = [{name: value for name, value in row.items() if value not in (None, "", [])} for row in dataset]
    rows = [(number, row) for number, row in enumerate(filled) if not row.keys().isdisjoint(COLUMNS)]
    if missing := len(filled) - len(rows):
        logger.warning(f"{missing} of {len(filled)} rows of {source} have none of {', '.join(COLUMNS)}; left out.")
    return [_prompt(row, f"{source} row {number}", f"{name}-{number}", name) for number, row in rows]


def _prompt(row: Mapping[str, Any], where: str, default_id: str, source: str) -> Prompt:
    column = next((column for column in COLUMNS if column in row), None)
    if column is None:
        raise ValueError(
            f"{where} has {', '.join(map(repr, row)) or 'nothing'} but no prompt. It needs one of {', '.join(COLUMNS)}."
        )
    value = row[column]
    if column == "instruction" and row.get("input"):
        value = f"{value}\nInput: {row['input']}"
    if column == "turns" and isinstance(value, list) and value:  # each later turn needs the answers to earlier ones
        value = value[0]
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return Prompt(str(row.get("id", default_id)), source, _messages(value, where, column))


def _messages(value: Any, where: str, column: str) -> list[dict[str, str]]:
    expected = f"{where}: {column!r} must be text, or a list of messages with text for 'role' and 'content'"
    if not isinstance(value, list):
        raise ValueError(f"{expected}, not {value!r}.")
    messages = []
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"{expected}, but a message is {message!r}.")
        messages.append({"role": message["role"], "content": message["content"]})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or not messages[-1]["content"].strip():
        raise ValueError(f"{where}: {column!r} is empty, so there is nothing to answer. Delete the line, or fill it.")
    return messages
