"""Replaced forwards of users are found, with their places; those of torch, transformers and accelerate are not
reported. What else users put on a model is in `tests/generate/test_foreign_code.py`."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from accelerate.utils import convert_outputs_to_fp32
from support.targets.models import tiny
from torch import nn

from hf_specdecpp.models.foreign import foreign_code


def names(target: Any) -> list[str]:
    return [each.name for each in foreign_code(target)]


class Hook(ModelHook):
    """Of a user, by accelerate."""


def replaced(old: Any) -> Any:
    @functools.wraps(old)  # which copies the module's name
    def scaled(*args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs)

    return scaled


def on_accelerate(mlp: nn.Module, hook: ModelHook) -> None:
    add_hook_to_module(mlp, hook)


# What is done to an MLP, and whether something foreign is there.
PATCHES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "its own forward": (lambda mlp: setattr(mlp, "forward", mlp.forward), False),
    "compiled": (lambda mlp: setattr(mlp, "forward", torch.compile(mlp.forward)), False),
    "in autocast": (lambda mlp: setattr(mlp, "forward", torch.autocast("cpu")(mlp.forward)), False),
    "accelerate's": (lambda mlp: setattr(mlp, "forward", convert_outputs_to_fp32(mlp.forward)), False),
    "accelerate's hook": (
        lambda mlp: on_accelerate(mlp, AlignDevicesHook(execution_device=torch.device("cpu"))),
        False,
    ),
    "user's": (lambda mlp: setattr(mlp, "forward", replaced(mlp.forward)), True),
    "user's compiled": (lambda mlp: setattr(mlp, "forward", torch.compile(replaced(mlp.forward))), True),
    "user's under accelerate's": (
        lambda mlp: setattr(mlp, "forward", convert_outputs_to_fp32(replaced(mlp.forward))),
        True,
    ),
    "user's hook by accelerate": (lambda mlp: on_accelerate(mlp, SequentialHook(AlignDevicesHook(), Hook())), True),
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_replaced_forward_is_found(name: str) -> None:
    target = tiny("llama")
    patch, is_foreign = PATCHES[name]
    patch(target.model.layers[1].mlp)
    found = names(target)
    assert bool(found) == is_foreign
    assert all(type(target.model.layers[1].mlp).__name__ in each or "Hook" in each for each in found)
