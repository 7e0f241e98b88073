"""The cache of a batch, and the masks of its rows."""

from typing import Any

import torch
from support.models import tiny
from transformers import DynamicCache

from hf_specdecpp.caches.batches import MOST_HOLES, BatchText, compact
from hf_specdecpp.caches.masks import row_masks


def test_columns_are_moved_together() -> None:
    cache, target = DynamicCache(), tiny("llama")
    layers: list[Any] = cache.layers
    target(torch.arange(10).view(2, 5), past_key_values=cache, use_cache=True)
    before = [layer.keys.clone() for layer in layers]
    valid = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 1, 0, 0]], dtype=torch.bool)
    assert compact(cache, valid, 3).tolist() == [[False, True, True], [True, True, True]]
    for layer, keys in zip(layers, before, strict=True):
        assert torch.equal(layer.keys[0, :, 1:], keys[0][:, [0, 2]])
        assert torch.equal(layer.keys[1], keys[1][:, :3])


def test_a_batch_at_two_paces() -> None:
    """The example of `BatchText`."""
    target = tiny("llama")
    cache = BatchText(target, DynamicCache(config=target.config), rows=2)
    for width, fed in ((4, [4, 4]), (3, [3, 2])):
        target(torch.ones(2, width, dtype=torch.long), past_key_values=cache.cache, use_cache=True)
        cache.note(torch.arange(width) < torch.tensor(fed)[:, None])
    layers: list[Any] = cache.cache.layers
    keys = layers[0].keys
    cache.keep(torch.tensor([1, 2]), of=torch.tensor([3, 2]))
    assert (cache.valid.tolist(), cache.held.tolist()) == ([[True] * 5 + [False], [True] * 6], [5, 6])
    assert torch.equal(layers[0].keys, keys[:, :, :6])
    cache.select([0])
    cache.keep(torch.tensor([2]), of=torch.tensor([2]))
    assert layers[0].keys.shape[:3] == (1, 2, 5)
    target(torch.ones(1, 2, dtype=torch.long), past_key_values=cache.cache, use_cache=True)
    cache.back()
    assert layers[0].keys.shape[:3] == (1, 2, 5)


def test_moving_columns_is_paid_by_the_holes_that_it_closes() -> None:
    """Columns are moved when there are `MOST_HOLES` times as many holes: a bounded share of what rounds feed."""
    target, rounds, moved = tiny("llama", num_hidden_layers=1), 100, 0
    generator = torch.Generator().manual_seed(0)
    cache = BatchText(target, DynamicCache(config=target.config), rows=8)
    for _ in range(rounds):
        cache.cache.update(*torch.zeros(2, 8, 2, 5, 8), 0)
        cache.note(torch.ones(8, 5, dtype=torch.bool))
        cache.keep(torch.randint(1, 6, (8,), generator=generator), of=torch.full((8,), 5))
        before = cache.valid.shape[1]
        cache.close_up()
        moved += cache.valid.shape[1] if cache.valid.shape[1] < before else 0
    assert 0 < moved < rounds * 5 / MOST_HOLES


def test_masks_of_rows_with_holes() -> None:
    """The example of `row_masks`, and a dummy, which sees itself."""
    model = tiny("mistral", sliding_window=2)
    valid = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    assert row_masks(model, valid, 1)[:, 0, 0].tolist() == [[False, False, True, True], [False, True, True, True]]
    assert torch.equal(row_masks(tiny("llama"), valid, 1), valid.long())
