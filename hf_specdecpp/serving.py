"""Drafts for other engines: writes plain models, checks that they can be loaded again, and makes serving commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import GenerationConfig

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_model

# Files to copy: transformers would rewrite tokenizers, and llama.cpp needs the original SentencePiece model.
TOKENIZER_FILES = [
    "tokenizer*.json", "*.model", "*.tiktoken", "tekken.json", "vocab.*", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.*",
]  # fmt: skip
PROBE = 32  # number of tokens after which logits are compared
TOLERANCE = 1e-3  # relative to the largest logit, for rounding
TOLERANCE_IN_HALF = 5e-2


@dataclass(frozen=True)
class Destination:
    """Folders of an exported draft, and the target and draft length for its serving commands.

    The draft is written into `folder`, which is renamed to `output` after all checks. `num_tokens`: candidates per
    round; `target`: Hub id or folder, `None` if unknown, and its `revision`; `head`: for engines that take one."""

    folder: Path
    output: Path
    target: str | None
    revision: str | None
    num_tokens: int
    head: AcceptanceHead | None = None


@dataclass(frozen=True)
class Exported:
    """Commands that serve a draft, by engine, and notes: sentences on differences from the draft in this package."""

    commands: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)


# Commands -------------------------------------------------------------------------------------------------------------


# Names of the method in vLLM, SGLang and llama.cpp.
AS_MODEL = "draft_model", "STANDALONE", "draft-simple"
AS_EAGLE3 = "eagle3", "EAGLE3", "draft-eagle3"
AS_DSPARK = "dspark", "DSPARK", "draft-dspark"
TEMPERATURES = "confidence_temperatures.json"  # for SGLang: a factor of the confidence at each place of a block


def commands_for(to: Destination, method: tuple[str, str, str] = AS_MODEL) -> dict[str, list[str]]:
    """Shell commands that serve a draft by `method`, by engine, with `TARGET` for an unknown target."""
    (vllm, sglang, llama_cpp), count, draft = method, to.num_tokens, str(to.output)
    target, gguf, is_dspark = to.target or "TARGET", f"{to.output}.gguf", method == AS_DSPARK
    reads_target = [] if method == AS_MODEL else ["--target-model-dir", target]
    settings = {"method": vllm, "model": draft, "num_speculative_tokens": count}
    settings |= {"enable_adaptive_verification": True} if is_dspark else {}
    launch = ["env", "SGLANG_RAGGED_VERIFY_MODE=compact"] if is_dspark else []
    launch += ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", sglang]
    how = ["--speculative-num-steps", str(count), "--speculative-eagle-topk", "1"]
    how = ["--speculative-dspark-confidence-sts-path", f"{draft}/{TEMPERATURES}"] if is_dspark else how
    words = {
        "vLLM": [["vllm", "serve", target, "--speculative-config", json.dumps(settings, separators=(",", ":"))]],
        "SGLang": [  # counts the last token of the sequence, too
            [*launch, "--speculative-draft-model-path", draft, *how, "--speculative-num-draft-tokens", str(count + 1)]
        ],
        "llama.cpp": [
            ["python", "convert_hf_to_gguf.py", draft, *reads_target, "--outfile", gguf],
            ["llama-server", "-m", f"{Path(target).name}.gguf", "--spec-type", llama_cpp, "-md", gguf]
            + ["--spec-draft-n-max", str(count), *(["--spec-draft-p-min", "0.5"] if is_dspark else [])],
        ],
    }
    return {engine: [shlex.join(command) for command in commands] for engine, commands in words.items()}


# Plain models ---------------------------------------------------------------------------------------------------------


def write_plain_model(
    model: CausalLM, source: str, revision: str | None, config: SpecDecPPConfig, to: Destination
) -> Exported:
    """Write a draft with its merged adapter and the tokenizer files of `source`, and check that it can be loaded again.
    `ValueError` if the model is not a text-only causal LM, is quantised, has no tokenizer files, or differs after
    loading."""
    name = type(model).__name__
    if model.config.get_text_config(decoder=True) is not model.config:
        raise ValueError(
            f"{name} reads more than text, but engines need a text-only draft. Name a text-only model with the same "
            "weights with --target, or train an independent draft."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"{name} is quantised, so an adapter cannot be merged into its weights, and engines cannot load a part of "
            "its layers. Name the unquantised model with --target; engines can quantise the exported draft."
        )
    # An LM head with a merged adapter is no longer tied to the embeddings.
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = head.weight is embeddings.weight
    # Special tokens and the draft length only: the target's sampling settings do not concern the draft.
    ids = {name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    counts: dict[str, Any] = {"num_assistant_tokens": to.num_tokens, "num_assistant_tokens_schedule": "constant"}
    model.generation_config = GenerationConfig(**ids, **counts)
    try:
        model.save_pretrained(to.folder)
    except StrictDataclassError as error:
        raise _not_equal(model, f"its config does not hold together ({error})") from error
    except SafetensorError as error:
        raise OSError(f"{to.folder} could not be written ({error}). Make room on the disk and try again.") from error
    _copy_tokenizer(source, revision, to.folder)
    _check_reloaded(model, to.folder)
    size, notes = model.config.vocab_size, list[str]()
    if config.draft_vocab_size is not None:
        notes.append(
            f"Here the draft proposes {config.draft_vocab_size} of {size} tokens. Plain models have no draft "
            "vocabulary: the full LM head is exported, so a step takes longer, and other tokens are proposed, too."
        )
    if config.vocab_size not in (None, size):
        notes.append(
            f"The draft has {size} token ids and the target {config.vocab_size}. vLLM expects equal numbers and may "
            "refuse the pair."
        )
    return Exported(commands_for(to), notes)


def _copy_tokenizer(source: str, revision: str | None, folder: Path) -> None:
    local = Path(source).is_dir()
    root = Path(source if local else snapshot_download(source, revision=revision, allow_patterns=TOKENIZER_FILES))
    found = {file for pattern in TOKENIZER_FILES for file in root.glob(pattern)}
    if not found:
        raise ValueError(
            f"{source!r} has no tokenizer files, which engines need. Save the target's tokenizer to the folder of the "
            "model: AutoTokenizer.from_pretrained(target).save_pretrained(folder)."
        )
    for file in found:
        shutil.copyfile(file, folder / file.name)


def _check_reloaded(model: CausalLM, folder: Path) -> None:
    """Raise `ValueError` unless the model in `folder` equals `model`: weights, settings of layers, and logits."""
    try:
        again = load_model(folder)
    except Exception as failure:  # configs and constructors of model families raise errors of any class
        raise _not_equal(model, f"transformers cannot load them ({str(failure)[:200]})") from failure
    ours, theirs = _contents(model), _contents(again)
    names = sorted({*ours, *theirs})
    if differing := [name for name in names if not _same(ours.get(name, "none"), theirs.get(name, "none"))]:
        raise _not_equal(model, f"{len(differing)} weights or settings differ, such as {', '.join(differing[:3])}")
    tokens = torch.arange(PROBE)[None] % model.config.vocab_size
    with torch.inference_mode():
        ours, theirs = model(tokens).logits.float(), again(tokens).logits.float()
    error, largest = float((ours - theirs).abs().max()), max(1.0, float(ours.abs().max()))
    in_half = model.dtype in (torch.float16, torch.bfloat16)
    if not error <= largest * (TOLERANCE_IN_HALF if in_half else TOLERANCE):
        raise _not_equal(model, f"its logits differ by up to {error:.3g}")


def _not_equal(model: CausalLM, how: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} loaded from the exported files differs from the draft: {how}. Its family sets up "
        "layers by their number, so other engines would draft other tokens; the files are deleted. The first layers of "
        "the target may work (train with --layers N), and an independent draft works."
    )


def _contents(model: CausalLM) -> dict[str, Any]:
    """Weights by name, and all attributes of layers that are numbers, strings, bool or `None`, such as a window."""
    settings = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        if re.search(r"\.\d+(\.|$)", name)
        for key, value in {"type": type(module).__name__, **vars(module)}.items()
        if isinstance(value, bool | int | float | str | None) and not key.startswith("_")
    }
    return {**settings, **model.state_dict()}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
