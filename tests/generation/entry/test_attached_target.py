"""Attaching changes nothing about a target but what our own calls do, and detaching and failing leave no trace."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from support.targets.models import assistant_for, assistant_of, partly_agreeing, prompt, tiny
from support.targets.snapshots import PROMPT, generate, snapshot
from support.targets.watchers import Collector, unnoticed
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.models.causal_lm import CausalLM


class BrokenError(Exception):
    pass


class BreakingStreamer(Collector):
    """Raises when it is given something for the `last` time."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.puts) == self.last:
            raise BrokenError


def breaks(module: Any, call: int) -> Any:
    """Make the module's `call`-th forward raise."""
    left = iter(range(call, 0, -1))

    def hook(*_: Any) -> None:
        if next(left) == 1:
            raise BrokenError

    return module.register_forward_pre_hook(unnoticed(hook))


@pytest.mark.daily("full ids-llama-draft", "full ids-mistral-target", "new ids-gemma3_text-streamer")
@pytest.mark.parametrize("where", ["draft", "target", "streamer"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("style", ["full ids", "new ids"])
def test_an_exception_in_a_round(family: str, where: str, style: str) -> None:
    """The user's cache goes back to the text that was emitted, so that the text can be continued from it."""
    target = tiny(family)
    before, first = snapshot(target), prompt(9, seed=5)
    cache: Any = DynamicCache(config=target.config)
    with torch.no_grad():
        target(first, past_key_values=cache)
    ids = torch.cat((first, PROMPT), dim=1)
    mask, plain = torch.ones_like(ids), target.generate(ids, do_sample=False, max_new_tokens=24)
    assistant = assistant_for(target)
    streamer = BreakingStreamer(last=5 if where == "streamer" else 1000)
    handle: Any = None
    if where == "draft":
        handle = breaks(assistant.drafter.model.get_decoder(), 7)
    elif where == "target":  # in the last layer, when the others have already written to the cache
        handle = breaks(target.get_decoder().layers[-1], 4)
    with pytest.raises(BrokenError):
        target.generate(
            ids if style == "full ids" else PROMPT, attention_mask=mask, past_key_values=cache, do_sample=False,
            max_new_tokens=24, assistant_model=assistant, streamer=streamer,
        )  # fmt: skip
    if handle is not None:
        handle.remove()
    assert streamer.ends == 0
    emitted = sum(streamer.puts, [] if style == "full ids" else first[0].tolist())
    assert ids.shape[1] < len(emitted) < plain.shape[1]
    assert emitted == plain[0, : len(emitted)].tolist()
    assert {layer.get_seq_length() for layer in cache.layers} == {len(emitted) - 1}

    # Continue, with the assistant and without.
    text = torch.tensor([emitted])
    arguments = {"attention_mask": torch.ones_like(text), "do_sample": False, "max_new_tokens": 24}
    expected = target.generate(text, **arguments)
    for model in (assistant, None):
        copied = copy.deepcopy(cache)
        assert torch.equal(target.generate(text, past_key_values=copied, assistant_model=model, **arguments), expected)
    assistant.detach()
    assert snapshot(target) == before


@pytest.mark.takes(2)
def test_other_calls_on_an_attached_target_are_plain() -> None:
    target, stock = tiny("llama"), partly_agreeing(tiny("llama"))
    calls: list[dict[str, Any]] = [
        {}, {"do_sample": True}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 3}, {"cache_implementation": "static"}, {"use_cache": False},
        {"prompt_lookup_num_tokens": 3}, {"assistant_model": stock}, {"assistant_model": stock, "do_sample": True},
    ]  # fmt: skip

    def run(arguments: dict[str, Any]) -> Tensor:
        torch.manual_seed(0)
        return generate(target, **arguments)

    plain, assistant = [run(arguments) for arguments in calls], assistant_for(target)
    for arguments, expected in zip(calls, plain, strict=True):
        assert torch.equal(run(arguments), expected), arguments
    assert assistant.stats.rounds == 0
    assistant.detach()


def through_pickle(model: CausalLM) -> CausalLM:
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - our own bytes


def through_torch(model: CausalLM) -> CausalLM:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # noqa: S614 - our own bytes


@pytest.mark.daily("deepcopy", "through_torch")
@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, through_pickle, through_torch])
def test_copies_of_an_attached_target_are_ordinary(way: Any) -> None:
    """Also once the states of its layers have been read."""
    target = tiny("llama")
    original, plain = type(target), generate(target)
    reading = assistant_of("eagle3", target, rule="fixed", num_tokens=3)
    assert torch.equal(generate(target, assistant_model=reading), plain)
    assistant = assistant_for(target)
    assistant.attach(target, default=True)
    twin = way(target)
    assert type(twin) is original
    assert snapshot(twin)["hooks"] == 0
    assert torch.equal(generate(twin), plain)
    assert torch.equal(generate(twin, assistant_model=assistant), plain), "as a target of its own"
    assert assistant.stats.decided["attached"] == "by a call"
    assert torch.equal(generate(target, assistant_model=assistant), plain), "and ours is still attached"
    assert assistant.stats.decided["attached"] == "before"
    assistant.detach()
    reading.detach()


def test_a_deep_copy_of_an_assistant_is_the_assistant() -> None:
    """Harnesses such as lm-eval copy the arguments of `generate()`: the copy must be attached to the same targets."""
    target = tiny("llama")
    plain, assistant = generate(target), assistant_for(target)
    arguments = copy.deepcopy({"assistant_model": assistant, "max_new_tokens": 24})
    assert torch.equal(generate(target, **arguments), plain)
    assert assistant.stats.decided["attached"] == "before"
    assistant.detach()
