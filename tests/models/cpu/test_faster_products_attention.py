"""Attention without copies of shared keys and values: the same bits, and only where PyTorch has a kernel for it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.targets.models import assistant_for, prompt, tiny
from support.targets.watchers import heard
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu.attention import grouped_attention
from hf_specdecpp.models.cpu.faster_products import FasterProducts

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])
Copies = list[tuple[int, ...]]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Shapes of the keys and values that transformers copies."""
    seen: Copies = []

    heard(monkeypatch, sdpa_attention, "repeat_kv", lambda states, *_: seen.append(tuple(states.shape)))
    return seen


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def passes(target: CausalLM, mask: Tensor | None = None) -> list[Tensor]:
    """Logits of a prompt of two tokens and of two passes over two more, all in several rows."""
    cache, logits = DynamicCache(config=target.config.get_text_config()), []
    ids, read = IDS.expand(3, -1), 0
    for count in (2, 2, 2):
        part = None if mask is None else mask[:, : read + count]
        logits.append(target(ids[:, read : read + count], attention_mask=part, past_key_values=cache).logits)
        read += count
    return logits


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2", "gpt2"])
@torch.inference_mode()
def test_the_same_bits_without_copies(family: str, padded: bool, dtype: torch.dtype, copies: Copies) -> None:
    target, mask = tiny(family).to(dtype), torch.ones(3, IDS.shape[1], dtype=torch.long)
    mask[0, :2] = 0
    expected = passes(target, mask if padded else None)
    groups = getattr(target.config, "num_key_value_heads", None) not in (None, target.config.num_attention_heads)
    assert bool(copies) is groups, "transformers makes copies, which is why this exists"
    copies.clear()
    with FasterProducts(target):
        actual = passes(target, mask if padded else None)
    assert not copies
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.skipif(not hasattr(sdpa_attention, "pack_gqa"), reason="older transformers copies for one token, too")
@torch.inference_mode()
def test_an_assisted_generation_makes_no_copies(copies: Copies) -> None:
    target = tiny("llama")
    all_settings: list[dict[str, Any]] = [{}, {"tree": "dyspec", "tree_budget": 6}]
    for settings in all_settings:
        assistant = assistant_for(target, **settings)
        for _ in range(2):  # in the first the target is checked for trees, as it is
            copies.clear()
            target.generate(prompt(5), assistant_model=assistant, max_new_tokens=12, do_sample=False)
        assert assistant.stats.accepted > 0
        assert not copies
    off = assistant_for(target, cpu_products="off")
    target.generate(prompt(5), assistant_model=off, max_new_tokens=12, do_sample=False)
    assert copies


class InPairs(nn.Module):
    """What transformers looks at of an attention layer: two query heads share each head of keys."""

    num_key_value_groups = 2


def call(**changes: Any) -> tuple[Tensor, Any]:
    """Attention of 4 heads over 2 tokens, with 2 heads of keys and values for 5."""
    shapes = {"query": (1, 4, 2, 8), "key": (1, 2, 5, 8), "value": (1, 2, 5, 8)}
    rng = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    mask = torch.ones(1, 1, 2, 5, dtype=torch.bool).tril(3)
    arguments = {"attention_mask": mask, "scaling": 0.3, "sliding_window": None, **tensors, **changes}
    return grouped_attention(InPairs(), **arguments)


@pytest.mark.parametrize("changes", [
    {"position_bias": torch.ones(1, 4, 2, 5)},
    {"dropout": 0.5},
    {"attention_mask": None},
    {"value": torch.ones(1, 2, 5, 4)},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
@torch.inference_mode()
def test_whatever_is_unusual_is_left_to_transformers(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        asked.append("transformers")
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr("hf_specdecpp.models.cpu.attention.sdpa_attention_forward", noted)
    call()
    assert not asked
    call(**changes)
    assert asked


def test_with_gradients_nothing_changes(copies: Copies) -> None:
    call()
    assert copies


def test_an_attention_that_somebody_else_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", theirs)
    with FasterProducts(tiny("llama")):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
