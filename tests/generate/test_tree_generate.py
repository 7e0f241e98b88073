"""`generate()` with token trees on an attached target: the tokens, records, caches and errors of plain `generate()`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.exact_distribution import exact_distribution, worst_error
from support.models import (
    FAMILIES,
    NEWER,
    VOCAB_SIZE,
    assistant_for,
    partly_agreeing,
    prompt,
    quiet_later_layers,
    tiny,
    told,
)
from support.outputs import PROCESSORS, RECORDS, assert_same, assert_same_cache, prefill
from support.repos import head_for
from support.stock_rounds import PROMPT as SHORT
from support.stock_rounds import small, target_distribution
from support.tree_generation import (
    ARGUMENTS,
    PROMPT,
    TREES,
    assert_trees_mattered,
    generate,
    plain_text,
    sharp,
    target_of,
)
from support.watchers import Collector, Recorder, tokenizer
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.caches.masks import held_rows

# Greedy equality. -----------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("llama", "gemma3_text", "gpt2", "qwen2") else [pytest.mark.slow])
        for family in FAMILIES
    ],
)
def test_greedy_equality(family: str) -> None:
    kind = list(TREES)[list(FAMILIES).index(family) % 3] if family not in ("llama", "gemma3_text") else "dyspec"
    assistant = assistant_for(target_of(family), mix=0.9, **TREES[kind])
    assert torch.equal(generate(target_of(family), assistant, **ARGUMENTS), plain_text(family))
    assert_trees_mattered(assistant.stats)
    if kind == "dyspec":
        passes = sum(depth * count for depth, count in enumerate(assistant.stats.tree_depths))
        assert assistant.stats.draft_passes == passes, "a draft pass a level"


@pytest.mark.every(5)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kind", TREES)
def test_attention_implementations(kind: str, family: str, implementation: str) -> None:
    target = sharp(tiny(family, attn_implementation=implementation))
    assistant = assistant_for(target, mix=0.9, **TREES[kind])
    assert torch.equal(generate(target, assistant, **ARGUMENTS), plain_text(family))


@pytest.mark.every(3)
@pytest.mark.parametrize("family", NEWER)
def test_more_families(family: str) -> None:
    target = tiny(family)
    plain = target.generate(PROMPT, **ARGUMENTS)
    assistant = assistant_for(target, mix=0.95, **TREES["static"])
    assert torch.equal(generate(target, assistant, **ARGUMENTS), plain)
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize("budget", [2, 3, 64])
@pytest.mark.parametrize("kind", ["dyspec", "dyspec-exact"])
def test_budgets(kind: str, budget: int) -> None:
    assistant = assistant_for(target_of("llama"), mix=0.9, tree=kind, tree_budget=budget)
    text = generate(target_of("llama"), assistant, max_new_tokens=30)
    assert torch.equal(text, generate(target_of("llama"), max_new_tokens=30))
    full = assistant.stats.rounds - 2  # there may be no room at the end
    assert assistant.stats.drafted >= budget * full


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_early_exits(family: str) -> None:
    target = sharp(quiet_later_layers(tiny(family)))
    plain = target.generate(PROMPT, **ARGUMENTS)
    assistant = told(SpecDecPPAssistant.from_early_exit(target, 2), **TREES["dyspec"])
    assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **ARGUMENTS), plain)
    assert assistant.stats.accepted > 0


def test_a_head_values_slots() -> None:
    target = target_of("llama")
    draft = partly_agreeing(target, 0.9)
    head = head_for(draft, inputs="before")
    with torch.no_grad():
        head.output.weight.normal_(std=0.3)
    assistant = told(SpecDecPPAssistant.from_draft(draft, target, head=head), **TREES["dyspec"])
    assert torch.equal(generate(target, assistant, **ARGUMENTS), plain_text("llama"))
    with_head = assistant.stats.tree_widths
    assistant.head = None
    assistant.attach(target)
    generate(target, assistant, **ARGUMENTS)
    assert assistant.stats.tree_widths != with_head, "the head had nothing to say"


@pytest.mark.every(5)
@pytest.mark.parametrize("processors", [
    {"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [3, 5, 7]},
    {"min_new_tokens": 30, "eos_token_id": list(range(8)), "pad_token_id": 0},
])  # fmt: skip
@pytest.mark.parametrize("kind", TREES)
def test_processors(kind: str, processors: dict[str, Any]) -> None:
    target = target_of("llama")
    assistant = assistant_for(target, mix=0.9, **TREES[kind])
    assert torch.equal(generate(target, assistant, **processors), generate(target, **processors))
    assert assistant.stats.accepted > 0


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ["none", "temperature", "top_p", "repetition_penalty", "no_repeat_ngram_size", "many"])
def test_sampling(name: str) -> None:
    """The distribution is tested in `test_tree_distribution.py`; with top_k=1 it is a point."""
    target = target_of("llama")
    arguments = {"do_sample": True, **PROCESSORS[name]}
    texts = []
    for _ in range(2):
        torch.manual_seed(0)
        texts.append(generate(target, assistant_for(target, mix=0.9, **TREES["dyspec"]), **arguments))
    assert torch.equal(*texts), "a seed fixes the run"
    assert int(texts[0].max()) < VOCAB_SIZE
    point = {**arguments, "top_k": 1}
    assistant = assistant_for(target, mix=0.9, **TREES["dyspec"])
    assert torch.equal(generate(target, assistant, **point), generate(target, **point))


@pytest.mark.parametrize("kind", ["dyspec", "dyspec-exact", [[0], [1], [0, 0]]], ids=str)
def test_generate_emits_exactly_p(kind: Any, enumerate_torch: Any) -> None:
    """The distribution of a whole `generate()`, by enumeration: rounds, caches, processors on each node's own path."""
    target, draft = small(7), small(107)
    knobs: dict[str, Any] = {"tree": kind, "tree_budget": 3, "tree_depth": 2}
    assistant = told(SpecDecPPAssistant.from_draft(draft, target), **knobs)

    def program(replay: Any) -> tuple[int, ...]:
        enumerate_torch(replay)
        assistant.memory.clear()  # every path begins alike
        options = {"temperature": 0.8, "top_k": 2, "repetition_penalty": 1.7, "max_new_tokens": 4}
        output = target.generate(SHORT, assistant_model=assistant, do_sample=True, **options)
        return tuple(output[0, SHORT.shape[1] :].tolist())

    assert worst_error(exact_distribution(program), target_distribution(target, 0.8, 2, penalty=1.7), 4) < 1e-6
    assert assistant.stats.tree_depths


# Ends. ----------------------------------------------------------------------------------------------------------------


@pytest.mark.every(5)
@pytest.mark.parametrize("index", range(0, 12, 2))
@pytest.mark.parametrize("end", ["eos", "stop string", "criterion"])
def test_ends_and_caches(end: str, index: int) -> None:
    """Wherever in a path the text ends, the cache holds the text but its last token."""
    target = target_of("gemma3_text")
    text = plain_text("gemma3_text")[0, 20:].tolist()
    token = text[index]
    arguments: dict[str, dict[str, Any]] = {
        "eos": {"eos_token_id": token, "pad_token_id": 0},
        "stop string": {"stop_strings": [tokenizer().decode(token)], "tokenizer": tokenizer()},
        "criterion": {"stopping_criteria": StoppingCriteriaList([Recorder(token)])},
    }
    assistant = assistant_for(target, mix=0.95, **TREES["dyspec"])
    ours = generate(target, assistant, return_dict_in_generate=True, **{**ARGUMENTS, **arguments[end]})
    expected = text[: text.index(token) + 1]
    assert ours.sequences[0, 20:].tolist() == expected
    assert_same_cache(ours.past_key_values, prefill(target, ours.sequences[:, :-1]))


def test_nothing_is_drafted_below_an_end_of_sequence() -> None:
    target = target_of("llama")
    eos = plain_text("llama")[0, 20:].tolist()[10]
    assistant = assistant_for(target, mix=1.0, **{**TREES["dyspec"], "tree_budget": 40})
    generate(target, assistant, **{**ARGUMENTS, "eos_token_id": eos, "pad_token_id": 0})
    tree = assistant.stats.last_tree.tree
    assert eos in tree.tokens[1:]
    assert all(not children for token, children in zip(tree.tokens[1:], tree.children[1:], strict=True) if token == eos)


@pytest.mark.parametrize("length", range(1, 8))
def test_short_answers(length: int) -> None:
    target = target_of("llama")
    assistant = assistant_for(target, mix=0.98, **TREES["dyspec"])
    text = generate(target, assistant, max_new_tokens=length)
    assert torch.equal(text, generate(target, max_new_tokens=length))


def test_a_streamer_gets_the_tokens_once_and_in_order() -> None:
    collector = Collector()
    text = generate(
        target_of("llama"), assistant_for(target_of("llama"), mix=0.9, **TREES["dyspec"]), streamer=collector
    )
    assert sum(collector.puts, []) == text[0].tolist()
    assert collector.ends == 1
    assert max(len(block) for block in collector.puts[1:]) > 1


# Records and caches. --------------------------------------------------------------------------------------------------


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_records_equal_those_of_plain_generate(family: str, kind: str) -> None:
    target = sharp(tiny(family, attn_implementation="eager"))
    arguments = {"return_dict_in_generate": True, "repetition_penalty": 1.2}
    arguments |= {f"output_{name}": True for name in RECORDS}
    plain = generate(target, **arguments)
    assistant = assistant_for(target, mix=0.9, **TREES[kind])
    ours = generate(target, assistant, **arguments)
    assert type(ours) is type(plain)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in RECORDS:
        assert_same(getattr(ours, name), getattr(plain, name))
    assert_same_cache(ours.past_key_values, plain.past_key_values)
    assert sum(assistant.stats.accepted_by_rank[1:]) > 0, "rows of other siblings never counted"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_caches_after_every_round(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of target and draft equal a fresh prefill of what they hold."""
    from hf_specdecpp.generation.decoding import AssistedDecoding

    target = target_of(family)
    assistant = assistant_for(target, mix=0.9, **TREES["dyspec"])
    checked = []
    original = AssistedDecoding.round

    def check(self: Any) -> None:
        original(self)
        ids, session = self.texts[0].ids, self.texts[0].generator.session
        for cache, model in ((self.target.prefix.cache, target), (session.cache, session.drafter.model)):
            length = cache.get_seq_length()
            assert length <= ids.shape[1] - 1
            fresh = prefill(model, ids[:, :length])
            layers: Any = zip(cache.layers, fresh.layers, strict=True)
            for ours, theirs in layers:
                rows = min(held_rows(ours), held_rows(theirs))
                assert rows == held_rows(theirs)
                assert_same(ours.keys[..., -rows:, :], theirs.keys)
                assert_same(ours.values[..., -rows:, :], theirs.values)
            checked.append(length)

    monkeypatch.setattr(AssistedDecoding, "round", check)
    generate(target, assistant)
    assert len(checked) > 10


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_exception_leaves_the_cache_at_the_text(family: str) -> None:
    target = target_of(family)

    class Fails(Recorder):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            if input_ids.shape[1] >= 20 + 13:
                raise RuntimeError("enough")
            return super().__call__(input_ids, scores)

    cache = DynamicCache(config=target.config)
    collector = Collector()
    with pytest.raises(RuntimeError, match="enough"):
        generate(
            target, assistant_for(target, mix=0.9, **TREES["dyspec"]), past_key_values=cache, streamer=collector,
            stopping_criteria=StoppingCriteriaList([Fails()]),
        )  # fmt: skip
    emitted = torch.tensor([sum(collector.puts, [])])
    assert_same_cache(cache, prefill(target, emitted[:, :-1]))


@pytest.mark.parametrize("style", ["full ids", "new ids"])
def test_a_second_turn(style: str) -> None:
    target = target_of("gemma3_text")
    first = generate(target, return_dict_in_generate=True)
    ids = torch.cat((first.sequences, prompt(5, seed=2)), dim=1)
    new = ids if style == "full ids" else ids[:, first.past_key_values.get_seq_length() :]
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 30}
    plain = target.generate(new, past_key_values=copy.deepcopy(first.past_key_values), **arguments)
    assistant = assistant_for(target, mix=0.9, **TREES["dyspec"])
    ours = target.generate(new, past_key_values=first.past_key_values, assistant_model=assistant, **arguments)
    assistant.detach()
    assert torch.equal(ours, plain)
    assert assistant.stats.accepted > 0


def test_a_left_padded_prompt() -> None:
    target = target_of("gemma3_text")
    padded = torch.cat((torch.zeros((1, 5), dtype=torch.long), PROMPT), dim=1)
    mask = (torch.arange(25) >= 5).long()[None]
    arguments = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 40}
    assistant = assistant_for(target, mix=0.9, **TREES["dyspec"])
    ours = target.generate(padded, assistant_model=assistant, **arguments)
    assistant.detach()
    assert torch.equal(ours, target.generate(padded, **arguments))
    assert torch.equal(ours[:, 5:], generate(target))
    assert assistant.stats.accepted > 0


# The rest. ------------------------------------------------------------------------------------------------------------


def test_repeated_calls_and_the_last_tree() -> None:
    target = target_of("llama")
    assistant = assistant_for(target, mix=0.9, **TREES["dyspec"])
    assert assistant.stats.last_tree is None
    texts = [target.generate(PROMPT, assistant_model=assistant, **ARGUMENTS) for _ in range(2)]
    assistant.detach()
    assert torch.equal(*texts)
    drawn: Any = assistant.stats.last_tree
    lines = str(drawn).splitlines()
    assert len(lines) == 1 + len(drawn.tree)
    assert sum("─*" in line for line in lines) == len(drawn.path)


def test_statistics_of_trees() -> None:
    target = target_of("llama")
    assistant = assistant_for(target, mix=0.9, **TREES["dyspec"])
    generate(target, assistant, **ARGUMENTS)
    stats = assistant.stats
    assert stats.generated == 150
    assert sum(stats.drafted_at) == stats.drafted
    assert sum(stats.accepted_at) == sum(stats.accepted_by_rank) == stats.accepted
    assert sum(stats.tree_widths) == sum(stats.tree_depths) == stats.rounds
    assert stats.tested_by_rank == sorted(stats.tested_by_rank, reverse=True)
    assert all(0.0 <= rate <= 1.0 for rate in stats.acceptance_by_rank)
    assert "trees" in str(stats)
    assert (stats + stats).tree_depths == [2 * count for count in stats.tree_depths]


def test_an_unattached_target_gets_chains(caplog: pytest.LogCaptureFixture) -> None:
    target = target_of("llama")
    assistant = assistant_for(target, attached=False, mix=0.9, **TREES["dyspec"])
    assert torch.equal(generate(target, assistant, **ARGUMENTS), plain_text("llama"))
    assert assistant.stats.accepted > 0
    assert not assistant.stats.tree_depths
    assert assistant.stats.last_tree is None


def test_a_head_that_judges_afterwards_is_refused() -> None:
    target = target_of("llama")
    draft = partly_agreeing(target)
    assistant = told(SpecDecPPAssistant.from_draft(draft, target, head=head_for(draft)), **TREES["dyspec"])
    with pytest.raises(ValueError, match="must know what a slot is worth before it draws there"):
        generate(target, assistant)
    told(assistant, **TREES["static"])
    assistant.attach(target)
    assert torch.equal(generate(target, assistant), generate(target))


def test_what_cannot_read_trees_is_refused_before_generating() -> None:
    target = tiny("llama", num_hidden_layers=1)
    target.config._attn_implementation = "flash_attention_2"
    assistant = assistant_for(tiny("llama", num_hidden_layers=1), attached=False, **TREES["dyspec"])
    assistant.attach(target)
    with pytest.raises(ValueError, match="flash_attention_2.*no mask of a tree's shape"):
        generate(target, assistant)
