"""An exception out of the user's code, wherever it comes, leaves the user's cache at the text that was emitted: plain
generation goes on with both, and gives the text that it gives without the exception."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.devices.capturing import CHAIN
from support.devices.pretend_graph import pretend_graphs
from support.devices.whole_rounds import TREE
from support.targets.models import assistant_of, prompt, quiet_later_layers, tiny
from support.targets.zoo import tiny_of
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specdecpp import assist
from hf_specdecpp.generation.captured.parts import RoundGraphs

LENGTH, FIRST, NEW = 6, 4, 25  # of the prompt, and of the turns of a conversation


class Interrupted(BaseException):
    """As KeyboardInterrupt is none that `except Exception` catches."""


class Countdown:
    """Raises when it is told for the n-th time; never where n is 0."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted


class Emitted(BaseStreamer):
    """Keeps the text that it is given, the prompt first."""

    def __init__(self, put: Countdown, end: Countdown) -> None:
        self.text: list[int] = []
        self.on_put, self.on_end = put, end

    def put(self, value: Tensor) -> None:
        self.text += value.flatten().tolist()
        self.on_put()

    def end(self) -> None:
        self.on_end()


class Criterion(StoppingCriteria):
    def __init__(self, countdown: Countdown) -> None:
        self.countdown = countdown

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.countdown()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Processor(LogitsProcessor):
    """Leaves the scores as they are."""

    def __init__(self, countdown: Countdown, reads_prefix_only: bool) -> None:
        self.countdown, self.reads_prefix_only = countdown, reads_prefix_only

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.countdown()
        return scores


SOURCES: dict[str, Callable[[Countdown, Countdown], dict[str, Any]]] = {
    "criterion": lambda it, never: {"stopping_criteria": [Criterion(it)], "streamer": Emitted(never, never)},
    "put": lambda it, never: {"streamer": Emitted(it, never)},
    "end": lambda _, never: {"streamer": Emitted(never, Countdown(1))},
    "processor": lambda it, never: {
        "logits_processor": [Processor(it, reads_prefix_only=True)],
        "streamer": Emitted(never, never),
    },
    "processor in order": lambda it, never: {
        "logits_processor": [Processor(it, reads_prefix_only=False)],
        "streamer": Emitted(never, never),
    },
}
HOW: dict[str, tuple[bool, dict[str, Any]]] = {
    "chain": (False, CHAIN),
    "tree": (False, TREE),
    "lookup": (False, {**CHAIN, "lookup": True}),
    "captured chain": (True, CHAIN),
    "captured tree": (True, TREE),
    "captured threshold": (True, {"rule": "threshold", "threshold": 0.9}),
    "captured throughput": (True, {"rule": "throughput"}),
    "captured passes": (True, {**CHAIN, "lookup": True}),
    "captured passes of trees": (True, {"tree": [3, 2, 1]}),
}


def interrupted(family: str, source: str, how: str, at: int) -> tuple[list[int], int, Tensor, Tensor]:
    """The text that was emitted and the tokens that the cache holds after an exception in the second turn of a
    conversation; and what plain generation goes on to, with the cache, and without an exception."""
    is_captured, settings = HOW[how]
    target = quiet_later_layers(tiny(family))
    assistant = assistant_of("independent", target, **settings)

    def generated(ids: Tensor, count: int, **more: Any) -> Tensor:
        mask = torch.ones_like(ids)  # the pad id may be part of the text
        how = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "max_new_tokens": count, **more}
        text: Tensor = target.generate(ids, **how)
        return text

    cache, given = DynamicCache(config=target.config), SOURCES[source](Countdown(at), Countdown(0))
    ids = generated(prompt(LENGTH), FIRST, past_key_values=cache)
    with pretend_graphs() if is_captured else nullcontext(), pytest.raises(Interrupted):
        generated(ids, NEW, assistant_model=assistant, past_key_values=cache, **given)
    found, held, count = given["streamer"].text, cache.get_seq_length(), NEW + ids.shape[1]
    left = count - len(found)
    text = torch.tensor([found])
    return found, held, generated(text, left, past_key_values=cache) if left else text, generated(ids, NEW)


@pytest.mark.daily(
    "llama-chain-criterion-1", "llama-chain-processor in order-1", "llama-tree-processor-1", "llama-lookup-end-1",
    "llama-captured chain-put-1", "llama-captured threshold-processor-1", "llama-captured passes of trees-criterion-1",
    "gemma2-chain-processor-1", "gemma2-tree-end-1", "gemma2-lookup-put-1",
    "gemma2-captured chain-processor in order-1", "gemma2-captured tree-processor-1",
    "gemma2-captured passes-criterion-1", takes=3,
)  # fmt: skip
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_cache_is_at_the_emitted_text(family: str, how: str, source: str, at: int) -> None:
    text, held, found, expected = interrupted(family, source, how, at)
    assert held == len(text) - 1
    assert torch.equal(found, expected)


def holds_before_it_emits(read: Callable[[RoundGraphs, Any], None]) -> Callable[[RoundGraphs, Any], None]:
    """A mutant: what was read is held, whether or not it is emitted."""

    def wrong(target: RoundGraphs, rounds: Any) -> None:
        read(target, rounds)
        target.passes.context.num_tokens += len(rounds[0].result.emitted)

    return wrong


def test_a_cache_that_is_ahead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundGraphs, "read", holds_before_it_emits(RoundGraphs.read))
    monkeypatch.setattr(RoundGraphs, "commit", lambda *_: None)
    text, held, found, expected = interrupted("llama", "criterion", "captured chain", 5)
    assert held > len(text) - 1
    assert not torch.equal(found, expected)


class Raises(BaseStreamer):
    """Raises at the n-th `put`, the prompt's included."""

    def __init__(self, at: int) -> None:
        self.raised = Countdown(at)

    def put(self, value: Tensor) -> None:
        self.raised()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "lfm2"])
def test_after_a_round_in_which_all_candidates_were_accepted(family: str) -> None:
    """A copy of the target drafts. The user's exception is raised, not one of the cache's."""
    target = tiny_of(family, None, bos_token_id=None, eos_token_id=None)
    assistant = assist(target, deepcopy(target), default=False, rule="fixed", num_tokens=3, tree=False)
    for at in (2, 3, 5):
        with pytest.raises(Interrupted):
            target.generate(
                prompt(), assistant_model=assistant, max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                streamer=Raises(at),
            )  # fmt: skip
        assert assistant.stats.decided["products"] == "own"
    assert assistant.stats.accepted > 0


def test_positions_are_given_to_a_model_that_counts_none() -> None:
    """As plain generation takes them."""
    target = tiny_of("mamba2", None, bos_token_id=None, eos_token_id=None)
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    how["position_ids"] = torch.arange(prompt().shape[1])[None]
    assistant = assist(target, deepcopy(target), default=False)
    assert torch.equal(target.generate(prompt(), assistant_model=assistant, **how), target.generate(prompt(), **how))
