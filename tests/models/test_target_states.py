"""The states that a draft reads are those that hooks see, whichever way they come, and forwards number them as here."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.targets.families import model_of
from support.targets.models import assistant_of, prompt, quiet_later_layers, tiny
from support.targets.outputs import assert_same
from support.targets.zoo import tiny_of
from torch import Tensor

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.models import target_states
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.early_exit import early_exit
from hf_specdecpp.models.target_states import FINAL, RETURNS_CHOSEN, StateReader, TargetStates, state_numbers

FAMILIES = ("llama", "gemma3_text", "mistral", "gpt2", "opt", "phi3", "cohere")
CHOICES = [([0, 1], True), ([1], False), ([], True), ([1, 0], True)]
needs_chosen = pytest.mark.skipif(not RETURNS_CHOSEN, reason="its forwards return no chosen states by our numbers")
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


def reader_of(target: CausalLM, reads: Sequence[int], final: bool) -> StateReader:
    reader = StateReader()
    reader.hidden_size = target.config.get_text_config().hidden_size
    reader.reads = [FINAL] * final + list(reads)
    return reader


def by_hooks(target: CausalLM, reader: StateReader, text: Tensor) -> Any:
    with TargetStates(target, reader) as caught:
        target(text)
        return caught.states_of()


@torch.no_grad()
def returned(target: CausalLM, reader: StateReader) -> tuple[TargetStates, Any]:
    """The states of a second pass, which needs no hooks if the first has shown that they are returned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_specdecpp.models.target_states.has_compiled_call", lambda _module: True)
        states = TargetStates(target, reader)
    for length in (5, 12):
        states.catch(target, **states.requesting({"input_ids": prompt(length)}))
    return states, states.states_of()


@needs_chosen
@pytest.mark.parametrize(("reads", "final"), CHOICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_returned_is_what_hooks_see(family: str, reads: list[int], final: bool) -> None:
    target = tiny(family)
    reader = reader_of(target, reads, final)
    with torch.no_grad():
        expected = by_hooks(target, reader, prompt(12))
    states, found = returned(target, reader)
    assert states.are_returned
    assert found.shape == (1, 12, reader.width)
    assert torch.equal(found, expected)


def one_less(reader: StateReader, num_layers: int) -> list[int]:
    return [number - 1 for number in state_numbers(reader, num_layers)]


def one_more(reader: StateReader, num_layers: int) -> list[int]:
    return [min(number + 1, num_layers) for number in state_numbers(reader, num_layers)]


@needs_chosen
@pytest.mark.parametrize("mutant", [one_less, one_more])
def test_numbers_that_are_one_off_are_noticed(
    mutant: Callable[[StateReader, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the prompt's pass, so that hooks go on and the states are right all the same."""
    target = tiny("llama")
    reader = reader_of(target, [0, 1], False)
    expected = by_hooks(target, reader, prompt(12))
    monkeypatch.setattr(target_states, "state_numbers", mutant)
    states, found = returned(target, reader)
    assert not states.are_returned
    assert torch.equal(found, expected)
    # Where the check is left out they are wrong.
    states.are_returned = True
    with torch.no_grad():
        states.catch(target, **states.requesting({"input_ids": prompt(12)}))
    assert not torch.equal(states.states_of(), expected)  # type: ignore[arg-type]


@needs_chosen
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_numbers_of_the_final_state(family: str) -> None:
    """It is normed; what the last layer itself puts out is not returned, and needs hooks."""
    target = tiny(family)
    last = reader_of(target, [2], False)
    assert state_numbers(last, 3) == []
    states, found = returned(target, last)
    assert not states.are_returned
    assert torch.equal(found, by_hooks(target, last, prompt(12)))
    assert not torch.equal(found, returned(target, reader_of(target, [], True))[1])


@pytest.mark.daily("eager-conditioned", "sdpa-eagle3")
@pytest.mark.parametrize("kind", ["conditioned", "eagle3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_outputs_that_a_user_asks_for(kind: str, attention: str) -> None:
    """All hidden states are returned to the user, and the draft reads its own out of them."""
    target = quiet_later_layers(tiny("llama", attn_implementation=attention))
    options = {**OPTIONS, "return_dict_in_generate": True, "output_hidden_states": True}
    assistant = assistant_of(kind, target, rule="fixed", num_tokens=3, draft_successors=False)
    plain = target.generate(prompt(), **options)
    ours = target.generate(prompt(), assistant_model=assistant, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same(ours.hidden_states, plain.hidden_states)
    accepted = assistant.stats.accepted
    target.generate(prompt(), assistant_model=assistant, **OPTIONS)
    assert assistant.stats.accepted == accepted > 0


def test_a_layer_that_runs_in_a_loop_has_one_state_a_token() -> None:
    """Dory runs its recurrent layers twice a pass. The last state is taken, also of several passes over one text."""
    target = model_of("dory")
    reader = reader_of(target, [1], True)
    seen: list[Tensor] = []
    handle = target.model.layers[1].register_forward_hook(lambda _module, _args, output: seen.append(output))
    with torch.no_grad(), TargetStates(target, reader) as caught:
        first = target(prompt(12))
        target(prompt(5), past_key_values=first.past_key_values)
        states = caught.states_of()
        target(prompt(5))
        again = caught.states_of()
    handle.remove()
    assert len(seen) == 6
    assert states is not None
    assert again is not None
    size = reader.hidden_size
    assert torch.equal(states[..., size:], torch.cat((seen[1], seen[3]), 1))
    assert torch.equal(again[..., size:], seen[5])


def test_several_states_a_token_are_refused() -> None:
    target = model_of("gemma3n")
    states = TargetStates(target, reader_of(target, [0], False))
    with pytest.raises(ValueError, match="returns 4-dimensional states"):
        states.catch(target, **states.requesting({"input_ids": prompt()}))


# Models whose hidden states, or layers, cannot be taken by themselves are refused with the reason. --------------------


@pytest.mark.parametrize("family", ["electra", "rembert"])
def test_layers_between_hidden_states_and_head(family: str) -> None:
    with pytest.raises(ValueError, match="has layers between its decoder and its LM head .*1x32"):
        Drafter(tiny_of(family), shares_target=True)


def test_a_target_that_reads_one_token_at_a_time() -> None:
    with pytest.raises(ValueError, match="ProphetNetForCausalLM reads one token at a time"):
        early_exit(tiny_of("prophetnet"), 1)
