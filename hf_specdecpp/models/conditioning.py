"""What a conditioned draft reads of its target: hidden states, caught on the way (`TargetStates`), and how they become
its input (`Fusion`).

Each verification computes the target's hidden states at every token that it verifies. A draft that reads them begins
where the target has got to, so a single layer knows more than several that begin from embeddings. EAGLE
(arXiv 2401.15077, 2503.01840) and jump drafting are built on the same observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.early_exit import layer_stack
from hf_specdecpp.models.quantised import sizes_of


class Fusion(nn.Module):
    """The input of a conditioned draft at a token: the state at the token before it, and the token itself.

        x = F [s; e],   s = h + R [h_1; ...; h_n]

    e is the token's input embedding. For a token that the target has verified, h is the target's final hidden state
    (after its final norm) at the token before, and h_1, ..., h_n are the outputs of its layers `reads` there. For a
    candidate after another one the target has no state yet: s is the draft's own final state.

    Example: after the text "a b c" the candidates d and e are drafted. The draft reads b with the target's state at a,
    and c with that at b, which gives d. It reads d with its own state at c, which gives e. Once d is verified, it reads
    d again, with the target's state at c.

    Args:
        hidden_size: of target and draft, H.
        embedding_size: E, also the size of x.
        reads: indices of the target's layers whose outputs are read beside its final state.
        rank: of F and R as products of two smaller maps; `None` for full ones.
    """

    def __init__(
        self, hidden_size: int, embedding_size: int, reads: list[int] | None = None, rank: int | None = None
    ) -> None:
        super().__init__()
        reads = reads or []
        if min(hidden_size, embedding_size, rank or 1) < 1 or any(read < 0 for read in reads):
            raise ValueError(
                f"A fusion with hidden_size={hidden_size}, embedding_size={embedding_size}, reads={reads} and "
                f"rank={rank} makes no sense: sizes are at least 1, layers are counted from 0."
            )
        self.hidden_size, self.embedding_size, self.reads, self.rank = hidden_size, embedding_size, reads, rank
        self.fuse = _linear(hidden_size + embedding_size, embedding_size, rank)
        self.read = _linear(len(self.reads) * hidden_size, hidden_size, rank) if self.reads else None
        self.reset()

    @classmethod
    def untrained(cls, target: CausalLM, reads: Sequence[int], rank: int | None = None) -> Fusion:
        """One of a target's sizes."""
        hidden_size, _ = sizes_of(target.get_output_embeddings())
        return cls(hidden_size, target.get_input_embeddings().weight.shape[1], list(reads), rank)

    @property
    def width(self) -> int:
        """Numbers in a target's state: its final state and the outputs of the layers that are read."""
        return (1 + len(self.reads)) * self.hidden_size

    @torch.no_grad()
    def reset(self) -> None:
        """As it is untrained: x = e with full maps, and the layers that are read change nothing."""
        if isinstance(self.fuse, nn.Linear):
            self.fuse.weight.zero_()
            self.fuse.weight[:, self.hidden_size :].fill_diagonal_(1.0)
        if self.read is not None:
            _last(self.read).weight.zero_()

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """The inputs `[..., E]` of the draft.

        Args:
            states: `[..., width]` of the target, or `[..., H]` of the draft itself.
            embeddings: `[..., E]`.
        """
        if self.read is not None and states.shape[-1] == self.width:
            final, read = states.split((self.hidden_size, self.width - self.hidden_size), dim=-1)
            states = final + self.read(read)
        fused: Tensor = self.fuse(torch.cat((states, embeddings), dim=-1))
        return fused

    def to_config(self) -> dict[str, Any]:
        """The arguments that make a fusion of this shape."""
        return {
            "hidden_size": self.hidden_size,
            "embedding_size": self.embedding_size,
            "reads": self.reads,
            "rank": self.rank,
        }


def _linear(inputs: int, outputs: int, rank: int | None) -> nn.Module:
    if rank is None:
        return nn.Linear(inputs, outputs, bias=False)
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False))


def _last(layer: nn.Module) -> Any:
    return layer[-1] if isinstance(layer, nn.Sequential) else layer


class TargetStates:
    """Catches the states that a conditioned draft reads out of the target's own passes.

    Within the context, hooks keep references to what the decoder and its layers return, and change nothing. It is
    entered around the passes over one text: logits processors may call the target, too, and passes of other threads are
    left out. A prompt may be read in several passes (chunked prefill), whose states follow one another.

    Args:
        target: whose passes.
        fusion: says which layers; with `None` nothing is caught.

    Raises:
        ValueError: the target has no such layers.
    """

    def __init__(self, target: CausalLM, fusion: Fusion | None) -> None:
        self._modules: list[nn.Module] = []
        if fusion is not None:
            decoder = inner_decoder(target)
            stack = layer_stack(decoder, target)[1]
            if missing := [read for read in fusion.reads if read >= len(stack)]:
                raise ValueError(
                    f"The draft reads layers {missing} of its target, and {type(target).__name__} has {len(stack)}, "
                    "counted from 0. It was trained for another target."
                )
            self._modules = [decoder, *(stack[read] for read in fusion.reads)]
        self._caught: list[list[Tensor]] = [[] for _ in self._modules]
        self._handles: list[Any] = []

    def __enter__(self) -> TargetStates:
        self.clear()
        for module, caught in zip(self._modules, self._caught, strict=True):
            self._handles.append(module.register_forward_hook(_keeper(caught, get_ident())))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        """Forget what was caught."""
        for caught in self._caught:
            caught.clear()

    def take(self, rows: Tensor | slice = slice(None)) -> Tensor | None:
        """States `[batch, n, width]` of `rows` of what was read in the context; `None` where nothing is to be caught.

        Raises:
            RuntimeError: the hooks were not called.
        """
        if not self._modules:
            return None
        if not all(self._caught):
            raise RuntimeError(
                "The draft reads hidden states of its target by hooks, and the target's pass did not call them: its "
                "forward was compiled without them (model.forward = torch.compile(model.forward)). Leave the target "
                "uncompiled, or use model.compile() or another kind of draft."
            )
        device = self._caught[0][0].device
        rows = rows.to(device) if isinstance(rows, Tensor) else rows
        parts = [torch.cat([part.to(device) for part in caught], dim=1)[:, rows] for caught in self._caught]
        self.clear()
        return torch.cat(parts, dim=-1)


def _keeper(caught: list[Tensor], thread: int) -> Any:
    def keep(module: nn.Module, _args: Any, output: Any) -> None:
        if get_ident() != thread:  # another generation of the same model
            return
        states = output if isinstance(output, Tensor) else output[0]
        if states.dim() != 3:
            raise ValueError(
                f"{type(module).__name__} returns {states.dim()}-dimensional states, several for each token, which no "
                "draft can be conditioned on. Read other layers, or use an early exit or an independent draft."
            )
        caught.append(states)

    return keep
