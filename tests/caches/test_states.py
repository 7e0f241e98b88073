"""Targets and drafts with recurrent layers: their states go back after a rejection, and texts are plain ones."""

import copy
from typing import Any

import pytest
import torch
from support.targets.families import informed_draft
from support.targets.models import VOCAB_SIZE, partly_agreeing, prompt, random_fusion, random_layer, tiny
from support.targets.outputs import RECORDS, assert_same, assert_same_cache
from support.targets.watchers import unnoticed
from support.targets.zoo import families, tiny_of
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.caches.cached_context import GrowingContext
from hf_specdecpp.caches.states import RollbackPoint, why_no_rollback
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.single_target import MOST_PENDING, TargetContext
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder

FAMILIES = ["granitemoehybrid", "zaya", "qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "falcon_h1",
            "bamba", "mamba2"]  # fmt: skip
PROMPT = prompt(10)
PLAIN = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
# States are computed in float32.
ROUNDING = 1e-3


def assistant_of(target: CausalLM, text: Tensor, **speculation: Any) -> SpecDecPPAssistant:
    """With a draft that knows three quarters of `text`."""
    speculation = speculation or {"rule": "fixed", "num_tokens": 4}
    draft = informed_draft(text, target.config.get_text_config().vocab_size)
    return SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig(**speculation))


def states_of(cache: Any) -> list[Any]:
    """Keys, values and recurrent states, layer by layer."""
    found: list[Any] = []
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            found += [layer.keys, layer.values]
        for name in ("conv_states", "recurrent_states"):
            found += [state for state in getattr(layer, name, {}).values() if state is not None]
    return found


def assert_same_states(cache: Any, expected: Any) -> None:
    for ours, theirs in zip(states_of(cache), states_of(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.daily("granitemoehybrid", takes=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_all_that_goes_with_them(family: str) -> None:
    """Hundreds of tokens, in rounds that accept none, some and all of their candidates."""
    target = tiny_of(family)
    options = {**PLAIN, "max_new_tokens": 200, "return_dict_in_generate": True, "repetition_penalty": 1.1}
    options |= {f"output_{name}": True for name in RECORDS if name != "attentions"}
    plain = target.generate(PROMPT, **options)
    assistant = assistant_of(target, plain.sequences)
    ours = target.generate(PROMPT, assistant_model=assistant, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert 50 < assistant.stats.accepted < assistant.stats.drafted
    for name in ("scores", "logits", "hidden_states"):
        assert_same(getattr(ours, name), getattr(plain, name), tolerance=ROUNDING)
    assert_same_states(ours.past_key_values, plain.past_key_values)
    assert assistant.stats.state_bytes > 0
    assistant.detach()


@pytest.mark.daily("20", "23")
@pytest.mark.parametrize("length", range(20, 26))
def test_a_text_may_end_with_tokens_pending(length: int) -> None:
    """Without an attention mask, as `generate()` leaves it out where a tokenizer was given for stop strings."""
    target = tiny_of("granitemoehybrid")
    plain = target.generate(PROMPT, **PLAIN, max_new_tokens=length, return_dict_in_generate=True)
    assistant = assistant_of(target, plain.sequences)
    options = {**PLAIN, "max_new_tokens": length, "return_dict_in_generate": True, "attention_mask": None}
    ours = target.generate(PROMPT, assistant_model=assistant, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same_states(ours.past_key_values, plain.past_key_values)


@pytest.mark.daily("14", takes=3)
@pytest.mark.parametrize("length", [30, *range(4, 25)])
def test_a_cache_is_carried_on_and_goes_back_after_an_interruption(length: int) -> None:
    """As plain generation carries its own on, which after some lengths is another text than without a pause."""
    target = tiny_of("granitemoehybrid")

    def carried_on(assistant: Any = None, layer: Any = None) -> Tensor:
        options = {**PLAIN, "past_key_values": DynamicCache(config=target.config), "assistant_model": assistant}
        text = target.generate(PROMPT, **options, max_new_tokens=length)
        assert options["past_key_values"].get_seq_length() == text.shape[1] - 1, "what was pending has been read"
        if layer is not None:
            handle = layer.register_forward_pre_hook(unnoticed(lambda *_: 1 / 0))
            with pytest.raises(ZeroDivisionError):
                target.generate(text, **options, max_new_tokens=10)
            handle.remove()
        return target.generate(text, **options, max_new_tokens=80 - length)

    plain = carried_on()
    assistant = assistant_of(target, plain)
    for layer in (None, target.model.layers[-1]):
        assert torch.equal(carried_on(assistant, layer), plain)


# With windows beside states; windows and convolutions in one layer; convolutions alone.
@pytest.mark.daily("lara_mini", "lfm2", takes=4)
@pytest.mark.parametrize("family", sorted({"lara_mini", "inkling_text", "lfm2"} & set(families())))
def test_turns_beyond_a_window(family: str) -> None:
    """The cache of each turn is plain's, whether its last candidates were accepted or not; a prompt is interrupted."""
    target, expected = tiny_of(family), DynamicCache(config=tiny_of(family).config.get_text_config())
    first = target.generate(PROMPT, **PLAIN, past_key_values=expected, max_new_tokens=9)
    second = target.generate(first, **PLAIN, past_key_values=expected, max_new_tokens=9)
    for wrong in (0, 1):
        cache = DynamicCache(config=target.config.get_text_config())
        assistant = assistant_of(target, (second + wrong) % VOCAB_SIZE)
        options = {**PLAIN, "past_key_values": cache, "max_new_tokens": 9, "assistant_model": assistant}
        assert torch.equal(target.generate(PROMPT, **options), first)
        handle = inner_decoder(target).layers[-1].register_forward_hook(unnoticed(lambda *_: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            target.generate(first, **options)
        handle.remove()
        assert torch.equal(target.generate(first, **options), second)
        assert_same_cache(cache, expected, ROUNDING)


def test_unknown_states_are_refused() -> None:
    """DeepSeek V4 compresses 128 tokens at a time, which no short trial reaches."""
    target = tiny_of("deepseek_v4", sliding_window=128, layer_types=["heavily_compressed_attention"] * 4)
    assert (reason := why_no_rollback(target)) is not None
    assert "keeps DeepseekV4HCACache in its cache" in reason


@pytest.mark.takes(2)
def test_what_is_pending_is_settled_in_time() -> None:
    """A draft that is always wrong: every round is read again, until one without candidates settles all."""
    target = tiny_of("granitemoehybrid")
    plain = target.generate(PROMPT, **PLAIN, max_new_tokens=50)
    assistant = assistant_of(target, (plain + 1) % VOCAB_SIZE, rule="fixed", num_tokens=3)
    assert torch.equal(target.generate(PROMPT, **PLAIN, max_new_tokens=50, assistant_model=assistant), plain)
    assert assistant.stats.idle_rounds >= 50 // (MOST_PENDING + 1) - 1


@pytest.mark.daily("independent", takes=3)
@pytest.mark.parametrize("kind", ["independent", "early exit", "conditioned", "eagle3"])
def test_drafts_with_recurrent_layers(kind: str) -> None:
    target = tiny_of("granitemoehybrid")
    plain = target.generate(PROMPT, **PLAIN, max_new_tokens=50)
    speculation = SpeculationConfig("fixed", num_tokens=3)
    assistant = {
        "independent": lambda: SpecDecPPAssistant.from_draft(partly_agreeing(target), target),
        "early exit": lambda: SpecDecPPAssistant.from_early_exit(target, [0, 3]),
        "conditioned": lambda: SpecDecPPAssistant.from_conditioned(target, [0, 3], fusion=random_fusion(target)),
        "eagle3": lambda: SpecDecPPAssistant.from_draft(random_layer(target, (0, 3)), target),
    }[kind]()
    assistant.speculation = speculation
    assert torch.equal(target.generate(PROMPT, **PLAIN, max_new_tokens=50, assistant_model=assistant), plain)
    assert 0 < assistant.stats.accepted < assistant.stats.drafted


@pytest.mark.daily("True-granitemoehybrid")
@pytest.mark.parametrize("family", ["granitemoehybrid", "mamba2"])
@pytest.mark.parametrize("attached", [True, False])
def test_a_recurrent_draft_for_a_transformer(attached: bool, family: str) -> None:
    target, draft = tiny("llama"), tiny_of(family)
    assistant = SpecDecPPAssistant.from_draft(draft, target if attached else None)
    assistant.speculation = SpeculationConfig("fixed", num_tokens=3)
    plain = target.generate(PROMPT, **PLAIN, max_new_tokens=30)
    assert torch.equal(target.generate(PROMPT, **PLAIN, max_new_tokens=30, assistant_model=assistant), plain)


@pytest.mark.daily("granitemoehybrid", takes=2)
@pytest.mark.parametrize("family", ["granitemoehybrid", "mamba2"])
def test_a_recurrent_draft_goes_back(family: str) -> None:
    """It drafts after every round what it would draft after reading the text anew."""
    target = tiny_of(family)
    assistant = SpecDecPPAssistant.from_draft(copy.deepcopy(target), target)
    assistant.speculation = SpeculationConfig("fixed", num_tokens=3)
    plain = target.generate(PROMPT, **PLAIN, max_new_tokens=41)
    forbidden = {"bad_words_ids": [[int(plain[0, 25])]], "suppress_tokens": None}
    for options in ({}, forbidden):
        settings = {**PLAIN, "max_new_tokens": 41, **options}
        expected = target.generate(PROMPT, **settings)
        assert torch.equal(target.generate(PROMPT, **settings, assistant_model=assistant), expected)
        assert assistant.stats.accepted == assistant.stats.drafted, "it is the target"


def changes_texts(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mutant: Any) -> bool:
    target = tiny_of("granitemoehybrid")
    plain = target.generate(PROMPT, **PLAIN, max_new_tokens=50)
    assistant = assistant_of(target, plain)
    monkeypatch.setattr(owner, name, mutant)
    return not torch.equal(target.generate(PROMPT, **PLAIN, max_new_tokens=50, assistant_model=assistant), plain)


@pytest.mark.takes(2)
def test_states_that_do_not_go_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    back = RollbackPoint.roll_back

    def only_rows(self: RollbackPoint) -> None:
        self.recurrent, self.copies = [], []
        back(self)

    assert changes_texts(monkeypatch, RollbackPoint, "roll_back", only_rows)


@pytest.mark.takes(2)
def test_tokens_that_are_not_read_again_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = GrowingContext.commit

    def forgets(self: GrowingContext, count: int, of: int, path: Any = None) -> None:
        keep(self, count, of, path)
        self.pending = max(self.pending - 1, 0)

    assert changes_texts(monkeypatch, GrowingContext, "commit", forgets)


def test_after_every_round_the_cache_is_a_fresh_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_of("granitemoehybrid")
    plain = target.generate(PROMPT, **PLAIN, max_new_tokens=60)
    settle, pending = TargetContext.settle, set()

    def check(self: TargetContext, *arguments: Any) -> None:
        settle(self, *arguments)
        pending.add(self.cached.pending)
        held, expected = self.cache.get_seq_length(), DynamicCache(config=target.config)
        with torch.no_grad():
            target(plain[:, :held], past_key_values=expected, use_cache=True)
        assert_same_states(self.cache, expected)

    monkeypatch.setattr(TargetContext, "settle", check)
    ours = target.generate(PROMPT, **PLAIN, max_new_tokens=60, assistant_model=assistant_of(target, plain))
    assert torch.equal(ours, plain)
    assert 0 in pending
    assert max(pending) > 4, "rejections followed one another"
