"""Masks and positions of a tree, what happens when they are wrong, and what `check_tree` refuses."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.enumeration.token_trees import LEVELS, gap, one_by_one, prefill, read_tree, tokens_for
from support.targets.models import prompt, tiny
from support.targets.watchers import unnoticed
from support.targets.zoo import WINDOW, tiny_of
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.caches.masks import CachedPrompt, Nodes, inputs_in_place, tree_inputs, tree_mask
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache, windows_of
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.attention import check_tree
from hf_specdecpp.trees.tree import relations

PREFIX = 2 * WINDOW


@pytest.mark.daily("3-llama-sdpa", "3-gemma3_text-sdpa", "3-gemma3_text-eager", "22-mistral-sdpa", "22-opt-eager")
@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "sdpa"), ("opt", "sdpa"), ("mistral", "sdpa"), ("gemma3_text", "sdpa"), ("llama4_text", "sdpa")]
    + [("opt", "eager"), ("gemma3_text", "eager")],
)
@pytest.mark.parametrize("padding", [3, PREFIX - 2])
def test_padding_before_the_prompt_changes_nothing(family: str, attention: str, padding: int) -> None:
    overrides: dict[str, Any] = {"attn_temperature_tuning": False} if family == "llama4_text" else {}
    # Not float64: transformers' own eager prefill then makes NaN of padding (float64's lowest number is -inf in the
    # float32 of its softmax).
    model = tiny_of(family, attention, **overrides).to(torch.float32)
    text, nodes = tokens_for(model, PREFIX)
    mask = torch.arange(PREFIX) >= padding
    for groups in (None, LEVELS):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            positions = (mask.cumsum(0) - 1).clamp_min(0)[None]
            model(
                input_ids=text[None],
                attention_mask=mask[None].long(),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        cache.activate_past_recording()
        position = torch.tensor([PREFIX - padding])
        logits = read_tree(model, cache, PREFIX, nodes, groups, prefix_mask=mask, position=position)
        assert gap(logits, one_by_one(model, text[padding:], nodes)) < 1e-4


def test_a_cache_that_keeps_all_rows_of_sliding_layers() -> None:
    """A user's `DynamicCache()`, made without the model's config."""
    model = tiny_of("mistral")
    text, nodes = tokens_for(model, PREFIX)
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=text[None], past_key_values=cache, use_cache=True)
    check_tree(model)
    assert gap(read_tree(model, cache, PREFIX, nodes, LEVELS), one_by_one(model, text, nodes)) < 1e-5


# Mutants: what `tree_inputs` must not return.


def causal_over_rows(inputs: dict[str, Any]) -> dict[str, Any]:
    """As if the nodes were a chain, for models with one mask."""
    mask = inputs["attention_mask"]
    rows, columns = mask.shape[-2:]
    seen = torch.ones((rows, columns), dtype=torch.bool).tril(columns - rows)[None, None]
    additive = torch.zeros(seen.shape, dtype=mask.dtype)
    return {**inputs, "attention_mask": seen if mask.dtype is torch.bool else additive.masked_fill(~seen, -1e9)}


def flat_positions(inputs: dict[str, Any]) -> dict[str, Any]:
    """One position a row."""
    positions = inputs["position_ids"]
    return {**inputs, "position_ids": positions[:, :1] + torch.arange(positions.shape[1])[None]}


def bool_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "attention_mask": inputs["attention_mask"] == 0}


@pytest.mark.daily(
    "dtype0-causal_over_rows-sdpa", "dtype0-flat_positions-eager", "dtype1-causal_over_rows-eager",
    "dtype1-bool_mask-eager",
)  # fmt: skip
@pytest.mark.parametrize(("mutant", "attention"), [
    (causal_over_rows, "sdpa"),
    (causal_over_rows, "eager"),
    (flat_positions, "sdpa"),
    (flat_positions, "eager"),
    (bool_mask, "eager"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_wrong_inputs_are_noticed(monkeypatch: Any, mutant: Any, attention: str, dtype: torch.dtype) -> None:
    """By the comparison that the tests of families make, and by the one that `check_tree` makes on a user's model."""
    model = tiny_of("llama", attention).to(dtype)
    check_tree(copy.deepcopy(model))

    def wrong(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return mutant(tree_inputs(*args, **kwargs))

    text, nodes = tokens_for(model, PREFIX)
    expected = one_by_one(model, text, nodes)
    assert gap(read_tree(model, prefill(model, text), PREFIX, nodes), expected) < 0.05
    monkeypatch.setattr("support.enumeration.token_trees.tree_inputs", wrong)
    assert gap(read_tree(model, prefill(model, text), PREFIX, nodes), expected) > 0.1
    monkeypatch.setattr("hf_specdecpp.trees.attention.tree_inputs", wrong)
    with pytest.raises(ValueError, match="reads a token tree differently from each of its paths"):
        check_tree(model)


def test_a_window_measured_by_row_is_noticed(monkeypatch: Any) -> None:
    model = tiny_of("mistral")
    text, nodes = tokens_for(model, PREFIX)
    expected = one_by_one(model, text, nodes)

    def by_row(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = tree_inputs(*args, **kwargs)
        rows, columns = inputs["attention_mask"].shape[-2:]
        inputs["attention_mask"] &= torch.ones((rows, columns), dtype=torch.bool).triu(columns - rows - WINDOW + 1)
        return inputs

    monkeypatch.setattr("support.enumeration.token_trees.tree_inputs", by_row)
    assert gap(read_tree(model, prefill(model, text), PREFIX, nodes), expected) > 0.01


# What `check_tree` refuses.


@pytest.mark.parametrize(("family", "overrides", "reason"), [
    ("bloom", {}, "ALiBi"),
    ("mpt", {}, "ALiBi"),
    ("falcon", {"alibi": True}, "ALiBi"),
    ("mamba", {}, "takes no position_ids"),
    ("rwkv", {}, "does not use a key-value cache"),
    ("qwen3_next", {}, "layers of type linear_attention"),
    ("lfm2", {}, "layers of type conv"),
    ("deepseek_v32", {}, "tokens that an indexer chooses"),
    ("bart", {}, "takes no position_ids"),
    ("gpt_neo", {}, "local attention"),
    ("llama4_text", {}, "attn_temperature_tuning"),
    ("minimax_m3_vl_text", {}, "index_topk_blocks"),
    ("moshi", {}, "in its cache but not in its mask"),
])  # fmt: skip
def test_what_cannot_work_is_refused_with_the_reason(family: str, overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_tree(tiny_of(family, **overrides))


def test_other_attention_is_refused_with_advice() -> None:
    model = tiny_of("llama")
    check_tree(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"draft LlamaForCausalLM runs attn_implementation='flash_attention_2'.*sdpa"):
        check_tree(model, role="draft")


def test_the_model_is_tried_once_and_left_as_it_was() -> None:
    model = tiny_of("gemma3_text")
    passes: list[tuple[int, ...]] = []
    note = unnoticed(lambda _, __, kwargs: passes.append(kwargs["input_ids"].shape))
    model.register_forward_pre_hook(note, with_kwargs=True)
    before, random, keys = copy.deepcopy(model.state_dict()), torch.get_rng_state(), set(vars(model))
    check_tree(model)
    check_tree(model)
    assert len(passes) == 3
    assert sum(rows * columns for rows, columns in passes) <= 30
    assert torch.equal(torch.get_rng_state(), random)
    assert set(vars(model)) == keys
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.set_attn_implementation("eager")
    check_tree(model)
    assert len(passes) == 6


# Masks and positions for a cache of fixed size: passes are those over a cache that grows, whatever is hidden in it. ---


ROOM, SPARE = 48, 8
TREE, FURTHER = [-1, 0, 0, 1, 3], 3  # parents, and nodes of later passes
MODELS: dict[str, Callable[[], CausalLM]] = {
    "full": lambda: tiny("llama"), "windows and full": lambda: tiny("gemma3_text"), "windows": lambda: tiny("mistral"),
    "chunks": lambda: tiny_of("llama4_text"), "positions of its own": lambda: tiny("gpt2"),
}  # fmt: skip


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
    room = FixedCache(windows_of(model.config) or [], ROOM, torch.device("cpu"), spare=SPARE)
    room.read(cache, total)
    position = positions[..., -1] + 1
    seen = tree_mask(model, cache, ancestors, depths, total, mask[0].bool())
    growing = {"attention_mask": seen, "position_ids": position[:, None] + depths}
    shown = torch.ones((1, ROOM), dtype=torch.bool)
    shown[0, :total] = mask[0].bool()
    further = (0, FURTHER)
    known: dict[str, Any] = {"seen": F.pad(ancestors, further), "depths": F.pad(depths, further), "places": depths}
    known |= {"num_prefix": torch.tensor([total]), "prompt": CachedPrompt(shown, position[:, None] - total)}
    given = change(known)
    room.prompt = given.pop("prompt")
    num_prefix = given.pop("num_prefix")
    fixed = inputs_in_place(model, room, Nodes(**given), num_prefix)
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
    torch.testing.assert_close(*passes(tiny("gemma3_text", attn_implementation="eager"), 26, 0), rtol=1e-4, atol=1e-5)


ALL_SHOWN = torch.ones((1, ROOM), dtype=torch.bool)
MUTANTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "shows padding": lambda given: {"prompt": CachedPrompt(ALL_SHOWN, given["prompt"].offset)},
    "rows as positions": lambda given: {
        "prompt": CachedPrompt(given["prompt"].shown, torch.zeros(1, 1, dtype=torch.long))
    },
    "sees siblings": lambda given: {"seen": given["seen"].cummax(dim=1).values},
    "stands in rows": lambda _: {"depths": torch.arange(8), "places": torch.arange(5)},
    "one row short": lambda given: {"num_prefix": given["num_prefix"] - 1},
}


@pytest.mark.parametrize("spare", [4, 3], ids=["just enough", "a mutant"])
@pytest.mark.parametrize("name", ["windows and full", "windows", "chunks"])
@torch.no_grad()
def test_rows_of_windows_are_used_in_turn(name: str, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window and the nodes of a pass, of which the root is part of both. With one less the last node takes the row of
    a token that the root still sees."""
    monkeypatch.setattr(sys.modules[__name__], "SPARE", spare)
    monkeypatch.setattr(sys.modules[__name__], "FURTHER", 0)
    same = [torch.allclose(*passes(MODELS[name](), length, 0), atol=1e-6) for length in range(20, 32)]
    assert all(same) == (spare == 4)


@torch.no_grad()
def test_tokens_that_were_never_written_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt shorter than the window."""
    monkeypatch.setattr(FixedCache, "shown", lambda _, tokens: tokens > -100)
    assert not torch.allclose(*passes(MODELS["windows"](), 4, 0), atol=1e-6)


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
        return given | {"prompt": CachedPrompt(shown, given["prompt"].offset)}

    found, expected = passes(model, 26, 3, counts)
    assert not torch.allclose(found, expected, atol=1e-6)
