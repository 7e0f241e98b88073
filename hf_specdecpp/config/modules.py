"""Read a trained module that a config describes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hf_specdecpp.config.bounds import CURE
from hf_specdecpp.config.types import check_arguments
from hf_specdecpp.files import load_strict

Module = TypeVar("Module", bound=nn.Module)


def read_module(kind: type[Module], name: str, arguments: dict[str, Any], path: Path, hint: str) -> Module:
    """A module with these arguments, whose weights are in `path`. No memory is taken before they are seen to fit.

    Args:
        kind: its class.
        name: what it is called in a message.
        arguments: of its class, from a file.
        hint: ends the message if the weights are of another one.

    Raises:
        ValueError: the arguments make no sense, or the file is damaged or does not fit them.
    """
    with as_described(name):
        check_arguments(kind.__init__, arguments)
        with torch.device("meta"):
            shapes = {key: tensor.shape for key, tensor in kind(**arguments).state_dict().items()}
    tensors = load_strict(path, shapes, hint)
    if odd := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        raise ValueError(f"{path}: {odd[0]} holds {str(tensors[odd[0]].dtype)[6:]}, no floating point numbers. {hint}")
    module = kind(**arguments)
    module.load_state_dict(tensors)
    return module.eval()


@contextmanager
def as_described(name: str) -> Iterator[None]:
    """What goes wrong within is a `ValueError` about the description of a module."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - transformers and torch raise anything for numbers that do not go together
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        what = what.removesuffix(CURE).strip(" .")[:600]
        raise ValueError(f"No {name} can be built as it is described: {what}. {CURE}") from None
