"""Access to parts and properties of any causal language model of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from transformers import GenerationConfig, GenerationMixin, Pipeline, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

# A `PreTrainedModel` with `GenerationMixin` and an LM head. `Any`, because the annotations of `PreTrainedModel` lack
# the methods for generation and the types of its attributes.
CausalLM: TypeAlias = Any

# Names of position tables: embeddings, and buffers with a row or a column for each position. A decoder with such a
# table cannot read sequences longer than the table; decoders without one, such as rotary ones, merely get worse.
POSITION_EMBEDDINGS = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "position_embeds_layer")
OTHER_INPUTS = ("image", "vision", "visual", "audio")  # in names of parts that do not read text
POSITION_BUFFERS = ("position_ids", "embed_positions", "pos_encoding")
# Names of the cache in models and in `generate()`: "cache" from transformers 5.24 on.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
CACHE = next(name for name in CACHE_NAMES if name in {item.name for item in fields(GenerateDecoderOnlyOutput)})


def base_model(model: CausalLM) -> CausalLM:
    """The transformers model inside the wrappers of PEFT and `torch.compile`; other models are returned unchanged.

    Raises:
        TypeError: `model` is no model of transformers, but a name, a pipeline or another module, for instance.
        ValueError: the wrapper adds virtual tokens (prompt tuning, P-tuning, prefix tuning).
    """
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if isinstance(model, PeftModel):
        if model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"The PEFT adapter {model.active_adapter!r} ({model.active_peft_config.peft_type.value}) puts virtual "
                "tokens before the prompt. They are in the cache and in no text, so hf_specdecpp cannot assist. "
                "Generate without an assistant, or use a LoRA adapter."
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"A model is needed here, and this is {_what(model)}.")
    return model


def _what(thing: object) -> str:
    """Description, for an error message, of an argument that should be a model, with a remedy if one is known."""
    if isinstance(thing, str | Path):
        name = str(thing)
        return f"the name {name!r}. Load the model that it names: AutoModelForCausalLM.from_pretrained({name!r})"
    if isinstance(thing, Pipeline):
        return f"a {type(thing).__name__}. Pass the model that it has: pipe.model"
    name = "None" if thing is None else article(type(thing).__name__)
    if isinstance(getattr(thing, "module", None), nn.Module):  # as in PyTorch's DataParallel
        return f"{name}. Pass the model that it has: wrapper.module"
    other = ", which is no PreTrainedModel of transformers. If there is one inside it, pass that"
    return f"{name}{other if isinstance(thing, nn.Module) else ''}"


def article(name: str) -> str:
    """The name after its indefinite article: "an int", "a bool"."""
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def inner_decoder(model: CausalLM) -> CausalLM:
    """The part of a causal LM that turns token ids into hidden states, without the LM head.

    `get_decoder()` returns this part in most families, but the LM head in ModernBERT, and a causal LM in Llama 4."""
    decoder = model.get_decoder()
    if isinstance(decoder, nn.Linear):
        return model.base_model
    return getattr(decoder, "model", decoder) if hasattr(decoder, "lm_head") else decoder


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model and all its submodules, each once, in a tenth of the time of `modules()`."""
    found = {model: None}
    left = [model]
    for module in left:
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return left


def num_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; shared ones count once."""
    parts = (each for module in modules_of(model) for each in (*module._parameters.values(), *module._buffers.values()))
    return sum({id(each): each.nbytes for each in parts if each is not None}.values())


def parameters_of(model: nn.Module) -> list[Tensor]:
    """The parameters of a model and its submodules; one that several modules share is listed once for each of them."""
    return [each for module in modules_of(model) for each in module._parameters.values() if each is not None]


def parameter_ids(model: nn.Module) -> dict[tuple[int, str], int]:
    """The `id()` of each parameter, by the `id()` of its module and its name there, to notice replaced ones. Each pass
    replaces offloaded ones, so they are left out. Weak references would keep PyTorch from moving tensor subclasses."""
    named = ((id(module), *item) for module in modules_of(model) for item in module._parameters.items())
    return {(module, name): id(each) for module, name, each in named if each is not None and each.device.type != "meta"}


def devices_of(model: nn.Module) -> set[torch.device]:
    """The devices of a model's parameters."""
    return {each.device for each in parameters_of(model)}


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether `module.forward = torch.compile(module.forward)` was set, which in a copy calls the original module."""
    return getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None) is not None


def has_compiled_call(module: nn.Module) -> bool:
    """Whether a call of the module runs code compiled by `torch.compile(module)`, by `module.compile()`, or by
    `module.forward = torch.compile(module.forward)`."""
    wrapped = "_orig_mod" in module._modules  # `torch.compile(module)`
    in_place = module._compiled_call_impl is not None  # `module.compile()`
    return wrapped or in_place or has_compiled_forward(module)


def takes_positions(model: CausalLM) -> bool:
    """Whether the forward of a model, or of its decoder, has an argument `position_ids`."""
    return "position_ids" in inspect.signature(model.forward).parameters


def why_no_positions(model: CausalLM) -> str:
    """Why `takes_positions` is false for a model or decoder, as the predicate of a message: "takes no position_ids"."""
    if "forward" not in vars(model):
        return "takes no position_ids"
    return (
        "has another forward (model.forward = ...), which does not name position_ids among its arguments "
        "(functools.wraps(the original) would)"
    )


def positions_of(model: CausalLM, tokens: Tensor, first: int = 0) -> dict[str, Tensor]:
    """The argument `position_ids`, from `first` on, for `tokens` `[batch, n]`; an empty dict if `model` takes none."""
    if not takes_positions(model):
        return {}
    places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
    return {"position_ids": places.expand(len(tokens), -1)}


def keeping_generators(device: torch.device) -> AbstractContextManager[None]:
    """A context that restores the states of torch's random generators of the CPU and of `device` at its end."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


@contextmanager
def trying(model: CausalLM) -> Iterator[Callable[..., Any]]:
    """A context for trial passes of a user's model, in eval mode and without gradients, as in `generate()`.

    Afterwards the training flags, all tensor and `None` attributes of modules, and torch's generators are restored.

    Yields:
        A function `read(tokens, first=0, **inputs)`, a forward pass over `tokens` `[batch, n]` from position `first`.
    """
    modules, device = list(model.modules()), input_device(model)
    training = [module for module in modules if module.training]
    left = [(vars(module), name, value) for module in modules for name, value in vars(module).items()
            if value is None or isinstance(value, Tensor)]  # fmt: skip

    def read(tokens: Tensor, first: int = 0, **inputs: Any) -> Any:
        return model(input_ids=tokens, **{**positions_of(model, tokens, first), **inputs}, return_dict=True)

    try:
        for module in training:
            module.training = False  # not by `train()`, which some modules override
        with torch.no_grad(), keeping_generators(device):
            yield read
    finally:
        for module in training:
            module.training = True
        for attributes, name, value in left:
            attributes[name] = value


def has_usual_inputs(model: CausalLM) -> bool:
    """Whether the model inherits `prepare_inputs_for_generation` from transformers' `GenerationMixin`."""
    return type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation


def cache_argument(model: CausalLM) -> str:
    """Name of the forward's argument for the cache (`cache_params` in Mamba2); the usual name if there is none."""
    known = forward_parameters(type(model))
    return next((name for name in CACHE_NAMES if name in known), CACHE)


def forward_parameters(kind: type[nn.Module]) -> set[str]:
    """Names of all parameters of a class's forward, including `self` and `kwargs`. If the forward takes `**kwargs`, the
    names of the forward that it overrides are added, and so on up the class's bases."""
    names: set[str] = set()
    for own in (vars(each) for each in kind.__mro__ if each is not nn.Module):
        if "forward" in own:
            parameters = inspect.signature(own["forward"]).parameters
            names.update(parameters)
            if all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
                break
    return names


def cache_among(values: Any) -> Any:
    """The cache among the arguments (a mapping) or in the output (an object) of a forward; `None` if there is none."""
    by_name = values if isinstance(values, Mapping) else vars(values)
    return next((by_name[name] for name in CACHE_NAMES if by_name.get(name) is not None), None)


def until_end(tokens: list[int], eos: Collection[int]) -> list[int]:
    """The tokens up to and including the first token in `eos`; all tokens if there is none."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in eos), tokens)


def input_device(model: CausalLM) -> torch.device:
    """The device on which a model takes input ids, also if accelerate has offloaded all of its weights."""
    if model.device.type != "meta":
        return model.device
    hook: Any = getattr(model.get_input_embeddings(), "_hf_hook", None)
    return model.device if hook is None else torch.device(hook.execution_device)


def num_embeddings(model: CausalLM) -> int:
    """Number of rows of the input embedding table: the model can read token ids below this number."""
    return model.get_input_embeddings().weight.shape[0]


def num_processes(model: CausalLM) -> int:
    """Number of processes among which tensor parallelism divides the model's forward passes; 1 without it."""
    return getattr(model, "tp_size", None) or 1


def move(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a model to a device and dtype, in place, except that its rotary frequencies stay in float32.

    Example: 0.1 in bfloat16 is 0.1001, which would rotate the 30,000th token by three more radians."""
    nn.Module.to(model, device=device, dtype=dtype)
    renew_rotary(model, device)


def renew_rotary(model: nn.Module, device: torch.device) -> None:
    """Replace the rotary modules of a model by new ones, with float32 frequencies computed from its config."""
    for module in list(model.modules()):
        for name, part in module.named_children():
            if any(buffer.endswith("inv_freq") for buffer, _ in part.named_buffers(recurse=False)):
                setattr(module, name, type(part)(part.config).to(device))


def num_logits(target: CausalLM) -> int:
    """Size of the vocabulary over which a target's logits and the draft's q are compared."""
    return int(target.config.get_text_config().vocab_size)


def eos_ids(generation_config: GenerationConfig) -> frozenset[int]:
    """The end-of-sequence token ids of a generation config; empty if it has none."""
    prepared = getattr(generation_config, "_eos_token_tensor", None)
    if prepared is not None:
        return frozenset(prepared.flatten().tolist())
    value = generation_config.eos_token_id
    return frozenset([value] if isinstance(value, int) else value or ())


def longest_text(*models: CausalLM) -> float:
    """Length in tokens of the longest sequence that all `models` can read; infinite if none has a position table."""
    return min((rows for model in models for rows in _position_rows(inner_decoder(model))), default=float("inf"))


def _position_rows(decoder: nn.Module) -> Iterator[int]:
    """For each position table of a decoder, the number of tokens that it has rows for.

    Example: BART's table has 1026 rows for 1024 tokens (`offset` 2), RoBERTa's 514 for 512 (`padding_idx` 1). GIT's
    decoder contains an encoder of images, whose table has a row for each patch of an image and is left out."""
    parts = decoder._modules.items()
    of_text = [part for name, part in parts if part is not None and not any(kind in name for kind in OTHER_INPUTS)]
    for module in [decoder, *chain.from_iterable(map(modules_of, of_text))]:
        for name in POSITION_EMBEDDINGS:
            if isinstance(table := module._modules.get(name), nn.Embedding):
                padding = -1 if table.padding_idx is None else table.padding_idx
                yield table.num_embeddings - getattr(table, "offset", padding + 1)
        for name in POSITION_BUFFERS:
            if (buffer := module._buffers.get(name)) is not None:
                yield buffer.shape[-1 if name == "position_ids" else 0]
