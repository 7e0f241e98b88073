"""What a draft reads of its target: hidden states, caught in the target's own passes (`TargetStates`).

Each verification computes the target's hidden states at every token that it verifies. A draft that reads them begins
where the target has got to, so a single layer knows more than several that begin from embeddings. EAGLE
(arXiv 2401.15077, 2503.01840) and jump drafting are built on the same observation.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.early_exit import layer_stack


class StateReader(nn.Module):
    """Makes a draft's inputs of the target's states and of embeddings, and says which states.

    Attributes:
        hidden_size: of the draft's states.
        embedding_size: of the embeddings that it reads.
        reads: indices of the target's layers whose outputs are read, in the order in which they are put together.
        reads_final: whether the target's final state (after its final norm) is read, too, and comes first.
    """

    hidden_size: int
    embedding_size: int
    reads: list[int]
    reads_final: bool = True

    @property
    def width(self) -> int:
        """Numbers in a target's state: its final state and the outputs of the layers that are read."""
        return (self.reads_final + len(self.reads)) * self.hidden_size

    def to_config(self) -> dict[str, Any]:
        """The arguments that make one of this shape."""
        raise NotImplementedError


class TargetStates:
    """Catches the states that a draft reads out of the target's own passes, and keeps them for its next round.

    Within the context, hooks keep references to what the decoder and its layers return, and change nothing. It is
    entered around the passes over one text: logits processors may call the target, too, and passes of other threads are
    left out. A prompt may be read in several passes (chunked prefill), whose states follow one another.

    Args:
        target: whose passes.
        reader: says which layers; with `None` nothing is caught.

    Attributes:
        found: `[1, n, width]` at the n tokens that the last pass verified, for one text (`keep`, `keep_row`); `None`
            before there was one, or where nothing is caught.

    Raises:
        ValueError: the target has no such layers.
    """

    def __init__(self, target: CausalLM, reader: StateReader | None) -> None:
        self.found: Tensor | None = None
        self._modules: list[nn.Module] = []
        if reader is not None:
            decoder = inner_decoder(target)
            stack = layer_stack(decoder, target)[1]
            if missing := [read for read in reader.reads if read >= len(stack)]:
                raise ValueError(
                    f"The draft reads layers {missing} of its target, and {type(target).__name__} has {len(stack)}, "
                    "counted from 0. It was trained for another target."
                )
            self._modules = [decoder] * reader.reads_final + [stack[read] for read in reader.reads]
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

    def keep(self, rows: Tensor | slice) -> None:
        """Keep the states of `rows` of the pass for the draft: of a chain those that stand, of a tree an accepted path.

        Example: the last token and 3 candidates were read, of which 1 was accepted: rows 0 and 1.
        """
        self.found = self.take(rows)

    def by_row(self, count: int) -> list[Tensor | None]:
        """The states `[1, n, width]` of each of the `count` rows of a batch."""
        states = self.take()
        return [None] * count if states is None else list(states.split(1))

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
