"""Where the training of an EAGLE-3 layer begins: like the target's last layer, in every step of a round.

The residual of an EAGLE-3 layer is g alone, so what else the target's layer adds before its MLP has to come through
attention. A head that attends to its own place alone gives `o v x`, a linear map of x = [norm_e(e); norm_g(g)] of the
head's rank. Several of them together give one of as many times that rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.drafts.eagle3.config_eagle3 import Eagle3Settings
from hf_specdecpp.drafts.eagle3.modeling_eagle3 import Eagle3Model
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.quantised import is_quantised, rows_of
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.training.distillation import least_squares
from hf_specdecpp.training.distillation.least_squares import LastLayer, layer_sizes, logit_factor, size_of

DISTANCES = 2048  # places before its own that a head must not attend to
MARGIN = 12.0  # by which the score of the own place is above all others: e^-12 each
TINY = 1e-6  # beside the mean square of a vector that is normed


def settings_for(target: CausalLM, reads: Sequence[int], vocab: Tensor | None) -> Eagle3Settings:
    """A draft of the target's own sizes, each head with keys of its own: one Llama layer, which every engine serves.
    `ValueError` if the target has no attention, whose sizes the layer takes."""
    config = target.config.get_text_config(decoder=True)
    if (heads := size_of(config, "num_attention_heads")) is None:
        raise ValueError(
            f"{type(target).__name__} has no attention, and an EAGLE-3 layer takes its sizes from the target's. Train "
            "another kind of draft for it, or use an independent one."
        )
    return Eagle3Settings(
        layer={"model_type": "llama", "num_hidden_layers": 1, **layer_sizes(config), "num_key_value_heads": heads},
        state_size=config.hidden_size,
        reads=list(reads),
        num_reads=len(reads),
        draft_vocab_size=None if vocab is None else len(vocab),
        own_head=vocab is not None or logit_factor(config) != 1.0,
    )


@torch.no_grad()
def untrained(settings: Eagle3Settings, target: CausalLM, vocab: Tensor | None) -> Eagle3Model:
    """A draft whose LM head and final norm are the target's, and whose other weights are random; float32."""
    model = Eagle3Model(settings).float()
    if model.lm_head is not None:
        ids = torch.arange(model.config.vocab_size, device=target.device) if vocab is None else vocab
        factor, head = logit_factor(target.config.get_text_config(decoder=True)), target.get_output_embeddings()
        model.lm_head.weight.copy_(factor * (rows_of(head, ids) if is_quantised(head) else head.weight[ids]))
        model.token_ids = None if vocab is None else vocab.clone()
    least_squares.copy_norm(dict(inner_decoder(target).named_children()).get("norm"), model.norm)
    model.to(device=target.device)
    model.meet(target, settings.reads or [])
    return model


@torch.no_grad()
def fit(model: Eagle3Model, target: CausalLM, texts: Iterable[Tensor]) -> None:
    """Begin like the target's last layer; texts are `[1, n]` each.

    By least squares fc makes of the target's states its final state before the final norm, of usual size: what the
    draft's own state y imitates, so that every step of a round goes on from the same kind of vector. What the MLP of
    that layer reads, less g, is by least squares again a linear function of this state and the embedding of the token
    after it, which attention carries; its MLP is that layer's.
    """
    texts, layer = list(texts), model.decoder.layers[0]
    last = LastLayer(target, layer)
    if model.reader.fc is not None:
        model.reader.fc.weight.copy_(_mixing(_places(model, target, texts, last)))
    lacking, one, squares = _maps(model, _places(model, target, texts, last))
    attention: Any = layer.self_attn
    count, size = attention.q_proj.weight.shape[0] // attention.head_dim, attention.head_dim
    carriers = min(-(-len(lacking) // size), count - count // 3)  # the other heads add nothing at first
    attention.o_proj.weight.zero_()
    _attend_to_own_place(attention, one, model.decoder.rotary_emb.inv_freq, carriers)
    _carry(attention, lacking, squares, carriers * size)
    last.copy_mlp()


def _places(
    model: Eagle3Model, target: CausalLM, texts: Iterable[Tensor], last: LastLayer
) -> Iterator[tuple[Tensor, ...]]:
    """Of each token but the first of a text, float32 on the CPU, `[n, ...]` each: what fc reads, of the token before;
    what the draft's own state there is like; the token's embedding; and what the last layer's MLP reads at it. Without
    those where the target stores something in a state, which is far larger then."""
    reads, reader, catching = model.reader, Reader(target), StateReader()
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    catching.reads, catching.reads_final = [*reads.reads, depth - 1], reads.reads_final
    for ids, states, inputs in least_squares.observed(target, catching, texts, last):
        read, final = states[:-1].split((reads.width, model.settings.state_size), dim=-1)
        usual = least_squares.is_usual(read) & least_squares.is_usual(final) & least_squares.is_usual(inputs[1:])
        parts = read, final, reader.embed(ids[1:]).float(), inputs[1:]
        yield tuple(part[usual].cpu() for part in parts)


def _mixing(places: Iterable[tuple[Tensor, ...]]) -> Tensor:
    """The weight of fc."""
    squares = products = sizes = torch.zeros(())
    rows = 0
    for states, final, _, _ in places:
        squares, products = squares + states.T @ states, products + states.T @ _unit(final)
        sizes, rows = sizes + final.square().mean(-1).sum(), rows + len(final)
    return (sizes / rows).sqrt() * least_squares.solved(squares, products)


def _maps(model: Eagle3Model, places: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """From the two normed vectors x of first and further steps: the maps `[hidden_size, 2 * hidden_size]` to what the
    residual g lacks and `[1, 2 * hidden_size]` to the number 1, and the mean of x x^T."""
    fc = None if model.reader.fc is None else model.reader.fc.weight.cpu()
    squares = products = torch.zeros(())
    rows = 0
    for states, final, embeddings, inputs in places:
        for g in (states if fc is None else states @ fc.T, final):
            known = torch.cat((_unit(embeddings), _unit(g)), dim=-1)
            wanted = torch.cat((inputs - g, torch.ones(len(g), 1)), dim=-1)
            squares, products, rows = squares + known.T @ known, products + known.T @ wanted, rows + len(g)
    solution = least_squares.solved(squares, products)
    return solution[:-1], solution[-1:], squares / rows


def _unit(states: Tensor) -> Tensor:
    """As the draft's norms make them, whose weights begin with ones."""
    return states * (states.square().mean(-1, keepdim=True) + TINY).rsqrt()


def _attend_to_own_place(attention: Any, one: Tensor, frequencies: Tensor, count: int) -> None:
    """Let the last `count` heads attend to their own place: query and key are one vector, turned by fast RoPE pairs."""
    distances = torch.arange(1, DISTANCES, dtype=torch.float32)[:, None]
    pairs = torch.arange(1, len(frequencies) + 1)
    largest = ((distances * frequencies.float().cpu()).cos().cumsum(1) / pairs).amax(0)
    num_pairs = int(largest.argmin()) + 1
    score = MARGIN / (1 - float(largest.min()))
    size = attention.head_dim
    for product in (attention.q_proj, attention.k_proj):
        own = product.weight[-count * size :].unflatten(0, (count, size))
        own.zero_()
        own[:, :num_pairs] = ((score / attention.scaling / num_pairs) ** 0.5 * one).to(own)


def _carry(attention: Any, wanted: Tensor, squares: Tensor, room: int) -> None:
    """Make the map of what the last `room` values and what mixes them, or the best of that rank for such x."""
    outputs, values = least_squares.low_rank(wanted, squares, room)
    balance = (values.square().mean() / outputs.square().mean()) ** 0.25  # both of one size: they learn at one rate
    rank = len(values)
    attention.o_proj.weight[:, -room:][:, :rank] = (balance * outputs).to(attention.o_proj.weight)
    attention.v_proj.weight[-room:][:rank] = (values / balance).to(attention.v_proj.weight)
