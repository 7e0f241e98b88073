"""What holes in a batch's cache cost: dropping rejected columns, and moving the others together."""

from __future__ import annotations

import logging
import time
from statistics import median
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_specdecpp.caches.batches import BatchCache

logger = logging.getLogger(__name__)
ROWS, COLUMNS = 8, 5
# A layer of SmolLM2-135M. All of its 30 would cost 30 times as much, in the passes and in the cache.
SIZES: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 512, "max_position_embeddings": 16384,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("context", [256, 2048, 8192])
@torch.inference_mode()
def test_realignment_takes_little(context: int) -> None:
    """Rounds of four candidates, of which each row keeps a random number, until the columns have been moved."""
    target = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    generator = torch.Generator().manual_seed(0)
    cache = BatchCache(target, DynamicCache(config=target.config), ROWS)
    layer: Any = cache.cache.layers[0]
    layer.update(*torch.randn(2, ROWS, 3, context, 64, generator=generator))
    cache.note(torch.ones(ROWS, context, dtype=torch.bool))
    fed = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    pass_seconds = median(seconds_of_a_pass(target, cache, fed) for _ in range(5))
    moved, rounds, realigning = False, 0, 0.0
    while not moved:
        layer.update(*torch.randn(2, ROWS, 3, COLUMNS, 64, generator=generator))
        cache.note(fed)
        rejected = torch.randint(0, COLUMNS, (ROWS,), generator=generator).tolist()
        begin, columns = time.perf_counter(), cache.valid.shape[1] - min(rejected)
        cache.forget(rejected)
        cache.close_up()
        realigning += time.perf_counter() - begin
        moved = cache.valid.shape[1] < columns
        rounds += 1
    share = realigning / rounds / pass_seconds
    logger.info("context %d: %d rounds, realignment %.1f %% of their passes", context, rounds, 100 * share)
    assert share < 0.05


def seconds_of_a_pass(target: Any, cache: BatchCache, fed: Any) -> float:
    """The target reads as many columns as a round feeds, and forgets them."""
    begin = time.perf_counter()
    target(fed.long(), attention_mask=cache.mask(fed), past_key_values=cache.cache)
    seconds = time.perf_counter() - begin
    cache.cache.crop(-fed.shape[1])
    return seconds
