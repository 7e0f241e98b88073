"""A layer of a target of any family as a Llama layer (`LayerBehind`), whose weights a draft's layer begins with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Norms that some families put behind a product, and a Llama layer has not: on average they are a factor of its rows.
NORMS_BEHIND = {
    "self_attn.q_proj": "self_attn.q_norm",
    "self_attn.k_proj": "self_attn.k_norm",
    "self_attn.o_proj": "post_attention_layernorm",
    "mlp.down_proj": "post_feedforward_layernorm",
}
MIXES = "self_attn.o_proj"


class LayerBehind:
    """A layer of the target as a Llama layer: its products, with the norms behind them as factors of their rows.

    Within the context it measures how large what they norm is, and catches what its heads attended to.

    Example: q_norm makes of a head's query q the vector w q / |q|, with |q| the root of the mean square. Where 1 / |q|
    is 0.5 on average, the rows of that head's product become 0.5 w times what they were.

    Attributes:
        is_sandwich: whether there are norms before and behind attention and MLP (Gemma).
        before_mlp: name of the norm before the MLP.
        attended: `[batch, n, heads * head_dim]`, what the heads gave in the last pass; `None` for other families.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.modules = layer, dict(layer.named_modules())
        self.is_sandwich = "pre_feedforward_layernorm" in self.modules
        self.before_mlp = "pre_feedforward_layernorm" if self.is_sandwich else "post_attention_layernorm"
        self.attended: Tensor | None = None
        self._inverse: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> LayerBehind:
        for name in NORMS_BEHIND:
            if self._norm(name) is not None and name in self.modules:
                sizes = self._inverse[name] = []
                self._handles.append(self.modules[name].register_forward_hook(self._note(name, sizes)))
        if MIXES in self.modules:
            self._handles.append(self.modules[MIXES].register_forward_hook(self._catch))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _norm(self, name: str) -> nn.Module | None:
        behind = NORMS_BEHIND.get(name)
        if behind == "post_attention_layernorm" and not self.is_sandwich:
            return None  # that one stands before the MLP
        return self.modules.get(behind or "")

    def _catch(self, _module: nn.Module, inputs: Any, _output: Tensor) -> None:
        self.attended = inputs[0]

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
        factors = torch.stack(self._inverse[name]).mean(0)[:, None] * multiplied_by(norm).float().cpu()
        return factors.flatten()[:, None] * weight


def multiplied_by(norm: Any) -> Tensor:
    """What a norm multiplies with: what it makes of a vector of ones, also where that is 1 + its weight."""
    made: Tensor = norm(torch.ones_like(norm.weight)[None])[0]
    return made


def norm_weight(module: nn.Module, name: str) -> Tensor | None:
    """What one of its norms multiplies with; `None` where it is not there, or has a bias."""
    norm: Any = dict(module.named_children()).get(name)
    return multiplied_by(norm) if norm is not None and getattr(norm, "bias", None) is None else None


def copy_norm(module: nn.Module, name: str, ours: Any) -> None:
    """Let one of our norms multiply with what the module's norm of this name does, if it has one."""
    if (weight := norm_weight(module, name)) is not None:
        ours.weight.copy_(weight)
