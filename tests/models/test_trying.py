"""A model that is tried is in eval mode and told positions, is left as it was, and no exception decides anything."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import prompt, tiny
from support.multimodal import AROUND, PATCHES, PLACEHOLDERS, TEXT, multimodal
from support.zoo import tiny_of
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from hf_specdecpp import assist
from hf_specdecpp.caches.states import STATE_TOLERANCE, check_states, state_error
from hf_specdecpp.drafts.eagle3.meeting import Heard
from hf_specdecpp.models.causal_lm import CausalLM, trying
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.trees.attention import check_tree, tree_error

TOKENS = prompt(5)
TRIALS: dict[str, tuple[CausalLM, Callable[[CausalLM], Any]]] = {
    "states": (tiny_of("granitemoehybrid", attention_dropout=0.5), state_error),
    "tree": (tiny_of("gpt2", resid_pdrop=0.5), tree_error),
    "a draft's self-check": (
        tiny_of("gpt2", resid_pdrop=0.5),
        lambda model: float(Heard(model, TOKENS).states[1].sum()),
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


def test_in_training_mode_a_model_can_be_read() -> None:
    model = tiny_of("gpt2", resid_pdrop=0.5).train()
    check_tree(model)
    Reader(model)
    assert model.training


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


# After an image, Qwen's models keep how far the positions of what follows are off. ------------------------------------


def qwen3_5() -> CausalLM:
    """Layers with a state, of a model that reads images."""
    linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    rope: dict[str, Any] = {**TEXT["rope_parameters"], "partial_rotary_factor": 1.0, "mrope_interleaved": True}
    kinds = ["linear_attention", "full_attention"] * (TEXT["num_hidden_layers"] // 2)
    text = {**TEXT, **linear, "head_dim": 8, "layer_types": kinds, "rope_parameters": rope}
    around: dict[str, Any] = {**PLACEHOLDERS, **AROUND}
    config = Qwen3_5Config(text_config=text, vision_config=copy.deepcopy(PATCHES), **around)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3_5ForConditionalGeneration(config).double().eval()


@pytest.mark.parametrize("rows", [1, 2])
def test_after_images_a_target_with_states_is_assisted(rows: int) -> None:
    target, (_, inputs) = qwen3_5(), multimodal("qwen2.5 vl")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    target.generate(**{name: torch.cat([value] * rows) for name, value in inputs.items()}, **options)
    left = target.model.rope_deltas
    assert bool(left.any())
    assistant = assist(target, "lookup", default=False)
    assert state_error(target) < STATE_TOLERANCE[torch.float64]
    assert target.model.rope_deltas is left
    plain = target.generate(TOKENS, **options)
    assert torch.equal(target.generate(TOKENS, assistant_model=assistant, **options), plain)


# Exceptions. ----------------------------------------------------------------------------------------------------------


def fails_once(model: CausalLM) -> None:
    """Its next pass runs out of memory."""
    error = torch.OutOfMemoryError("17 GiB are needed")

    def fail(*_: Any) -> None:
        hook.remove()
        raise error

    hook = model.register_forward_pre_hook(fail)


@pytest.mark.parametrize(("family", "check"), [("granitemoehybrid", check_states), ("llama", check_tree)])
def test_an_exception_is_named_and_decides_nothing(family: str, check: Callable[[CausalLM], None]) -> None:
    model = tiny_of(family)
    fails_once(model)
    with pytest.raises(ValueError, match=r"OutOfMemoryError\('17 GiB are needed'\)"):
        check(model)
    check(model)
