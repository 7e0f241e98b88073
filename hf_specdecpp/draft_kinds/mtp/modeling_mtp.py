"""Multi-token layers as draft models (`one_layer`), the `Draft` of several layers (`MtpDraft`), its session for one
sequence (`LayersSession`), and its steps in captured rounds (`LayerSteps`).

A single layer is a `Drafter`: after the first candidate it reads its own states. With several layers, each proposes one
candidate, and the last layer proposes further candidates by reading its own states."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps, Unrolled, Window, last_rows
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache
from hf_specdecpp.drafting.draft import DraftingSession, StateDraft
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafting.model_steps import read, read_chain
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder, input_device
from hf_specdecpp.models.early_exit import layer_stack, why_no_early_exit, with_layers
from hf_specdecpp.models.target_states import FINAL, StateReader

# Config fields with the kinds of the target's layers and of multi-token layers, and the default kind of the latter.
KINDS = (("layer_types", "mtp_layer_types", "full_attention"), ("mlp_layer_types", "mtp_mlp_layer_types", ""))
POST_NORM = "post_norm.weight"  # Inkling: one for all layers, or none
Tensors = Mapping[str, Tensor]


class MtpInput(StateReader):
    """Computes the input of a multi-token layer: x = P [norm_e(e); norm_h(h)] (arXiv 2412.19437, equation 21).

    e is the embedding of a token; h is the hidden state at the token before: the target's, after its final norm, or the
    output of a multi-token layer.

    Args:
        norm: the target's final norm; norm_e and norm_h are copies of it with other weights.
        states_first: x = P [norm_h(h); norm_e(e)] (Inkling)."""

    def __init__(self, tensors: Tensors, norm: nn.Module, states_first: bool = False) -> None:
        super().__init__()
        self.states_first = states_first
        self.reads = [FINAL]
        self.hidden_size = self.embedding_size = tensors["eh_proj.weight"].shape[0]
        self.enorm, self.hnorm = _norm(norm, tensors["enorm.weight"]), _norm(norm, tensors["hnorm.weight"])
        self.eh_proj = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=False, device="meta")
        self.eh_proj.weight = nn.Parameter(tensors["eh_proj.weight"], requires_grad=False)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return the layer's inputs x `[..., hidden_size]`; `states` (h) and `embeddings` (e) have the same shape."""
        read = self.enorm(embeddings), self.hnorm(states)
        return self.eh_proj(torch.cat(read[::-1] if self.states_first else read, dim=-1))


def one_layer(tensors: Tensors, place: int, target: CausalLM, source: str) -> tuple[CausalLM, MtpInput]:
    """Make a causal LM from one multi-token layer; returns the model and the `MtpInput` that computes its inputs.
    `tensors`: of layer number `place` (from 0) in `MtpLayers`. `ValueError` if the tensors do not fit the target.

    Shares the target's embeddings, LM head and rotary frequencies. The layer has the class of the target's layers;
    transformers renames and merges its tensors (experts) as it does for the target."""
    text = target.config.get_text_config(decoder=True)
    size = text.hidden_size
    shapes = {"eh_proj": [size, 2 * size], **dict.fromkeys(("enorm", "hnorm", "post_norm"), [size])}
    for name, shape in shapes.items():
        if f"{name}.weight" in tensors and (found := list(tensors[f"{name}.weight"].shape)) != shape:
            raise ValueError(
                f"The multi-token layers of {source} have {name} of shape {found}, and {type(target).__name__} needs "
                f"{shape}. They are of another model: name the repository of this one."
            )
    if (reason := why_no_early_exit(target, text)) is not None:
        raise ValueError(f"{type(target).__name__} {reason}. Use an independent draft.")
    kinds = _kinds(text, place)
    model = with_layers(target, [_like(text, kinds)])
    decoder = inner_decoder(model)
    for field, kind in kinds.items():
        setattr(decoder.config, field, [kind])
    stack, layers = layer_stack(decoder, model)
    loaded = _loaded(tensors, decoder, stack, target, source)
    layer = getattr(loaded, stack)[0]
    norm = loaded.norm if POST_NORM in tensors else nn.Identity()
    for module in layer.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config = decoder.config  # selects the attention implementation
    reader = MtpInput(tensors, loaded.norm, getattr(text, "mtp_hidden_states_first", False))
    reader.to(dtype=target.dtype)  # not the layer: parts of experts stay in float32
    for part in (layer, norm, reader):
        part.to(device=input_device(target)).requires_grad_(False)
    layers[0], decoder.norm = layer, norm
    return model.eval(), reader.eval()


def _kinds(config: Any, place: int) -> dict[str, str]:
    """Return the kinds of multi-token layer number `place`, such as `{"layer_types": "full_attention"}`, as the
    target's config lists them for such layers, else the default ones (`KINDS`) if the target has layers of them."""
    found = {}
    for field, listed, usual in KINDS:
        own, theirs = getattr(config, listed, None), getattr(config, field, None) or ()
        if theirs and (own or usual in theirs):
            found[field] = str(own[min(place, len(own) - 1)]) if own else usual
    return found


def _like(config: Any, kinds: dict[str, str]) -> int:
    """Return the index of the target's last layer of all these kinds, or of as many as possible."""
    chosen = list(range(config.num_hidden_layers))
    for field, kind in kinds.items():
        chosen = [layer for layer in chosen if getattr(config, field)[layer] == kind] or chosen
    return chosen[-1]


def _loaded(tensors: Tensors, decoder: CausalLM, stack: str, target: CausalLM, source: str) -> Any:
    """Load a decoder of the class of `decoder` with one layer, its norm and a table of one embedding from the tensors,
    by transformers' `from_pretrained`, which renames and merges tensors. `stack`: name of the decoder's layers."""
    config = copy.deepcopy(decoder.config)
    config.vocab_size, config.pad_token_id = 1, 0
    if get_checkpoint_conversion_mapping(config.model_type) is None:
        config.model_type = target.config.model_type  # whose conversion rules apply to the checkpoint
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


def _norm(like: nn.Module, weight: Tensor) -> nn.Module:
    """Copy a norm, with another weight."""
    norm = copy.deepcopy(like)
    norm.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return norm


class MtpDraft(StateDraft):
    """Drafts chains with several multi-token layers: layer k (from 0) proposes candidate k, and the last layer also all
    further candidates."""

    def __init__(self, layers: Sequence[Drafter]) -> None:
        self.layers, self.first, self.max_length = list(layers), layers[0], layers[0].max_length
        super().__init__(self.first.model, self.first.fusion)
        self.cannot = {
            "trees": f"The target has {len(self.layers)} multi-token layers, and each of them reads the rows of the "
            "one before it, which differ from path to path: nodes of a tree share none. Draft chains (tree=False); a "
            "single multi-token layer drafts trees, too."
        }

    @property
    def parts(self) -> list[nn.Module]:
        return list(dict.fromkeys(part for layer in self.layers for part in layer.parts))

    def session(self, vocab_size: int) -> DraftingSession:
        return LayersSession(self.layers, vocab_size)

    def give_up(self, reason: str) -> None:
        self.first.give_up(reason)

    def round_steps(self, vocab_size: int, fuse: bool) -> LayerSteps | None:
        copies = [layer.captured_copy(fuse) for layer in self.layers]
        return None if None in copies else LayerSteps(copies, vocab_size)


class LayersSession(DraftingSession):
    """Session for one sequence. Row r of layer k (from 0) reads the token at position r + k + 1 and a state: the first
    layer the target's state at position r, other layers the output of row r of the layer before.

    Example: two layers, the sequence `a b c d`, and the target's states at a, b and c. The first layer reads b, c, d
    with these states, and proposes e. The second reads c, d, e with the first layer's outputs, and proposes f. For a
    third candidate, the second layer reads f with its own last output. Its rows of e and f are dropped after the round.
    """

    def __init__(self, layers: Sequence[Drafter], vocab_size: int) -> None:
        super().__init__()
        self.layers, self.vocab_size, self.embed, self.device = layers, vocab_size, layers[0].embed, layers[0].device
        self.caches = [DynamicCache(config=layer.text_config) for layer in layers]
        for cache in self.caches:
            cache.activate_past_recording()  # the last rows of a prompt are rolled back, too
        self.counts = [0] * len(layers)  # rows in each cache
        self.first = [0] * len(layers)  # the same at the beginning of the round
        # `[1, n, hidden_size]` for each layer: states of its rows from `first` on, as far as they are known.
        self.states = [torch.empty(1, 0, layer.hidden_size, dtype=layer.dtype, device=self.device) for layer in layers]
        self._text: Tensor = torch.empty(1, 0, dtype=torch.long, device=self.device)
        self._last: Any = None  # output of the latest row, `[1, 1, hidden_size]`

    @property
    def length(self) -> int:
        return self._text.shape[1]

    def read_verified(self, new_tokens: Tensor, num_accepted: int, states: Any = None) -> None:
        end = max(self.length - 1, 0)
        for place, cache in enumerate(self.caches):
            kept = min(self.counts[place], max(self.length - 1 - place, 0))  # rows that read no candidate
            if self.counts[place]:
                cache.crop(kept - self.counts[place])  # also with 0 rows to drop: layers with a window trim
            first = self.first[place]
            self.states[place] = self.states[place][:, kept - first : end - first].clone()
            self.counts[place] = self.first[place] = end = kept
        tokens, states = new_tokens.to(self.device), states.to(self.device)
        if not self.length:  # fewer states than tokens if the call continues a cache
            tokens = tokens[:, -(states.shape[1] + 1) :]
        self._text = torch.cat((self._text, tokens), dim=1)
        self.states[0] = torch.cat((self.states[0], states[:, -(self.length - 1) :]), dim=1)
        self.unread, self.passes = self.states[0].shape[1], 0

    def propose_next(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        place = min(len(candidates), len(self.layers) - 1)
        layer, drawn = self.layers[place], [each.view(1, 1) for each in candidates]
        if len(candidates) < len(self.layers):
            tokens, states = torch.cat((self._text[:, self.first[place] + place + 1 :], *drawn), 1), self.states[place]
        else:
            tokens, states = drawn[-1], self._last
        hidden = layer.hidden_states(tokens, self.caches[place], states)
        self.counts[place] += tokens.shape[1]
        if place + 1 < len(self.layers):
            self.states[place + 1] = torch.cat((self.states[place + 1], hidden), dim=1)
        self._last, self.unread = hidden[:, -1:], 0
        self.passes += 1
        return layer.logits(hidden[0, -1], self.vocab_size), hidden[0, -1]


class LayerSteps(RoundSteps):
    """`LayersSession` for captured rounds, in which all layers read all rows of the window.

    Example: two layers, and a window of b c d after `a`. The first layer reads b, c, d with the target's states at a, b
    and c, and proposes e. The second reads c, d, e with the first layer's outputs, and proposes f. If e and f are
    accepted and g follows, the next window is d e f g: the second layer reads e, f, g and a candidate."""

    def __init__(self, layers: Sequence[Any], vocab_size: int) -> None:
        super().__init__(layers[0], vocab_size)
        self.layers, self.key = layers, tuple(layers)
        self.num_layers, self.again, self.least = len(layers), len(layers) - 1, len(layers)

    def unroll(self, cache: FixedCache, window: Window, depths: Tensor) -> Unrolled:
        parts = [cache.part(place, 1) for place in range(len(self.layers))]  # each layer is the first of its model
        tokens, count = functional.pad(window.tokens, (0, len(parts))), window.tokens.shape[1]
        states: Any = window.states
        for place, (layer, part) in enumerate(zip(self.layers, parts, strict=True)):
            states = read_chain(layer, part, layer.known(tokens[:, place : place + count]), states)
            hidden = last_rows(states, window.last)
            level = yield layer.logits(hidden, self.vocab_size)[:, None], hidden[:, None]
            tokens = tokens.scatter(1, window.last[:, None] + 1 + place, level.tokens)
        cache.length.add_(window.last + 1)
        while True:
            own = Window(layer.known(level.tokens), hidden[:, None], window.last.new_zeros(len(hidden)))
            logits, hidden = read(layer, part, own, self.vocab_size)
            level = yield logits[:, None], hidden[:, None]
