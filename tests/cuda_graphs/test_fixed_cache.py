"""Caches of captured passes: few sizes, and a bound of their memory."""

from collections.abc import Iterator
from math import inf
from typing import Any

import pytest
import torch
from support.devices.capturing import CHAIN
from support.devices.pretend_graph import direct_graphs, pretend_graphs
from support.targets.models import assistant_of, prompt, quiet_later_layers, tiny
from transformers import DynamicCache

from hf_specdecpp.caches.cached_context import width_of
from hf_specdecpp.cuda_graphs import captured_target, fixed_cache
from hf_specdecpp.cuda_graphs.fixed_cache import (
    Budget,
    FixedCache,
    FixedContext,
    capacity_for,
    windows_of,
    with_rows,
)
from hf_specdecpp.cuda_graphs.graphs import Graphs
from hf_specdecpp.generation.stats import SpeculationStats

CPU = torch.device("cpu")
TOKEN = 2 * 3 * 2 * 4 * 4  # bytes of one in the caches below: keys and values, layers, heads, size, float32


@pytest.mark.parametrize(
    ("tokens", "room"),
    [(1, 256), (256, 256), (257, 512), (4097, 8192), (8193, 16384), (16385, 24576), (131073, 139264)],
)
def test_rooms_double_and_then_grow_by_equal_parts(tokens: int, room: int) -> None:
    assert capacity_for(tokens) == room


def test_batches_have_few_sizes() -> None:
    rows = {1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 16, 17: 32, 32: 32}
    assert {texts: len(with_rows(torch.zeros(texts, 1))) for texts in rows} == rows
    assert with_rows(torch.tensor([[3, 4, 5]]), dim=1).tolist() == [[3, 4, 5, 5]]


def of_texts(budget: Budget, rooms: list[int], forgot: list[Any]) -> list[tuple[list[int], int]]:
    """The rooms that remain after texts of these lengths, and how often graphs were forgotten."""
    caches, found = FixedContext([inf] * 3, CPU, budget), []
    for tokens in rooms:
        budget.text += 1
        cache = caches.empty(tokens)
        layers: list[Any] = cache.layers
        for layer in layers:
            if not layer.is_initialized:
                layer.lazy_initialization(*torch.zeros(2, 1, 2, 1, 4))
        found.append((sorted(room for room, *_ in caches.made), len(forgot)))
    return found


def test_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_cache, "free_bytes", lambda _: 4 * TOKEN * (256 + 512 + 1024))
    forgot: list[Any] = []
    kept = of_texts(Budget(CPU, lambda: forgot.append(1)), [100, 300, 1000, 100, 2000, 300], forgot)
    assert kept == [
        ([256], 0), ([256, 512], 0), ([256, 512, 1024], 0), ([256, 512, 1024], 0),
        ([2048], 1),  # which alone is more than the budget: it is in use
        ([512], 2),
    ]  # fmt: skip


def test_caches_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one text: of the target and of the draft, the smaller and the larger one."""
    monkeypatch.setattr(fixed_cache, "free_bytes", lambda _: 0.0)
    budget = Budget(CPU, lambda: None)
    both, budget.text = [FixedContext([inf] * 3, CPU, budget) for _ in range(2)], 1
    for caches in both:
        for tokens in (100, 300):
            caches.empty(tokens)
    assert [len(caches.made) for caches in both] == [2, 2]


# Texts of known length. -----------------------------------------------------------------------------------------------


@pytest.mark.daily("60-400-100-rooms2")
@pytest.mark.takes(4)
@pytest.mark.parametrize(
    ("prompt_length", "new_tokens", "ahead", "rooms"),
    [
        (200, 90, 512, [512]),
        (60, 100, 512, [256]),
        (60, 400, 100, [256, 512]),  # the end may be far away, and a larger cache takes longer to read
        (200, 90, -(1 << 30), [256, 512]),  # a mutant
    ],
)
def test_a_cache_is_made_for_the_expected_tokens(
    prompt_length: int, new_tokens: int, ahead: int, rooms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the draft's, too. A cache that grows is copied, and its graphs are captured once more."""
    monkeypatch.setattr(captured_target, "AHEAD", ahead)
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2, max_position_embeddings=1024)).float()
    assistant = assistant_of("early_exit", target, **CHAIN)
    with direct_graphs():
        text = target.generate(
            ids := prompt(prompt_length), assistant_model=assistant, max_new_tokens=new_tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    assert assistant.stats.uncaptured is None
    assert torch.equal(text, target.generate(ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0))
    made = [sorted(room for room, *_ in owner.made) for owner in captured_target._known[target][1].budget.owners]
    assert made == [rooms, rooms]


# Layers with a window. ------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("length", [3, 9, 40])
def test_windows_are_read_and_written_back(length: int) -> None:
    """A text in a growing cache, which passes a fixed one and a larger one."""
    model = tiny("gemma3_text")
    windows, before = windows_of(model.config) or [], DynamicCache(config=model.config)
    model(prompt(length), past_key_values=before)
    small, large = (FixedCache(windows, capacity, CPU, spare=4) for capacity in (48, 64))
    small.read(before, length)
    large.copy_from(small)
    layers: list[Any] = large.layers
    assert {layer.capacity for layer in layers} == {min(windows) + 4, 64}
    after = DynamicCache(config=model.config)
    large.write(after, length)
    pairs: list[Any] = list(zip(before.layers, after.layers, strict=True))
    for one, other in pairs:
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.daily("None-3", "spare-3", "all tokens-1", takes=6)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mutant", [None, "spare", "all tokens"])
def test_texts_longer_than_their_windows(mutant: str | None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a window keep the window and the nodes of a pass; texts and the cache that is returned are plain
    generation's. A mutant keeps too little, another all."""
    if mutant == "spare":
        monkeypatch.setattr(FixedContext, "set_width", lambda caches, _: setattr(caches, "spare", 1))
    elif mutant == "all tokens":
        monkeypatch.setattr(fixed_cache, "windows_of", lambda config: [inf] * config.num_hidden_layers)
        monkeypatch.setattr(captured_target, "windows_of", fixed_cache.windows_of)
    target = quiet_later_layers(tiny("gemma3_text"))
    assistant, ids = assistant_of("early_exit", target, **CHAIN), torch.cat([prompt(20, seed) for seed in range(rows)])
    returns = rows == 1  # a batch that returns its cache is not captured
    how: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, return_dict_in_generate=True, **how)
    with pretend_graphs():
        ours = target.generate(ids, assistant_model=assistant, return_dict_in_generate=returns, **how)
    assert torch.equal(ours.sequences if returns else ours, plain.sequences)
    # The comparison with the target's own passes notices rows that are overwritten too early.
    assert (assistant.stats.decided["rounds"] == "captured") == (mutant != "spare")
    window, caches = min(windows_of(target.config) or []), captured_target._known[target][1].context
    layers: list[Any] = next(iter(caches.made.values())).layers
    (kept,) = {layer.capacity for layer in layers} - {256} or {256}
    assert (kept <= window + 8) == (mutant != "all tokens")
    if mutant is None and returns:
        for one, other in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys)


# A day of a server. ---------------------------------------------------------------------------------------------------


FREE = 4 * 40_000_000  # bytes: all caches of a day would be more than the budget


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    found: list[Any] = []
    capture = Graphs._capture

    def counted(*arguments: Any) -> Any:
        found.append(arguments[0])
        return capture(*arguments)

    monkeypatch.setattr(Graphs, "_capture", counted)
    monkeypatch.setattr(fixed_cache, "free_bytes", lambda _: FREE)
    with direct_graphs():
        yield found


def day(requests: int, longest: int) -> Iterator[tuple[SpeculationStats, float]]:
    """Statistics and the budget after each request: few rows in the morning and at night, up to eight at noon; a new
    temperature, top-k, top-p and length each time."""
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2, max_position_embeddings=4096)).float()
    assistant = assistant_of("early_exit", target, draft_successors=False, **CHAIN)
    for place in range(requests):
        rows = 1 + round(7 * (1 - abs(2 * place / requests - 1)))
        ids = prompt(50 + (place * 919) % (longest - 50), seed=place).repeat(rows, 1)
        how = {"temperature": 0.5 + 0.1 * (place % 10), "top_k": 5 + place % 7, "top_p": 0.5 + 0.01 * (place % 50)}
        target.generate(
            ids, assistant_model=assistant, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=True,
            pad_token_id=0, **how,
        )  # fmt: skip
        stats = assistant.stats
        assert (stats.decided["rounds"], stats.uncaptured) == ("captured", None)
        yield stats, captured_target._known[target][1].budget.most


@pytest.mark.parametrize(
    ("requests", "longest", "most"),
    [(16, 400, 9), pytest.param(200, 3000, 40, marks=pytest.mark.slow)],
    ids=["hours", "a day"],
)
@pytest.mark.takes(10)
def test_a_day_of_a_server(requests: int, longest: int, most: int, captures: list[Any]) -> None:
    """Few graphs, and their memory stays below the budget. In some hours: four sizes of batches in two rooms, and the
    pass that is compared first."""
    for stats, budget in day(requests, longest):
        assert 0 < stats.graph_bytes <= budget
    assert len(captures) <= most


def as_many_rows(count: int) -> int:
    """A mutant: caches have as many rows as there are sequences, up to eight. Their other sizes stay."""
    return count if count <= 8 else width_of(count)


@pytest.mark.takes(10)
@pytest.mark.parametrize("mutant", ["numbers", "rows", "budget"])
def test_a_server_without_bounds_is_noticed(mutant: str, captures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant == "numbers":
        monkeypatch.setattr("hf_specdecpp.sampling.processors.Processing.with_contents", lambda processing: processing)
    elif mutant == "rows":
        for module in ("cuda_graphs.fixed_cache", "generation.captured.entering"):
            monkeypatch.setattr(f"hf_specdecpp.{module}.width_of", as_many_rows)
    else:
        monkeypatch.setattr(Budget, "make_room", lambda *_: None)
        monkeypatch.setattr(fixed_cache, "free_bytes", lambda _: 4 * 1_000_000)
    over = [stats.graph_bytes > budget for stats, budget in day(16, 400)]
    assert any(over) if mutant == "budget" else len(captures) > 9
