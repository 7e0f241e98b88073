"""Where the training of an EAGLE-3 layer begins: like the target's last layer, in every step of a round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.config.bounds import ROPE
from hf_specdecpp.drafts.eagle3.config import Eagle3Settings
from hf_specdecpp.drafts.eagle3.model import Eagle3Model
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.early_exit import layer_stack
from hf_specdecpp.models.quantised import is_quantised, rows_of
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import StateReader, TargetStates
from hf_specdecpp.training.distillation.initial import attention
from hf_specdecpp.training.distillation.initial.attention import Fitted
from hf_specdecpp.training.distillation.initial.fusion import OUTLIER, RIDGE
from hf_specdecpp.training.distillation.initial.layer_behind import LayerBehind, copy_norm

COPIED = ("intermediate_size", "num_attention_heads", "head_dim", "rms_norm_eps")
PARTS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LEAST_ROWS = 3  # tokens of a text
TINY = 1e-6  # beside the mean square of a vector that is normed
USUAL_LENGTH = 2048  # tokens, where a target does not say for how long texts it was made (Bloom)


def settings_for(target: CausalLM, reads: Sequence[int], vocab: Tensor | None) -> Eagle3Settings:
    """A draft of the target's own sizes, each head with keys of its own: one Llama layer, which every engine serves.

    Args:
        reads: the target's layers whose outputs it reads.
        vocab: `[n]` token ids that it may propose; `None` for all.

    Raises:
        ValueError: the target has no attention, whose sizes the layer takes.
    """
    config = target.config.get_text_config(decoder=True)
    if size_of(config, "num_attention_heads") is None:
        raise ValueError(
            f"{type(target).__name__} has no attention, and an EAGLE-3 layer takes its sizes from the target's. Train "
            "another kind of draft for it, or use an independent one."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma has one for each kind of layer
    rope = {name: rope[name] for name in ROPE if name in rope}
    layer = {name: size for name in COPIED if (size := size_of(config, name)) is not None}
    return Eagle3Settings(
        layer={
            "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size, "intermediate_size": 4 * config.hidden_size,
            "max_position_embeddings": size_of(config, "max_position_embeddings") or USUAL_LENGTH, **layer,
            "num_key_value_heads": layer["num_attention_heads"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        },
        state_size=config.hidden_size,
        reads=list(reads),
        num_reads=len(reads),
        draft_vocab_size=None if vocab is None else len(vocab),
        own_head=vocab is not None or logit_factor(config) != 1.0,
    )  # fmt: skip


def size_of(config: Any, name: str) -> Any:
    """A number of a target's config, if it is there; of layers that differ, as in Gemma 4, the last one's."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to name one for all
        return getattr(config.per_layer_config[-1], name)


@torch.no_grad()
def untrained(settings: Eagle3Settings, target: CausalLM, vocab: Tensor | None) -> Eagle3Model:
    """A draft whose LM head and final norm are the target's, and whose other weights are random; float32."""
    model = Eagle3Model(settings).float()
    if model.lm_head is not None:
        ids = torch.arange(model.config.vocab_size, device=target.device) if vocab is None else vocab
        factor = logit_factor(target.config.get_text_config(decoder=True))
        model.lm_head.weight.copy_(factor * _rows(target.get_output_embeddings(), ids))
        model.token_ids = None if vocab is None else vocab.clone()
    copy_norm(inner_decoder(target), "norm", model.norm)
    model.to(device=target.device)
    model.meet(target, settings.reads or [])
    return model


@torch.no_grad()
def fit(model: Eagle3Model, target: CausalLM, texts: Iterable[Tensor]) -> None:
    """Begin like the target's last layer.

    By least squares fc makes of the target's states its final state before the final norm, of usual size: what the
    draft's own state y imitates, so that every step of a round goes on from the same kind of vector. The input of that
    layer is, by least squares again, a linear function of this state and the embedding of the token after it. What of
    it the residual lacks the draft's attention carries (`initial/attention.py`); its MLP is that layer's. Parts that a
    target of another family does not have stay random.

    Args:
        model: is changed.
        texts: `[1, n]` each.
    """
    texts, last = list(texts), layer_stack(inner_decoder(target), target)[1][-1]
    with LayerBehind(last) as behind:
        if model.reader.fc is not None:
            model.reader.fc.weight.copy_(_mixing(_places(model, target, behind, texts)))
        fitted = _fitted(model, _places(model, target, behind, texts))
    layer = model.decoder.layers[0]
    attention.begin(layer.self_attn, behind, fitted, model.decoder.rotary_emb.inv_freq)
    for name in PARTS:
        ours, theirs = layer.get_submodule(name).weight, behind.weight(name)
        if theirs is not None and theirs.shape == ours.shape:
            ours.copy_(theirs)
    copy_norm(last, behind.before_mlp, layer.post_attention_layernorm)


@dataclass(frozen=True)
class _Places:
    """Of a text, for each token but the first: float32 on the CPU, `[n, ...]` each.

    Attributes:
        states: what fc reads, of the token before.
        final: the target's state there that the draft's own is like.
        embeddings: of the token.
        inputs: of the target's last layer.
        attended: what the heads of that layer gave; without columns where that is not known.
    """

    states: Tensor
    final: Tensor
    embeddings: Tensor
    inputs: Tensor
    attended: Tensor


def _places(model: Eagle3Model, target: CausalLM, behind: LayerBehind, texts: Iterable[Tensor]) -> Iterator[_Places]:
    """Without those where the target stores something in a state, which is far larger then."""
    reads, size = model.reader, model.settings.state_size
    depth = len(layer_stack(inner_decoder(target), target)[1])
    catching, reader = StateReader(), Reader(target)
    catching.reads, catching.reads_final = [*reads.reads, depth - 1, depth - 2], reads.reads_final
    with TargetStates(target, catching) as caught:
        for ids in texts:
            reader.hidden_states(ids)
            found = caught.take()
            if found is None or ids.shape[1] < LEAST_ROWS:
                continue
            read, final, inputs = found[0].float().split((reads.width, size, size), dim=-1)
            usual = (_is_usual(read[:-1]) & _is_usual(final[:-1]) & _is_usual(inputs[1:])).cpu()
            attended = read[:, :0] if behind.attended is None else behind.attended[0]
            before, after = slice(0, -1), slice(1, None)
            parts = read[before], final[before], reader.embed(ids[0, after]), inputs[after], attended[after]
            yield _Places(*(part.float().cpu()[usual] for part in parts))


def _is_usual(states: Tensor) -> Tensor:
    sizes = states.norm(dim=-1)
    return sizes < OUTLIER * sizes.median()


def _mixing(places: Iterable[_Places]) -> Tensor:
    """The weight of fc."""
    squares = products = sizes = torch.zeros(())
    rows = 0
    for at in places:
        squares, products = squares + at.states.T @ at.states, products + at.states.T @ _unit(at.final)
        sizes, rows = sizes + at.final.square().mean(-1).sum(), rows + len(at.final)
    return (sizes / rows).sqrt() * _solved(squares, products).T


def _fitted(model: Eagle3Model, places: Iterable[_Places]) -> Fitted:
    """What the two normed vectors say that the attention reads: in first steps, and in further ones."""
    fc = None if model.reader.fc is None else model.reader.fc.weight.cpu()
    squares = products = of_attended = torch.zeros(())
    rows, size = 0, model.settings.state_size
    for at in places:
        for g in (at.states if fc is None else at.states @ fc.T, at.final):
            known = torch.cat((_unit(at.embeddings), _unit(g)), dim=-1)
            wanted = torch.cat((at.inputs, g, torch.ones(len(g), 1), at.attended), dim=-1)
            squares, products = squares + known.T @ known, products + known.T @ wanted
            of_attended, rows = of_attended + at.attended.T @ at.attended, rows + len(g)
    solution = _solved(squares, products).T
    inputs, states, one, attended = solution.split((size, size, 1, len(solution) - 2 * size - 1))
    left = (of_attended - attended @ squares @ attended.T) / rows
    return Fitted(squares / rows, inputs, states, one, attended, left)


def _solved(squares: Tensor, products: Tensor) -> Tensor:
    ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(squares))
    return torch.linalg.solve(squares + ridge, products)


def _unit(states: Tensor) -> Tensor:
    """As the draft's norms make them, whose weights begin with ones."""
    return states * (states.square().mean(-1, keepdim=True) + TINY).rsqrt()


def _rows(head: Any, vocab: Tensor) -> Tensor:
    return rows_of(head, vocab) if is_quantised(head) else head.weight[vocab]


def logit_factor(config: Any) -> float:
    """What some families multiply logits with."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
