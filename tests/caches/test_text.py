"""A text in a cache: what is kept and taken back of it, of a tree a path; what remains, and what it costs."""

import copy
from typing import Any

import pytest
import torch
from support.token_trees import LEVELS, PARENTS, PATH, cache_gap, prefill, read_tree, tokens_for
from support.zoo import WINDOW, tiny_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from hf_specdecpp.caches.masks import GrowingTreeLayer
from hf_specdecpp.caches.text import PathRows, keep_path, text_in
from hf_specdecpp.models.causal_lm import CACHE

FAMILIES = ["llama", "gemma3_text", "mistral", "gpt_oss", "gemma4_text"]
PREFIX = 2 * WINDOW


def read(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits after the last of `tokens` `[n]`."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens[None], use_cache=True, **{CACHE: cache}).logits[0, -1]
    return logits


def growing(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@pytest.mark.parametrize(("family", "make"), [
    ("llama", growing),
    ("mistral", growing),  # with a window
    ("granitemoehybrid", growing),  # with recurrent layers
    ("llama", lambda model: StaticCache(config=model.config, max_cache_len=64)),
], ids=["growing", "windowed", "recurrent", "static"])  # fmt: skip
def test_what_is_kept_and_taken_back(family: str, make: Any) -> None:
    """Whatever the cache is: nothing of three tokens that are read, then two of four, then all of one."""
    model = tiny_of(family)
    text, others = tokens_for(model, PREFIX)
    cache = make(model)
    read(model, cache, text)
    if isinstance(cache, DynamicCache):
        cache.activate_past_recording()
    held = text_in(cache)
    read(model, cache, others[:3])
    held.back()
    assert held.held == PREFIX
    held.begin()
    read(model, cache, others[:4])
    held.keep(2, of=4)
    again = others[2 - held.pending : 2]  # before the next ones
    held.begin()
    found = read(model, cache, torch.cat((again, others[4:5])))
    held.keep(len(again) + 1, of=len(again) + 1)
    assert (held.pending, held.held) == (0, PREFIX + 3)
    expected = read(model, growing(model), torch.cat((text, others[:2], others[4:5])))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)  # recurrent layers compute in float32


def after_a_tree(family: str, levels: list[list[int]] | None = None) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
    """A model, a text, the nodes of a tree behind it, and the cache after both were read."""
    model = tiny_of(family)
    text, nodes = tokens_for(model, PREFIX)
    cache = prefill(model, text)
    read_tree(model, cache, PREFIX, nodes, levels)
    return model, text, nodes, cache


def rows_of(cache: Any) -> list[torch.Tensor]:
    return [rows for layer in cache.layers if layer.keys is not None for rows in (layer.keys, layer.values)]


def test_the_wrong_path_is_noticed() -> None:
    """The mutant: keeping a chain of the right length instead of the path."""
    model, text, nodes, cache = after_a_tree("gemma3_text")
    keep_path(cache, PREFIX, list(range(len(PATH))))
    assert cache_gap(cache, prefill(model, torch.cat((text, nodes[PATH])), record=False)) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_many_rounds(family: str) -> None:
    """Round after round in one cache, in one pass and level by level; sliding windows stay as small as they may be."""
    model = tiny_of(family)
    text, _ = tokens_for(model, 3)
    cache = prefill(model, text)
    for round_ in range(8):
        _, nodes = tokens_for(model, 0, seed=round_)
        groups = LEVELS if round_ % 2 else [list(range(len(PARENTS)))]
        fed, path = sum(groups, []), [[0], PATH, [0, 1, 2, 3]][round_ % 3]
        read_tree(model, cache, len(text), nodes, groups)
        keep_path(cache, len(text), [fed.index(node) for node in path])
        text = torch.cat((text, nodes[path]))
    assert cache_gap(cache, prefill(model, text, record=False)) < 1e-6
    for layer in cache.layers:
        if layer.keys is not None and layer.is_sliding:
            assert layer.keys.shape[-2] == WINDOW - 1
            assert isinstance(layer, GrowingTreeLayer)


def test_where_all_rows_stand_no_layer_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a round of a rule for trees without candidates: where drafting does not pay, most rounds are such ones."""
    model = tiny_of("llama")
    text, nodes = tokens_for(model, PREFIX)
    cache = prefill(model, text, record=False)
    held = text_in(cache)
    held.begin()
    read(model, cache, nodes[:2])
    monkeypatch.delattr(DynamicLayer, "crop")
    held.keep(2, of=2, path=PathRows([0, 1], torch.tensor([0, 1])))
    assert held.held == PREFIX + 2
    with pytest.raises(AttributeError, match="crop"):
        held.keep(1, of=2, path=PathRows([0], torch.tensor([0])))


def test_the_storage_does_not_grow() -> None:
    model = tiny_of("gemma3_text")
    text, nodes = tokens_for(model, PREFIX)
    cache, length = prefill(model, text), PREFIX
    for _ in range(5):
        read_tree(model, cache, length, nodes)
        keep_path(cache, length, PATH)
        length += len(PATH)
        for rows in rows_of(cache):
            rows_in_storage = rows.untyped_storage().nbytes() // (rows[..., 0, :].numel() * rows.element_size())
            assert rows_in_storage <= rows.shape[-2] + len(PARENTS)


def test_a_cache_that_was_copied_before_the_round_is_not_written_to() -> None:
    model = tiny_of("gemma3_text")
    text, nodes = tokens_for(model, PREFIX)
    cache = prefill(model, text)
    held = rows_of(cache)
    before = copy.deepcopy(held)
    read_tree(model, cache, PREFIX, nodes)
    keep_path(cache, PREFIX, PATH)
    assert all(torch.equal(rows, was) for rows, was in zip(held, before, strict=True))


def test_inference_tensors() -> None:
    """A draft's cache is made under inference_mode, and may be reduced outside of it."""
    with torch.inference_mode():
        model, text, nodes, cache = after_a_tree("llama")
    keep_path(cache, PREFIX, PATH)
    assert cache_gap(cache, prefill(model, torch.cat((text, nodes[PATH])), record=False)) < 1e-6


class CountsCopies(TorchDispatchMode):
    """Counts the elements that operations write; views write none."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        is_view = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() in inputs
        if isinstance(result, torch.Tensor) and (not is_view or func.__name__.split(".")[0].endswith("_")):
            self.elements += result.numel()
        return result


def long_cache(context: int, nodes: int, window: int | None) -> DynamicCache:
    model_config = tiny_of("gemma3_text", sliding_window=window or WINDOW).config if window else tiny_of("llama").config
    cache = DynamicCache(config=model_config)
    for index in range(len(cache.layers)):
        cache.update(torch.randn(1, 2, context, 8), torch.randn(1, 2, context, 8), index)
    cache.activate_past_recording()
    for index in range(len(cache.layers)):
        cache.update(torch.randn(1, 2, nodes, 8), torch.randn(1, 2, nodes, 8), index)
    return cache


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("nodes", [64, 768])
def test_moving_the_path_costs_the_path_and_not_the_context(window: int | None, nodes: int) -> None:
    path, written = [0, *range(3, nodes, 13)], []
    for context in (1024, 8192, 32768):
        cache = long_cache(context, nodes, window)
        storages = [rows.untyped_storage().data_ptr() for rows in rows_of(cache)]
        with CountsCopies() as counter:
            keep_path(cache, context, path)
        assert [rows.untyped_storage().data_ptr() for rows in rows_of(cache)] == storages
        assert cache.get_seq_length() == context + len(path)
        written.append(counter.elements)
    # Each row but the root's is gathered and written once, in keys and values of 4 layers, 2 heads of 8.
    moved = (len(path) - 1) * 2 * 4 * 2 * 8
    assert written[0] == written[1] == written[2]
    assert moved <= written[0] <= 2 * moved + len(path)
