"""The EAGLE-3 draft (arXiv 2503.01840, section 3): a model whose first layer reads an embedding and a hidden state
(`Eagle3Model`), and the `Draft` that runs it in a generation (`Eagle3Drafter`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from hf_specdecpp.draft_kinds.eagle3.config_eagle3 import Eagle3Settings
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import FINAL, StateReader


class Eagle3Input(StateReader):
    """Computes the input of a draft step: the embedding of a token, and the state g at the token before it.

    For verified tokens g = fc([a_1; ...; a_k]), or a_1 without fc, with the target's states a at the token before. For
    a candidate that follows another one, g is the draft's own hidden state at that one, unchanged."""

    def __init__(self, settings: Eagle3Settings, norm: Any) -> None:
        super().__init__()
        self.hidden_size = self.embedding_size = settings.layer["hidden_size"]
        self.state_size, self.reads = settings.state_size, settings.reads or [FINAL]
        mixed = settings.num_reads * settings.state_size
        self.num_reads = settings.num_reads
        self.fc = nn.Linear(mixed, self.hidden_size, bias=settings.fc_bias) if mixed else None
        self.input_norm = norm(mixed) if settings.norm_before_fc else None
        norms = [norm(settings.state_size) for _ in range(settings.num_reads)]
        self.fc_norm = nn.ModuleList(norms) if settings.fc_norm else None

    @property
    def width(self) -> int:
        return max(self.num_reads, 1) * self.state_size

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return `[..., 2 * hidden_size]`: `embeddings`, then g. `states`: the target's `[..., width]`, or the draft's
        own `[..., hidden_size]`."""
        if self.fc is not None and states.shape[-1] == self.width:
            states = self.fc(self.normed(states))
        return torch.cat((embeddings, states), dim=-1)

    def normed(self, states: Tensor) -> Tensor:
        """Return the input of fc: `states` `[..., width]`, the target's, normed as the settings specify."""
        if self.input_norm is not None:
            return self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.split(self.state_size, dim=-1)
            return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return states


class FirstLayer(nn.Module):
    """The first layer of a draft: its attention reads embedding e and state g, normed separately; the residual is g.

        x = [norm_e(e); norm_g(g)],   r = g + attention(x),   y = r + mlp(norm(r))

    Args:
        layer: a decoder layer of transformers, whose modules are reused; q, k and v get twice as many inputs.
        norm_before_residual: instead r = norm_g(g) + attention(x)."""

    def __init__(self, layer: Any, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            wide = nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None, device=old.weight.device)
            setattr(self.self_attn, name, wide)
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        size, self.epsilon = layer.input_layernorm.weight.shape[0], layer.input_layernorm.variance_epsilon
        self.hidden_norm = type(layer.input_layernorm)(size, eps=self.epsilon)

    def forward(self, inputs: Tensor, **attention: Any) -> Tensor:
        # Both norms at once, of `[..., 2, hidden_size]`: a step is short, and each operation counts.
        weights = torch.stack((self.input_layernorm.weight, self.hidden_norm.weight))
        single = inputs.unflatten(-1, (2, -1)).float()
        single = single * torch.rsqrt(single.square().mean(-1, keepdim=True) + self.epsilon)
        both = weights * single.to(inputs.dtype)
        attended, _ = self.self_attn(both.flatten(-2), **attention)
        state = both[..., 1, :] if self.norm_before_residual else inputs.chunk(2, dim=-1)[1]
        residual = state + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Model(PreTrainedModel):
    """The weights of an EAGLE-3 draft, as a model of transformers. `set_target` gives it the target's embeddings and LM
    head, which are used if the draft has none of its own.

    Attributes:
        settings: sizes and variants of the draft.
        reader: computes the inputs of the first layer.
        decoder: the layers as a transformers model without a final norm; its `inputs_embeds` are
            `[..., 2 * hidden_size]`.
        norm: final norm before the LM head; with `norm_output` the next step also reads its output.
        token_ids: `[draft_vocab_size]` int64: the target's ids of the draft's tokens; `None` for all."""

    config_class = None
    _supports_sdpa = True
    token_ids: Tensor | None

    def __init__(self, settings: Eagle3Settings) -> None:
        config = settings.layer_config()
        config._attn_implementation = "sdpa"  # accepts tree masks
        super().__init__(config)
        self.settings = settings
        self.decoder = AutoModel.from_config(config, attn_implementation="sdpa")
        self.norm, self.decoder.norm = self.decoder.norm, nn.Identity()
        self.decoder.layers[0] = FirstLayer(self.decoder.layers[0], settings.norm_before_residual)
        if not settings.own_embeddings:
            del self.decoder.embed_tokens
        self.reader = Eagle3Input(settings, lambda size: type(self.norm)(size, eps=config.rms_norm_eps))
        size, count = settings.layer["hidden_size"], settings.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(size, count, bias=False) if settings.own_head else None
        self.register_buffer("token_ids", None, persistent=False)
        self._targets: tuple[Any, Any] = (None, None)  # embeddings and LM head; a tuple: not submodules

    def set_target(self, target: CausalLM) -> None:
        """Called when the draft is bound: take the target's embeddings and LM head, and let `reader` read the layers of
        the settings."""
        self._targets = target.get_input_embeddings(), target.get_output_embeddings()
        self.reader.reads = self.settings.reads or [FINAL]

    def to_config(self) -> dict[str, Any]:
        return asdict(self.settings)

    def get_decoder(self, *_: Any, **__: Any) -> Any:
        return self.decoder

    def get_input_embeddings(self) -> Any:
        return self.decoder.embed_tokens if self.settings.own_embeddings else self._targets[0]

    def get_output_embeddings(self) -> Any:
        return self._targets[1] if self.lm_head is None else self.lm_head


class Eagle3Drafter(Drafter):
    """The `Draft` of an `Eagle3Model` that is bound to a target (`PublishedKind.bind`)."""

    tree_reader = None  # no trial needed: the attention (SDPA) of these layers accepts tree masks

    def __init__(self, model: Eagle3Model, target: CausalLM) -> None:
        model.set_target(target)
        super().__init__(model, model.token_ids, shares_target=True, fusion=model.reader)

    @property
    def num_ids(self) -> int:
        return int(self.model.config.vocab_size)

    def _head_of_draft_vocab(self) -> None:
        """`None`: the draft's own LM head has these tokens only."""

    def hidden_states(self, *read: Any, **inputs: Any) -> Tensor:
        """As in `Drafter`: the states that the next step reads, with `norm_output` those after the final norm."""
        states = super().hidden_states(*read, **inputs)
        return self.model.norm(states) if self.model.settings.norm_output else states

    def before_head(self, hidden: Tensor) -> Tensor:
        return hidden if self.model.settings.norm_output else self.model.norm(hidden)

    def _check_logits(self) -> None:
        """Skips the check that logits are computed as by the model: this package defines the model."""
