"""Logits that are no numbers somewhere in a text, of the target or of the draft; captured or not.

Sampling raises what plain generation raises, with the user's cache at the text that was emitted. A draft's nan changes
no text, and nothing is learned of it."""

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.devices.capturing import CHAIN
from support.devices.pretend_graph import pretend_graphs
from support.devices.whole_rounds import TREE, batch, together
from support.targets.models import assistant_of, prompt, quiet_later_layers, tiny
from support.targets.watchers import Collector
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessor

from hf_specdecpp.cuda_graphs import on_device
from hf_specdecpp.estimation.estimators import AcceptanceRates

MESSAGE = "probability tensor contains either `inf`, `nan` or element < 0"
NAN, NEVER = float("nan"), float("-inf")
SETTINGS: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "threshold": {"rule": "threshold", "threshold": 0.9},
    "throughput": {"rule": "throughput"},
    "tree": TREE,
}
# A seed changes nothing of a text with one token to choose from.
ONE: dict[str, Any] = {"do_sample": True, "top_k": 1, "pad_token_id": 0, "max_new_tokens": 24}


@torch.no_grad()
def spoil(model: Any, text: Tensor, values: dict[int, float]) -> None:
    """Let a model's logits be of these `values` after the first tokens of a text `[1, length]`, by their number, and
    nowhere else. All layers are PyTorch's own: passes that run code of others are not captured.

    Of a state h, u is a product with a random vector, less that product at the place. h + 100 and |u| go through a
    threshold that is above |u| at the place alone, and leaves -inf there. 0 * -inf is nan."""
    states = model.model(input_ids=text).last_hidden_state[0, [length - 1 for length in values]]
    head, (count, size) = model.lm_head, states.shape
    eye = torch.eye(size + count, dtype=states.dtype)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=states.dtype)
    apart, together, logits = (nn.Linear(inputs, outputs, dtype=states.dtype) for inputs, outputs in (
        (size, size + 2 * count), (size + 2 * count, size + count), (size + count, len(head.weight)),
    ))  # fmt: skip
    products = states @ vector
    apart.weight.copy_(torch.cat((eye[:size, :size], vector.expand(count, -1), -vector.expand(count, -1))))
    apart.bias.copy_(torch.cat((torch.full((size,), 100.0), -products, products)))
    together.weight.copy_(torch.cat((eye, eye[:, size:]), dim=1))
    together.bias.zero_()
    chosen = torch.tensor([0.0 if math.isnan(value) else 1e-300 for value in values.values()])
    logits.weight.copy_(torch.cat((head.weight, chosen.to(eye).expand(len(head.weight), -1)), dim=1))
    logits.bias.copy_(-100.0 * head.weight.sum(1))
    model.lm_head = nn.Sequential(apart, nn.ReLU(), together, nn.Threshold(1e-6, NEVER), logits)
    model.lm_head.weight = head.weight


class Spoils(LogitsProcessor):
    """Scores are `value` after so many tokens."""

    reads_prefix_only = True

    def __init__(self, value: float, length: int) -> None:
        self.value, self.length = value, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, self.value) if input_ids.shape[1] >= self.length else scores


def raised(target: Any, ids: Tensor, **how: Any) -> tuple[list[int], int]:
    """The text that was emitted before the error, and the tokens that the cache holds then."""
    seen, cache = Collector(), DynamicCache(config=target.config)
    with pytest.raises(RuntimeError, match=MESSAGE):
        target.generate(ids, streamer=seen, past_key_values=cache, **ONE, **how)
    return [token for put in seen.puts for token in put], cache.get_seq_length()


@pytest.mark.daily(
    "chain-True-nan-head", "throughput-False-nan-head", "chain-False-nan-processor", "tree-False--inf-head", takes=3,
)  # fmt: skip
@pytest.mark.parametrize("where", ["head", "processor"])
@pytest.mark.parametrize("value", [NAN, NEVER])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_sampling_raises_as_plain_sampling_does(name: str, captured: bool, value: float, where: str) -> None:
    target, ids = quiet_later_layers(tiny("llama")), prompt(12)
    assistant, how = assistant_of("independent", target, **SETTINGS[name]), dict[str, Any]()
    if where == "head":
        spoil(target, target.generate(ids, **ONE), {24: value})
    else:
        how["logits_processor"] = [Spoils(value, 24)]
    plain, _ = raised(target, ids, **how)
    assert len(plain) == 24
    with pretend_graphs() if captured else nullcontext():
        text, held = raised(target, ids, assistant_model=assistant, **how)
    assert text == plain[: len(text)]
    assert len(text) > len(plain) - 9
    assert held == len(text) - 1


@pytest.mark.daily("chain-True-nan", "threshold-False-nan", "tree-False--inf")
@pytest.mark.parametrize("value", [NAN, NEVER])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_texts_go_on(name: str, captured: bool, value: float) -> None:
    """With the token that plain generation takes then."""
    target, ids = quiet_later_layers(tiny("llama")), prompt(12)
    assistant, how = assistant_of("independent", target, **SETTINGS[name]), {**ONE, "do_sample": False, "top_k": None}
    spoil(target, target.generate(ids, **how), {20: value})
    plain = target.generate(ids, **how)
    with pretend_graphs() if captured else nullcontext():
        assert torch.equal(target.generate(ids, assistant_model=assistant, **how), plain)


def test_a_row_of_a_batch() -> None:
    """One that goes on raises as in plain generation; one that has ended does not, as little as without the others."""
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("independent", target, **CHAIN)
    ids, mask = batch(3)
    with pretend_graphs():
        plain = together(target, assistant, ids, mask, **ONE)
        assert torch.equal(plain, together(target, None, ids, mask, **ONE))
        own = plain[1, mask[1].argmax() :][None]
        spoil(target, own, {own.shape[1] - 6: NAN})
        for each in (None, assistant):
            with pytest.raises(RuntimeError, match=MESSAGE):
                together(target, each, ids, mask, **ONE)
        ends = {**ONE, "eos_token_id": int(own[0, -8])}  # before that
        assert torch.equal(together(target, assistant, ids, mask, **ends), together(target, None, ids, mask, **ends))


def spoilt_draft(settings: dict[str, Any], greedy: bool, captured: bool) -> tuple[int, list[AcceptanceRates]]:
    """Candidates that were accepted of texts of which the draft has nan after some tokens, and what was learned."""
    target, ids = quiet_later_layers(tiny("llama")), prompt(12)
    assistant = assistant_of("independent", target, **settings)
    how: dict[str, Any] = {**ONE, "do_sample": False, "top_k": None} if greedy else ONE
    plain, draft = target.generate(ids, **how), assistant.ready_drafter().model
    spoil(draft, plain, {17: NAN, 18: NAN, 27: NEVER})
    accepted = 0
    with pretend_graphs() if captured else nullcontext():
        for _ in range(2):
            assert torch.equal(target.generate(ids, assistant_model=assistant, **how), plain)
            accepted += assistant.stats.accepted
    assert assistant.stats.decided["rounds"] == ("captured" if captured else "step by step")
    return accepted, [each.rates for each in assistant.memory.learned.get(target, {}).values()]


def is_finite(rates: AcceptanceRates) -> bool:
    return bool(np.isfinite(rates.transitions).all() and np.isfinite(rates.estimated).all())


@pytest.mark.daily("tree-True-True", "chain-False-False", "chain-True-True", takes=3)
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("name", "captured"), [
    *((name, True) for name in SETTINGS), *((name, False) for name in SETTINGS if name != "throughput"),
])  # fmt: skip
def test_a_drafts_nan_changes_nothing(name: str, captured: bool, greedy: bool) -> None:
    accepted, learned = spoilt_draft(SETTINGS[name], greedy, captured)
    assert accepted > 10
    assert all(map(is_finite, learned))


def submits_what_was_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    count = on_device.num_drawn
    monkeypatch.setattr(on_device, "num_drawn", lambda weights, greedy: count(torch.ones_like(weights), greedy))


def test_an_estimate_of_what_was_not_drawn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    submits_what_was_not_drawn(monkeypatch)
    _, learned = spoilt_draft(SETTINGS["threshold"], greedy=False, captured=True)
    assert not all(map(is_finite, learned))


def test_a_token_that_was_not_drawn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token, as `argmax` of nan."""
    follows = on_device.draw_next
    monkeypatch.setattr(on_device, "draw_next", lambda *arguments: follows(*arguments).clamp_min(0))
    target, ids = quiet_later_layers(tiny("llama")), prompt(12)
    spoil(target, target.generate(ids, **ONE), {24: NAN})
    assistant = assistant_of("independent", target, **CHAIN)
    with pretend_graphs():
        assert target.generate(ids, assistant_model=assistant, **ONE)[0, 24] == 0
