"""Go on where an earlier run stopped: one idiom for every stage.

Beside what a stage makes lies its record, a JSON file with the settings that it is made with, for example

    {"settings": {"target": "org/model", "rank": 8}, "complete": false}

and, once it is complete, what came of it. All other files appear whole or not at all (`files.replacing`). A run with
the same settings takes what is there and makes what is missing; what was made with other settings is removed and made
again, or refused where it was expensive.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.files import differences, read_json, save_tensors, save_text

logger = logging.get_logger("hf_specdecpp")


class Record:
    """The record of what is made with `settings`.

    Args:
        path: of the JSON file.
        settings: all that what is made depends on; whatever JSON can hold.
        made: files and folders that are worth nothing once the settings are others.
    """

    def __init__(self, path: Path, settings: dict[str, Any], made: Sequence[Path] = ()) -> None:
        self.path, self.made = path, made
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))  # a tuple would not equal the list read back

    def result(self) -> dict[str, Any] | None:
        """What came of an earlier run with the same settings; `None` unless it has ended."""
        found = self._read()
        return found if found.get("complete") and found.get("settings") == self.settings else None

    def changes(self) -> list[str]:
        """How the settings of an earlier run differ from these, in words; empty where there was none."""
        found = self._read()
        return differences(found.get("settings", {}), self.settings) if found else []

    def begin(self) -> None:
        """Note the settings. What was made with others, or nobody knows with which, is removed first."""
        found = self._read()
        if found.get("settings") == self.settings:
            return
        if found:
            logger.warning(f"{self.path.parent} is of other settings and is made again: {'; '.join(self.changes())}.")
        for path in self.made:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._write({"settings": self.settings, "complete": False})

    def end(self, result: dict[str, Any]) -> None:
        """Note that all is made, and what came of it."""
        self._write({"settings": self.settings, "complete": True, **result})

    def _read(self) -> dict[str, Any]:
        return dict(read_json(self.path)) if self.path.is_file() else {}

    def _write(self, contents: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_json(contents, self.path)


def shards(
    record: Record, rows: Sequence[int], size: int, make: Callable[[Iterable[int]], dict[str, Tensor]], title: str
) -> list[Path]:
    """Safetensors files beside a record, `size` of the `rows` in each; those that are there are not made again.

    Args:
        make: the tensors of some rows; it goes through them once.
        title: of the bar that counts the rows.
    """
    record.begin()
    paths = []
    with logging.tqdm(total=len(rows), desc=title, unit="text") as bar:
        for number, start in enumerate(range(0, len(rows), size)):
            part = rows[start : start + size]
            path = record.path.with_name(f"shard-{number:05d}.safetensors")
            if path.is_file():
                bar.update(len(part))
            else:
                save_tensors(make(_counted(part, bar)), path)
            paths.append(path)
    return paths


def _counted(rows: Sequence[int], bar: Any) -> Iterator[int]:
    for row in rows:
        yield row
        bar.update()


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of several parts, one after another; empty where there is no part."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def save_json(contents: Any, path: Path) -> None:
    save_text(json.dumps(contents, indent=2) + "\n", path)
