"""The cache of a batch, and the masks of its rows."""

from typing import Any

import torch
from support.models import tiny
from transformers import DynamicCache

from hf_specdecpp.caches.batches import MOST_HOLES, BatchCache
from hf_specdecpp.caches.masks import row_masks


def test_a_batch_at_two_paces() -> None:
    """The example of `BatchCache`."""
    target = tiny("llama")
    cache = BatchCache(target, DynamicCache(config=target.config), rows=2)
    for width, fed in ((4, [4, 4]), (3, [3, 2])):
        target(torch.ones(2, width, dtype=torch.long), past_key_values=cache.cache, use_cache=True)
        cache.note(torch.arange(width) < torch.tensor(fed)[:, None])
    layers: list[Any] = cache.cache.layers
    keys = layers[0].keys
    cache.forget([2, 0])
    assert (cache.valid.tolist(), cache.lengths.tolist()) == ([[True] * 5 + [False], [True] * 6], [5, 6])
    assert torch.equal(layers[0].keys, keys[:, :, :6])
    cache.select([0])
    cache.forget([0])
    assert layers[0].keys.shape[:3] == (1, 2, 5)


def test_moving_columns_is_paid_by_the_holes_that_it_closes() -> None:
    """Columns are moved when there are `MOST_HOLES` times as many holes: a bounded share of what rounds feed."""
    target, rounds, moved = tiny("llama", num_hidden_layers=1), 100, 0
    generator = torch.Generator().manual_seed(0)
    cache = BatchCache(target, DynamicCache(config=target.config), rows=8)
    for _ in range(rounds):
        cache.cache.update(*torch.zeros(2, 8, 2, 5, 8), 0)
        cache.note(torch.ones(8, 5, dtype=torch.bool))
        cache.forget(torch.randint(0, 5, (8,), generator=generator).tolist())
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
