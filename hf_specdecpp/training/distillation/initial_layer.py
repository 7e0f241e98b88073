"""Where the training of an EAGLE-3 layer begins: the target's last layer, with an input that imitates that layer's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.eagle3.model import Eagle3Model
from hf_specdecpp.eagle3.settings import Eagle3Settings
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.early_exit import layer_stack
from hf_specdecpp.models.quantised import is_quantised, rows_of
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import StateReader, TargetStates
from hf_specdecpp.training.distillation.initial_fusion import OUTLIER, RIDGE

COPIED = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
PARTS = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LEAST_ROWS = 3  # tokens of a text


def settings_for(
    target: CausalLM, reads: Sequence[int], vocab: Tensor | None, fc_norm: bool = False, norm_output: bool = False
) -> Eagle3Settings:
    """A draft of the target's own sizes: one Llama layer, which every engine serves.

    Args:
        reads: the target's layers whose outputs it reads.
        vocab: `[n]` token ids that it may propose; `None` for all.
        fc_norm, norm_output: as in `Eagle3Settings`.
    """
    config = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma has one for each kind of layer
    layer = {name: size for name in COPIED if (size := _size(config, name)) is not None}
    return Eagle3Settings(
        layer={
            "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size, "max_position_embeddings": config.max_position_embeddings,
            "intermediate_size": 4 * config.hidden_size, **layer,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        },
        state_size=config.hidden_size,
        reads=list(reads),
        num_reads=len(reads),
        draft_vocab_size=None if vocab is None else len(vocab),
        own_head=vocab is not None,
        fc_norm=fc_norm,
        norm_output=norm_output,
    )  # fmt: skip


def _size(config: Any, name: str) -> Any:
    """A number of a target's config, if it is there; of layers that differ, as in Gemma 4, the last one's."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to name one for all
        return getattr(config.per_layer_config[-1], name)


@torch.no_grad()
def untrained(settings: Eagle3Settings, target: CausalLM, vocab: Tensor | None) -> Eagle3Model:
    """A draft whose LM head and final norm are the target's, and whose other weights are random; float32."""
    model = Eagle3Model(settings).float()
    if vocab is not None and model.lm_head is not None:
        model.lm_head.weight.copy_(_rows(target.get_output_embeddings(), vocab))
        model.token_ids = vocab.clone()
    _copy_norm(inner_decoder(target), "norm", model.norm)
    model.to(device=target.device)
    model.meet(target, settings.reads or [])
    return model


@torch.no_grad()
def fit(model: Eagle3Model, target: CausalLM, texts: Iterable[Tensor]) -> None:
    """Begin like the target's last layer, where the draft can.

    The input x of that layer at a token is, by least squares, a linear function of the target's states at the token
    before, a, and of the token's embedding e: x = F a + M e. The draft's fc becomes F, and the products of its
    attention those of that layer, applied to M e in their first half. The residual of that layer has M e, too, and the
    draft's has not: that it has to learn. Parts that a target of another family does not have stay random.

    Args:
        model: is changed.
        texts: `[1, n]` each.
    """
    stack = layer_stack(inner_decoder(target), target)[1]
    squares, products, e_square = _sums(model, target, len(stack) - 1, texts)
    ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(squares))
    solution = torch.linalg.solve(squares + ridge, products).T
    of_states, of_tokens = solution.split((model.reader.width, model.reader.embedding_size), dim=1)
    known = squares[: model.reader.width, : model.reader.width]
    g_square = (of_states @ known @ of_states.T).diagonal().mean()
    x_square = (solution @ squares @ solution.T).diagonal().mean()
    layer, last = model.decoder.layers[0], stack[-1]
    if model.reader.fc is not None:
        model.reader.fc.weight.copy_(of_states)
    _copy_norm(last, "input_layernorm", layer.hidden_norm)
    norm = layer.hidden_norm.weight.cpu().clone()
    layer.hidden_norm.weight.mul_((g_square / x_square).sqrt())
    for name in ("q_proj", "k_proj", "v_proj"):
        wide, narrow = getattr(layer.self_attn, name).weight, _weight(last, f"self_attn.{name}")
        if narrow is not None and 2 * narrow.shape[1] == wide.shape[1] and narrow.shape[0] == wide.shape[0]:
            of_embedding = (narrow * norm) @ of_tokens * (e_square / x_square).sqrt()
            wide.copy_(torch.cat((of_embedding, narrow), dim=1))
    for name in PARTS:
        ours, theirs = layer.get_submodule(name).weight, _weight(last, name)
        if theirs is not None and theirs.shape == ours.shape:
            ours.copy_(theirs)
    _copy_norm(last, "pre_feedforward_layernorm", layer.post_attention_layernorm) or _copy_norm(
        last, "post_attention_layernorm", layer.post_attention_layernorm
    )


def _sums(model: Eagle3Model, target: CausalLM, layer: int, texts: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Means over places: the squares of what is known, its products with that layer's input, and the mean square of an
    embedding's numbers."""
    catching = StateReader()
    catching.reads, catching.reads_final = [*model.reader.reads, layer - 1], False
    reader, known_size = Reader(target), model.reader.width + model.reader.embedding_size
    squares, products = torch.zeros(known_size, known_size), torch.zeros(known_size, model.settings.state_size)
    of_e, rows = torch.zeros(()), 0
    with TargetStates(target, catching) as caught:
        for ids in texts:
            reader.hidden_states(ids)
            states = caught.take()
            if states is None or ids.shape[1] < LEAST_ROWS:
                continue
            read, wanted = states[0].cpu().float().split((model.reader.width, model.settings.state_size), dim=-1)
            embeddings = reader.embed(ids[0, 1:]).cpu().float()
            sizes = wanted[1:].norm(dim=-1)
            usual = (sizes < OUTLIER * sizes.median()) & (read[:-1].norm(dim=-1) < OUTLIER * read.norm(dim=-1).median())
            known, inputs = torch.cat((read[:-1], embeddings), dim=-1)[usual], wanted[1:][usual]
            squares += known.T @ known
            products += known.T @ inputs
            of_e += embeddings[usual].square().mean(-1).sum()
            rows += len(known)
    return squares / rows, products / rows, of_e / rows


def _rows(head: Any, vocab: Tensor) -> Tensor:
    return rows_of(head, vocab) if is_quantised(head) else head.weight[vocab]


def _weight(layer: nn.Module, name: str) -> Tensor | None:
    """The weight of a part of a layer in float32; `None` where it is not there."""
    parts = dict(layer.named_modules())
    found = getattr(parts.get(name), "weight", None)
    return found.float().cpu() if isinstance(found, Tensor) and found.dim() == 2 else None


def _copy_norm(module: nn.Module, name: str, ours: Any) -> bool:
    """Copy what a norm multiplies with: that is what it makes of a vector of ones, also where it is 1 + its weight."""
    norm: Any = dict(module.named_children()).get(name)
    if norm is None or getattr(norm, "bias", None) is not None:
        return False
    weight = norm.weight
    ours.weight.copy_(norm(torch.ones_like(weight)[None])[0])
    return True
