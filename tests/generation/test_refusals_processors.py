"""Logits processors that take more than token ids and scores: the error is that of plain `generate()`."""

from typing import Any

import pytest
import torch
from support.targets.models import configured, prompt, tiny
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdecpp.assistant import SpecDecPPAssistant


class Required(LogitsProcessor):
    reads_prefix_only = True  # so that it is not refused in batches

    def __call__(self, input_ids: Tensor, scores: Tensor, extra: Any) -> Tensor:
        return scores


class Optional(Required):
    def __call__(self, input_ids: Tensor, scores: Tensor, extra: Any = None) -> Tensor:
        return scores


class Keywords(Required):
    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        return scores


def function(input_ids: Tensor, scores: Tensor, extra: Any) -> Tensor:
    return scores


function.reads_prefix_only = True  # type: ignore[attr-defined]


def error_of(target: Any, **options: Any) -> tuple[type[Exception], str]:
    with pytest.raises((TypeError, ValueError)) as caught:
        target.generate(max_new_tokens=6, do_sample=False, **options)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("made", [Required, Optional, Keywords, lambda: function])
@pytest.mark.parametrize("kind", [list, LogitsProcessorList])
def test_as_plain(made: Any, kind: Any) -> None:
    target = tiny("llama")
    assistant = SpecDecPPAssistant.from_early_exit(target, 2)
    batch = torch.cat((prompt(6), prompt(6, seed=2)))
    for ids, trees in ((prompt(6), (False, "dyspec", "dyspec-exact", [2, 1])), (batch, (False,))):
        options = {"input_ids": ids, "logits_processor": kind([made()]), "repetition_penalty": 1.2}
        plain = error_of(target, **options)
        for tree in trees:
            configured(assistant, tree=tree)
            assert error_of(target, assistant_model=assistant, **options) == plain
            with assistant.as_default(target):
                assert error_of(target, **options) == plain
