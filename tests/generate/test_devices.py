"""Targets and drafts on pretended accelerators: the right devices everywhere, and how often the host waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import partly_agreeing, prompt, tiny
from support.pretend_devices import DeviceTensor, on_device, pretend_devices

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

RULES: list[dict[str, Any]] = [
    {"rule": "fixed", "num_tokens": 4},
    {"rule": "threshold", "threshold": 0.6, "max_tokens": 6},
    {"rule": "svip"},
    {"rule": "adaedl"},
    {"rule": "confidence"},
    {"rule": "throughput"},
]
TREES: list[dict[str, Any]] = [
    {"tree": "dyspec", "tree_budget": 12, "tree_depth": 4},
    {"tree": "dyspec-exact", "tree_budget": 6, "tree_depth": 3},
    {"tree": "static", "tree_shape": [2, 2, 1]},
]


@pytest.mark.parametrize("speculation", [*RULES, *TREES], ids=str)
def test_greedy_text_is_plain(speculation: dict[str, Any]) -> None:
    target = tiny("llama")
    draft = partly_agreeing(target, 0.9)
    plain = target.generate(prompt(), max_new_tokens=24, do_sample=False)
    with pretend_devices(), torch.no_grad():
        on_device(target), on_device(draft)
        assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig(**speculation))
        text = target.generate(on_device(prompt()), max_new_tokens=24, do_sample=False, assistant_model=assistant)
        assert isinstance(text, DeviceTensor)
        assert torch.equal(text.host, plain)
        assert 0 < assistant.stats.accepted < assistant.stats.drafted
        torch.manual_seed(0)
        target.generate(on_device(prompt()), max_new_tokens=24, do_sample=True, assistant_model=assistant)
        assert assistant.stats.drafted > 0
