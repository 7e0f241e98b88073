"""The passes of a target over candidates that the host has proposed; on pretended graphs."""

from collections.abc import Sequence

import pytest
import torch
from support.devices.capturing import pretended
from support.targets.models import prompt, tiny
from torch import Tensor

from hf_specdecpp.caches.cached_context import PathRows
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.models.causal_lm import CausalLM

__all__ = ["pretended"]
HELD, ROOM = 8, 256


def entered(target: CausalLM) -> CapturedTarget:
    """The passes of a target that has read a prompt."""
    passes = CapturedTarget(target)
    cache = target(prompt(HELD), use_cache=True).past_key_values
    passes.begin_texts(cache, HELD, None, torch.tensor([[HELD]]))
    return passes


def round_of(passes: CapturedTarget, width: int, path: Sequence[int]) -> Tensor:
    """The keys that stand after a pass over a chain, read as a tree, of which the rows of a path are kept."""
    places = torch.arange(width)
    passes.read(torch.arange(width)[None], (places <= places[:, None], places))
    keys = passes.context.cache.layers[0].keys[0, 0].clone()
    held = passes.context.num_tokens
    passes.commit(len(path), PathRows(list(path), torch.tensor(path)))
    kept = passes.context.cache.layers[0].keys[0, 0, held : passes.context.num_tokens]
    torch.testing.assert_close(kept, keys[[held + row for row in path]])
    return kept


@torch.no_grad()
@pytest.mark.usefixtures("pretended")
def test_rows_of_an_earlier_path_are_not_moved_again() -> None:
    """Of a wider pass, they would lie behind the end of the room, where a device stops with an error."""
    passes = entered(tiny("llama", num_hidden_layers=1))
    round_of(passes, 32, [0, 9, 20, 31])
    passes.commit(ROOM - 8 - passes.context.num_tokens)
    round_of(passes, 8, [0, 2, 5])
    assert (passes.context.cache.capacity, passes.context.num_tokens) == (ROOM, ROOM - 5)
    assert int(passes.context.cache.length) == ROOM - 5
