"""What the starts of drafts share: a target's states along texts, and linear maps that are fitted to them.

A draft that reads its target's states begins with maps that predict, from what the draft knows at a token, what the
target computes there. Linear predictors of this kind are the idea of jump drafting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.drafts.conditioned import Fusion
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.early_exit import layer_stack
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import StateReader, TargetStates

RIDGE = 1e-3  # of the mean of the squares
LEAST = 1e-9  # added to it: where no text was of use, the map is zero
OUTLIER = 5.0  # times the median norm: states that a target uses to store something, such as those of the first token
LEAST_TOKENS = 3  # of a text
COPIED = ("intermediate_size", "num_attention_heads", "head_dim", "rms_norm_eps")  # of a layer's sizes
USUAL_LENGTH = 2048  # tokens, where a target does not say for how long texts it was made (Bloom)
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def solved(squares: Tensor, products: Tensor) -> Tensor:
    """The map `[wanted, known]` of least squares, from sums or means of x x^T and x y^T over places."""
    ridge = (RIDGE * squares.diagonal().mean() + LEAST) * torch.eye(len(squares))
    return torch.linalg.solve(squares + ridge, products).T


def low_rank(wanted: Tensor, squares: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Maps `[out, rank]` and `[rank, in]` that approximate `wanted` best for inputs with these squares."""
    outputs = torch.linalg.eigh(wanted @ squares @ wanted.T).eigenvectors[:, -rank:]
    return outputs, outputs.T @ wanted


def is_usual(states: Tensor) -> Tensor:
    """Which places of a text, `[n, size]`, have a state of usual size; bool `[n]`."""
    sizes = states.norm(dim=-1)
    return sizes < OUTLIER * sizes.median()


class LastLayer:
    """The last layer of a target: what its MLP reads, and that MLP as far as a draft's own layer can have the same.

    Where a layer has another kind of MLP, or a norm behind it, as Gemma's, nothing is copied, and what is looked at is
    all that the layer makes.
    """

    def __init__(self, target: CausalLM, ours: Any) -> None:
        self.layer, self.ours = layer_stack(inner_decoder(target), target)[1][-1], ours
        modules = dict(self.layer.named_modules())
        pairs = [(getattr(modules.get(name), "weight", None), ours.get_submodule(name).weight) for name in MLP]
        fits = all(isinstance(theirs, Tensor) and theirs.shape == own.shape for theirs, own in pairs)
        norm = modules.get("post_attention_layernorm")
        self.norm = norm if fits and "pre_feedforward_layernorm" not in modules else None

    def watch(self, seen: list[Tensor]) -> Any:
        """Note in each pass x, the input of the MLP's norm, or what the layer makes; the handle of the hook."""
        if self.norm is not None:
            return self.norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        return self.layer.register_forward_hook(
            lambda _module, _inputs, made: seen.append(made[0] if isinstance(made, tuple) else made)
        )

    def copy_mlp(self) -> None:
        """Let our layer have the same MLP; where it cannot, let its own add nothing at first."""
        if self.norm is None:
            self.ours.get_submodule(MLP[-1]).weight.zero_()
            return
        for name in MLP:
            self.ours.get_submodule(name).weight.copy_(self.layer.get_submodule(name).weight)
        copy_norm(self.norm, self.ours.post_attention_layernorm)


def observed(
    target: CausalLM, reads: StateReader, texts: Iterable[Tensor], last: LastLayer | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each text `[1, n]` of three tokens or more: its tokens `[n]`, the target's states there `[n, width]` and x of
    `LastLayer` `[n, size]`, both in float32."""
    reader, seen = Reader(target), list[Tensor]()
    with ExitStack() as hooks:
        if last is not None:
            hooks.callback(last.watch(seen).remove)
        caught = hooks.enter_context(TargetStates(target, reads))
        for ids in texts:
            seen.clear()
            reader.hidden_states(ids)
            states: Any = caught.take()
            if ids.shape[1] >= LEAST_TOKENS:
                inputs = seen[-1].view(ids.shape[1], -1) if seen else states[0, :, :0]
                yield ids[0], states[0].float(), inputs.to(states).float()


def copy_norm(theirs: Any, ours: Any) -> None:
    """Let one of our norms multiply with what the target's does, if it has one and that has no bias.

    The target's norm says that of numbers of size 1 and mean 0, which both kinds of norm leave as they are."""
    if theirs is not None and getattr(theirs, "bias", None) is None:
        weight = getattr(theirs, "weight", None)  # Dory's and OLMo's norms have none
        signs = torch.ones_like(ours.weight if weight is None else weight)
        signs[1::2] = -1.0
        ours.weight.copy_(theirs(signs[None])[0] * signs)


# Sizes of a draft's own layers ----------------------------------------------------------------------------------------


def size_of(config: Any, name: str) -> Any:
    """A number of a target's config, if it is there; of layers that differ, as in Gemma 4, the last one's."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to name one for all
        return getattr(config.per_layer_config[-1], name)


def layer_sizes(config: Any) -> dict[str, Any]:
    """What a draft's layer takes from the config of a target of any family, as a Llama's config names it."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma has one for each kind of layer
    return {
        "hidden_act": "silu", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": 4 * config.hidden_size,
        **{name: size for name in COPIED if (size := size_of(config, name)) is not None},
        "max_position_embeddings": size_of(config, "max_position_embeddings") or USUAL_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
    }  # fmt: skip


def logit_factor(config: Any) -> float:
    """What some families multiply logits with."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


# A fusion -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fit(fusion: Fusion, target: CausalLM, layer: int, texts: Iterable[Tensor]) -> None:
    """Set F to what makes x, by least squares, the target's own input of its `layer`, the first one that drafts, at
    each token. What the fusion reads of further layers still adds nothing; layer 0 reads embeddings: then nothing is
    fitted.

    So the draft's first layer begins with inputs like those that it knows, made of what a draft has: the target's final
    state at the token before, and the token.
    """
    if layer == 0:
        return
    below = Fusion(fusion.hidden_size, fusion.embedding_size, [layer - 1])  # only says what to catch
    reader, size = Reader(target), fusion.hidden_size + fusion.embedding_size
    squares, products = torch.zeros(size, size), torch.zeros(size, fusion.hidden_size)
    for ids, states, _ in observed(target, below, texts):
        final, wanted = states.cpu().split(fusion.hidden_size, dim=-1)
        known = torch.cat((final[:-1], reader.embed(ids[1:]).cpu().float()), dim=-1)
        usual = is_usual(wanted[1:])
        squares += known[usual].T @ known[usual]
        products += known[usual].T @ wanted[1:][usual]
    solution = solved(squares, products)
    if isinstance(fusion.fuse, nn.Linear):
        fusion.fuse.weight.copy_(solution)
    elif isinstance(fusion.fuse, nn.Sequential) and fusion.rank is not None:
        first, second = fusion.fuse
        outputs, inner = low_rank(solution, squares, fusion.rank)
        first.weight.copy_(inner)  # type: ignore[operator]
        second.weight.copy_(outputs)  # type: ignore[operator]
