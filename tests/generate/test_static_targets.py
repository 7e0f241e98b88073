"""Targets with a static cache: the text of plain `generate()`, the rows that are held, and widths."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from support.families import informed_draft, model_of
from support.models import prompt, quiet_later_layers, tiny, told
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
from support.tree_generation import TREES
from support.watchers import no_work, unnoticed
from support.zoo import tiny_of
from torch import Tensor
from transformers import StaticCache

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.caches import text as texts
from hf_specdecpp.caches.text import PathRows, StaticText, hold, move
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.generation.prefix import extended
from hf_specdecpp.models.causal_lm import CausalLM, cache_among
from hf_specdecpp.throughput.known_costs import in_widths
from hf_specdecpp.trees.tree import TreePass

EACH = pytest.mark.parametrize("how", ["fixed", "dyspec"])  # a chain and a tree


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


def stays(rows: Sequence[Tensor], indices: Tensor, to: int) -> None:
    """The path is not moved."""


def one_off(rows: Sequence[Tensor], indices: Tensor, to: int) -> None:
    move(rows, indices - 1, to)


def from_the_start(rows: Sequence[Tensor], indices: Tensor, to: int) -> None:
    move(rows, indices, to - 1)


def keeps_a_row_too_many(text: StaticText, count: int, of: int, path: PathRows | None) -> None:
    kept(text, count, of, path)
    if path is not None:
        text.held += 1
        hold(text.cache, text.held)


def unmoved_past(text: StaticText, count: int, of: int, _: PathRows | None) -> None:
    """As in a chain."""
    kept(text, count, of)


def sees_dummies(tree_pass: TreePass, *args: Any) -> Any:
    tokens, ancestors, depths = uploaded(tree_pass, *args)
    ancestors[:, len(tree_pass.order) :] = True
    return tokens, ancestors, depths


def one_place_behind(tree_pass: TreePass, *args: Any) -> Any:
    tokens, ancestors, depths = uploaded(tree_pass, *args)
    return tokens, ancestors, (depths - 1).clamp(min=0)


kept, uploaded = StaticText.keep, TreePass.upload
MUTANTS: list[tuple[str, Any, str, Callable[..., Any]]] = [
    *(("fixed", StaticText, "keep", each) for each in (no_roll_back, keeps_one_too_many, forgets_too_much)),
    *(("dyspec", texts, "move", each) for each in (stays, one_off, from_the_start)),
    *(("dyspec", StaticText, "keep", each) for each in (keeps_a_row_too_many, unmoved_past)),
    *(("dyspec", TreePass, "upload", each) for each in (sees_dummies, one_place_behind)),
]


@pytest.mark.parametrize(("how", "owner", "name", "mutant"), MUTANTS, ids=[each[-1].__name__ for each in MUTANTS])
def test_what_is_read_or_kept_wrongly_is_noticed(
    how: str, owner: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, options = tiny("llama"), {**STATIC, "max_new_tokens": 50}
    plain, assistant = target.generate(prompt(), **options), attached(target, how)
    monkeypatch.setattr(owner, name, mutant)
    try:
        ours = target.generate(prompt(), assistant_model=assistant, **options)
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


def test_dummies_need_no_further_positions() -> None:
    longer = extended({"position_ids": torch.tensor([[6, 7]]), "attention_mask": torch.tensor([[0, 1]])}, 2, dummies=1)
    assert longer["position_ids"].tolist() == [[6, 7, 8, 9, 9]]
    assert longer["attention_mask"].tolist() == [[0, 1, 1, 1, 1]]


@pytest.mark.every(3)
@pytest.mark.parametrize("how", ["fixed", "threshold", *GROWTHS])
def test_passes_have_few_widths_and_end_within_the_cache(how: str) -> None:
    """Trees are drafted up to the end of the text: a cache that `generate()` makes has room for one after it."""
    target, passes, length = quiet_later_layers(tiny("llama")), [], 12 + 40

    def note(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        cache: Any = cache_among(inputs)
        if isinstance(cache, StaticCache):  # not where trees are tried on the target
            first: Any = cache.layers[0]
            width, room = inputs["input_ids"].shape[1], first.max_cache_len
            passes.append((int(cache.get_seq_length()), width, room))
            mask = inputs.get("attention_mask") if how in GROWTHS else None
            assert mask is None or mask.shape == (1, 1, width, room)

    assistant = attached(target, how)
    target.register_forward_pre_hook(unnoticed(note), with_kwargs=True)
    target.generate(prompt(), assistant_model=assistant, **STATIC)
    begins, widths, rooms = zip(*passes[1:], strict=True)
    assert set(widths) <= {1, 2, 4, 8, 16}
    assert len(set(widths)) >= (3 if how in RULES else 2)
    assert set(rooms) == {length - 1 + {"looked up": 8, **dict.fromkeys(RULES, 0)}.get(how, 16)}
    ends = [begin + width for begin, width in zip(begins, widths, strict=True)]
    assert max(ends) <= rooms[0]
    last = max(begin for begin, width in zip(begins, widths, strict=True) if width == max(widths))
    assert how not in TREES or last + max(widths) > length - 1


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


@pytest.mark.parametrize(("make", "own", "message"), [
    (lambda: tiny_of("qwen3_5_text"), False, "keeps LinearAttentionLayer in it"),
    (lambda: tiny("mistral"), True, "has windows of 8 tokens in it, the text may grow to 52"),
])  # fmt: skip
def test_refusals(make: Callable[[], CausalLM], own: bool, message: str) -> None:
    target = make()
    options = {**OPTIONS, "past_key_values": static_cache(target)} if own else STATIC
    draft = informed_draft(prompt(), target.config.get_text_config().vocab_size)
    assistant = told(SpecDecPPAssistant.from_draft(draft, target), **RULES["fixed"])
    with no_work(target), pytest.raises(ValueError, match=f"A static cache cannot be used here: .*{message}"):
        target.generate(prompt(), assistant_model=assistant, **options)
