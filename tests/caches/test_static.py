"""Targets with a static cache: the text of plain `generate()`, and the rows that are held afterwards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.targets.families import informed_draft, model_of
from support.targets.models import configured, prompt, quiet_later_layers, tiny
from support.targets.multimodal import multimodal
from support.targets.outputs import RECORDS, assert_same
from support.targets.static_caches import (
    GROWTHS,
    OPTIONS,
    RULES,
    STATIC,
    assert_prefilled,
    attached,
    held,
    static_cache,
)
from support.targets.watchers import no_work
from support.targets.zoo import tiny_of
from torch import Tensor
from transformers import DynamicCache, StaticCache

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.entry import calls
from hf_specdecpp.models.causal_lm import CausalLM

EACH = pytest.mark.parametrize("how", ["fixed", "dyspec"])  # a chain and a tree


@pytest.mark.daily("mistral-early_exit-looked up", takes=4)
@pytest.mark.parametrize("how", [*RULES, *GROWTHS])
@pytest.mark.parametrize("kind", ["independent", "early_exit", "conditioned", "eagle3"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "gpt2"])
def test_greedy_text(family: str, kind: str, how: str) -> None:
    """Prompts from one token on; texts longer than the windows, up to the cache's last row."""
    target = quiet_later_layers(tiny(family))
    plain = {length: target.generate(prompt(length), **STATIC) for length in (1, 6, 37)}
    assistant = attached(target, how, kind)
    for length, text in plain.items():
        assert torch.equal(target.generate(prompt(length), assistant_model=assistant, **STATIC), text)
        assert assistant.stats.rounds > 0


OTHERS: dict[str, Callable[[], Any]] = {
    "shared keys": lambda: model_of("gemma3n"), "chunks": lambda: model_of("llama4"),
    "no positions": lambda: tiny_of("bloom"), "latent attention": lambda: tiny_of("deepseek_v3"),
    "images": lambda: multimodal("qwen2.5 vl"), "sinks and experts": lambda: tiny("gpt_oss"),
}  # fmt: skip


@pytest.mark.daily("shared keys", "no positions", "images")
@pytest.mark.parametrize("name", OTHERS)
def test_other_targets(name: str) -> None:
    if name == "no positions" and transformers.__version__ < "5.23":
        pytest.skip("Bloom's own forward did not take the masks of a static cache")
    made = OTHERS[name]()
    target, inputs = made if isinstance(made, tuple) else (made, {"input_ids": prompt()})
    options = {**STATIC, "max_new_tokens": 24, "eos_token_id": None}
    plain = target.generate(**inputs, **options)
    draft = informed_draft(plain, target.config.get_text_config().vocab_size)
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig("fixed", num_tokens=4))
    assert torch.equal(target.generate(**inputs, assistant_model=assistant, **options), plain)
    assert assistant.stats.accepted > 0


@pytest.mark.daily("llama-fixed", "gpt2-dyspec")
@EACH
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_padded_prompt(family: str, how: str) -> None:
    target, text = quiet_later_layers(tiny(family)), prompt(14)
    text[0, :3] = 0
    options = {**STATIC, "attention_mask": (text != 0).long()}
    plain = target.generate(text, **options)
    assert torch.equal(target.generate(text, assistant_model=attached(target, how), **options), plain)


@pytest.mark.daily("fixed")
@EACH
def test_up_to_the_last_position(how: str) -> None:
    """A cache may have more rows than the target has positions, which neither nodes nor dummies must ask for."""
    target = tiny("gpt2", n_positions=64)
    for options in ({**OPTIONS, "past_key_values": static_cache(target)}, STATIC):
        plain = target.generate(prompt(9), **{**OPTIONS, "max_new_tokens": 55})
        ours = target.generate(prompt(9), assistant_model=attached(target, how), **{**options, "max_new_tokens": 55})
        assert torch.equal(ours, plain)


@pytest.mark.daily("gemma3_text-dyspec", takes=3)
@EACH
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_turns_with_a_users_cache(family: str, how: str) -> None:
    """With windows the text must not outgrow them. The last turn but one ends with the cache."""
    window: dict[str, Any] = {"sliding_window": 192} if family == "gemma3_text" else {}
    target = quiet_later_layers(tiny(family, **window))
    assistant, cache = attached(target, how), static_cache(target, room=12 + 3 * 40 + 2 * 5 - 1)
    text, turn = prompt(), prompt(5, seed=4)

    def generate(**further: Any) -> Tensor:
        found: Tensor = target.generate(text, attention_mask=torch.ones_like(text), **further, **OPTIONS)
        return found

    for _ in range(2):
        plain, text = generate(), generate(assistant_model=assistant, past_key_values=cache)
        assert torch.equal(text, plain)
        assert_prefilled(held(cache), target, text[:, :-1])
        text = torch.cat((text, turn), dim=1)
    plain, before = generate(), copy.deepcopy(cache)
    assert torch.equal(generate(assistant_model=assistant, past_key_values=cache), plain), "up to its last row"
    assert_prefilled(held(cache), target, plain[:, :-1])
    assert torch.equal(generate(past_key_values=before), plain), "plain generation goes on, too"


@pytest.mark.daily("llama-fixed", "llama-dyspec")
@pytest.mark.parametrize(("family", "how"), [
    ("llama", "fixed"),
    ("gemma3_text", "fixed"),
    ("mistral", "fixed"),
    ("llama", "dyspec"),
    ("gemma3_text", "dyspec"),
])  # fmt: skip
def test_records(family: str, how: str) -> None:
    target = quiet_later_layers(tiny(family, attn_implementation="eager"))
    arguments = {**STATIC, "return_dict_in_generate": True, **{f"output_{name}": True for name in RECORDS}}
    plain = target.generate(prompt(), **arguments)
    ours = target.generate(prompt(), assistant_model=attached(target, how), **arguments)
    assert torch.equal(ours.sequences, plain.sequences)
    # Nodes of a tree see one another, and full windows have other columns in a static layer.
    for name in RECORDS if (family, how) == ("llama", "fixed") else RECORDS[:-1]:
        assert_same(getattr(ours, name), getattr(plain, name))
    assert isinstance(ours.past_key_values, StaticCache)
    assert_prefilled(held(ours.past_key_values), target, ours.sequences[:, :-1])


@pytest.mark.daily("(3, 9)-fixed", "(3, 3, 3)-fixed")
@EACH
@pytest.mark.parametrize("turns", [(3,), (3, 9), (9, 3), (3, 3, 3)], ids=str)
def test_turns_beyond_the_windows(turns: tuple[int, ...], how: str) -> None:
    """Each by plain generation, and then with an assistant: full windows move on in a static layer, too."""
    target = quiet_later_layers(tiny("mistral"))  # windows of 8 tokens
    ours, plain = static_cache(target), static_cache(target)
    assistant, text = attached(target, how), prompt(6)
    for count in turns:
        options = {**OPTIONS, "max_new_tokens": count, "attention_mask": torch.ones_like(text)}
        expected = target.generate(text, past_key_values=plain, **options)
        assert torch.equal(target.generate(text, past_key_values=ours, assistant_model=assistant, **options), expected)
        for mine, theirs in zip(held(ours), held(plain), strict=True):
            assert_same([each[:, :, -7:] for each in mine], [each[:, :, -7:] for each in theirs])
        text = torch.cat((expected, prompt(1, seed=count)), dim=1)
    options = {**OPTIONS, "attention_mask": torch.ones_like(text)}
    ids = [target.generate(text, past_key_values=each, **options) for each in (ours, plain)]
    assert torch.equal(*ids), "plain generation goes on"


def shifted(static: StaticCache, growing: DynamicCache) -> None:
    """As if rows of a full window began in the first place."""
    copied(static, growing)
    for layer in list[Any](static.layers):
        layer.keys, layer.values = layer.keys.roll(-1, dims=2), layer.values.roll(-1, dims=2)


def not_at_all(static: StaticCache, growing: DynamicCache) -> None: ...


def one_too_few(static: StaticCache, growing: DynamicCache) -> None:
    copied(static, growing)
    for layer in list[Any](static.layers):
        layer.cumulative_length.sub_(1)
        layer.cumulative_length_int -= 1


copied = calls.copy_back


@pytest.mark.parametrize("mutant", [shifted, not_at_all, one_too_few])
def test_what_is_copied_back_wrongly_is_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "copy_back", mutant)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        test_turns_beyond_the_windows((3, 9), "fixed")


@EACH
def test_a_cache_that_is_too_small(how: str) -> None:
    """As in plain generation, and afterwards it holds nothing of the text."""
    target = tiny("llama")
    for more in ({}, {"assistant_model": attached(target, how)}):
        cache = static_cache(target, room=20)
        with pytest.raises(IndexError):
            target.generate(prompt(), past_key_values=cache, **OPTIONS, **more)
    assert not int(cache.get_seq_length())
    short = {**OPTIONS, "max_new_tokens": 9}
    text = target.generate(prompt(), past_key_values=cache, assistant_model=attached(target, how), **short)
    assert torch.equal(text, target.generate(prompt(), **short)), "up to its last row"


def test_what_only_the_prompt_shows_leaves_a_users_cache_as_it_was() -> None:
    target = tiny("mistral", attn_implementation="eager")
    assistant, cache = attached(target), static_cache(target)
    padded = torch.cat((torch.zeros((1, 5), dtype=torch.long), prompt()), dim=1)
    with pytest.raises(ValueError, match="has padding"):
        target.generate(padded, attention_mask=(padded != 0).long(), past_key_values=cache, assistant_model=assistant)
    assert not cache.is_initialized
    assert not int(cache.get_seq_length())


@pytest.mark.daily("12-fixed", "20-dyspec")
@EACH
@pytest.mark.parametrize("length", [12, 20])  # in the prompt's own pass, and in a later round
def test_an_exception_rolls_a_users_cache_back(length: int, how: str) -> None:
    target, text = quiet_later_layers(tiny("llama")), prompt(12)
    cache, assistant = static_cache(target), attached(target, how)
    target(text[:, :6], past_key_values=cache)

    def fails(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= length:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        target.generate(text, assistant_model=assistant, past_key_values=cache, logits_processor=[fails], **OPTIONS)
    emitted = assistant.stats.generated
    assert int(cache.get_seq_length()) == (6 if not emitted else 12 + emitted - 1)
    again = target.generate(text, **OPTIONS)
    whole = again[:, : 12 + emitted]
    assert torch.equal(target.generate(whole, past_key_values=cache, **OPTIONS)[:, : again.shape[1]], again)


class Cache(StaticCache):
    """Of a user's."""


@pytest.mark.parametrize(("make", "own", "message"), [
    (lambda: tiny_of("qwen3_5_text"), None, "keeps LinearAttentionLayer in it"),
    (lambda: tiny("mistral"), 6, "has windows of 8 tokens, of which it has room for 6, and the text may grow to 52"),
    (lambda: tiny("llama"), Cache, "Cache may have code of its own"),
    (lambda: tiny("llama"), "mistral", "its layers are not those of LlamaForCausalLM"),
])  # fmt: skip
def test_refusals(make: Callable[[], CausalLM], own: Any, message: str) -> None:
    target = make()
    caches: dict[Any, Callable[[], Any]] = {
        6: lambda: static_cache(target, room=6), Cache: lambda: Cache(target.config, 99),
        "mistral": lambda: static_cache(tiny("mistral")),
    }  # fmt: skip
    options = {**OPTIONS, "past_key_values": caches[own]()} if own else STATIC
    draft = informed_draft(prompt(), target.config.get_text_config().vocab_size)
    assistant = configured(SpecDecPPAssistant.from_draft(draft, target), **RULES["fixed"])
    with no_work(target), pytest.raises(ValueError, match=f"A static cache cannot be used here: .*{message}"):
        target.generate(prompt(), assistant_model=assistant, **options)
