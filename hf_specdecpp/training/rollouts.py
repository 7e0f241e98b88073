"""Stage `rollouts`: the target's answers to the prompts, as parquet shards.

A shard depends only on the settings and its number, and is written completely or not at all, so that a stopped run
continues with the missing shards. Several processes (`accelerate launch`) share the shards."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pyarrow
import pyarrow.parquet
from transformers.utils import logging

from hf_specdecpp.files import replacing
from hf_specdecpp.provenance import commit_of
from hf_specdecpp.texts.answers import FOLDER, HELDOUT, RECORD, TRAIN
from hf_specdecpp.texts.encoding import Codec, Encoded
from hf_specdecpp.texts.prompts import Prompt, named_sources, read_prompts, sample_prompts, split_prompts
from hf_specdecpp.texts.sampling import seed_of
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.targets import LocalTarget, ServerTarget
from hf_specdecpp.training.trainers import Record, process_state

logger = logging.get_logger(__name__)

COLUMNS = {
    "prompt_id": "string", "source": "string", "sample": "int32", "temperature": "float32",
    "input_ids": pyarrow.list_(pyarrow.int32()), "prompt_length": "int32", "finished": "bool",
}  # fmt: skip

FEW_TOKENS = 50_000  # of answers; SmolLM2's draft was trained on 587,000

Row: TypeAlias = tuple[Encoded, int, float]  # an answer to generate: its prompt, sample number and temperature
# (prompts, temperature, seed) -> (index of a prompt, new tokens, whether an end-of-sequence token ended them), ...
Target: TypeAlias = Callable[[list[Encoded], float, int], Iterator[tuple[int, list[int], bool]]]


# Prompts -------------------------------------------------------------------------------------------------------------


def sets_to_evaluate(config: TrainingConfig) -> dict[str, str]:
    """Return the name of each test set with its file or data set. `ValueError` as in `named_sources`."""
    return named_sources(config.evaluation.data, TRAIN, HELDOUT)


def all_prompts(config: TrainingConfig) -> dict[str, list[Prompt]]:
    """Return the prompts by set: `train`, `heldout` and the name of every test set."""
    rollouts = config.rollouts
    whole = {name: read_prompts(source) for name, source in sets_to_evaluate(config).items()}
    unseen = {prompt.opening for prompts in whole.values() for prompt in prompts}  # also beyond `max_prompts`
    prompts = split_prompts(rollouts.data, rollouts.heldout, rollouts.max_prompts, config.seed, unseen)
    tests = {name: sample_prompts(each, config.evaluation.max_prompts, config.seed) for name, each in whole.items()}
    return {**prompts, **tests}


# Answers -------------------------------------------------------------------------------------------------------------


def run(config: TrainingConfig) -> None:
    """Answer all prompts that have no answer yet. `ValueError` if prompts or settings are invalid, or answers are from
    other settings; `OSError` if the server does not answer, or the disk is full: finished shards are kept."""
    folder = config.work / FOLDER
    state = process_state()
    prompts = all_prompts(config)
    codec = Codec.from_pretrained(config.target)
    record = Record(folder / RECORD, _settings(config, codec, prompts))
    if record.result() is not None:
        logger.info(f"{folder} is complete.")
        return
    with state.main_process_first():
        # Answers are expensive, so those from other or unknown settings are not deleted: the run stops.
        advice = f"Continue with the earlier settings, choose another work_dir, or delete {folder} to start again."
        if not record.path.is_file() and any(folder.glob("*/shard-*.parquet")):
            raise ValueError(f"{folder} has answers but no {RECORD}, so their settings are unknown. {advice}")
        if different := record.changes():
            raise ValueError(f"{folder} has answers from other settings: {'; '.join(different)}. {advice}")
        record.begin()
    shards = _plan(config, {split: codec.encode_all(prompts[split]) for split in prompts})
    _answer(config, codec, dict(list(shards.items())[state.process_index :: state.num_processes]))
    state.wait_for_everyone()
    if state.is_main_process:
        summary = {split: _summary([path for path in shards if path.parent.name == split]) for split in prompts}
        record.end(summary)
        if config.distill.enabled:
            warn_of_few(**summary["train"])


def _settings(config: TrainingConfig, codec: Codec, prompts: dict[str, list[Prompt]]) -> dict[str, Any]:
    """The settings that answers depend on. Server address and batch size are left out: they may change between runs."""
    rollouts = config.rollouts
    texts = json.dumps([[[prompt.id, prompt.messages] for prompt in prompts[split]] for split in prompts])
    return {
        "target": config.target,
        "revision": commit_of(SimpleNamespace(config=codec.config)),
        "answered_by": "server" if rollouts.server else "local",
        "prompts": f"{sum(map(len, prompts.values()))} with hash {hashlib.sha256(texts.encode()).hexdigest()[:16]}",
        "temperatures": [float(temperature) for temperature in rollouts.temperatures],
        **{name: getattr(rollouts, name) for name in ("top_k", "max_new_tokens", "samples_per_prompt", "shard_size")},
        "dtype": config.dtype,
        "heldout": float(rollouts.heldout),
        "seed": config.seed,
    }


def _plan(config: TrainingConfig, items: dict[str, list[Encoded]]) -> dict[Path, list[Row]]:
    """The rows of each shard, by path, all of one temperature. First samples of all prompts precede second samples."""
    size, plan = config.rollouts.shard_size, {}
    for split, encoded in items.items():
        shuffled = random.Random(config.seed).sample(encoded, len(encoded))  # noqa: S311 - no secret
        for sample in range(config.rollouts.samples_per_prompt):
            for temperature in config.rollouts.temperatures:
                rows = [(item, sample, temperature) for item in shuffled if temperature > 0 or sample == 0]
                for start in range(0, len(rows), size):
                    name = f"shard-{sample}-{temperature:g}-{start // size:05d}.parquet"
                    plan[config.work / FOLDER / split / name] = rows[start : start + size]
    return plan


def _answer(config: TrainingConfig, codec: Codec, shards: dict[Path, list[Row]]) -> None:
    """Generate those of the `shards` that are not whole."""
    missing = {path: rows for path, rows in shards.items() if not _is_whole(path, len(rows))}
    if not missing:
        return
    target: Target = (ServerTarget if config.rollouts.server else LocalTarget)(config, codec)
    total, left = (sum(map(len, each.values())) for each in (shards, missing))
    begin, tokens = time.perf_counter(), 0
    quiet = not process_state().is_main_process
    with logging.tqdm(total=total, initial=total - left, desc="rollouts", unit="answer", disable=quiet) as bar:
        for path, rows in missing.items():
            finished, seed = dict[int, dict[str, Any]](), seed_of(config.seed, path.parent.name, path.name)
            for index, answer, ended in target([item for item, *_ in rows], rows[0][-1], seed):
                bar.update()
                item, sample, temperature = rows[index]
                finished[index] = {
                    "prompt_id": item.prompt.id, "source": item.prompt.source, "sample": sample,
                    "temperature": temperature, "input_ids": item.input_ids + answer,
                    "prompt_length": len(item.input_ids), "finished": ended,
                }  # fmt: skip
                tokens += len(answer)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - begin):.1f} tokens/s", refresh=False)
            table = pyarrow.Table.from_pylist([finished[index] for index in range(len(rows))], pyarrow.schema(COLUMNS))
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                pyarrow.parquet.write_table(table, temporary)


def _is_whole(path: Path, num_rows: int) -> bool:
    """Whether a shard exists with all its rows. Warns of a file that is damaged."""
    if not path.is_file():
        return False
    with suppress(pyarrow.ArrowInvalid, OSError):
        if pyarrow.parquet.read_metadata(path).num_rows == num_rows:
            return True
    logger.warning(f"{path} is damaged and is generated again.")
    return False


def warn_of_few(answers: int, answer_tokens: int, **_: Any) -> None:
    """Warn if there are too few answer tokens for a useful draft."""
    if answer_tokens < FEW_TOKENS:
        logger.warning(
            f"The draft trains on {answer_tokens:,} tokens of {answers:,} answers. With fewer than {FEW_TOKENS:,} most "
            "drafts are accepted too rarely to speed up generation. Give more prompts, or raise "
            "rollouts.samples_per_prompt or rollouts.max_new_tokens (docs/training.md)."
        )


def _summary(paths: list[Path]) -> dict[str, Any]:
    rows = [
        (len(row["input_ids"]) - row["prompt_length"], row["finished"])
        for path in paths
        for row in pyarrow.parquet.read_table(path, columns=["input_ids", "prompt_length", "finished"]).to_pylist()
    ]
    return {"answers": len(rows), "answer_tokens": sum(row[0] for row in rows), "finished": sum(row[1] for row in rows)}
