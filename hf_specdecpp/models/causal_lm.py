"""What is common to all causal language models of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from transformers import GenerationConfig, Pipeline
from transformers.generation import GenerateDecoderOnlyOutput

# A `PreTrainedModel` with `GenerationMixin` and an LM head. The annotations of `PreTrainedModel` know neither its
# methods for generation nor that its attributes are what they are, so a checker is told nothing about it.
CausalLM: TypeAlias = Any

# Decoders whose positions come from a table cannot run past its end; others, rotary ones for instance, merely get
# worse. What such tables are called: embeddings, and buffers with a row or a column for each position.
POSITION_EMBEDDINGS = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "position_embeds_layer")
POSITION_BUFFERS = ("position_ids", "embed_positions", "pos_encoding")
# What models and `generate()` call their cache: "cache" from transformers 5.24 on.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
CACHE = next(name for name in CACHE_NAMES if name in {item.name for item in fields(GenerateDecoderOnlyOutput)})


def base_model(model: CausalLM) -> CausalLM:
    """The transformers model inside the wrappers of PEFT and `torch.compile`; other models as they are.

    Raises:
        TypeError: it is no model, but the name of one, for instance.
        ValueError: the wrapper adds virtual tokens (prompt tuning, P-tuning, prefix tuning).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"A model is needed here, and this is {_what(model)}.")
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if not isinstance(model, PeftModel):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"The PEFT adapter {model.active_adapter!r} ({model.active_peft_config.peft_type.value}) puts virtual "
            "tokens before the prompt. They are in the cache and in no text, so hf_specdecpp cannot assist. Generate "
            "without an assistant, or use a LoRA adapter."
        )
    return model.get_base_model()


def _what(thing: object) -> str:
    """What was given in the place of a model, and what to do."""
    if isinstance(thing, str | Path):
        name = str(thing)
        return f"the name {name!r}. Load the model that it names: AutoModelForCausalLM.from_pretrained({name!r})"
    if isinstance(thing, Pipeline):
        return f"a {type(thing).__name__}. Pass the model that it has: pipe.model"
    return "None" if thing is None else article(type(thing).__name__)


def article(name: str) -> str:
    """Such as "an int" and "a bool"."""
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def inner_decoder(model: CausalLM) -> CausalLM:
    """The part of a causal LM that turns token ids into hidden states, without its LM head.

    `get_decoder()` finds it in most families. ModernBERT calls its LM head `decoder`; in Llama 4 it is a causal LM.
    """
    decoder = model.get_decoder()
    if isinstance(decoder, nn.Linear):
        return model.base_model
    return getattr(decoder, "model", decoder) if hasattr(decoder, "lm_head") else decoder


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model and all modules below it, each once, for each text anew: `modules()` takes ten times as long."""
    found = {model: None}
    left = [model]
    for module in left:
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return left


def num_bytes(model: nn.Module) -> int:
    """Of its parameters and buffers, those that are shared once."""
    parts = (each for module in modules_of(model) for each in (*module._parameters.values(), *module._buffers.values()))
    return sum({id(each): each.nbytes for each in parts if each is not None}.values())


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Its parameters, as `modules_of` finds modules: those that modules share come once for each."""
    return [each for module in modules_of(model) for each in module._parameters.values() if each is not None]


def devices_of(model: nn.Module) -> set[torch.device]:
    """Where the parameters of a model lie."""
    return {each.device for each in parameters_of(model)}


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether somebody did `module.forward = torch.compile(module.forward)`, which runs that very module's code."""
    return getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None) is not None


def has_compiled_call(module: nn.Module) -> bool:
    """Whether torch.compile sees through a call of the module, wherever that comes from."""
    wrapped = "_orig_mod" in module._modules  # `torch.compile(module)`
    in_place = module._compiled_call_impl is not None  # `module.compile()`
    return wrapped or in_place or has_compiled_forward(module)


def takes_positions(model: CausalLM) -> bool:
    """Whether the forward of a model, or of a part of one, can be told where in the text its tokens stand."""
    return "position_ids" in inspect.signature(model.forward).parameters


def why_no_positions(model: CausalLM) -> str:
    """What a message says of a model, or a part of one, whose forward cannot be told where tokens stand."""
    if "forward" not in vars(model):
        return "takes no position_ids"
    return (
        "has another forward (model.forward = ...), which does not name position_ids among its arguments "
        "(functools.wraps(the original) would)"
    )


def positions_of(model: CausalLM, tokens: Tensor, first: int = 0) -> dict[str, Tensor]:
    """What tells a forward, if it can be told, where tokens `[batch, n]` stand, the first of them at `first`."""
    if not takes_positions(model):
        return {}
    places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
    return {"position_ids": places.expand(len(tokens), -1)}


def keeping_generators(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn within leaves the generators of the host and of a device as they are."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


@contextmanager
def trying(model: CausalLM) -> Iterator[Callable[..., Any]]:
    """A model of somebody's, to be tried on a few tokens as `generate()` runs it: in eval mode, told where they stand.

    Afterwards all is as it was: which modules train, what passes have left on them, and torch's generators.

    Yields:
        What makes a pass over tokens `[batch, n]`, of which the first stands at `first`, with further arguments.
    """
    modules, device = list(model.modules()), input_device(model)
    training = [module for module in modules if module.training]
    left = [(vars(module), name, value) for module in modules for name, value in vars(module).items()
            if value is None or isinstance(value, Tensor)]  # fmt: skip

    def read(tokens: Tensor, first: int = 0, **inputs: Any) -> Any:
        return model(input_ids=tokens, **{**positions_of(model, tokens, first), **inputs}, return_dict=True)

    try:
        for module in training:
            module.training = False  # past `train()`, which some modules override
        with torch.no_grad(), keeping_generators(device):
            yield read
    finally:
        for module in training:
            module.training = True
        for attributes, name, value in left:
            attributes[name] = value


def cache_argument(model: CausalLM) -> str:
    """What a model, or a part of one, calls its cache: Mamba2 has a name of its own. One without a cache: the usual."""
    known = inspect.signature(type(model).forward).parameters
    return next((name for name in CACHE_NAMES if name in known), CACHE)


def cache_among(values: Any) -> Any:
    """The cache among arguments or outputs of a forward, if there is one."""
    by_name = values if isinstance(values, Mapping) else vars(values)
    for name in CACHE_NAMES:
        if (cache := by_name.get(name)) is not None:
            return cache
    return None


def until_end(tokens: list[int], eos: Collection[int]) -> list[int]:
    """The tokens up to the first that ends a text, that one included."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in eos), tokens)


def input_device(model: CausalLM) -> torch.device:
    """The device that a model computes on: not that of its weights where all are offloaded (accelerate)."""
    if model.device.type != "meta":
        return model.device
    hook: Any = getattr(model.get_input_embeddings(), "_hf_hook", None)
    return model.device if hook is None else torch.device(hook.execution_device)


def num_embeddings(model: CausalLM) -> int:
    """Rows of the embedding table: the ids below can be read."""
    return model.get_input_embeddings().weight.shape[0]


def num_processes(model: CausalLM) -> int:
    """How many processes make the model's passes together (tensor parallelism)."""
    return getattr(model, "tp_size", None) or 1


def move(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a model's weights. Its rotary frequencies stay in float32 whatever these are in.

    Example: in bfloat16 0.1 is 0.1001, which turns the 30,000th token by three radians more.
    """
    nn.Module.to(model, device=device, dtype=dtype)
    renew_rotary(model, device)


def renew_rotary(model: nn.Module, device: torch.device) -> None:
    """Compute a model's rotary frequencies, which are in no file, anew from its config."""
    for module in list(model.modules()):
        for name, part in module.named_children():
            if any(buffer.endswith("inv_freq") for buffer, _ in part.named_buffers(recurse=False)):
                setattr(module, name, type(part)(part.config).to(device))


def num_logits(target: CausalLM) -> int:
    return int(target.config.get_text_config().vocab_size)


def eos_ids(generation_config: GenerationConfig) -> frozenset[int]:
    """All end-of-sequence ids of a generation."""
    prepared = getattr(generation_config, "_eos_token_tensor", None)
    if prepared is not None:
        return frozenset(prepared.flatten().tolist())
    value = generation_config.eos_token_id
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def longest_text(*models: CausalLM) -> float:
    """The most tokens that all of the models can read; infinite where no positions come from a table."""
    return min((rows for model in models for rows in _position_rows(inner_decoder(model))), default=float("inf"))


def _position_rows(decoder: nn.Module) -> Iterator[int]:
    """How many tokens each table of positions has rows for.

    Example: BART's has 514 for 512 tokens (`offset`), and RoBERTa's 514, the first of them for padding and before it.
    """
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_EMBEDDINGS:
            padding = -1 if module.padding_idx is None else module.padding_idx
            yield module.num_embeddings - getattr(module, "offset", padding + 1)
    for name, buffer in decoder.named_buffers():
        if (leaf := name.rpartition(".")[2]) in POSITION_BUFFERS:
            yield buffer.shape[-1 if leaf == "position_ids" else 0]
