"""Read a trained module that a config describes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

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
    module = kind(**arguments)
    module.load_state_dict(tensors)
    return module.eval()


@contextmanager
def as_described(name: str) -> Iterator[None]:
    """What goes wrong within is a `ValueError` about the description of a module."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"No {name} can be built as it is described: {error}") from None
