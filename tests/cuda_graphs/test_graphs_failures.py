"""Texts whose captures fail or whose rooms find no memory are plain generation's, and later ones are captured."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from support.devices.capturing import generate, pretended
from support.targets.models import assistant_of, prompt, quiet_later_layers, tiny
from support.targets.zoo import tiny_of
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.caches.masks import Nodes
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget, captured_target
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache, FixedLayer
from hf_specdecpp.models.causal_lm import CausalLM

CHAIN: dict[str, Any] = {"rule": "fixed", "num_tokens": 3}
MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
# Which capture fails, and with what: of the target's pass, of the draft, of the verification.
PASSING = [(0, MEMORY), (1, RuntimeError("CUDA error: out of memory")), (1, RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")),
           (1, RuntimeError("another capture is under way"))]  # fmt: skip

__all__ = ["pretended"]


def small() -> CausalLM:
    return quiet_later_layers(tiny("llama", num_hidden_layers=2))


def fail_at(place: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the capture of this number, and no other, fail."""
    seen, original = [], graphs.captured

    def flaky(*how: Any) -> Any:
        seen.append(how)
        if len(seen) == place + 1:
            raise error
        return original(*how)

    monkeypatch.setattr(graphs, "captured", flaky)


@pytest.mark.daily("0-*", "*-another capture is under way")
@pytest.mark.takes(4)
@pytest.mark.parametrize(("place", "error"), PASSING, ids=str)
def test_a_passing_error_is_tried_again(
    place: int, error: Exception, pretended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = small()
    assistant = assistant_of("early_exit", target, **CHAIN)
    fail_at(place, error, monkeypatch)
    plain = generate(target, None, max_new_tokens=8)
    assert torch.equal(generate(target, assistant, max_new_tokens=8), plain)
    assert str(error).partition(". ")[0] in str(assistant.stats.uncaptured)
    assert assistant.stats.decided["rounds"] != "captured"
    assert assistant.ready_drafter().captured[1] is not None
    assert not captured_target(target).busy
    assert torch.equal(generate(target, assistant, max_new_tokens=8), plain)
    assert (assistant.stats.uncaptured, assistant.stats.decided["rounds"]) == (None, "captured")


@pytest.mark.takes(4)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_any_other_error_is_a_verdict(place: int, pretended: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    assistant = assistant_of("early_exit", target, **CHAIN)
    fail_at(place, TypeError("not of this kind"), monkeypatch)
    for _ in range(2):
        generate(target, assistant, max_new_tokens=6)
        if place < 2:
            assert assistant.stats.decided["rounds"] != "captured"
    assert (assistant.ready_drafter().captured[1] is None) == (place == 1)
    assert (captured_target(target).why_not is not None) == (place == 0)


def test_a_capture_beside_others_is_not_tried_for_ever(pretended: Counter[str]) -> None:
    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    made = graphs.Graphs(torch.device("cpu"))
    for expected in (True, True, False):
        with pytest.raises(graphs.CannotCaptureError) as caught:
            made.run("one", fails)
        assert caught.value.is_passing == expected


@pytest.mark.takes(4)
def test_what_failed_in_the_middle_of_a_text_is_tried_in_the_next(
    pretended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text goes on uncaptured: here from the round on that needs a room of 512."""
    target = small()
    assistant = assistant_of("early_exit", target, **CHAIN)
    plain = generate(target, None, 248, max_new_tokens=8)
    generate(target, assistant, 12, max_new_tokens=8)
    fail_at(0, MEMORY, monkeypatch)
    assert torch.equal(generate(target, assistant, 248, max_new_tokens=8), plain)
    assert "out of memory" in str(assistant.stats.uncaptured)
    assert torch.equal(generate(target, assistant, 248, max_new_tokens=8), plain)
    assert assistant.stats.uncaptured is None


def test_a_batch_whose_pass_raises_is_uncaptured(pretended: Counter[str]) -> None:
    """GPTBigCode gives one head of keys and values a mask of four dimensions of its own."""
    target = tiny_of("gpt_bigcode")
    assistant = assistant_of("early_exit", target, **CHAIN)
    ids = torch.cat([prompt(12, seed) for seed in range(3)]) % target.config.vocab_size
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
    plain = target.generate(ids, pad_token_id=0, **how)
    assert torch.equal(target.generate(ids, pad_token_id=0, assistant_model=assistant, **how), plain)
    assert "its pass cannot be captured (RuntimeError" in str(assistant.stats.uncaptured)
    assert assistant.stats.rounds > 0


@pytest.mark.takes(4)
def test_nothing_is_captured_within_autocast(pretended: Counter[str]) -> None:
    """Where plain generation computes in another dtype, and from copies of the weights that go with its context."""
    target = small().float()
    assistant = assistant_of("early_exit", target, **CHAIN)
    for _ in range(2):
        before = pretended["captured"], pretended["replayed"]
        with torch.autocast("cpu", torch.bfloat16):
            text = generate(target, assistant, max_new_tokens=8)
            assert torch.equal(text, generate(target, None, max_new_tokens=8))
        assert assistant.stats.uncaptured == "autocast is on"
        assert (pretended["captured"], pretended["replayed"]) == before
        text = generate(target, assistant, max_new_tokens=8)
        assert torch.equal(text, generate(target, None, max_new_tokens=8))
        assert assistant.stats.uncaptured is None


@pytest.mark.takes(4)
def test_nothing_is_captured_with_hooks(pretended: Counter[str]) -> None:
    """They run once a graph, with what they read then. Without them it is captured again."""
    target, strength = small(), [0.0]
    assistant = assistant_of("early_exit", target, **CHAIN)

    def steer(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return output + strength[0]

    handle = target.model.layers[1].mlp.register_forward_hook(steer)
    for strength[0] in (0.0, 2.0):
        assert torch.equal(generate(target, assistant, max_new_tokens=8), generate(target, None, max_new_tokens=8))
        assert "the target runs a hook of LlamaMLP, steer (" in str(assistant.stats.uncaptured)
    assert not pretended["captured"]
    handle.remove()
    assert torch.equal(generate(target, assistant, max_new_tokens=8), generate(target, None, max_new_tokens=8))
    assert assistant.stats.uncaptured is None


@pytest.mark.takes(4)
@pytest.mark.parametrize("name", ["chain", "passes"])
def test_nothing_stays_of_a_text_that_went_on_elsewhere(
    name: str, pretended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not until garbage is collected either: an error refers to all that its functions had at hand."""
    target = small()
    assistant, cache = assistant_of("early_exit", target, **SETTINGS[name]), DynamicCache(config=target.config)
    growing(monkeypatch)
    left = weakref.ref(cache)
    gc.collect()
    gc.disable()
    try:
        generate(target, assistant, 244, max_new_tokens=16, past_key_values=cache)
        assert str(assistant.stats.uncaptured).startswith("memory ended")
        MEMORY.__traceback__ = None  # which is no error of this text alone
        del cache
        assert left() is None
    finally:
        gc.enable()


# Memory. -------------------------------------------------------------------------------------------------------------


SETTINGS: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "tree": {"rule": "fixed", "tree": "dyspec", "tree_budget": 15},
    "lookups": {**CHAIN, "lookup": True, "lookup_tokens": 6},
    "passes": {**CHAIN, "costs": {"draft": 0.1, "verify": [1.0]}},
    "passes of trees": {"tree": [2, 1]},
}


def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no text grow into a larger room: after some layers memory ends."""

    def ends(self: FixedCache, smaller: FixedCache) -> None:
        layers, held = list[Any](self.layers), list[Any](smaller.layers)
        layers[0].lazy_initialization(held[0].keys, held[0].values)
        raise MEMORY

    monkeypatch.setattr(FixedCache, "copy_from", ends)


@pytest.mark.daily("tree-early_exit-llama", "chain-conditioned-llama", takes=6)
@pytest.mark.parametrize(("name", "kind", "family"), [
    *((name, "early_exit", "llama") for name in SETTINGS), ("chain", "conditioned", "llama"),
    ("passes", "conditioned", "llama"), ("chain", "early_exit", "gemma3_text"), ("passes", "early_exit", "gemma3_text"),
])  # fmt: skip
def test_a_text_that_finds_no_larger_room_goes_on_elsewhere(
    name: str, kind: str, family: str, pretended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = small() if family == "llama" else quiet_later_layers(tiny(family))
    assistant, length = (
        assistant_of(kind, target, **SETTINGS[name]),
        226 if name == "tree" else 242 if name == "passes" or family != "llama" else 236,
    )
    how = {"padding": 5, "max_new_tokens": 16}
    plain = generate(target, None, length, **how)
    with monkeypatch.context() as patch:
        growing(patch)
        text = generate(target, assistant, length, **how, return_dict_in_generate=True)
    assert torch.equal(text.sequences, plain)
    assert str(assistant.stats.uncaptured).startswith("memory ended (CUDA out of memory")
    assert assistant.stats.rounds > 2
    assert assistant.stats.idle_rounds or name.startswith("passes"), "the draft has read the text in rooms alone"
    assert pretended["replayed"]
    passes = captured_target(target)
    assert not passes.busy
    assert passes.context.num_bytes == 0 == len(passes.graphs)
    # The cache holds the text, as plain generation leaves it.
    held = {"past_key_values": text.past_key_values, "attention_mask": torch.ones_like(text.sequences)}
    held["attention_mask"][:, :5] = 0
    more = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4}
    mask = held["attention_mask"]
    expected = target.generate(text.sequences, attention_mask=mask, **more)
    assert torch.equal(target.generate(text.sequences, **held, **more), expected)
    assert torch.equal(generate(target, assistant, length, **how), plain)
    assert assistant.stats.uncaptured is None


@pytest.mark.daily("True-early_exit", "False-conditioned")
@pytest.mark.takes(4)
@pytest.mark.parametrize("kind", ["early_exit", "conditioned"])
@pytest.mark.parametrize("carries", [False, True])
def test_rows_that_find_no_larger_room_go_on_elsewhere(
    kind: str, carries: bool, pretended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each from its own place, and one row has ended before."""
    target = small()
    assistant = assistant_of(kind, target, **CHAIN)
    ids = torch.cat([prompt(240, seed) for seed in range(3)])
    ids[1, :7] = 0
    how: dict[str, Any] = {"attention_mask": (ids != 0).long(), "do_sample": False, "pad_token_id": 0}
    how |= {"max_new_tokens": 16, "return_dict_in_generate": carries}
    plain = target.generate(ids, **how)
    rows = (plain.sequences if carries else plain)[:, ids.shape[1] :]
    how["eos_token_id"] = next(int(token) for token in rows[2, 1:9] if token not in rows[0, :20])
    plain = target.generate(ids, **how)
    growing(monkeypatch)
    text = target.generate(ids, assistant_model=assistant, **how)
    if carries:
        text, plain = text.sequences, plain.sequences
    assert torch.equal(text, plain)
    assert str(assistant.stats.uncaptured).startswith("memory ended")


@pytest.mark.takes(4)
def test_a_prompt_that_finds_no_room(pretended: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    assistant = assistant_of("early_exit", target, **CHAIN)
    plain = generate(target, None, max_new_tokens=8)

    def ends(*_: Any) -> None:
        raise MEMORY

    with monkeypatch.context() as patch:
        patch.setattr(FixedLayer, "lazy_initialization", ends)
        assert torch.equal(generate(target, assistant, max_new_tokens=8), plain)
    assert str(assistant.stats.uncaptured).startswith("memory ended")
    assert torch.equal(generate(target, assistant, max_new_tokens=8), plain)
    assert assistant.stats.uncaptured is None


def wrong_where(is_wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let captured passes of some widths say something else at their last token."""
    theirs = CapturedTarget.forward

    def forward(passes: CapturedTarget, cache: Any, tokens: Tensor, nodes: Nodes) -> list[Tensor]:
        logits, *states = theirs(passes, cache, tokens, nodes)
        if is_wrong(tokens.shape[1]):
            logits[:, -1] = logits[:, -1].flip(-1)
        return [logits, *states]

    monkeypatch.setattr(CapturedTarget, "forward", forward)


SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"rule": "fixed", "num_tokens": 5},
    "chains": {"rule": "throughput", "lookup": False},
    "tree": {"tree": "dyspec", "tree_budget": 15, "tree_depth": 6},
    "lookups": {"rule": "fixed", "num_tokens": 5, "lookup": True},
}


@pytest.mark.takes(3)
@pytest.mark.parametrize(
    ("settings", "width", "rows"),
    [("chain", 6, 1), ("chain", 6, 2), ("chains", 4, 1), ("chains", 8, 2), ("tree", 16, 1), ("lookups", 8, 1)],
)
def test_every_width_is_compared(
    settings: str, width: int, rows: int, pretended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that is wrong with one width alone is found before a round relies on it."""
    target, ids = small(), torch.cat([prompt(12, seed) for seed in range(rows)])
    assistant = assistant_of("early_exit", target, **SHAPES[settings])
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 40}
    plain = target.generate(ids, pad_token_id=0, **how)
    wrong_where(lambda tokens: tokens == width, monkeypatch)
    assert torch.equal(target.generate(ids, pad_token_id=0, assistant_model=assistant, **how), plain)
    assert f"a captured pass of width {width} is off by" in str(assistant.stats.uncaptured)
    assert assistant.stats.drafted > 0
