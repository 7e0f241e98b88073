"""A text in a cache: of a tree a path is kept; what remains, and what it costs, in batches too."""

import copy
import sys
from typing import Any

import pytest
import torch
from support.enumeration.token_trees import PARENTS, PATH, cache_gap, prefill, read_tree, tokens_for
from support.targets.models import assistant_for, prompt, tiny
from support.targets.watchers import unnoticed
from support.targets.zoo import WINDOW, tiny_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hf_specdecpp.caches.batches import MOST_HOLES, BatchContext
from hf_specdecpp.caches.cached_context import keep_path

PREFIX = 2 * WINDOW


def rows_of(cache: Any) -> list[torch.Tensor]:
    return [rows for layer in cache.layers if layer.keys is not None for rows in (layer.keys, layer.values)]


def test_the_wrong_path_is_noticed() -> None:
    """The mutant: keeping a chain of the right length instead of the path."""
    model = tiny_of("gemma3_text")
    text, nodes = tokens_for(model, PREFIX)
    cache = prefill(model, text)
    read_tree(model, cache, PREFIX, nodes)
    keep_path(cache, PREFIX, list(range(len(PATH))))
    assert cache_gap(cache, prefill(model, torch.cat((text, nodes[PATH])), record=False)) > 0.1


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


def test_a_batch_at_two_paces() -> None:
    """The example of `BatchContext`."""
    target = tiny("llama")
    cache = BatchContext(target, DynamicCache(config=target.config), rows=2)
    for width, fed in ((4, [4, 4]), (3, [3, 2])):
        target(torch.ones(2, width, dtype=torch.long), past_key_values=cache.cache, use_cache=True)
        cache.record_pass(torch.arange(width) < torch.tensor(fed)[:, None])
    layers: list[Any] = cache.cache.layers
    keys = layers[0].keys
    cache.commit(torch.tensor([1, 2]), of=torch.tensor([3, 2]))
    assert (cache.valid.tolist(), cache.num_tokens.tolist()) == ([[True] * 5 + [False], [True] * 6], [5, 6])
    assert torch.equal(layers[0].keys, keys[:, :, :6])
    cache.select([0])
    cache.commit(torch.tensor([2]), of=torch.tensor([2]))
    assert layers[0].keys.shape[:3] == (1, 2, 5)
    target(torch.ones(1, 2, dtype=torch.long), past_key_values=cache.cache, use_cache=True)
    cache.roll_back()
    assert layers[0].keys.shape[:3] == (1, 2, 5)


def test_moving_columns_is_paid_by_the_holes_that_it_closes() -> None:
    """Columns are moved when there are `MOST_HOLES` times as many holes: a bounded share of what rounds feed."""
    target, rounds, moved = tiny("llama", num_hidden_layers=1), 100, 0
    generator = torch.Generator().manual_seed(0)
    cache = BatchContext(target, DynamicCache(config=target.config), rows=8)
    for _ in range(rounds):
        cache.cache.update(*torch.zeros(2, 8, 2, 5, 8), 0)
        cache.record_pass(torch.ones(8, 5, dtype=torch.bool))
        cache.commit(torch.randint(1, 6, (8,), generator=generator), of=torch.full((8,), 5))
        before = cache.valid.shape[1]
        cache.close_up()
        moved += cache.valid.shape[1] if cache.valid.shape[1] < before else 0
    assert 0 < moved < rounds * 5 / MOST_HOLES


@pytest.mark.daily("3-llama", "12-gemma3_text")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("length", [3, 12])
def test_memory_ends_between_keys_and_values(family: str, length: int) -> None:
    """Wherever within a pass: the user's own error, and a cache with which the text goes on as plain generation's."""
    target, concatenate, left = tiny(family), torch.cat, 0

    @unnoticed
    def failing(tensors: Any, *given: Any, **how: Any) -> torch.Tensor:
        nonlocal left
        if sys._getframe(1).f_code.co_name == "update":  # of a layer of the cache
            left -= 1
            if not left:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return concatenate(tensors, *given, **how)

    ids = prompt(length)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 9}
    expected = target.generate(ids, **options)
    with pytest.MonkeyPatch.context() as patch:
        assistant = assistant_for(target, rule="fixed", num_tokens=3)
        for number in range(1, 25):
            cache = DynamicCache(config=target.config)
            patch.setattr(torch, "cat", failing)
            left = number
            with pytest.raises(torch.OutOfMemoryError):
                target.generate(ids, assistant_model=assistant, past_key_values=cache, **options)
            patch.setattr(torch, "cat", concatenate)
            known = expected[:, : max(cache.get_seq_length() + 1, length)]
            more = {**options, "max_new_tokens": expected.shape[1] - known.shape[1], "past_key_values": cache}
            assert torch.equal(target.generate(known, **more) if more["max_new_tokens"] else known, expected), number
