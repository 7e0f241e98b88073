"""A capture counts once, and a failed one leaves what it changes as it was; which caches can be captured."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import WINDOW, prompt, tiny
from support.outputs import assert_same, assert_same_cache, prefill
from support.zoo import tiny_of
from torch import Tensor
from transformers import DynamicCache, StaticCache

from hf_specdecpp.captured.graphs import CannotCaptureError, Graphs
from hf_specdecpp.captured.rooms import RoomCache, num_room_layers, room_for, why_not_rooms

CPU = torch.device("cpu")


@pytest.mark.usefixtures("pretended")
def test_the_first_run_counts_once() -> None:
    """Though the function runs several times then; a tensor that is not named as changed is off."""
    for changes, expected in ((True, 1), (False, 4)):
        graphs, length = Graphs(CPU), torch.tensor(0)

        def add(length: Tensor = length) -> None:
            length.add_(1)

        graphs.run("one", add, [length] if changes else [])
        assert int(length) == expected


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.nonzero, bool])
@pytest.mark.usefixtures("pretended")
def test_what_cannot_be_captured_changes_nothing(read: Callable[[Tensor], Any]) -> None:
    graphs, length = Graphs(CPU), torch.tensor(3)

    def waits() -> None:
        length.add_(1)
        read(length)

    with pytest.raises(CannotCaptureError, match="RuntimeError: .* waits for the device"):
        graphs.run("waits", waits, [length])
    assert (int(length), len(graphs)) == (3, 0)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("num_tokens", "room"), [(1, 256), (256, 256), (257, 512), (512, 512), (513, 1024), (5000, 8192)]
)
def test_room_for(num_tokens: int, room: int) -> None:
    assert room_for(num_tokens) == room


@pytest.mark.parametrize("length", [5, 20])  # below a window of 8, and beyond
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
@torch.no_grad()
def test_a_growing_cache_is_read_and_written_back(family: str, length: int) -> None:
    """With it transformers' own passes go on as if nothing had happened."""
    target, ids = tiny(family), prompt(length)
    cache, expected = prefill(target, ids), prefill(target, ids)
    cache.activate_past_recording()
    expected.activate_past_recording()
    room = RoomCache(num_room_layers(target.config) or 0, 32, CPU)
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
