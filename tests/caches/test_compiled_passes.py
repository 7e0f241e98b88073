"""A compiled target that is changed between texts is compiled anew, though no pass looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compiling import graphs
from support.models import assistant_of, prompt, quiet_later_layers, tiny
from support.static_caches import STATIC
from torch import Tensor, nn
from transformers import CompileConfig

from hf_specdecpp.caches import compiled_passes
from hf_specdecpp.models.causal_lm import CausalLM


def double(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return 2.0 * output


def scaled_weights(target: CausalLM) -> None:
    with torch.no_grad():
        target.model.layers[1].mlp.down_proj.weight *= 3.0


def another_module(target: CausalLM) -> None:
    target.model.layers[1].mlp.act_fn = nn.Tanh()


def a_hook(target: CausalLM) -> None:
    target.model.layers[1].mlp.register_forward_hook(double)


def a_setting(target: CausalLM) -> None:
    target.model.layers[1].self_attn.scaling = 2.0


CHANGES = [(scaled_weights, False), (another_module, True), (a_hook, True), (a_setting, True)]


@pytest.mark.every(2)
@pytest.mark.parametrize(("change", "compiles"), CHANGES)
def test_changes_between_texts(
    change: Callable[[CausalLM], None], compiles: bool, traced_only: CompileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that of the changed target; without looking at it, it would not be. New weights compile nothing."""

    def texts() -> tuple[Tensor, Tensor]:
        plain = target.generate(prompt(), **STATIC)
        return plain, target.generate(prompt(), assistant_model=assistant, compile_config=traced_only, **STATIC)

    for looks in (True, False):
        target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
        assistant = assistant_of("early_exit", target, rule="fixed", num_tokens=3)
        with monkeypatch.context() as patch:
            if not looks:
                patch.setattr(compiled_passes, "_identity", lambda _: [])
            before, ours = texts()
            assert torch.equal(before, ours)
            compiled = graphs()
            change(target)
            plain, ours = texts()
        assert not torch.equal(plain, before)
        assert (graphs() > compiled) == (compiles and looks)
        assert torch.equal(plain, ours) == (looks or not compiles)
