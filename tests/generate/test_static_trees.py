"""Trees on targets with a static cache: mutants, and widths. Their texts are in `test_static_targets.py`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.models import prompt, quiet_later_layers, tiny
from support.static_caches import GROWTHS, OPTIONS, STATIC, attached, static_cache
from support.tree_generation import TREES, assert_trees_mattered
from torch import Tensor
from transformers import StaticCache

from hf_specdecpp import SpeculationConfig
from hf_specdecpp.caches import text as texts
from hf_specdecpp.caches.text import PathRows, StaticText, hold, move
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.models.causal_lm import CausalLM, cache_among
from hf_specdecpp.trees.tree import DraftTree, TreePass


def test_branches_are_accepted_and_rejected() -> None:
    target = tiny("llama")
    assistant = attached(target, "static")
    target.generate(prompt(), assistant_model=assistant, **{**STATIC, "max_new_tokens": 150})
    assert_trees_mattered(assistant.stats)


# Rows -----------------------------------------------------------------------------------------------------------------


def stays(rows: Sequence[Tensor], indices: Tensor, to: int) -> None:
    """The path is not moved."""


def one_off(rows: Sequence[Tensor], indices: Tensor, to: int) -> None:
    move(rows, indices - 1, to)


def from_the_start(rows: Sequence[Tensor], indices: Tensor, to: int) -> None:
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
    (texts, "move", stays), (texts, "move", one_off), (texts, "move", from_the_start),
    (StaticText, "keep", keeps_one_too_many), (StaticText, "keep", unmoved_past), (TreePass, "upload", sees_dummies),
    (TreePass, "upload", one_place_behind),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "mutant"), MUTANTS, ids=[mutant.__name__ for *_, mutant in MUTANTS])
def test_trees_that_are_read_or_kept_wrongly_are_noticed(
    owner: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, options = tiny("llama"), {**STATIC, "max_new_tokens": 50}
    plain, assistant = target.generate(prompt(), **options), attached(target, "dyspec")
    monkeypatch.setattr(owner, name, mutant)
    try:
        ours = target.generate(prompt(), assistant_model=assistant, **options)
    except (IndexError, RuntimeError):
        return  # beyond the last row
    assert not torch.equal(ours, plain)


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


@pytest.mark.every(3)
@pytest.mark.parametrize("growth", GROWTHS)
def test_passes_have_few_shapes_and_end_within_the_cache(growth: str) -> None:
    """Trees are drafted up to the end of the text: a cache that `generate()` makes has room for one after it."""
    target, length = quiet_later_layers(tiny("llama")), 12 + 40
    assistant, rooms = attached(target, growth), set()
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
    cache, plain = static_cache(target, room=12 + 40 - 1), target.generate(prompt(), **OPTIONS)
    with noted_passes(target) as passes:
        ours = target.generate(prompt(), assistant_model=attached(target, "dyspec"), past_key_values=cache, **OPTIONS)
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


@pytest.mark.parametrize(("settings", "most"), [
    ({"tree": "dyspec", "tree_budget": 9}, 9),
    ({"tree": [3, 2, 1]}, 15),
    ({"tree": [2, 1], "lookup": True, "tree_budget": 9}, 9),
    ({"tree": "static", "tree_budget": 9}, 9),
    ({"rule": "fixed", "num_tokens": 3}, 3),
])  # fmt: skip
def test_the_most_candidates_of_a_round(settings: dict[str, Any], most: int) -> None:
    assert Decisions().most_tokens(SpeculationConfig(**settings)) == most
