"""`generate()` with token trees on an attached target: its exact distribution, its ends and its statistics."""

from typing import Any

import pytest
from support.enumeration.exact_distribution import exact_distribution, worst_error
from support.enumeration.stock_rounds import PROMPT as SHORT
from support.enumeration.stock_rounds import small, target_distribution
from support.targets.models import assistant_for, configured
from support.targets.tree_generation import ARGUMENTS, TREES, generate, plain_text, target_of

from hf_specdecpp.assistant import SpecDecPPAssistant


@pytest.mark.daily("dyspec", "[[0], [1], [0, 0]]", takes=2)
@pytest.mark.parametrize("kind", ["dyspec", "dyspec-exact", [[0], [1], [0, 0]]], ids=str)
def test_generate_emits_exactly_p(kind: Any, enumerate_torch: Any) -> None:
    """The distribution of a whole `generate()`, by enumeration: rounds, caches, processors on each node's own path."""
    target, draft = small(7), small(107)
    knobs: dict[str, Any] = {"tree": kind, "tree_budget": 3, "tree_depth": 2}
    assistant = configured(SpecDecPPAssistant.from_draft(draft, target), **knobs)

    def program(replay: Any) -> tuple[int, ...]:
        enumerate_torch(replay)
        assistant.memory.clear()  # every path begins alike
        options = {"temperature": 0.8, "top_k": 2, "repetition_penalty": 1.7, "max_new_tokens": 4}
        output = target.generate(SHORT, assistant_model=assistant, do_sample=True, **options)
        return tuple(output[0, SHORT.shape[1] :].tolist())

    assert worst_error(exact_distribution(program), target_distribution(target, 0.8, 2, penalty=1.7), 4) < 1e-6
    assert assistant.stats.tree_depths


def test_nothing_is_drafted_below_an_end_of_sequence() -> None:
    target, eos = target_of("llama"), plain_text("llama")[0, 20:].tolist()[10]
    assistant = assistant_for(target, mix=1.0, **{**TREES["dyspec"], "tree_budget": 40})
    generate(target, assistant, **{**ARGUMENTS, "eos_token_id": eos, "pad_token_id": 0})
    tree = assistant.stats.last_tree.tree
    assert eos in tree.tokens[1:]
    assert all(not children for token, children in zip(tree.tokens[1:], tree.children[1:], strict=True) if token == eos)


def test_statistics_of_trees() -> None:
    target = target_of("llama")
    assistant = assistant_for(target, mix=0.9, **TREES["dyspec"])
    generate(target, assistant, **ARGUMENTS)
    stats = assistant.stats
    assert (stats.generated, sum(stats.drafted_at)) == (150, stats.drafted)
    assert sum(stats.accepted_at) == sum(stats.accepted_by_rank) == stats.accepted
    assert sum(stats.tree_widths) == sum(stats.tree_depths) == stats.rounds
    assert stats.tested_by_rank == sorted(stats.tested_by_rank, reverse=True)
    assert all(0.0 <= rate <= 1.0 for rate in stats.acceptance_by_rank)
    assert "trees" in str(stats)
    assert (stats + stats).tree_depths == [2 * count for count in stats.tree_depths]
