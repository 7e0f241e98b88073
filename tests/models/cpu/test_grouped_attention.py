"""Attention without copies of shared keys and values, and from one query at a time in half precision: the same bits."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.devices.products import faster, needs_float16, use_copies
from support.targets.models import assistant_for, prompt, quiet_later_layers, tiny
from support.targets.watchers import heard
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu import faster_products
from hf_specdecpp.models.cpu import grouped_attention as attention
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.models.cpu.grouped_attention import HALF, grouped_attention, separate_queries
from hf_specdecpp.models.cpu.products import rows_round_alike

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
    all_settings: list[dict[str, Any]] = [{}, {"tree": "dyspec", "tree_budget": 6}, {"cpu_products": "off"}]
    for settings in all_settings:
        assistant = assistant_for(target, **settings)
        for _ in range(2):  # in the first the target is checked for trees, as it is
            copies.clear()
            target.generate(prompt(5), assistant_model=assistant, max_new_tokens=12, do_sample=False)
        assert assistant.stats.accepted > 0
        assert not copies


class InPairs(nn.Module):
    """What transformers looks at of an attention layer: two query heads share each head of keys."""

    num_key_value_groups = 2


LAYER = InPairs()


@contextmanager
def computing(in_float32: bool = False) -> Iterator[None]:
    """Within `FasterProducts` of a target with this layer; with copies in half precision, if `in_float32`."""
    attention.of_thread.contexts.append(({LAYER}, in_float32))
    yield
    attention.of_thread.contexts.pop()


def call(**changes: Any) -> tuple[Tensor, Any]:
    """Attention of 4 heads over 2 tokens, with 2 heads of keys and values for 5."""
    shapes = {"query": (1, 4, 2, 8), "key": (1, 2, 5, 8), "value": (1, 2, 5, 8)}
    rng = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    mask = torch.ones(1, 1, 2, 5, dtype=torch.bool).tril(3)
    arguments = {"attention_mask": mask, "scaling": 0.3, "sliding_window": None, **tensors, **changes}
    with computing():
        return grouped_attention(LAYER, **arguments)


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

    monkeypatch.setattr("hf_specdecpp.models.cpu.grouped_attention.sdpa_attention_forward", noted)
    call()
    assert not asked
    call(**changes)
    assert asked


def test_an_attention_that_somebody_else_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", theirs)
    with FasterProducts(tiny("llama")):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs


# A prefix of 200 tokens; then a chain of 4, and a tree: root, child, grandchild, and a sibling of the child.
PREFIX = 200
CHAIN = torch.ones(4, 4, dtype=torch.bool).tril()
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]).bool()


def one_by_one(states: dict[str, Tensor], among: Tensor, scaling: float) -> Tensor:
    """Attention of passes over one token, whose cache holds the prefix and the ancestors only."""
    outputs = []
    for place, ancestors in enumerate(among):
        seen = torch.cat((torch.ones(PREFIX, dtype=torch.bool), ancestors))
        keys, values = states["key"][:, :, seen], states["value"][:, :, seen]
        query = states["query"][:, :, place : place + 1]
        outputs.append(grouped_attention(LAYER, query, keys, values, None, scaling=scaling)[0])
    return torch.cat(outputs, dim=1)


def states_of(dtype: torch.dtype, tokens: int = 4) -> dict[str, Tensor]:
    """A query of 16 heads for each of the last `tokens` tokens, and 8 heads of keys and values for all tokens."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"query": (1, 16, tokens, 64), "key": (1, 8, PREFIX + tokens, 64), "value": (1, 8, PREFIX + tokens, 64)}
    return {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}


def mask_of(among: Tensor) -> Tensor:
    return torch.cat((torch.ones(len(among), PREFIX, dtype=torch.bool), among), dim=1)[None, None]


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("among", [CHAIN, TREE], ids=["chain", "tree"])
@torch.inference_mode()
def test_separate_queries_have_the_bits_of_passes_over_one_token(
    among: Tensor, dtype: torch.dtype, in_float32: bool
) -> None:
    states, mask = states_of(dtype), mask_of(among)
    with computing(in_float32):
        expected = one_by_one(states, among, 0.125)
        with separate_queries():
            separate, _ = grouped_attention(LAYER, **states, attention_mask=mask, scaling=0.125)
            again, _ = grouped_attention(LAYER, **states, attention_mask=mask, scaling=0.125)
    with computing():
        together, _ = grouped_attention(LAYER, **states, attention_mask=mask, scaling=0.125)
    assert torch.equal(separate, expected)
    assert torch.equal(again, expected)
    torch.testing.assert_close(together, expected, atol=2e-2, rtol=2e-2)


PER_HEAD = torch.randn(1, 16, 1, PREFIX + 1, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("mask", [
    None, mask_of(CHAIN), torch.where(mask_of(TREE), 0.0, -math.inf), torch.ones(1, 1, 1, PREFIX + 1).bool(), PER_HEAD,
    mask_of(torch.ones(32, 32).bool().tril()),
], ids=["no mask", "chain", "added", "one token", "added to each head", "most tokens"])  # fmt: skip
def test_attention_in_float32_rounds_once(mask: Tensor | None, dtype: torch.dtype) -> None:
    """It returns the exact result, rounded. Keys differ from layer to layer, in and outside of inference mode."""
    tokens = 1 if mask is None else mask.shape[2]
    for scale, inference in ((1.0, True), (0.5, False), (1.0, True)):
        states = {name: scale * each for name, each in states_of(dtype, tokens).items()}
        query, key, value = (each.double() for each in states.values())
        bias = mask if mask is None or mask.dtype is torch.bool else mask.to(dtype)
        with torch.inference_mode(inference), torch.no_grad(), computing(True):
            found, _ = grouped_attention(LAYER, **states, attention_mask=bias, scaling=0.125)
        bias = bias if bias is None or bias.dtype is torch.bool else bias.double()
        expected = functional.scaled_dot_product_attention(query, key, value, bias, scale=0.125, enable_gqa=True)
        error = (found.double() - expected.transpose(1, 2)).abs().max().item()
        rounding = torch.finfo(dtype).eps / 2 * expected.abs().max().item()
        assert found.dtype is dtype
        assert error <= 1.01 * rounding


@torch.inference_mode()
def test_more_tokens_are_left_to_pytorch() -> None:
    states, mask = states_of(torch.bfloat16, 33), mask_of(torch.ones(33, 33).bool().tril())
    with computing():
        own, _ = grouped_attention(LAYER, **states, attention_mask=mask, scaling=0.125)
    with computing(True), separate_queries():
        found, _ = grouped_attention(LAYER, **states, attention_mask=mask, scaling=0.125)
    assert torch.equal(found, own)


@needs_float16
def test_half_precision_attends_in_float32_where_it_has_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in other threads, autocast or float32, or where PyTorch's own products compute the bits of plain passes."""
    seen = list[torch.dtype]()
    heard(monkeypatch, attention, "_attend_in_float32", lambda _, query, *others: seen.append(query.dtype))
    use_copies(monkeypatch)
    target = tiny("llama").bfloat16()

    def attends(of: CausalLM = target) -> bool:
        seen.clear()
        with torch.no_grad():
            passes(of)
            of.generate(prompt(5), max_new_tokens=3, do_sample=False)
        return bool(seen)

    assert not attends()
    with faster(target), ThreadPoolExecutor(1) as pool:
        assert attends()
        assert not pool.submit(attends).result()
        with torch.autocast("cpu", torch.bfloat16):
            assert not attends()
        assert attention.of_thread.buffers
    assert not attends()
    assert not attention.of_thread.buffers, "memory is kept"
    whole = tiny("llama")
    with faster(whole):
        assert not attends(whole)
    use_copies(monkeypatch, most=0)
    for alike in (True, False):  # with AMX by the number of inputs
        monkeypatch.setattr(faster_products, "rows_round_alike", lambda _, alike=alike: alike)
        with faster(target):
            assert attends() is not alike


@needs_float16
@torch.no_grad()
def test_other_models_attend_as_ever_within_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a reward model that a logits processor calls; also in a hook of the target."""
    seen, found = list[Any](), list[tuple[bool, int]]()
    heard(monkeypatch, attention, "_attend_in_float32", lambda *_: seen.append(_))
    use_copies(monkeypatch)
    target, other = tiny("llama").bfloat16(), tiny("qwen3").bfloat16()
    expected = passes(other)

    def compare(*_: Any) -> None:
        before = len(seen)
        are_equal = all(torch.equal(*pair) for pair in zip(passes(other), expected, strict=True))
        found.append((are_equal, len(seen) - before))

    with faster(target), target.register_forward_hook(compare), separate_queries():
        passes(target)
    assert seen
    assert found == [(True, 0)] * 3
    with faster(other):
        compare()
    assert found[-1][1] > 0


@pytest.mark.parametrize("mutant", [
    lambda mask, _: [slice(mask.shape[-1])] * mask.shape[-2],  # later candidates
    lambda mask, _: [slice(PREFIX + 1 + place) for place in range(mask.shape[-2])],  # siblings
    lambda mask, _: [slice(PREFIX)] * mask.shape[-2],  # nothing after the prefix
], ids=["all", "as in a chain", "prefix"])  # fmt: skip
@pytest.mark.parametrize("in_float32", [False, True])
def test_other_keys_would_be_noticed(
    mutant: Callable[[Tensor, Any], Any], in_float32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_seen_keys", mutant)
    with pytest.raises(AssertionError):
        test_separate_queries_have_the_bits_of_passes_over_one_token(TREE, torch.bfloat16, in_float32)


@torch.inference_mode()
def test_queries_stay_together_where_a_window_hides_the_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = list[int]()
    heard(
        monkeypatch, functional, "scaled_dot_product_attention", lambda query, *_, **k: queries.append(query.shape[2])
    )
    states = {name: torch.randn(1, 2 if name != "query" else 4, 2 if name == "query" else 5, 8).bfloat16()
              for name in ("query", "key", "value")}  # fmt: skip
    mask = torch.ones(1, 1, 2, 5, dtype=torch.bool).tril(3)
    mask[..., 1, 0] = False
    with computing(), separate_queries():
        grouped_attention(LAYER, **states, attention_mask=mask, scaling=0.3)
    assert queries == [2]


@pytest.mark.daily("tree")
@needs_float16
@pytest.mark.parametrize("settings", [{}, {"tree": "dyspec", "tree_budget": 6}], ids=["chain", "tree"])
def test_logits_in_bfloat16_have_the_bits_of_plain_generation(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain generation with the copies of weights that the assistant uses."""
    apart, together = list[int](), list[int]()

    def note(_: Any, query: Tensor, *others: Any) -> None:
        if attention.of_thread.seen is not None:  # in a round's pass
            (together if others[-1] is None and query.shape[2] > 1 else apart).append(query.shape[2])

    heard(monkeypatch, attention, "_attend_in_float32", note)
    use_copies(monkeypatch)
    target = quiet_later_layers(tiny("llama", hidden_size=128, num_attention_heads=4)).bfloat16()
    arguments = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    assistant = assistant_for(target, rule="fixed", num_tokens=5, **settings)
    assistant.warm_up()
    with faster(target):
        plain = target.generate(prompt(160), **arguments).logits
    assisted = target.generate(prompt(160), assistant_model=assistant, **arguments).logits
    assert assistant.stats.accepted > 0
    assert assistant.stats.decided["products"].startswith("float16")
    assert torch.equal(torch.stack(plain), torch.stack(assisted))
    assert max(apart) > 1
    assert not together, "a round attended at once"


@pytest.mark.daily("{}-False", "{'reproducible': True}-True")
@pytest.mark.skipif(
    not rows_round_alike(torch.randn(48, 128).bfloat16()),
    reason="products of several rows round differently from those of one",
)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("settings", [{}, {"cpu_products": "off"}, {"reproducible": True}], ids=str)
def test_own_products_have_the_bits_of_plain_generate(settings: dict[str, Any], autocast: bool) -> None:
    """In bfloat16, and in float32 where `torch.autocast` rounds to bfloat16."""
    target = quiet_later_layers(tiny("llama", hidden_size=128, num_attention_heads=4))
    target = target.float() if autocast else target.bfloat16()
    arguments = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    assistant = assistant_for(target, **{"rule": "fixed", "num_tokens": 5, "cpu_products": "off", **settings})
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = target.generate(prompt(160), **arguments).logits
        assisted = target.generate(prompt(160), assistant_model=assistant, **arguments).logits
    assert assistant.stats.accepted > 0
    assert torch.equal(torch.stack(plain), torch.stack(assisted))
