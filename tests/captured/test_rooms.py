"""Caches of fixed rooms: what is read from a growing cache, written back, and kept of passes."""

from typing import Any

import pytest
import torch
from support.models import WINDOW, prompt, tiny
from support.outputs import assert_same, assert_same_cache, prefill
from support.zoo import tiny_of
from torch import Tensor
from transformers import DynamicCache, StaticCache

from hf_specdecpp.captured.rooms import RoomCache, num_room_layers, room_for, why_not_rooms
from hf_specdecpp.models.causal_lm import CausalLM

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_tokens", "room"), [(1, 256), (256, 256), (257, 512), (512, 512), (513, 1024), (5000, 8192)]
)
def test_room_for(num_tokens: int, room: int) -> None:
    assert room_for(num_tokens) == room


def room_of(target: CausalLM, room: int = 32) -> RoomCache:
    return RoomCache(num_room_layers(target.config) or 0, room, CPU)


def rows(cache: RoomCache) -> list[tuple[Tensor, Tensor]]:
    layers: list[Any] = cache.layers
    length = int(cache.length)
    return [(layer.keys[:, :, :length], layer.values[:, :, :length]) for layer in layers]


@pytest.mark.parametrize("length", [5, 20])  # below a window of 8, and beyond
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
@torch.no_grad()
def test_a_growing_cache_is_read_and_written_back(family: str, length: int) -> None:
    """With it transformers' own passes go on as if nothing had happened."""
    target, ids = tiny(family), prompt(length)
    cache, expected = prefill(target, ids), prefill(target, ids)
    cache.activate_past_recording()
    expected.activate_past_recording()
    room = room_of(target)
    room.read(cache, length)
    room.write(cache, length)
    assert cache.get_seq_length() == length
    written: list[Any] = cache.layers
    fresh: list[Any] = expected.layers
    for ours, theirs in zip(written, fresh, strict=True):
        kept = min(length, WINDOW - 1) if theirs.is_sliding else length
        assert_same((ours.keys, ours.values), (theirs.keys[:, :, -kept:], theirs.values[:, :, -kept:]))
    following = prompt(3, seed=5)
    found, wanted = (target(following, past_key_values=each).logits for each in (cache, expected))
    torch.testing.assert_close(found, wanted)
    assert_same_cache(cache, expected)


@torch.no_grad()
def test_rows_that_are_not_kept_are_written_over() -> None:
    """Passes of 3, 4 and 2 tokens, of which 3, 1 and 2 stand."""
    target, ids = tiny("llama"), prompt(12)
    room = room_of(target)
    chosen = [ids[:, :3], torch.cat((ids[:, 3:4], ids[:, :3]), dim=1), ids[:, 4:6]]
    span = torch.arange(32)
    for tokens, kept in zip(chosen, (3, 1, 2), strict=True):
        queries = int(room.length) + torch.arange(tokens.shape[1])
        mask = (span <= queries[:, None])[None, None]
        room.begin_pass(tokens.shape[1])
        target(tokens, past_key_values=room, attention_mask=mask, position_ids=queries[None])
        room.length.add_(kept)
    expected: list[Any] = prefill(target, ids[:, :6]).layers
    assert_same(rows(room), [(layer.keys, layer.values) for layer in expected])


@torch.no_grad()
def test_a_larger_room_holds_what_a_smaller_one_held() -> None:
    target, ids = tiny("llama"), prompt(10)
    small, large = room_of(target, 16), room_of(target, 32)
    small.read(prefill(target, ids), 10)
    large.copy_from(small)
    assert int(large.length) == 10
    assert_same(rows(large), rows(small))
    large.clear()
    assert int(large.length) == 0
    layers: list[Any] = large.layers
    assert not any(layer.keys.any() or layer.values.any() for layer in layers)
    assert large.num_bytes == 2 * small.num_bytes == sum(2 * layer.keys.nbytes for layer in layers)


@torch.no_grad()
def test_what_cannot_go_on_in_rooms() -> None:
    target = tiny("llama")
    assert why_not_rooms(prefill(target, prompt(4))) is None
    assert why_not_rooms(StaticCache(target.config, max_cache_len=8)) == "the text is in a StaticCache"
    shares = prefill(target, prompt(4))
    layer: Any = shares.layers[1]
    layer.keys = None
    assert why_not_rooms(shares) == "layers share the keys of others"
    mixed = tiny_of("qwen3_5_text")
    assert num_room_layers(mixed.config) is None
    assert "keeps" in str(why_not_rooms(DynamicCache(config=mixed.config)))
