"""What a draft reads of its target: hidden states, caught in the target's own passes (`TargetStates`).

A draft that reads them begins where the target has got to, so a single layer knows more than several that begin from
embeddings (EAGLE, arXiv 2401.15077 and 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from hf_specdecpp.models.causal_lm import CausalLM, has_compiled_call, inner_decoder, modules_of
from hf_specdecpp.models.early_exit import layer_stack

# A forward returns chosen states, `output_hidden_states=[numbers]`, of which number 0 are the embeddings. Until 5.22
# number 0 of such a list was the first layer's output.
RETURNS_CHOSEN = Version(transformers.__version__) >= Version("5.23")
FINAL = -1  # in the place of a layer's index


class StateReader(nn.Module):
    """Makes a draft's inputs of the target's states and of embeddings, and says which states.

    Attributes:
        hidden_size: of the draft's states.
        embedding_size: of the embeddings that it reads.
        reads: indices of the target's layers whose outputs are read, in the order in which they are put together;
            `FINAL` is its final state, after its final norm.
    """

    hidden_size: int
    embedding_size: int
    reads: list[int]

    @property
    def width(self) -> int:
        """Numbers in a target's state: of all that is read."""
        return len(self.reads) * self.hidden_size


class TargetStates:
    """Catches the states that a draft reads out of the target's own passes; `ValueError` if the target has no such
    layers.

    Hooks catch them, which keep references to what the decoder and its layers return. Compiled forwards run past hooks,
    so they are asked to return the states, from the first pass on that returned the very ones that hooks saw; where a
    user has compiled the target without hooks, what it returns is believed. Others are not asked: transformers would
    leave hooks of its own in the target for good, with which it cannot be pickled.

    Used as a context around the passes over one text, it catches by hooks. Passes of other threads are left out.

    Example: layer 1 and the final state are read, of a target with 3 layers. State 0 are the embeddings, so the numbers
    of the two are 2 and 3.

    Args:
        target: whose passes.
        reader: says which layers; with `None` nothing is caught.

    Attributes:
        are_returned: whether passes return the states, so that they need no hooks.
        are_read: whether anything is caught.
    """

    def __init__(self, target: CausalLM, reader: StateReader | None) -> None:
        self.are_returned = False
        self._modules: list[nn.Module] = []
        self._numbers: list[int] = []  # of the states in what a forward returns, if it does
        if reader is not None:
            self._modules, decoder = read_modules(target, reader), inner_decoder(target)
            can_return = RETURNS_CHOSEN and "hidden_states" in (decoder._can_record_outputs or {})
            if can_return and any(map(has_compiled_call, modules_of(target))):
                self._numbers = state_numbers(reader, decoder.config.num_hidden_layers)
        self.are_read = reader is not None
        self._caught: list[list[Tensor]] = [[] for _ in self._modules]
        self._handles: list[Any] = []

    def give(self, states: list[Tensor]) -> None:
        """The states `[1, n, size]` of a pass that was captured, in the order in which they are put together."""
        self._caught = [[each] for each in states]

    def asked_for(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """A forward's arguments with which it returns the states, and what users ask of it themselves."""
        if not self._numbers or model_kwargs.get("output_hidden_states"):  # all of them
            return model_kwargs
        return model_kwargs | {"output_hidden_states": self._numbers}

    def catch(self, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        """Make a pass whose arguments are `asked_for`, and catch its states; what it returns."""
        if not self._modules:
            return forward(*args, **inputs)
        if self.are_returned:
            outputs = forward(*args, **inputs)
            self._caught = self._returned(outputs)
            return outputs
        with self:
            outputs = forward(*args, **inputs)
        if returned := self._returned(outputs):
            if not all(self._caught):  # the forward was compiled without hooks
                self._caught = returned
            pairs = zip(self._caught, returned, strict=True)
            self.are_returned = all(caught and caught[-1] is own for caught, (own,) in pairs)
        return outputs

    def _returned(self, outputs: Any) -> list[list[Tensor]]:
        """The states among the outputs of a pass, as hooks catch them; empty where they are not there."""
        states = (outputs.hidden_states or ()) if self._numbers else ()
        if len(states) <= max(self._numbers, default=0):
            return []
        return [[states[number]] for number in self._numbers]

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
        for caught in self._caught:
            caught.clear()

    def by_row(self, count: int) -> list[Tensor | None]:
        """The states `[1, n, width]` of each of the `count` rows of a batch."""
        states = self.states_of()
        return [None] * count if states is None else list(states.split(1))

    def states_of(self, rows: Tensor | slice = slice(None)) -> Tensor | None:
        """States `[batch, n, width]` of `rows` of what was read in the context; `None` where nothing is to be caught.

        Example: of the last token and 3 candidates, of which 1 was accepted, rows 0 and 1.
        """
        if not self._modules:
            return None
        if not all(self._caught):
            raise RuntimeError(
                "The draft reads hidden states of its target by hooks, and the target's pass did not call them: its "
                "forward was compiled without them (model.forward = torch.compile(model.forward)), and does not return "
                "the states (transformers does from 5.23 on, but for the last layer's own). Leave the target "
                "uncompiled, or use model.compile() or another kind of draft."
            )
        device = self._caught[0][0].device
        rows = rows.to(device) if isinstance(rows, Tensor) else rows
        parts = [torch.cat([part.to(device) for part in caught], dim=1)[:, rows] for caught in self._caught]
        self.clear()
        return torch.cat(parts, dim=-1)


def read_modules(target: CausalLM, reader: StateReader) -> list[nn.Module]:
    """The modules of a target whose outputs a draft reads, in the order in which they are put together; `ValueError` if
    the target has no such layers."""
    decoder = inner_decoder(target)
    stack = layer_stack(decoder, target)[1]
    if missing := [read for read in reader.reads if read >= len(stack)]:
        raise ValueError(
            f"The draft reads layers {missing} of its target, and {type(target).__name__} has {len(stack)}, counted "
            "from 0. It was trained for another target."
        )
    return [decoder if read == FINAL else stack[read] for read in reader.reads]


def state_of(module: nn.Module, output: Any) -> Tensor:
    """The states `[rows, n, size]` among what a module returns."""
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    if states.dim() != 3:
        raise ValueError(
            f"{type(module).__name__} returns {states.dim()}-dimensional states, several for each token, which no "
            "draft can be conditioned on. Read other layers, or use an early exit or an independent draft."
        )
    return states


def state_numbers(reader: StateReader, num_layers: int) -> list[int]:
    """The numbers of a reader's states among those that a forward returns: 0 are the embeddings, and after the last
    layer it returns the final state. Empty if the last layer's own output is read, which it does not return."""
    if num_layers - 1 in reader.reads:
        return []
    return [num_layers if read == FINAL else read + 1 for read in reader.reads]


def _keeper(caught: list[Tensor], thread: int) -> Any:
    def keep(module: nn.Module, _args: Any, output: Any) -> None:
        if get_ident() != thread:  # another generation of the same model
            return
        caught.append(state_of(module, output))

    return keep
