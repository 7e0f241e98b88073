"""Make a multi-token layer a model that drafts: its input (`MtpInput`), and its target around it (`one_layer`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder, input_device
from hf_specdecpp.models.early_exit import layer_stack, why_no_early_exit, with_layers
from hf_specdecpp.models.target_states import StateReader

# What a config says of the kind of each layer, what it says of that of multi-token layers, and the usual kind of these.
KINDS = (("layer_types", "mtp_layer_types", "full_attention"), ("mlp_layer_types", "mtp_mlp_layer_types", None))
POST_NORM = "post_norm.weight"  # of Inkling's layers: one for all of them, or none
Tensors = Mapping[str, Tensor]


class MtpInput(StateReader):
    """The input of a multi-token layer: x = P [norm_e(e); norm_h(h)] (arXiv 2412.19437, equation 21).

    e is the embedding of a token; h is the target's state at the token before it, after its final norm, or what a
    multi-token layer returned there.

    Args:
        tensors: of the layer.
        norm: the target's final norm, of whose class the two are.
        states_first: x = P [norm_h(h); norm_e(e)] (Inkling).
    """

    def __init__(self, tensors: Tensors, norm: nn.Module, states_first: bool = False) -> None:
        super().__init__()
        self.states_first = states_first
        self.reads: list[int] = []
        self.hidden_size = self.embedding_size = tensors["eh_proj.weight"].shape[0]
        self.enorm, self.hnorm = _norm(norm, tensors["enorm.weight"]), _norm(norm, tensors["hnorm.weight"])
        self.eh_proj = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=False, device="meta")
        self.eh_proj.weight = nn.Parameter(tensors["eh_proj.weight"], requires_grad=False)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """The inputs `[..., hidden_size]` of the layer, of states and embeddings of the same shape."""
        read = self.enorm(embeddings), self.hnorm(states)
        inputs: Tensor = self.eh_proj(torch.cat(read[::-1] if self.states_first else read, dim=-1))
        return inputs

    def to_config(self) -> dict[str, Any]:
        return {"multi_token": True, "hidden_size": self.hidden_size}


def one_layer(tensors: Tensors, place: int, target: CausalLM, source: str) -> tuple[CausalLM, MtpInput]:
    """A causal LM with a multi-token layer as its only one and that layer's norm as its final one, and its input.

    The target's embeddings, LM head and rotary frequencies are shared. The layer is of the target's own class, and its
    tensors are renamed and put together (experts) as transformers does it with the target's.

    Args:
        tensors: of the layer (`kind.MtpLayers`).
        place: which of the multi-token layers it is.
        source: where they are from, for messages.

    Raises:
        ValueError: they do not fit the target.
    """
    _check_sizes(tensors, target, source)
    text = target.config.get_text_config(decoder=True)
    if (reason := why_no_early_exit(target, text)) is not None:
        raise ValueError(f"{type(target).__name__} {reason}. Use an independent draft.")
    model = with_layers(target, [_like(text, place)])
    decoder = inner_decoder(model)
    for kind, said, usual in KINDS:
        if (wanted := _wanted(text, place, said, usual)) is not None and getattr(text, kind, None):
            setattr(decoder.config, kind, [wanted])
    stack, layers = layer_stack(decoder, model)
    loaded = _loaded(tensors, decoder, stack, target, source)
    layer = getattr(loaded, stack)[0]
    norm = loaded.norm if POST_NORM in tensors else nn.Identity()
    for module in layer.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config = decoder.config  # which says how attention is computed
    reader = MtpInput(tensors, loaded.norm, getattr(text, "mtp_hidden_states_first", False))
    reader.to(dtype=target.dtype)  # the layer has its own: some parts of experts stay in float32
    for part in (layer, norm, reader):
        part.to(device=input_device(target)).requires_grad_(False)
    layers[0], decoder.norm = layer, norm
    return model.eval(), reader.eval()


def _like(config: Any, place: int) -> int:
    """The last of the target's layers that is of the kind of a multi-token layer, as far as there is one."""
    chosen = list(range(config.num_hidden_layers))
    for kind, said, usual in KINDS:
        wanted, kinds = _wanted(config, place, said, usual), getattr(config, kind, None)
        chosen = [layer for layer in chosen if kinds and kinds[layer] == wanted] or chosen
    return chosen[-1]


def _wanted(config: Any, place: int, said: str, usual: str | None) -> str | None:
    """The kind of a multi-token layer: what the config says of it, or the usual one if the target has such layers."""
    kinds = getattr(config, said, None)
    if kinds:
        return str(kinds[min(place, len(kinds) - 1)])
    return usual if usual in (getattr(config, "layer_types", None) or ()) else None


def _loaded(tensors: Tensors, decoder: CausalLM, stack: str, target: CausalLM, source: str) -> Any:
    """A decoder with the layer and its norm, read by transformers as it reads the target; next to no embeddings."""
    config = copy.deepcopy(decoder.config)
    config.vocab_size, config.pad_token_id = 1, 0
    if get_checkpoint_conversion_mapping(config.model_type) is None:
        config.model_type = target.config.model_type  # which says how the whole model's files are written
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    block = {f"{stack}.0.{name[6:]}": tensor for name, tensor in tensors.items() if name.startswith("block.")}
    embeddings = decoder.get_input_embeddings()
    table = next(name for name, module in decoder.named_modules() if module is embeddings)
    around = {f"{table}.{name}": tensor for name, tensor in embeddings.state_dict().items()}
    around[f"{table}.weight"] = torch.zeros(1, embeddings.weight.shape[1])
    state = {**around, **block, "norm.weight": tensors.get(POST_NORM, torch.ones(embeddings.weight.shape[1]))}
    problem = ""
    try:
        loaded, found = type(decoder).from_pretrained(
            None, config=config, state_dict=state, dtype=target.dtype, output_loading_info=True
        )
    except (RuntimeError, ValueError) as error:  # shapes that differ
        problem = str(error)[:600]
    else:
        for what in ("missing", "unexpected", "mismatched"):
            if names := sorted(map(str, found[f"{what}_keys"])):
                problem += f"{what}: {', '.join(names[:6])}. "
    if problem:
        raise ValueError(
            f"A multi-token layer of {source} is not like the layers of {type(decoder).__name__} ({problem.strip()}), "
            "so what it computes is not known. If the files are the target's own, its layers are of a form that "
            "hf_specdecpp does not know: use another draft (specdecpp drafts lists some)."
        )
    return loaded


def _check_sizes(tensors: Tensors, target: CausalLM, source: str) -> None:
    size = target.config.get_text_config(decoder=True).hidden_size
    wanted = {"eh_proj": [size, 2 * size], **dict.fromkeys(("enorm", "hnorm", "post_norm"), [size])}
    for name, shape in wanted.items():
        if f"{name}.weight" in tensors and (found := list(tensors[f"{name}.weight"].shape)) != shape:
            raise ValueError(
                f"The multi-token layers of {source} have {name} of shape {found}, and {type(target).__name__} needs "
                f"{shape}. They are of another model: name the repository of this one."
            )


def _norm(like: nn.Module, weight: Tensor) -> nn.Module:
    """A norm with this weight, otherwise like another one."""
    norm = copy.deepcopy(like)
    norm.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return norm
