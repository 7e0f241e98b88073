"""A model that is tried is in eval mode and told positions, is left as it was, and no exception decides anything."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.targets.models import prompt, tiny
from support.targets.watchers import unnoticed
from support.targets.zoo import tiny_of

from hf_specdecpp.caches.states import state_error
from hf_specdecpp.draft_kinds.acceptance import agreement
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.generation.entry.attached import check_reading
from hf_specdecpp.models.causal_lm import CausalLM, trying
from hf_specdecpp.trees.attention import check_tree, tree_error

TOKENS = prompt(5)
TRIALS: dict[str, tuple[CausalLM, Callable[[CausalLM], Any]]] = {
    "states": (tiny_of("granitemoehybrid", attention_dropout=0.5), state_error),
    "tree": (tiny_of("gpt2", resid_pdrop=0.5), tree_error),
    "the check of a draft": (
        tiny_of("gpt2", resid_pdrop=0.5),
        lambda model: agreement(Drafter(copy.deepcopy(model).eval()), model, [prompt(24)]),
    ),
}


@pytest.mark.parametrize("trial", TRIALS)
def test_it_is_in_eval_mode_and_then_as_it_was(trial: str) -> None:
    """PEFT and Trainer leave dropout on, perhaps in some modules only."""
    model, attempt = TRIALS[trial]
    expected = attempt(copy.deepcopy(model).eval())
    for place, module in enumerate(model.modules()):
        module.training = place % 7 > 0
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    assert attempt(model) == expected
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def test_a_pass_leaves_nothing_on_the_model() -> None:
    """Of Qwen's models that read images a forward may set `rope_deltas`."""
    model, kept = tiny("llama").train(), torch.tensor(3)
    model.model.rope_deltas, model.model.unset = kept, None

    def leave(module: Any, _: Any) -> None:
        module.rope_deltas, module.unset = None, kept

    model.model.register_forward_pre_hook(leave)
    with trying(model) as read:
        read(TOKENS)
        assert model.model.rope_deltas is None
    assert model.model.rope_deltas is kept
    assert model.model.unset is None
    assert model.training


def fails_once(model: CausalLM) -> None:
    """Its next pass runs out of memory."""
    error = torch.OutOfMemoryError("17 GiB are needed")

    def fail(*_: Any) -> None:
        hook.remove()
        raise error

    hook = model.register_forward_pre_hook(unnoticed(fail))


@pytest.mark.parametrize(("family", "check"), [("granitemoehybrid", check_reading), ("llama", check_tree)])
def test_an_exception_is_named_and_decides_nothing(family: str, check: Callable[[CausalLM], None]) -> None:
    model = tiny_of(family)
    fails_once(model)
    with pytest.raises(ValueError, match=r"OutOfMemoryError\('17 GiB are needed'\)"):
        check(model)
    check(model)
