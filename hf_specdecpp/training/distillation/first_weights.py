"""The first weights of drafts that read their target's states: of a fusion (`fit_fusion`), and of an EAGLE-3 layer
(`untrained_layer`, `fit_layer`), which begins like the target's last layer in every step of a round.

Both begin with maps that predict by least squares, from what the draft knows at a token, what the target computes
there. Linear predictors of this kind are the idea of jump drafting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.draft_kinds.conditioned import Fusion
from hf_specdecpp.draft_kinds.eagle3.config_eagle3 import Eagle3Settings
from hf_specdecpp.draft_kinds.eagle3.modeling_eagle3 import Eagle3Model
from hf_specdecpp.drafting.draft_model import DraftModel
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.early_exit import layer_stack
from hf_specdecpp.models.quantised import is_quantised, rows_of
from hf_specdecpp.models.target_states import StateReader, TargetStates

RIDGE = 1e-3  # of the mean of the squares
LEAST = 1e-9  # added to it: where no text was of use, the map is zero
OUTLIER = 5.0  # times the median norm: states that a target uses to store something, such as those of the first token
LEAST_TOKENS = 3  # of a text
TINY = 1e-6  # beside the mean square of a vector that is normed
COPIED = ("intermediate_size", "num_attention_heads", "head_dim", "rms_norm_eps")  # of a layer's sizes
USUAL_LENGTH = 2048  # tokens, where a target does not say for how long texts it was made (Bloom)
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
DISTANCES = 2048  # places before its own that a head must not attend to
MARGIN = 12.0  # by which the score of the own place is above all others: e^-12 each


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


def observed(
    target: CausalLM, reads: StateReader, texts: Iterable[Tensor], last: LastLayer | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each text `[1, n]` of three tokens or more: its tokens `[n]`, the target's states there `[n, width]` and x of
    `LastLayer` `[n, size]`, both in float32."""
    reader, seen = DraftModel(target, shares_target=True), list[Tensor]()
    with ExitStack() as hooks:
        if last is not None:
            hooks.callback(last.watch(seen).remove)
        caught = hooks.enter_context(TargetStates(target, reads))
        for ids in texts:
            seen.clear()
            reader.hidden_states(ids)
            states: Any = caught.states_of()
            if ids.shape[1] >= LEAST_TOKENS:
                inputs = seen[-1].view(ids.shape[1], -1) if seen else states[0, :, :0]
                yield ids[0], states[0].float(), inputs.to(states).float()


# The fusion of a conditioned draft ------------------------------------------------------------------------------------


@torch.no_grad()
def fit_fusion(fusion: Fusion, target: CausalLM, layer: int, texts: Iterable[Tensor]) -> None:
    """Set F to what makes x, by least squares, the target's own input of its `layer`, the first one that drafts, at
    each token. What the fusion reads of further layers still adds nothing; layer 0 reads embeddings: then nothing is
    fitted.

    So the draft's first layer begins with inputs like those that it knows, made of what a draft has: the target's final
    state at the token before, and the token.
    """
    if layer == 0:
        return
    below = Fusion(fusion.hidden_size, fusion.embedding_size, [layer - 1])  # only says what to catch
    reader, size = DraftModel(target, shares_target=True), fusion.hidden_size + fusion.embedding_size
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


# An EAGLE-3 layer -----------------------------------------------------------------------------------------------------


def layer_settings(target: CausalLM, reads: Sequence[int], vocab: Tensor | None) -> Eagle3Settings:
    """A draft of the target's own sizes, each head with keys of its own: one Llama layer, which every engine serves.
    `ValueError` if the target has no attention, whose sizes the layer takes."""
    config = target.config.get_text_config(decoder=True)
    if (heads := size_of(config, "num_attention_heads")) is None:
        raise ValueError(
            f"{type(target).__name__} has no attention, and an EAGLE-3 layer takes its sizes from the target's. Train "
            "another kind of draft for it, or use an independent one."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma has one for each kind of layer
    layer = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": 4 * config.hidden_size,
        **{name: size for name in COPIED if (size := size_of(config, name)) is not None},
        "max_position_embeddings": size_of(config, "max_position_embeddings") or USUAL_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        "num_key_value_heads": heads,
    }  # fmt: skip
    return Eagle3Settings(
        layer=layer,
        state_size=config.hidden_size,
        reads=list(reads),
        num_reads=len(reads),
        draft_vocab_size=None if vocab is None else len(vocab),
        own_head=vocab is not None or logit_factor(config) != 1.0,
    )


def size_of(config: Any, name: str) -> Any:
    """A number of a target's config, if it is there; of layers that differ, as in Gemma 4, the last one's."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to name one for all
        return getattr(config.per_layer_config[-1], name)


def logit_factor(config: Any) -> float:
    """What some families multiply logits with."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


@torch.no_grad()
def untrained_layer(settings: Eagle3Settings, target: CausalLM, vocab: Tensor | None) -> Eagle3Model:
    """A draft whose LM head and final norm are the target's, and whose other weights are random; float32."""
    model = Eagle3Model(settings).float()
    if model.lm_head is not None:
        ids = torch.arange(model.config.vocab_size, device=target.device) if vocab is None else vocab
        factor, head = logit_factor(target.config.get_text_config(decoder=True)), target.get_output_embeddings()
        model.lm_head.weight.copy_(factor * (rows_of(head, ids) if is_quantised(head) else head.weight[ids]))
        model.token_ids = None if vocab is None else vocab.clone()
    copy_norm(dict(inner_decoder(target).named_children()).get("norm"), model.norm)
    model.to(device=target.device)
    model.meet(target, settings.reads or [])
    return model


@torch.no_grad()
def fit_layer(model: Eagle3Model, target: CausalLM, texts: Iterable[Tensor]) -> None:
    """Begin like the target's last layer; texts are `[1, n]` each.

    The residual of an EAGLE-3 layer is g alone, so what else the target's layer adds before its MLP has to come through
    attention. A head that attends to its own place alone gives `o v x`, a linear map of x = [norm_e(e); norm_g(g)] of
    the head's rank. Several of them together give one of as many times that rank.

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
    reads, reader, catching = model.reader, DraftModel(target, shares_target=True), StateReader()
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    catching.reads = [*reads.reads, depth - 1]
    for ids, states, inputs in observed(target, catching, texts, last):
        read, final = states[:-1].split((reads.width, model.settings.state_size), dim=-1)
        usual = is_usual(read) & is_usual(final) & is_usual(inputs[1:])
        parts = read, final, reader.embed(ids[1:]).float(), inputs[1:]
        yield tuple(part[usual].cpu() for part in parts)


def _mixing(places: Iterable[tuple[Tensor, ...]]) -> Tensor:
    """The weight of fc."""
    squares = products = sizes = torch.zeros(())
    rows = 0
    for states, final, _, _ in places:
        squares, products = squares + states.T @ states, products + states.T @ _unit(final)
        sizes, rows = sizes + final.square().mean(-1).sum(), rows + len(final)
    return (sizes / rows).sqrt() * solved(squares, products)


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
    solution = solved(squares, products)
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
    outputs, values = low_rank(wanted, squares, room)
    balance = (values.square().mean() / outputs.square().mean()) ** 0.25  # both of one size: they learn at one rate
    rank = len(values)
    attention.o_proj.weight[:, -room:][:, :rank] = (balance * outputs).to(attention.o_proj.weight)
    attention.v_proj.weight[-room:][:rank] = (values / balance).to(attention.v_proj.weight)


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


def copy_norm(theirs: Any, ours: Any) -> None:
    """Let one of our norms multiply with what the target's does, if it has one and that has no bias.

    The target's norm says that of numbers of size 1 and mean 0, which both kinds of norm leave as they are."""
    if theirs is not None and getattr(theirs, "bias", None) is None:
        weight = getattr(theirs, "weight", None)  # Dory's and OLMo's norms have none
        signs = torch.ones_like(ours.weight if weight is None else weight)
        signs[1::2] = -1.0
        ours.weight.copy_(theirs(signs[None])[0] * signs)
