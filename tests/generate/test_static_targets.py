"""Targets with a static cache: the text of plain `generate()`, the rows that are held, and widths."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from support.families import informed_draft, model_of
from support.models import Rounds, prompt, quiet_later_layers, tiny, told
from support.multimodal import multimodal
from support.outputs import RECORDS, assert_same
from support.static_caches import (
    COSTS,
    GROWTHS,
    OPTIONS,
    RULES,
    STATIC,
    assert_held_rows_are_text,
    assert_others_unattended,
    assert_prefilled,
    attached,
    held,
    static_cache,
)
from support.watchers import no_work
from support.zoo import tiny_of
from torch import Tensor
from transformers import StaticCache

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.caches.text import StaticText, hold, width_of
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.generation.prefix import extended
from hf_specdecpp.models.causal_lm import CausalLM, cache_among
from hf_specdecpp.throughput.known_costs import in_widths

EACH = pytest.mark.parametrize("how", ["fixed", "dyspec"])  # a chain and a tree


# Texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.every(89, takes=4)
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


@pytest.mark.takes(2)
def test_rounds_of_all_kinds_take_place(monkeypatch: pytest.MonkeyPatch) -> None:
    target, rounds = quiet_later_layers(tiny("llama")), Rounds(monkeypatch)
    assistant = attached(target)
    for length in (3, 12, 40):
        target.generate(prompt(length), assistant_model=assistant, **STATIC)
    rounds.assert_all_kinds()


OTHERS: dict[str, Callable[[], Any]] = {
    "shared keys": lambda: model_of("gemma3n"), "chunks": lambda: model_of("llama4"),
    "no positions": lambda: tiny_of("bloom"), "latent attention": lambda: tiny_of("deepseek_v3"),
    "images": lambda: multimodal("qwen2.5 vl"), "sinks and experts": lambda: tiny("gpt_oss"),
}  # fmt: skip


@pytest.mark.every(2)
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


@pytest.mark.every(3, takes=3)
@pytest.mark.parametrize(("how", "family", "kind", "attention"), [
    ("fixed", "llama", "independent", "sdpa"),
    ("threshold", "llama", "independent", "sdpa"),
    ("dyspec", "gemma3_text", "conditioned", "sdpa"),
    ("static", "gemma3_text", "conditioned", "eager"),
])  # fmt: skip
def test_sampled_text_is_that_of_a_dynamic_cache(how: str, family: str, kind: str, attention: str) -> None:
    """The same seed, candidates and distributions, however many dummies are read with them."""
    window: dict[str, Any] = {"sliding_window": 192} if family == "gemma3_text" else {}
    target = quiet_later_layers(tiny(family, attn_implementation=attention, **window))
    assistant = attached(target, how, kind, adapt=False)
    options = {**OPTIONS, "do_sample": True, "temperature": 0.8, "assistant_model": assistant}
    for seed in range(2):
        torch.manual_seed(seed)
        dynamic = target.generate(prompt(), **options)
        torch.manual_seed(seed)
        assert torch.equal(target.generate(prompt(), past_key_values=static_cache(target), **options), dynamic)


@pytest.mark.every(3)
@EACH
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_padded_prompt(family: str, how: str) -> None:
    target, text = quiet_later_layers(tiny(family)), prompt(14)
    text[0, :3] = 0
    options = {**STATIC, "attention_mask": (text != 0).long()}
    plain = target.generate(text, **options)
    assert torch.equal(target.generate(text, assistant_model=attached(target, how), **options), plain)


@pytest.mark.every(2)
@EACH
def test_up_to_the_last_position(how: str) -> None:
    """A cache may have more rows than the target has positions, which neither nodes nor dummies must ask for."""
    target = tiny("gpt2", n_positions=64)
    for options in ({**OPTIONS, "past_key_values": static_cache(target)}, STATIC):
        plain = target.generate(prompt(9), **{**OPTIONS, "max_new_tokens": 55})
        ours = target.generate(prompt(9), assistant_model=attached(target, how), **{**options, "max_new_tokens": 55})
        assert torch.equal(ours, plain)


@pytest.mark.every(3, takes=3)
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
    plain, length = generate(), int(cache.get_seq_length())
    assert torch.equal(generate(assistant_model=assistant, past_key_values=cache), plain), "up to its last row"
    hold(cache, length)
    assert torch.equal(generate(past_key_values=cache), plain), "plain generation goes on, too"


@pytest.mark.every(3)
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
    # Windows are kept whole, so attentions are as wide as the text there.
    for name in RECORDS if (family, how) == ("llama", "fixed") else RECORDS[:-1]:
        assert_same(getattr(ours, name), getattr(plain, name))
    assert isinstance(ours.past_key_values, StaticCache)
    assert_prefilled(held(ours.past_key_values), target, ours.sequences[:, :-1])


# Rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.every(5)
@EACH
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_held_rows_are_the_texts_after_every_round(family: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = quiet_later_layers(tiny(family))
    assert_held_rows_are_text(target, attached(target, how), monkeypatch)


@EACH
def test_rows_that_are_not_held_are_never_attended_to(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = quiet_later_layers(tiny("llama"))
    assert_others_unattended(target, attached(target, how), monkeypatch)


def no_roll_back(text: StaticText, count: int, of: int, path: Any) -> None:
    text.held = int(text.cache.get_seq_length())


def keeps_one_too_many(text: StaticText, count: int, of: int, path: Any) -> None:
    """Where all candidates stand a dummy."""
    fed = int(text.cache.get_seq_length()) - text.held
    text.held += fed if text.held == 0 else min(fed, count + 1)
    hold(text.cache, text.held)


def forgets_too_much(text: StaticText, count: int, of: int, path: Any) -> None:
    text.held = int(text.cache.get_seq_length()) if text.held == 0 else text.held + 1
    hold(text.cache, text.held)


@pytest.mark.parametrize("mutant", [no_roll_back, keeps_one_too_many, forgets_too_much])
def test_rows_that_are_kept_or_forgotten_wrongly_are_noticed(
    mutant: Callable[[StaticText, int, int, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = quiet_later_layers(tiny("llama"))
    plain = target.generate(prompt(), **STATIC)
    monkeypatch.setattr(StaticText, "keep", mutant)
    try:
        ours = target.generate(prompt(), assistant_model=attached(target), **STATIC)
    except (IndexError, RuntimeError):
        return  # beyond the last row
    assert not torch.equal(ours, plain)


@pytest.mark.every(3)
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


def test_a_pass_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has read the candidates, the others have not."""
    target = quiet_later_layers(tiny("llama"))
    cache: Any = static_cache(target)
    assistant, calls = attached(target), iter(range(100))

    def fails(*_: Any) -> None:
        if next(calls) == 9:
            raise RuntimeError("out of memory")

    target.model.layers[1].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        target.generate(prompt(), assistant_model=assistant, past_key_values=cache, **OPTIONS)
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {12 + assistant.stats.generated - 1}


# Widths --------------------------------------------------------------------------------------------------------------


def test_dummies_need_no_further_positions() -> None:
    longer = extended({"position_ids": torch.tensor([[6, 7]]), "attention_mask": torch.tensor([[0, 1]])}, 2, dummies=1)
    assert longer["position_ids"].tolist() == [[6, 7, 8, 9, 9]]
    assert longer["attention_mask"].tolist() == [[0, 1, 1, 1, 1]]


@pytest.mark.parametrize(("count", "width"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)])
def test_width_of(count: int, width: int) -> None:
    assert width_of(count) == width


@pytest.mark.parametrize("rule", ["fixed", "threshold"])
def test_passes_have_few_widths_and_end_within_the_cache(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, passes, room = quiet_later_layers(tiny("llama")), [], 12 + 40 - 1

    def note(_: Any, __: Any, arguments: dict[str, Any]) -> None:
        passes.append((int(cache_among(arguments).get_seq_length()), arguments["input_ids"].shape[1]))

    assistant = attached(target, rule)
    target.register_forward_pre_hook(note, with_kwargs=True)
    target.generate(prompt(), assistant_model=assistant, **STATIC)
    assert {width for _, width in passes[1:]} <= {1, 2, 4, 8, 16, 32}
    assert len({width for _, width in passes[1:]}) >= 3
    assert max(begin + width for begin, width in passes) <= room


@pytest.mark.parametrize("options", [OPTIONS, STATIC], ids=["dynamic", "static"])
def test_the_target_is_optimised_for_decoding_as_in_plain_generation(options: dict[str, Any]) -> None:
    target, inside, passes = tiny("llama", num_hidden_layers=2), [False], []

    @contextmanager
    def optimised() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    assistant = attached(target)
    target._optimize_model_for_decode = optimised
    target.register_forward_pre_hook(lambda *_: passes.append(inside[0]))
    target.generate(prompt(), **options)
    assert passes == [False] + [True] * 39
    passes.clear()
    target.generate(prompt(), assistant_model=assistant, **options)
    assert passes[0] is False
    assert all(passes[1:])


# Costs and refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["throughput", "tree, throughput"])
def test_costs_of_the_widths_that_are_run(how: str) -> None:
    costs = Costs(draft=0.001, verify=(0.010, 0.011, 0.012, 0.013, 0.014))
    assert in_widths(costs, 5).verify == pytest.approx((0.010, 0.011, 0.013, 0.013, 0.017, 0.017))
    target = tiny("llama")
    assistant = attached(target, how)

    def verify() -> tuple[float, ...]:
        (learned,) = assistant.memory.learned[target].values()
        plan: Any = learned.plan
        return tuple(plan.costs.verify)

    target.generate(prompt(), assistant_model=assistant, **STATIC)
    assert verify()[2:4] == (1.1, 1.1)
    target.generate(prompt(), assistant_model=assistant, **OPTIONS)
    assert verify() == tuple(COSTS["verify"])  # type: ignore[arg-type]
    target.generate(prompt(), assistant_model=assistant, past_key_values=static_cache(target), **OPTIONS)
    assert verify()[2:4] == (1.1, 1.1)


def hybrid() -> tuple[CausalLM, dict[str, Any]]:
    return tiny_of("qwen3_5_text"), STATIC


def windows() -> tuple[CausalLM, dict[str, Any]]:
    target = tiny("mistral")
    return target, {**OPTIONS, "past_key_values": static_cache(target)}


def batch() -> tuple[CausalLM, dict[str, Any]]:
    return tiny("llama"), {**STATIC, "attention_mask": torch.ones(2, 12, dtype=torch.long)}


@pytest.mark.parametrize(("make", "message"), [
    (hybrid, "keeps LinearAttentionLayer in it"),
    (windows, "has windows of 8 tokens in it, the text may grow to 52"),
    (batch, "the 2 rows of a batch"),
])  # fmt: skip
def test_refusals(make: Callable[[], tuple[CausalLM, dict[str, Any]]], message: str) -> None:
    target, options = make()
    text = prompt(12)
    draft = informed_draft(text, target.config.get_text_config().vocab_size)
    assistant = told(SpecDecPPAssistant.from_draft(draft, target), **RULES["fixed"])
    if make is batch:
        text = text.repeat(2, 1)
    with no_work(target), pytest.raises(ValueError, match=f"A static cache cannot be used here: .*{message}"):
        target.generate(text, assistant_model=assistant, **options)
