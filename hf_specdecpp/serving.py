"""Drafts as other engines serve them: plain models written and loaded again to compare, and the commands to type."""

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
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_model

# Copied as they are: transformers writes tokenizers anew, and llama.cpp wants the original SentencePiece model.
TOKENIZER_FILES = [
    "tokenizer*.json", "*.model", "*.tiktoken", "tekken.json", "vocab.*", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.*",
]  # fmt: skip
PROBE = 32  # tokens
TOLERANCE = 1e-3  # of the largest logit: the same weights in the same modules differ by rounding at most
TOLERANCE_IN_HALF = 5e-2


@dataclass(frozen=True)
class Destination:
    """Where a draft is written, and what for: into `folder`, which becomes `output`, as commands name it, once all is
    right.

    An engine that drafts a fixed number of tokens drafts `num_tokens`; `target` is `None` where nobody has named it.
    """

    folder: Path
    output: Path
    target: str | None
    revision: str | None
    num_tokens: int


@dataclass(frozen=True)
class Exported:
    """Commands that serve a draft, by engine, and whole sentences about what differs from the draft as it runs here."""

    commands: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)


# Commands -------------------------------------------------------------------------------------------------------------


# The engines' names of the method (vLLM, SGLang, llama.cpp), and the branches of SGLang's tree, of which 1 is a chain.
AS_MODEL = "draft_model", "STANDALONE", "draft-simple", 1
AS_EAGLE3 = "eagle3", "EAGLE3", "draft-eagle3", 4


def commands_for(to: Destination, method: tuple[str, str, str, int] = AS_MODEL) -> dict[str, list[str]]:
    """Commands by engine for a draft, ready for a shell; a target without a name is `TARGET`."""
    (vllm, sglang, llama_cpp, branches), count, draft = method, to.num_tokens, str(to.output)
    target, gguf = to.target or "TARGET", f"{to.output}.gguf"
    converting = ["--target-model-dir", target] if method == AS_EAGLE3 else []
    settings = {"method": vllm, "model": draft, "num_speculative_tokens": count}
    # Nodes of the tree, the token before it included: a chain of k tokens has k + 1.
    nodes = count + 1 if branches == 1 else branches * count
    tree = f"--speculative-num-steps {count} --speculative-eagle-topk {branches} --speculative-num-draft-tokens {nodes}"
    words = {
        "vLLM": [["vllm", "serve", target, "--speculative-config", json.dumps(settings, separators=(",", ":"))]],
        "SGLang": [
            ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", sglang]
            + ["--speculative-draft-model-path", draft, *tree.split()]
        ],
        "llama.cpp": [
            ["python", "convert_hf_to_gguf.py", draft, *converting, "--outfile", gguf],
            ["llama-server", "-m", f"{Path(target).name}.gguf", "--spec-type", llama_cpp, "-md", gguf]
            + ["--spec-draft-n-max", str(count)],
        ],
    }
    return {engine: [shlex.join(command) for command in commands] for engine, commands in words.items()}


# Plain models ---------------------------------------------------------------------------------------------------------


def write_plain_model(
    model: CausalLM, source: str, revision: str | None, config: SpecDecPPConfig, to: Destination
) -> Exported:
    """Write a draft, its adapter merged, with the tokenizer files of `source`, and load it again; `ValueError` if the
    model is more or less than an ordinary causal LM, is quantised, has no tokenizer files, or does not come back from
    its files as it was."""
    name = type(model).__name__
    if model.config.get_text_config(decoder=True) is not model.config:
        raise ValueError(
            f"{name} reads more than text, and engines want a language model as a draft. Name a text-only model of the "
            "same weights with --target, or train a draft that is a model of its own."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"{name} is quantised, so an adapter cannot be merged into its weights, nor would engines read a part of "
            "them alone. Name the model before quantisation with --target; engines can quantise what is exported."
        )
    # An adapter of the LM head parts it from the embeddings that it was tied to.
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = head.weight is embeddings.weight
    # The ends of texts, and how many tokens to draft: how a target samples is none of a draft's business.
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
            f"Here the draft proposes {config.draft_vocab_size} of {size} tokens. A plain model cannot say that, so "
            "its full LM head is exported: a step costs more, and other tokens are proposed, too."
        )
    if config.vocab_size not in (None, size):
        notes.append(
            f"The draft has {size} token ids and the target {config.vocab_size}. vLLM wants equal numbers and may "
            "refuse the pair."
        )
    return Exported(commands_for(to), notes)


def _copy_tokenizer(source: str, revision: str | None, folder: Path) -> None:
    local = Path(source).is_dir()
    root = Path(source if local else snapshot_download(source, revision=revision, allow_patterns=TOKENIZER_FILES))
    found = {file for pattern in TOKENIZER_FILES for file in root.glob(pattern)}
    if not found:
        raise ValueError(
            f"{source!r} has no tokenizer files, and engines load a draft with them. Put the tokenizer of the target "
            "into a folder with the model: AutoTokenizer.from_pretrained(target).save_pretrained(folder)."
        )
    for file in found:
        shutil.copyfile(file, folder / file.name)


def _check_reloaded(model: CausalLM, folder: Path) -> None:
    """Raise `ValueError` unless what is in `folder` is the model: weights, settings of layers, logits of a text."""
    try:
        again = load_model(folder)
    except Exception as failure:  # whatever the checks of a family's config and constructor raise
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
        f"{type(model).__name__} does not come back from its files as the draft that it was: {how}. Its family builds "
        "layers by rules that a choice of layers does not keep, so another engine would draft something else, and what "
        "was written is deleted. The first layers alone may do (--layers N when training); an independent draft does."
    )


def _contents(model: CausalLM) -> dict[str, Any]:
    """The weights, and every plain setting in every layer, such as its window."""
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
