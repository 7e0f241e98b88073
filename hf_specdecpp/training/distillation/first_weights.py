"""Initial weights of drafts that read the target's hidden states: of a fusion (`fit_fusion`), and of an EAGLE-3 layer
(`untrained_layer`, `fit_layer`), which initially computes about the same as the target's last layer.

Both are fitted by least squares: linear maps predict the target's hidden states from the inputs of the draft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.draft_kinds.conditioned import Fusion
from hf_specdecpp.draft_kinds.eagle3.config_eagle3 import Eagle3Settings
from hf_specdecpp.draft_kinds.eagle3.modeling_eagle3 import Eagle3Model
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.early_exit import layer_stack
from hf_specdecpp.models.quantised import is_quantised, rows_of
from hf_specdecpp.models.target_states import StateReader, TargetStates

RIDGE = 1e-3  # ridge of least squares, relative to the mean diagonal element of x x^T
LEAST = 1e-9  # added to the ridge: without data the map is zero
OUTLIER = 5.0  # states with more than 5 times the median norm are excluded, such as those of an attention sink
LEAST_TOKENS = 3  # per sequence
TINY = 1e-6  # epsilon of an RMS norm
COPIED = ("intermediate_size", "num_attention_heads", "head_dim", "rms_norm_eps")  # fields of the target's config
USUAL_LENGTH = 2048  # tokens, if the target's config has no maximum length (Bloom)
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
DISTANCES = 2048  # earlier positions that a head must not attend to
MARGIN = 12.0  # score of a head's own position minus any other score, so that others weigh at most e^-12


def solved(squares: Tensor, products: Tensor) -> Tensor:
    """Least-squares map `[size of y, size of x]` from x to y, from sums or means of x x^T and x y^T (`products`)."""
    ridge = (RIDGE * squares.diagonal().mean() + LEAST) * torch.eye(len(squares))
    return torch.linalg.solve(squares + ridge, products).T


def low_rank(wanted: Tensor, squares: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Maps `[out, rank]` and `[rank, in]` with a product closest to `wanted` on inputs x. `squares`: mean of x x^T."""
    outputs = torch.linalg.eigh(wanted @ squares @ wanted.T).eigenvectors[:, -rank:]
    return outputs, outputs.T @ wanted


def is_usual(states: Tensor) -> Tensor:
    """Bool `[n]`: whether the norm of each state in `[n, size]` is below 5 times the median norm."""
    sizes = states.norm(dim=-1)
    return sizes < OUTLIER * sizes.median()


def observed(
    target: CausalLM, reads: StateReader, texts: Iterable[Tensor], last: LastLayer | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Run the target over sequences `[1, n]`. Yields for each sequence of at least three tokens its tokens `[n]`, the
    states `[n, width]` for `reads`, and the states `[n, size]` that `last` records (size 0 without `last`); float32."""
    reader, seen = Drafter(target, shares_target=True), list[Tensor]()
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
    """Set the matrix F of a `Fusion` by least squares, so that its output is close to the input that the target
    computes for `layer`, the first layer of the draft. Nothing is fitted for layer 0, which reads embeddings.

    The inputs are the target's final state at the token before, and the token's embedding. R stays zero, so that
    further layers in `reads` have no effect before training."""
    if layer == 0:
        return
    below = Fusion(fusion.hidden_size, fusion.embedding_size, [layer - 1])  # only names the states to record
    reader, size = Drafter(target, shares_target=True), fusion.hidden_size + fusion.embedding_size
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
    """Settings of a draft of one Llama layer, which all engines serve, with the target's sizes and without grouped
    keys. `ValueError` if the target has no attention."""
    config = target.config.get_text_config(decoder=True)
    if (heads := size_of(config, "num_attention_heads")) is None:
        raise ValueError(
            f"{type(target).__name__} has no attention, and an EAGLE-3 layer takes its sizes from the target's. Train "
            "another kind of draft for it, or use an independent one."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope) or {}  # Gemma has parameters for each layer type, Beam partly none
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
    """Return a field of a target's config, or `None`; the last layer's if layers differ, as in Gemma 4."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers raises this if layers differ
        return getattr(config.per_layer_config[-1], name)


def logit_factor(config: Any) -> float:
    """Return the factor by which a model of this config multiplies its logits; 1 for most model families."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


@torch.no_grad()
def untrained_layer(settings: Eagle3Settings, target: CausalLM, vocab: Tensor | None) -> Eagle3Model:
    """A float32 draft with the target's LM head (of the tokens `vocab`) and final norm, and random other weights."""
    model = Eagle3Model(settings).float()
    if model.lm_head is not None:
        ids = torch.arange(model.config.vocab_size, device=target.device) if vocab is None else vocab
        factor, head = logit_factor(target.config.get_text_config(decoder=True)), target.get_output_embeddings()
        model.lm_head.weight.copy_(factor * (rows_of(head, ids) if is_quantised(head) else head.weight[ids]))
        model.token_ids = None if vocab is None else vocab.clone()
    copy_norm(dict(inner_decoder(target).named_children()).get("norm"), model.norm)
    model.to(device=target.device)
    model.set_target(target)
    return model


@torch.no_grad()
def fit_layer(model: Eagle3Model, target: CausalLM, texts: Iterable[Tensor]) -> None:
    """Initialise the draft's layer so that it computes about the same as the target's last layer, by least squares on
    sequences `[1, n]`. The names e, g, x and y are those of `FirstLayer`.

    1. fc predicts, from the states that the draft reads, the target's state before its final norm, scaled to the same
       size at all tokens. The draft's output y imitates this state, too, so that all steps of a round have a similar g.
    2. The input of the target's MLP minus g is predicted linearly from x. Heads that attend only to their own position
       compute o v x (o, v: output and value projection), a linear map of limited rank, which is set to this prediction.
    3. The MLP is copied from the target."""
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
    """For each sequence four float32 tensors `[n, ...]` on the CPU: at each token but the last, the states that fc
    reads and the target's final state; at the next token, its embedding and the input of the last layer's MLP norm.
    Outliers (`is_usual`) are excluded."""
    reads, reader, catching = model.reader, Drafter(target, shares_target=True), StateReader()
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    catching.reads = [*reads.reads, depth - 1]
    for ids, states, inputs in observed(target, catching, texts, last):
        read, final = states[:-1].split((reads.width, model.settings.state_size), dim=-1)
        usual = is_usual(read) & is_usual(final) & is_usual(inputs[1:])
        parts = read, final, reader.embed(ids[1:]).float(), inputs[1:]
        yield tuple(part[usual].cpu() for part in parts)


def _mixing(places: Iterable[tuple[Tensor, ...]]) -> Tensor:
    """The weight of fc, fitted by least squares on the `_places` (step 1 of `fit_layer`)."""
    squares = products = sizes = torch.zeros(())
    rows = 0
    for states, final, _, _ in places:
        squares, products = squares + states.T @ states, products + states.T @ _unit(final)
        sizes, rows = sizes + final.square().mean(-1).sum(), rows + len(final)
    return (sizes / rows).sqrt() * solved(squares, products)


def _maps(model: Eagle3Model, places: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """Least-squares maps from x, the normed inputs of first and of further steps: `[hidden_size, 2 * hidden_size]` to
    the MLP's input minus g, and `[1, 2 * hidden_size]` to the number 1. Also the mean of x x^T."""
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
    """Divide states by their root mean square, as the draft's norms do with weights of 1, but with epsilon `TINY`."""
    return states * (states.square().mean(-1, keepdim=True) + TINY).rsqrt()


def _attend_to_own_place(attention: Any, one: Tensor, frequencies: Tensor, count: int) -> None:
    """Let the last `count` heads attend to their own position: query and key are equal, and only the fastest RoPE pairs
    are used, so that all other positions score lower. `one`: the map to the number 1 of `_maps`."""
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
    """Make the last heads' output and value projections multiply to `wanted`, or the closest map of rank `room`."""
    outputs, values = low_rank(wanted, squares, room)
    balance = (values.square().mean() / outputs.square().mean()) ** 0.25  # weights of equal size train at equal rates
    rank = len(values)
    attention.o_proj.weight[:, -room:][:, :rank] = (balance * outputs).to(attention.o_proj.weight)
    attention.v_proj.weight[-room:][:rank] = (values / balance).to(attention.v_proj.weight)


class LastLayer:
    """The last layer of a target: records the inputs of its MLP's norm, and copies MLP and norm to the draft's layer.

    If the MLP has another form, or a norm after it (Gemma), no weights are copied, and the layer's output is recorded
    instead."""

    def __init__(self, target: CausalLM, ours: Any) -> None:
        self.layer, self.ours = layer_stack(inner_decoder(target), target)[1][-1], ours
        modules = dict(self.layer.named_modules())
        pairs = [(getattr(modules.get(name), "weight", None), ours.get_submodule(name).weight) for name in MLP]
        fits = all(isinstance(theirs, Tensor) and theirs.shape == own.shape for theirs, own in pairs)
        norm = modules.get("post_attention_layernorm")
        self.norm = norm if fits and "pre_feedforward_layernorm" not in modules else None

    def watch(self, seen: list[Tensor]) -> Any:
        """Append the input of the MLP's norm, or the layer's output, to `seen` in each pass. Returns the hook."""
        if self.norm is not None:
            return self.norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        return self.layer.register_forward_hook(
            lambda _module, _inputs, made: seen.append(made[0] if isinstance(made, tuple) else made)
        )

    def copy_mlp(self) -> None:
        """Copy the MLP and its norm into the draft's layer, or set the draft's MLP to zero output."""
        if self.norm is None:
            self.ours.get_submodule(MLP[-1]).weight.zero_()
            return
        for name in MLP:
            self.ours.get_submodule(name).weight.copy_(self.layer.get_submodule(name).weight)
        copy_norm(self.norm, self.ours.post_attention_layernorm)


def copy_norm(theirs: Any, ours: Any) -> None:
    """Copy the scale of the target's norm into the draft's RMS norm, unless the target's norm has a bias. The scale is
    read from the norm's output for (1, -1, 1, ...), a vector that neither RMS norm nor layer norm changes otherwise."""
    if theirs is not None and getattr(theirs, "bias", None) is None:
        weight = getattr(theirs, "weight", None)  # OLMo's norms have no weight
        signs = torch.ones_like(ours.weight if weight is None else weight)
        signs[1::2] = -1.0
        ours.weight.copy_(theirs(signs[None])[0] * signs)
