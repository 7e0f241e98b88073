"""Hidden states that a draft reads, captured in the target's own passes (`TargetStates`).

With them a draft of one layer predicts better than several that read embeddings only (arXiv 2401.15077, 2503.01840)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from hf_specdecpp.models.causal_lm import CausalLM, has_compiled_call, inner_decoder, modules_of
from hf_specdecpp.models.early_exit import layer_stack

# Whether a forward returns chosen states, `output_hidden_states=[numbers]`, with the embeddings as number 0. Until 5.22
# number 0 was the first layer's output.
RETURNS_CHOSEN = Version(transformers.__version__) >= Version("5.23")
FINAL = -1  # in `reads`, instead of a layer's index


class StateReader(nn.Module):
    """Base class of modules that make a draft's inputs from token embeddings and the target's hidden states."""

    hidden_size: int  # of the draft's states, and of the target's unless a subclass overrides `width`
    embedding_size: int
    # Indices of the target's layers whose outputs are read, in the order of concatenation; `FINAL` is the target's
    # final state, after its final norm.
    reads: list[int]

    @property
    def width(self) -> int:
        """Size of a token's concatenated target states."""
        return len(self.reads) * self.hidden_size


class TargetStates:
    """Captures hidden states that a draft reads in the target's own forward passes; `ValueError` if the target lacks
    one of the layers.

    Hooks store the outputs of the layers and of the decoder. A compiled target may skip hooks, so it is also asked to
    return the states (`requesting`). Hooks are no longer used once a pass has returned the same tensors that they have
    captured, or they have captured nothing. Other targets are not asked: transformers would leave hooks in them, with
    which they cannot be pickled.

    `catch` captures one call. As a context, it captures all passes of this thread, over parts of one sequence.

    Example: a draft reads layer 1 and the final state of a target with 3 layers. State 0 is the embeddings, so the
    forward returns these as states 2 and 3.

    Args:
        target: the model whose passes are captured.
        reader: defines which states are read; `None` if the draft reads none, so that nothing is captured.

    Attributes:
        are_returned: whether passes return the states, so that hooks are not needed.
        are_read: whether states are captured.
    """

    def __init__(self, target: CausalLM, reader: StateReader | None) -> None:
        self.are_returned = False
        self._modules: list[nn.Module] = []
        self._decoder = inner_decoder(target)
        self._numbers: list[int] = []  # of the states that a forward returns, if it does
        if reader is not None:
            self._modules = read_modules(target, reader)
            can_return = RETURNS_CHOSEN and "hidden_states" in (self._decoder._can_record_outputs or {})
            if can_return and any(map(has_compiled_call, modules_of(target))):
                self._numbers = state_numbers(reader, self._decoder.config.num_hidden_layers)
        self.are_read = reader is not None
        self._caught: list[list[Tensor]] = [[] for _ in self._modules]
        self._passes = 0  # ended since the states were cleared
        self._handles: list[Any] = []

    def set_states(self, states: list[Tensor]) -> None:
        """Store the states of a pass that ran as a CUDA graph: for each of `StateReader.reads` `[1, n, size]`."""
        self._caught = [[each] for each in states]

    def latest(self) -> list[Tensor]:
        """The states captured in the latest pass: for each of `StateReader.reads` `[rows, n, size]`."""
        return [caught[-1] for caught in self._caught]

    def requesting(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """`model_kwargs` of a forward pass, for compiled targets with the request to return the states."""
        if not self._numbers or model_kwargs.get("output_hidden_states"):  # all of them
            return model_kwargs
        return model_kwargs | {"output_hidden_states": self._numbers}

    def catch(self, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        """Run a forward pass with `inputs` from `requesting`, capture its states, and return its output."""
        if not self._modules:
            return forward(*args, **inputs)
        with nullcontext() if self.are_returned else self:
            outputs = forward(*args, **inputs)
        if returned := self._returned(outputs):
            if self.are_returned or not all(self._caught):  # the forward was compiled without hooks
                self._caught = returned
            pairs = zip(self._caught, returned, strict=True)
            self.are_returned = all(caught[-1] is own for caught, (own,) in pairs)
        return outputs

    def _returned(self, outputs: Any) -> list[list[Tensor]]:
        """The states in the outputs of a pass, a list of one tensor per layer; empty if the pass returned none."""
        states = (outputs.hidden_states or ()) if self._numbers else ()
        if len(states) <= max(self._numbers, default=0):
            return []
        return [[states[number]] for number in self._numbers]

    def __enter__(self) -> TargetStates:
        self.clear()
        thread = get_ident()  # in others the same model may generate, too

        def keep(caught: list[Tensor], module: nn.Module, _args: Any, output: Any) -> None:
            if get_ident() == thread:
                caught.append(state_of(module, output))

        def end_pass(*_: object) -> None:
            if get_ident() == thread:
                for caught in self._caught:  # the last state, of a layer that runs several times in each pass (Dory)
                    caught[self._passes :] = caught[-1:]
                self._passes += 1

        hooks = [(module, partial(keep, caught)) for module, caught in zip(self._modules, self._caught, strict=True)]
        self._handles = [module.register_forward_hook(hook) for module, hook in (*hooks, (self._decoder, end_pass))]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        self._passes = 0
        for caught in self._caught:
            caught.clear()

    def by_row(self, count: int) -> list[Tensor | None]:
        """`states_of()` split into the `count` rows of a batch: `[1, n, width]` each, or `None` if none are read."""
        states = self.states_of()
        return [None] * count if states is None else list(states.split(1))

    def states_of(self, rows: Tensor | slice = slice(None)) -> Tensor | None:
        """Remove the captured states and return those of the tokens with the indices `rows` in the passes, concatenated
        over layers: `[batch, n, width]`. `None` if the draft reads none. `RuntimeError` if a compiled pass neither
        called hooks nor returned states.

        Example: `rows` is [0, 1] after a pass over the last token and 3 candidates, of which 1 was accepted."""
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
    """The target's modules whose outputs a draft reads, in the order of `StateReader.reads`: a layer for an index, the
    decoder for `FINAL`. `ValueError` if the target lacks a layer."""
    decoder = inner_decoder(target)
    stack = layer_stack(decoder, target)[1]
    if missing := [read for read in reader.reads if read >= len(stack)]:
        raise ValueError(
            f"The draft reads layers {missing} of its target, and {type(target).__name__} has {len(stack)}, counted "
            "from 0. It was trained for another target."
        )
    return [decoder if read == FINAL else stack[read] for read in reader.reads]


def state_of(module: nn.Module, output: Any) -> Tensor:
    """The hidden states `[rows, n, size]` in a module's output; `ValueError` if they do not have three dimensions."""
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    if states.dim() != 3:
        raise ValueError(
            f"{type(module).__name__} returns {states.dim()}-dimensional states, several for each token, which no "
            "draft can be conditioned on. Read other layers, or use an early exit or an independent draft."
        )
    return states


def state_numbers(reader: StateReader, num_layers: int) -> list[int]:
    """Indices of a reader's states among the `hidden_states` that a forward returns: 0 for the embeddings, `num_layers`
    for the final state. Empty if the last layer's own output is read, which forwards do not return."""
    if num_layers - 1 in reader.reads:
        return []
    return [num_layers if read == FINAL else read + 1 for read in reader.reads]
