"""Which of torch's operations run on Apple's devices, as torch's own table says that its kernels are generated from."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchgen  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

TABLE = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"


@cache
def is_missing(operation: Any) -> bool:
    """Whether an operation of the dispatcher (`aten.add.Tensor`) has no kernel there, and is not made of others."""
    name = operation._schema.name.removeprefix("aten::") + (
        operation._schema.overload_name and f".{operation._schema.overload_name}"
    )
    entry = _table().get(name, "")
    if delegate := re.search(r"structured_delegate: (\S+)", entry):
        entry += _table()[delegate[1]]
    _, is_listed, backends = entry.partition("dispatch:")
    return bool(is_listed) and not re.search(r"\bMPS\b|\bComposite\w+", backends)


@cache
def _table() -> dict[str, str]:
    """By an operation's full name, what stands in the table about it."""
    entries = re.split(r"^- func: ", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {entry.partition("(")[0]: re.sub(r"#.*", "", entry) for entry in entries}


class AsOnApple(TorchDispatchMode):
    """Tensors of the host may do within what they could do on an Apple device: for backward passes, which torch's
    engine makes on real devices alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_missing(func):
            raise NotImplementedError(f"{func} is not currently implemented for the MPS device.")
        if any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in tree_flatten(out)[0]):
            raise TypeError(f"{func} makes float64, which the MPS device does not have.")
        return out
