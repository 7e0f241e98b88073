"""Inputs of a benchmark: target, assistant, contestants and prompts (`Benchmark`); and its log (`RunLog`)."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import is_sklearn_available, logging

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark.contestants import Contestant, all_contestants, choose, quick_contestants, without_draft
from hf_specdecpp.choosing import assist, for_command
from hf_specdecpp.cli_options import BenchmarkConfig
from hf_specdecpp.draft_kinds.known import describe
from hf_specdecpp.files import differences, read_json, save_text
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_model
from hf_specdecpp.provenance import commit_of, device_name
from hf_specdecpp.texts.encoding import Codec
from hf_specdecpp.texts.prompts import named_sources, read_prompts, sample_prompts
from hf_specdecpp.trees.attention import check_trees
from hf_specdecpp.version import __version__

logger = logging.get_logger("hf_specdecpp")

RUNS, SETTINGS, RESULTS = "runs.jsonl", "settings.json", "results.json"
DEMO = Path(__file__).with_name("demo.jsonl")  # the default prompts
QUICK_PROMPTS, QUICK_TOKENS = 3, 32  # about a minute of one core with SmolLM2-135M


@dataclass
class Question:
    """The input of one `generate()` call: token ids of one prompt, or of `batch` prompts (0: a single prompt)."""

    set: str
    prompt: str
    ids: list[list[int]]
    batch: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.set, self.prompt


@dataclass
class Benchmark:
    """A loaded benchmark. The assistant is attached to the target; `questions` are single prompts."""

    config: BenchmarkConfig
    target: CausalLM
    assistant: SpecDecPPAssistant
    contestants: list[Contestant]
    questions: list[Question]

    @classmethod
    def load(cls, config: BenchmarkConfig) -> Benchmark:
        """Load models and prompts. `ValueError` or `OSError` if an option is invalid, or a file is missing."""
        if config.quick:
            config = replace(
                config, max_prompts=min(config.max_prompts or QUICK_PROMPTS, QUICK_PROMPTS), temperatures=[0.0],
                max_new_tokens=min(config.max_new_tokens, QUICK_TOKENS), attempts=1,
            )  # fmt: skip
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        target = load_model(config.target, dtype=config.dtype, device=config.device or accelerator or "cpu")
        assistant = _assistant(config, target)
        contestants = choose(_contestants(config, target, assistant), config.contestants)
        return cls(config, target, assistant, contestants, _questions(config))

    @property
    def asked(self) -> list[Question]:
        """All questions to time: single prompts (unless `live` is off), then batches."""
        return [*(self.questions if self.config.live else []), *in_batches(self.questions, self.config.batch_size)]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that results depend on, without contestants and temperatures: a later run may add some."""
        config, assistant = self.config, self.assistant
        prompts = json.dumps([[each.set, each.prompt, each.ids[0]] for each in self.questions])
        return {
            "target": config.target,
            "target_revision": commit_of(self.target),
            "assistant": config.assistant,
            "draft_name": describe(assistant.config),
            "assistant_contents": _digest(assistant),
            "prompts": f"{len(self.questions)} with hash {hashlib.sha256(prompts.encode()).hexdigest()[:16]}",
            "max_new_tokens": config.max_new_tokens,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "seed": config.seed,
            "cpu_products": assistant.speculation.cpu_products,
            **environment(self.target.device),
        }


def in_batches(questions: list[Question], sizes: list[int]) -> list[Question]:
    """Join questions to full batches, a set for each size. `ValueError` if there are fewer prompts than a batch has."""
    found = []
    for size in sizes:
        if size > len(questions):
            raise ValueError(f"batch_size={size}, but there are only {len(questions)} prompts. Give more prompts.")
        for begin in range(0, len(questions) - size + 1, size):
            ids = [row for each in questions[begin : begin + size] for row in each.ids]
            found.append(Question(f"batches of {size}", f"batch {begin // size + 1}", ids, size))
    return found


def _assistant(config: BenchmarkConfig, target: CausalLM) -> SpecDecPPAssistant:
    if config.assistant is None or config.lookup:
        assistant = for_command(target, replace(config, assistant=None))
    else:
        copy = {} if config.draft is None else {"draft": config.draft}
        assistant = assist(target, config.assistant, default=False, **copy)
    chosen: dict[str, Any] = {} if config.cpu_products is None else {"cpu_products": config.cpu_products}
    assistant.speculation = replace(assistant.speculation, **chosen)
    return assistant


def _contestants(config: BenchmarkConfig, target: CausalLM, assistant: SpecDecPPAssistant) -> list[Contestant]:
    drafter, has_head = assistant.ready_drafter(), assistant.head is not None
    if drafter.model is None:
        return without_draft()
    if config.quick:
        contestants = quick_contestants(has_head)
    else:
        try:
            check_trees(assistant.setup().tree_readers(target))
            can_tree = True
        except ValueError as error:
            can_tree = False
            logger.warning(f"No trees take part: {error}")
        contestants = all_contestants(has_head, can_tree, bool(assistant.config.acceptance_by_rank))
    # transformers' loop does not pass the target's states to a draft.
    return [each for each in contestants if each.stock is None or drafter.reads is None]


def _questions(config: BenchmarkConfig) -> list[Question]:
    codec = Codec.from_pretrained(config.target)
    sets = {name: read_prompts(source) for name, source in named_sources(config.data or [str(DEMO)]).items()}
    return [
        Question(name, item.prompt.id, [item.input_ids])
        for name, prompts in sets.items()
        for item in codec.encode_all(sample_prompts(prompts, config.max_prompts, config.seed))
    ]


def _digest(assistant: SpecDecPPAssistant) -> str:
    """A hash of config, adapter, head and own module of an assistant."""
    digest = hashlib.sha256(json.dumps(assistant.config.to_dict(), sort_keys=True, default=str).encode())
    if assistant.parts.adapter is not None:
        digest.update((assistant.parts.adapter / ADAPTER_FILES[1]).read_bytes())
    for part in (assistant.head, assistant.parts.module):
        for name, tensor in part.state_dict().items() if part is not None else ():
            digest.update(name.encode() + tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# The log --------------------------------------------------------------------------------------------------------------


def environment(device: torch.device) -> dict[str, Any]:
    """Machine and versions, for the results. A run can only be continued in the same environment."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "machine": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specdecpp": __version__,
        # If installed, transformers adapts its confidence threshold while it generates.
        "scikit-learn": is_sklearn_available(),
    }


class RunLog:
    """The file of finished generations, a JSON line each. Later runs with the same settings continue it as a new
    session: speeds are only compared within a session. `ValueError` for other settings."""

    def __init__(self, folder: Path, settings: dict[str, Any], name: str = RUNS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, known = folder / name, folder / SETTINGS
        if not known.is_file():
            save_text(json.dumps(settings, indent=2) + "\n", known)
        elif different := differences(read_json(known), settings):
            raise ValueError(
                f"{folder} has results from other settings: {'; '.join(different)}. They cannot be compared: continue "
                "with the earlier settings, choose another --output, or delete the folder."
            )
        lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.is_file() else [""]
        if lines[-1]:  # an unfinished line of a killed run
            save_text("".join(line + "\n" for line in lines[:-1]), self.path)
        self.rows = [json.loads(line) for line in lines[:-1]]
        self.session = 1 + max((row["session"] for row in self.rows), default=0)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Append a row to the log. Returns the row with the number of the session."""
        row = {**row, "session": self.session}
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return row
