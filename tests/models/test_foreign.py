"""Hooks and replaced forwards of users are found, with their places; those of torch, transformers and accelerate are
not reported."""

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


def steer(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return output


class Steering:
    def __call__(self, *_: Any) -> None: ...

    def method(self, *_: Any) -> None: ...


class Hook(ModelHook):
    """Of a user, by accelerate."""


HOOKS: dict[str, tuple[Any, str]] = {
    "function": (steer, "steer"),
    "lambda": (lambda *_: None, "<lambda>"),
    "partial": (functools.partial(steer), "steer"),
    "object": (Steering(), "Steering"),
    "method": (Steering().method, "method"),
    "in torch's context": (torch.no_grad()(steer), "steer"),
    "compiled": (torch.compile(steer), "steer"),
    "builtin": (print, "print"),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_is_found(name: str, kind: str) -> None:
    target = tiny("llama")
    assert names(target) == []
    handle = getattr(target.model.layers[1].mlp, kind)(HOOKS[name][0])
    (found,) = names(target)
    assert found.startswith(f"a hook of {type(target.model.layers[1].mlp).__name__}, {HOOKS[name][1]}")
    handle.remove()
    assert names(target) == []


def test_a_hook_of_all_modules_is_found() -> None:
    handle = nn.modules.module.register_module_forward_hook(steer)
    try:
        assert names(tiny("llama")) == [f"a hook of all modules, steer ({__name__})"]
    finally:
        handle.remove()


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


def test_a_forward_replaced_in_a_class_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama", num_hidden_layers=2)
    kind: Any = type(target.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", replaced(kind.forward))
    assert [each.startswith(f"a forward of {kind.__name__}, ") for each in names(target)] == [True]


def test_a_module_of_the_users_own_class_is_found() -> None:
    class Own(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    target = tiny("llama")
    target.model.layers[1].mlp = Own()
    assert [each.startswith("a forward of Own, ") for each in names(target)] == [True]
