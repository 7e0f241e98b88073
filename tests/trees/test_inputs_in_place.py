"""Masks and positions for a cache of fixed size: passes are those over a cache that grows, whatever is hidden in it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import prompt, tiny
from support.zoo import tiny_of
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.captured.rooms import RoomCache, num_room_layers
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.attention import Prompt, inputs_in_place, tree_inputs
from hf_specdecpp.trees.tree import relations

ROOM = 48
TREE = [-1, 0, 0, 1, 3]  # parents
MODELS: dict[str, Callable[[], CausalLM]] = {
    "full": lambda: tiny("llama"),
    "windows and full": lambda: tiny("gemma3_text"),
    "windows": lambda: tiny("mistral"),
    "chunks": lambda: tiny_of("llama4_text"),
    "positions of its own": lambda: tiny("gpt2"),
}


def passes(
    model: CausalLM, length: int, padding: int, change: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given
) -> tuple[Tensor, Tensor]:
    """Logits of a tree after a text with padding before it, in place and over a cache that grows."""
    text = F.pad(prompt(length), (padding, 0))
    mask = F.pad(torch.ones(1, length, dtype=torch.long), (padding, 0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    tokens, (ancestors, depths) = torch.tensor([[1, 2, 3, 4, 5]]), relations(TREE)
    cache, total = DynamicCache(config=model.config), length + padding
    model(text, past_key_values=cache, attention_mask=mask, position_ids=positions)
    cache.activate_past_recording()
    room = RoomCache(num_room_layers(model.config) or 0, ROOM, torch.device("cpu"))
    room.read(cache, total)
    position = positions[..., -1] + 1
    growing = tree_inputs(model, cache, ancestors, depths, total, mask[0].bool(), position)
    shown = torch.ones((1, ROOM), dtype=torch.bool)
    shown[0, :total] = mask[0].bool()
    known: dict[str, Any] = {"ancestors": F.pad(ancestors, (0, 3)), "depths": F.pad(depths, (0, 3)), "places": depths}
    known |= {"num_prefix": torch.tensor([total]), "prompt": Prompt(shown, position[:, None] - total)}
    fixed = inputs_in_place(model, ROOM, **change(known))
    assert fixed["position_ids"].shape == growing["position_ids"].shape
    expected = model(tokens, past_key_values=cache, **growing).logits
    room.begin_pass(tokens.shape[1])
    return model(tokens, past_key_values=room, **fixed).logits, expected


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("length", [4, 26])  # within the windows of 8 and 12, and beyond
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_passes_in_place(name: str, length: int, padding: int) -> None:
    torch.testing.assert_close(*passes(MODELS[name](), length, padding))


@torch.no_grad()
def test_additive_masks() -> None:
    """Of eager attention, whose softmax is float32."""
    model = tiny("gemma3_text", attn_implementation="eager")
    torch.testing.assert_close(*passes(model, 26, 0), rtol=1e-4, atol=1e-5)


ALL_SHOWN = torch.ones((1, ROOM), dtype=torch.bool)
MUTANTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "shows padding": lambda given: {"prompt": Prompt(ALL_SHOWN, given["prompt"].offset)},
    "rows as positions": lambda given: {"prompt": Prompt(given["prompt"].shown, torch.zeros(1, 1, dtype=torch.long))},
    "sees siblings": lambda given: {"ancestors": given["ancestors"].cummax(dim=1).values},
    "stands in rows": lambda _: {"depths": torch.arange(8), "places": torch.arange(5)},
    "one row short": lambda given: {"num_prefix": given["num_prefix"] - 1},
}


@pytest.mark.parametrize("mutant", MUTANTS)
@torch.no_grad()
def test_inputs_that_are_wrong_are_noticed(mutant: str) -> None:
    found, expected = passes(tiny("gpt2"), 6, 3, lambda given: given | MUTANTS[mutant](given))
    assert not torch.allclose(found, expected, atol=1e-3)


@torch.no_grad()
def test_chunks_do_not_count_padding() -> None:
    """Their borders would lie elsewhere."""
    model = MODELS["chunks"]()

    def counts(given: dict[str, Any]) -> dict[str, Any]:
        shown = given["prompt"].shown.clone()
        shown[0] = True  # as if padding began after it
        return given | {"prompt": Prompt(shown, given["prompt"].offset)}

    found, expected = passes(model, 26, 3, counts)
    assert not torch.allclose(found, expected, atol=1e-6)
