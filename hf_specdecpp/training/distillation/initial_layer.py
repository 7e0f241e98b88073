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
# Norms that some families put behind a product, and a Llama layer has not: on average they are a factor of its rows.
NORMS_BEHIND = {
    "self_attn.q_proj": "self_attn.q_norm",
    "self_attn.k_proj": "self_attn.k_norm",
    "self_attn.o_proj": "post_attention_layernorm",
    "mlp.down_proj": "post_feedforward_layernorm",
}
LEAST_ROWS = 3  # tokens of a text
USUAL_LENGTH = 2048  # tokens, where a target does not say for how long texts it was made (Bloom)


def settings_for(
    target: CausalLM, reads: Sequence[int], vocab: Tensor | None, fc_norm: bool = False, norm_output: bool = False
) -> Eagle3Settings:
    """A draft of the target's own sizes: one Llama layer, which every engine serves.

    Args:
        reads: the target's layers whose outputs it reads.
        vocab: `[n]` token ids that it may propose; `None` for all.
        fc_norm, norm_output: as in `Eagle3Settings`.

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
    layer = {name: size for name in COPIED if (size := size_of(config, name)) is not None}
    return Eagle3Settings(
        layer={
            "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size, "intermediate_size": 4 * config.hidden_size,
            "max_position_embeddings": size_of(config, "max_position_embeddings") or USUAL_LENGTH, **layer,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        },
        state_size=config.hidden_size,
        reads=list(reads),
        num_reads=len(reads),
        draft_vocab_size=None if vocab is None else len(vocab),
        own_head=vocab is not None or logit_factor(config) != 1.0,
        fc_norm=fc_norm,
        norm_output=norm_output,
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
    with Behind(stack[-1]) as behind:
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
    copy_norm(last, "input_layernorm", layer.hidden_norm)
    norm = layer.hidden_norm.weight.cpu().clone()
    layer.hidden_norm.weight.mul_((g_square / x_square).sqrt())
    for name in ("q_proj", "k_proj", "v_proj"):
        wide, narrow = getattr(layer.self_attn, name).weight, behind.weight(f"self_attn.{name}")
        if narrow is not None and 2 * narrow.shape[1] == wide.shape[1] and narrow.shape[0] == wide.shape[0]:
            of_embedding = (narrow * norm) @ of_tokens * (e_square / x_square).sqrt()
            wide.copy_(torch.cat((of_embedding, narrow), dim=1))
    for name in PARTS:
        ours, theirs = layer.get_submodule(name).weight, behind.weight(name)
        if theirs is not None and theirs.shape == ours.shape:
            ours.copy_(theirs)
    copy_norm(last, behind.before_mlp, layer.post_attention_layernorm)


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


def logit_factor(config: Any) -> float:
    """What some families multiply logits with."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


class Behind:
    """A layer of the target as a Llama layer: its products, with the norms behind them as factors of their rows.

    Within the context it measures how large what they norm is.

    Example: q_norm makes of a head's query q the vector w q / |q|, with |q| the root of the mean square. Where 1 / |q|
    is 0.5 on average, the rows of that head's product become 0.5 w times what they were.

    Attributes:
        is_sandwich: whether there are norms before and behind attention and MLP (Gemma).
        before_mlp: name of the norm before the MLP.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.modules = dict(layer.named_modules())
        self.is_sandwich = "pre_feedforward_layernorm" in self.modules
        self.before_mlp = "pre_feedforward_layernorm" if self.is_sandwich else "post_attention_layernorm"
        self._inverse: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Behind:
        for name in NORMS_BEHIND:
            if self._norm(name) is not None and name in self.modules:
                sizes = self._inverse[name] = []
                self._handles.append(self.modules[name].register_forward_hook(self._note(name, sizes)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _norm(self, name: str) -> nn.Module | None:
        behind = NORMS_BEHIND.get(name)
        if behind == "post_attention_layernorm" and not self.is_sandwich:
            return None  # that one stands before the MLP
        return self.modules.get(behind or "")

    def _note(self, name: str, sizes: list[Tensor]) -> Any:
        norm: Any = self._norm(name)

        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            parts = output.detach().float().unflatten(-1, (-1, norm.weight.shape[0]))
            sizes.append(parts.square().mean(-1).rsqrt().flatten(0, -2).mean(0).cpu())  # by head

        return hook

    def weight(self, name: str) -> Tensor | None:
        """The weight of a product in float32; `None` where it is not there."""
        found = getattr(self.modules.get(name), "weight", None)
        if not isinstance(found, Tensor) or found.dim() != 2:
            return None
        weight, norm = found.float().cpu(), self._norm(name)
        if norm is None or not self._inverse.get(name):
            return weight
        factors = torch.stack(self._inverse[name]).mean(0)[:, None] * _multiplied_by(norm).float().cpu()
        return factors.flatten()[:, None] * weight


def _multiplied_by(norm: Any) -> Tensor:
    """What a norm multiplies with: what it makes of a vector of ones, also where that is 1 + its weight."""
    made: Tensor = norm(torch.ones_like(norm.weight)[None])[0]
    return made


def copy_norm(module: nn.Module, name: str, ours: Any) -> None:
    """Let one of our norms multiply with what the module's norm of this name does, if it has one."""
    norm: Any = dict(module.named_children()).get(name)
    if norm is not None and getattr(norm, "bias", None) is None:
        ours.weight.copy_(_multiplied_by(norm))
