"""Trees on targets with a static cache: the text of plain `generate()`, the rows that are held, and widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.models import assistant_of, prompt, quiet_later_layers, tiny
from support.outputs import RECORDS, NoRepeat, assert_same
from support.static_caches import (
    OPTIONS,
    STATIC,
    assert_held_rows_are_those_of_the_text,
    assert_other_rows_are_never_attended_to,
    assert_prefilled,
    held,
    static_cache,
)
from support.tree_generation import TREES, assert_trees_mattered
from torch import Tensor
from transformers import StaticCache

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.caches import text as texts
from hf_specdecpp.caches.text import PathRows, StaticText, hold, move
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.models.causal_lm import CausalLM, cache_among
from hf_specdecpp.trees.tree import DraftTree, TreePass

COSTS = {"draft": 0.1, "verify": [1.0, 1.0, 1.05, 1.1, 1.2]}
GROWTHS: dict[str, dict[str, Any]] = {
    **TREES,
    "throughput": {"tree": "dyspec", "rule": "throughput", "tree_budget": 12, "costs": COSTS},
    "looked up": {"tree": "dyspec", "tree_budget": 6, "lookup": True},
}


def attached(target: CausalLM, kind: str = "independent", growth: str = "dyspec") -> SpecDecPPAssistant:
    return assistant_of(kind, target, **GROWTHS[growth])


# Texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.every(17)
@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("kind", ["independent", "early_exit", "conditioned", "eagle3"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "gpt2"])
def test_greedy_text(family: str, kind: str, growth: str) -> None:
    """Prompts from one token on; texts longer than the windows, up to the cache's last row."""
    target = quiet_later_layers(tiny(family))
    plain = {length: target.generate(prompt(length), **STATIC) for length in (1, 6, 37)}
    assistant = attached(target, kind, growth)
    for length, text in plain.items():
        assert torch.equal(target.generate(prompt(length), assistant_model=assistant, **STATIC), text)
        assert assistant.stats.accepted > 0


def test_branches_are_accepted_and_rejected() -> None:
    target = tiny("llama")
    assistant = attached(target, growth="static")
    target.generate(prompt(), assistant_model=assistant, **{**STATIC, "max_new_tokens": 150})
    assert_trees_mattered(assistant.stats)


@pytest.mark.every(3)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("growth", ["dyspec", "static"])
def test_sampled_text_is_that_of_a_dynamic_cache(growth: str, attention: str) -> None:
    """The same seed, trees and distributions, however many dummies are read with them."""
    target = quiet_later_layers(tiny("gemma3_text", attn_implementation=attention, sliding_window=192))
    assistant = assistant_of("conditioned", target, **GROWTHS[growth], adapt=False)
    options = {**OPTIONS, "do_sample": True, "temperature": 0.8, "assistant_model": assistant}
    for seed in range(3):
        torch.manual_seed(seed)
        dynamic = target.generate(prompt(), **options)
        torch.manual_seed(seed)
        assert torch.equal(target.generate(prompt(), past_key_values=static_cache(target), **options), dynamic)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_padded_prompt(family: str) -> None:
    target, text = quiet_later_layers(tiny(family)), prompt(14)
    text[0, :3] = 0
    options = {**STATIC, "attention_mask": (text != 0).long()}
    plain = target.generate(text, **options)
    assert torch.equal(target.generate(text, assistant_model=attached(target), **options), plain)


def test_up_to_the_last_position() -> None:
    """Neither nodes nor dummies ask for positions that the target does not have."""
    target = tiny("gpt2", n_positions=64)
    for options in ({**OPTIONS, "past_key_values": static_cache(target)}, STATIC):
        plain = target.generate(prompt(9), **{**OPTIONS, "max_new_tokens": 55})
        ours = target.generate(prompt(9), assistant_model=attached(target), **{**options, "max_new_tokens": 55})
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_turns_with_a_users_cache(family: str) -> None:
    """With windows the text must not outgrow them. The last turn ends with the cache."""
    window: dict[str, Any] = {"sliding_window": 192} if family == "gemma3_text" else {}
    target = quiet_later_layers(tiny(family, **window))
    assistant, cache = attached(target), static_cache(target, room=12 + 3 * 40 + 2 * 5 - 1)
    text, turn = prompt(), prompt(5, seed=4)

    def generate(**further: Any) -> Tensor:
        found: Tensor = target.generate(text, attention_mask=torch.ones_like(text), **further, **OPTIONS)
        return found

    for last in (False, False, True):
        plain = generate()
        text = generate(assistant_model=assistant, past_key_values=cache)
        assert torch.equal(text, plain)
        assert_prefilled(held(cache), target, text[:, :-1])
        assert assistant.stats.accepted > 0
        if not last:
            text = torch.cat((text, turn), dim=1)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_records(family: str) -> None:
    target = quiet_later_layers(tiny(family, attn_implementation="eager"))
    arguments = {**STATIC, "return_dict_in_generate": True, **{f"output_{name}": True for name in RECORDS}}
    plain = target.generate(prompt(), **arguments)
    ours = target.generate(prompt(), assistant_model=attached(target), **arguments)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in RECORDS[:-1]:
        assert_same(getattr(ours, name), getattr(plain, name))


def test_processors_that_are_called_in_order() -> None:
    target = quiet_later_layers(tiny("llama"))
    plain = target.generate(prompt(), logits_processor=[NoRepeat()], **STATIC)
    ours = target.generate(prompt(), logits_processor=[NoRepeat()], assistant_model=attached(target), **STATIC)
    assert torch.equal(ours, plain)


def test_costs_of_the_widths_that_are_run() -> None:
    target = tiny("llama")
    assistant = attached(target, growth="throughput")

    def verify() -> tuple[float, ...]:
        (learned,) = assistant.memory.learned[target].values()
        costs: Any = learned.plan
        return tuple(costs.costs.verify)

    target.generate(prompt(), assistant_model=assistant, **STATIC)
    assert verify()[2:4] == (1.1, 1.1)
    target.generate(prompt(), assistant_model=assistant, **OPTIONS)
    assert verify() == tuple(COSTS["verify"])  # type: ignore[arg-type]


# Rows -----------------------------------------------------------------------------------------------------------------


def test_held_rows_are_those_of_the_text_after_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("llama", "gemma3_text", "mistral"):
        target = quiet_later_layers(tiny(family))
        assert_held_rows_are_those_of_the_text(target, attached(target), monkeypatch)


def test_rows_that_are_not_held_are_never_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    target = quiet_later_layers(tiny("llama"))
    assert_other_rows_are_never_attended_to(target, attached(target), monkeypatch)


def stays(rows: Tensor, indices: Tensor, to: int) -> None:
    """The path is not moved."""


def one_off(rows: Tensor, indices: Tensor, to: int) -> None:
    move(rows, indices - 1, to)


def from_the_start(rows: Tensor, indices: Tensor, to: int) -> None:
    move(rows, indices, to - 1)


def keeps_one_too_many(text: StaticText, count: int, of: int, path: PathRows | None) -> None:
    kept(text, count, of, path)
    if path is not None:
        text.held += 1
        hold(text.cache, text.held)


def unmoved_past(text: StaticText, count: int, of: int, _: PathRows | None) -> None:
    """As in a chain."""
    kept(text, count, of)


def sees_dummies(tree_pass: TreePass, *args: Any) -> Any:
    tokens, ancestors, depths = uploaded(tree_pass, *args)
    ancestors[:, len(tree_pass.order) :] = True
    return tokens, ancestors, depths


def one_place_behind(tree_pass: TreePass, *args: Any) -> Any:
    tokens, ancestors, depths = uploaded(tree_pass, *args)
    return tokens, ancestors, (depths - 1).clamp(min=0)


kept, uploaded = StaticText.keep, TreePass.upload
MUTANTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (texts, "move", stays),
    (texts, "move", one_off),
    (texts, "move", from_the_start),
    (StaticText, "keep", keeps_one_too_many),
    (StaticText, "keep", unmoved_past),
    (TreePass, "upload", sees_dummies),
    (TreePass, "upload", one_place_behind),
]


@pytest.mark.parametrize(("owner", "name", "mutant"), MUTANTS, ids=[mutant.__name__ for *_, mutant in MUTANTS])
def test_trees_that_are_read_or_kept_wrongly_are_noticed(
    owner: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny("llama")
    options = {**STATIC, "max_new_tokens": 80}
    plain = target.generate(prompt(), **options)
    assistant = attached(target)
    monkeypatch.setattr(owner, name, mutant)
    try:
        ours = target.generate(prompt(), assistant_model=assistant, **options)
    except (IndexError, RuntimeError):
        return  # beyond the last row
    assert not torch.equal(ours, plain)


@pytest.mark.parametrize("length", [12, 20])  # in the prompt's own pass, and in a later round
def test_an_exception_rolls_a_users_cache_back(length: int) -> None:
    target, text = quiet_later_layers(tiny("llama")), prompt(12)
    cache, assistant = static_cache(target), attached(target)
    target(text[:, :6], past_key_values=cache)

    def fails(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= length:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        target.generate(text, assistant_model=assistant, past_key_values=cache, logits_processor=[fails], **OPTIONS)
    emitted = assistant.stats.generated
    assert int(cache.get_seq_length()) == (6 if not emitted else 12 + emitted - 1)
    again = target.generate(text, **OPTIONS)
    whole = again[:, : 12 + emitted]
    assert torch.equal(target.generate(whole, past_key_values=cache, **OPTIONS)[:, : again.shape[1]], again)


# Widths ---------------------------------------------------------------------------------------------------------------


@contextmanager
def noted_passes(target: CausalLM) -> Iterator[list[tuple[int, int, tuple[int, ...]]]]:
    """Rows held, tokens, and the shape of the mask, of each pass after the prompt's."""
    passes: list[tuple[int, int, tuple[int, ...]]] = []

    def note(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        mask = inputs.get("attention_mask")
        if mask is None or not isinstance(cache_among(inputs), StaticCache):
            return  # the prompt's, or those by which trees are tried on the target
        passes.append((int(cache_among(inputs).get_seq_length()), inputs["input_ids"].shape[1], tuple(mask.shape)))

    handle = target.register_forward_pre_hook(note, with_kwargs=True)
    yield passes
    handle.remove()


@pytest.mark.parametrize("growth", GROWTHS)
def test_passes_have_few_shapes_and_end_within_the_cache(growth: str) -> None:
    """Trees are drafted up to the end of the text: a cache that `generate()` makes has room for one after it."""
    target, length = quiet_later_layers(tiny("llama")), 12 + 40
    assistant = attached(target, growth=growth)
    rooms = set()
    with noted_passes(target) as passes:
        target.generate(prompt(), assistant_model=assistant, **STATIC)
    for begin, width, mask in passes:
        rooms.add(mask[-1])
        assert width in (1, 2, 4, 8, 16)
        assert mask == (1, 1, width, mask[-1])
        assert begin + width <= mask[-1]
    (room,) = rooms
    assert room == length - 1 + (8 if growth == "looked up" else 16)
    widest = max(width for _, width, _ in passes)
    last = max(begin for begin, width, _ in passes if width == widest)
    assert growth not in TREES or last + widest > length - 1


def test_a_users_cache_that_is_almost_full() -> None:
    """Where a tree might not fit there is none; the text is the same."""
    target = quiet_later_layers(tiny("llama"))
    cache = static_cache(target, room=12 + 40 - 1)
    plain = target.generate(prompt(), **OPTIONS)
    with noted_passes(target) as passes:
        ours = target.generate(prompt(), assistant_model=attached(target), past_key_values=cache, **OPTIONS)
    assert torch.equal(ours, plain)
    assert max(begin + width for begin, width, _ in passes) <= 51


def test_the_nodes_of_a_pass_and_its_dummies() -> None:
    tree = DraftTree(5)
    tree.add(0, 7)
    tree.add(0, 8)
    tokens, ancestors, depths = TreePass(tree).upload(torch.device("cpu"), width=4)
    assert tokens.tolist() == [7, 8]
    assert ancestors.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    assert depths.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"tree": "dyspec", "tree_budget": 9}, 9),
        ({"tree": [3, 2, 1]}, 15),
        ({"tree": [2, 1], "lookup": True, "tree_budget": 9}, 9),
        ({"tree": "static", "tree_budget": 9}, 9),
        ({"rule": "fixed", "num_tokens": 3}, 3),
    ],
)
def test_the_most_candidates_of_a_round(settings: dict[str, Any], most: int) -> None:
    assert Decisions().most_tokens(SpeculationConfig(**settings)) == most
