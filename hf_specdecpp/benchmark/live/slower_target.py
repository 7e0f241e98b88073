"""A target that says exactly the same and costs more: what a draft is worth depends on how much cheaper it is.

Behind the target's layers come further ones whose output projections are zero, so that they compute everything and add
nothing. Their other weights are those of the target's own layers in turn, shared: they cost no memory, yet have to be
fetched from it as those of a larger model would be.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_specdecpp.clocks import least_times
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.early_exit import layer_stack, with_layers
from hf_specdecpp.models.reader import Reader

# What the families call the projections that write into the residual stream.
OUTPUTS = frozenset(
    {
        "o_proj",
        "down_proj",
        "out_proj",
        "fc2",
        "c_proj",
        "dense",
        "dense_4h_to_h",
        "fc_out",
        "w2",
        "wo",
        "output_linear",
    }
)
PROBED_LAYERS = 16  # whose cost is measured to find how many are needed
CONTEXT, STEP_SECONDS = 64, 20.0  # tokens in the caches, and most seconds of timing steps


def slower_target(target: CausalLM, extra_layers: int) -> CausalLM:
    """A model with `extra_layers` more decoder layers and the same logits, bit for bit.

    It shares its tensors with `target`. Its key-value cache and its time grow with its layers. An early-exit assistant
    of `target` fits it: the layers that it drafts with have the same numbers.

    Raises:
        ValueError: the family's layers cannot be silenced in this way.
    """
    depth = len(layer_stack(target.get_decoder(), target)[1])
    slower = with_layers(target, [place % depth for place in range(depth + extra_layers)])
    zeros: dict[tuple[object, ...], nn.Parameter] = {}
    for layer in layer_stack(slower.get_decoder(), slower)[1][depth:]:
        _silence(layer, zeros)
    _check(target, slower)
    return slower


def layers_for_ratio(target: CausalLM, drafter: Drafter, ratio: float) -> int:
    """How many further layers make a draft step cost `ratio` target passes, by measurement.

    Raises:
        ValueError: the target is too slow for that already, or nothing can be measured.
    """
    probe = Reader(slower_target(target, PROBED_LAYERS))
    draft, plain, slower = step_seconds([drafter, Reader(target), probe])
    a_layer = (slower - plain) / PROBED_LAYERS
    if a_layer <= 0.0:
        raise ValueError(
            f"{PROBED_LAYERS} further layers took no more time than none ({slower:.4f} s, {plain:.4f} s): other load "
            "is too high to measure what a layer costs. Try again on a quiet machine."
        )
    missing = draft / ratio - plain
    if missing < -0.5 * a_layer:
        raise ValueError(
            f"A draft step costs {draft / plain:.3f} target passes here, which is less than the wanted {ratio:g}: "
            "further layers would only lower it. Ask for a lower ratio."
        )
    return max(math.ceil(missing / a_layer - 0.5), 0)


@torch.inference_mode()
def step_seconds(models: list[Reader]) -> list[float]:
    """Least seconds of a pass of each over one token, LM head included: other load only adds to it."""
    caches = [DynamicCache(config=model.text_config) for model in models]
    for model, cache in zip(models, caches, strict=True):
        text = torch.arange(CONTEXT, device=model.device)[None] % model.text_config.vocab_size
        model.hidden_states(text, cache)

    def step(number: int) -> None:
        model = models[number]
        token = torch.ones((1, 1), dtype=torch.long, device=model.device)
        logits = model.logits(model.hidden_states(token, caches[number])[0, -1], model.text_config.vocab_size)
        logits.argmax().item()  # waits for the device

    times = least_times({number: partial(step, number) for number in range(len(models))}, STEP_SECONDS)
    return [times[number] for number in range(len(models))]


def _silence(layer: nn.Module, zeros: dict[tuple[object, ...], nn.Parameter]) -> None:
    """Replace the layer's output projections by zeros, of which there is one tensor for each shape."""
    for path, parameter in list(layer.named_parameters()):
        if OUTPUTS.isdisjoint(path.split(".")):
            continue
        key = (parameter.shape, parameter.dtype, parameter.device)
        if key not in zeros:
            zeros[key] = nn.Parameter(torch.zeros_like(parameter), requires_grad=False)
        owner, _, name = path.rpartition(".")
        setattr(layer.get_submodule(owner), name, zeros[key])


@torch.no_grad()
def _check(target: CausalLM, slower: CausalLM) -> None:
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    probe: Tensor = torch.arange(1, 9, device=target.device)[None] % vocab_size
    expected, actual = target(probe).logits, slower(probe).logits
    if not torch.equal(expected, actual):
        error = float((expected - actual).abs().max())
        raise ValueError(
            f"The further layers change what {type(target).__name__} says (logits differ by up to {error:.3g}), so "
            "hf_specdecpp does not know all of its output projections. Benchmark the target as it is, without "
            "--cost_ratio."
        )
