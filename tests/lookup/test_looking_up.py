"""Candidates that are looked up, alone and beside drafts: texts are plain ones, under every door, rule and cache."""

from typing import Any

import pytest
import torch
from support.targets.models import VOCAB_SIZE, assistant_for, partly_agreeing, prompt, tiny
from support.targets.watchers import heard
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.generation import candidate_generator
from hf_specdecpp.lookup.looking_up import Choice, LookingUp
from hf_specdecpp.lookup.token_index import NOTHING, LookupRates, TextLookup
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import special_ids

PROMPT = prompt(12)
COSTS = {"draft": 0.2, "verify": [1.0, 1.02, 1.04, 1.06, 1.1, 1.2]}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60, "pad_token_id": 0}
SAMPLED: dict[str, Any] = {**GREEDY, "do_sample": True, "temperature": 0.7}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {}, "dyspec": {"tree": "dyspec", "tree_budget": 16},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 16}, "static": {"tree": [2, 2, 1]},
}  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "throughput": {"rule": "throughput", "costs": COSTS},
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold"},
}


def lookup_for(target: CausalLM, **speculation: Any) -> SpecDecPPAssistant:
    speculation = speculation or RULES["throughput"]
    return assist(target, "lookup", speculation=SpeculationConfig(**speculation), default=False)


def inform(assistant: SpecDecPPAssistant, text: Tensor) -> None:
    """Let an earlier answer be this text, with every ninth token another one, so that lookups are mostly right."""
    answer = text[0, PROMPT.shape[1] :].tolist()
    answer[8::9] = [(token + 1) % VOCAB_SIZE for token in answer[8::9]]
    assistant.speculation.lookup = "history"
    assistant.memory.answers.most = 1000
    assistant.memory.answers.add([*PROMPT[0].tolist(), *answer])


def generate(target: CausalLM, assistant: Any = None, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return target.generate(PROMPT, assistant_model=assistant, **{**GREEDY, **options})


@pytest.mark.daily("llama-chain-greedy", "gemma3_text-static-sampled", "gpt2-dyspec-exact-greedy")
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_alone_the_text_is_the_very_text_of_plain_generation(family: str, shape: str, options: dict[str, Any]) -> None:
    """Sampled texts, too, under the same seed: each token is drawn as plain generation draws it."""
    target = tiny(family)
    plain = generate(target, seed=3, **options)
    rule = RULES["threshold"] if shape in ("static", "dyspec-exact") else RULES["throughput"]
    assistant = lookup_for(target, **rule, **SHAPES[shape])
    inform(assistant, plain)
    assert torch.equal(generate(target, assistant, seed=3, **options), plain)
    stats = assistant.stats
    assert stats.looked_up == stats.drafted > stats.accepted == stats.accepted_lookups > 20
    assert (stats.draft_passes, stats.lookup_rounds) == (0, stats.rounds - stats.idle_rounds)
    assert stats.generated + stats.discarded == stats.drafted + stats.target_passes


def test_it_finds_what_the_text_itself_repeats() -> None:
    target = tiny("llama", initializer_range=0.05)
    plain, assistant = generate(target, max_new_tokens=100), lookup_for(target)
    assert torch.equal(generate(target, assistant, max_new_tokens=100), plain)
    assert assistant.stats.tokens_per_pass > 2.0
    assert "looked up" in str(assistant.stats)


def test_special_tokens_are_never_proposed() -> None:
    target = tiny("llama", eos_token_id=None)
    plain = generate(target)
    target.config.image_token_id = image = int(plain[0, 20])
    target.generation_config.eos_token_id = [int(plain[0, -1])]
    assistant = lookup_for(target)
    inform(assistant, plain)
    proposed: list[int] = []

    with pytest.MonkeyPatch.context() as patch:
        heard(patch, LookingUp, "record_outcome", lambda _, tree, __: proposed.extend(tree.candidates))
        ours = generate(target, assistant)
    assert torch.equal(ours, generate(target))
    assert proposed
    assert not {image, int(plain[0, -1])} & set(proposed)
    assert {image, int(plain[0, -1])} <= special_ids(target.config, target.generation_config)


def test_a_chain_goes_on_with_what_follows_what_was_drafted() -> None:
    """Nothing matches the text before the round's first candidate, which the draft guesses; after it all does."""
    target = tiny("llama")
    plain, assistant = generate(target), assistant_for(target, mix=1.0, lookup=True, **RULES["throughput"])
    answer = plain[0].tolist()
    assistant.speculation.lookup = "history"
    assistant.memory.answers.most = 1000
    for begin in range(12, 60, 5):  # texts of five tokens: no match at their ends
        assistant.memory.answers.add(answer[begin : begin + 5])
    mixed: list[tuple[int, int]] = []
    extend = LookingUp.extend

    def noting(self: LookingUp, chain: Any, survival: float) -> Any:
        extended = extend(self, chain, survival)
        mixed.append((extended.num_drawn, len(extended.looked_up)))
        return extended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LookingUp, "extend", noting)
        assert torch.equal(generate(target, assistant), plain)
    assert any(drawn and further for drawn, further in mixed)


@pytest.mark.daily("gpt2-chain", "opt-dyspec")
@pytest.mark.parametrize("shape", ["chain", "dyspec"])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_up_to_the_end_of_the_position_table(family: str, shape: str) -> None:
    """Neither what is looked up nor what follows drafted candidates is read beyond the text's last place."""
    table: dict[str, Any] = {"n_positions": 64} if family == "gpt2" else {"max_position_embeddings": 64}
    target = tiny(family, **table)
    for length in (40, 52):
        plain = generate(target, max_new_tokens=length)
        for assistant in (
            lookup_for(target, **RULES["throughput"], **SHAPES[shape]),
            assistant_for(target, lookup=True, **RULES["throughput"], **SHAPES[shape]),
        ):
            inform(assistant, plain)
            assert torch.equal(generate(target, assistant, max_new_tokens=length), plain)
            assert assistant.stats.accepted_lookups > 0
            assistant.detach()


@pytest.mark.daily("chain-True")
@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize("shape", ["chain", "dyspec"])
def test_a_draft_reads_a_prompt_if_that_takes_less_than_it_saves(shape: str, lookup: bool) -> None:
    """The text repeats nothing and the draft is always right, so rounds without the draft are plain passes."""
    target, options = tiny("llama"), {"no_repeat_ngram_size": 2}
    plain, rounds = generate(target, **options), {}
    for read in (0.0, 1.0, 100.0):
        rule: dict[str, Any] = {"rule": "throughput", "costs": {**COSTS, "read": read}}
        assistant = assistant_for(target, mix=1.0, lookup=lookup, **rule, **SHAPES[shape])
        assert torch.equal(generate(target, assistant, **options), plain)
        rounds[read] = assistant.stats.target_passes
        assert (assistant.stats.draft_passes > 0) == (read < 100.0)
    assert rounds[0.0] <= rounds[1.0] < rounds[100.0]


@pytest.mark.daily("beside a draft-throughput", "alone-fixed")
@pytest.mark.parametrize("rule", ["throughput", "fixed"])
@pytest.mark.parametrize("drafts", [True, False], ids=["beside a draft", "alone"])
def test_batches(rule: str, drafts: bool) -> None:
    target, ids = tiny("llama"), torch.cat([prompt(12, seed) for seed in range(3)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {**GREEDY, "attention_mask": mask}
    plain = target.generate(ids, **options)
    assistant = assistant_for(target, lookup=True, **RULES[rule]) if drafts else lookup_for(target, **RULES[rule])
    assistant.speculation.lookup = "history"
    assistant.memory.answers.most = 1000
    for text in plain:
        assistant.memory.answers.add(text.tolist())
    assert torch.equal(target.generate(ids, assistant_model=assistant, **options), plain)
    assert assistant.stats.accepted_lookups > 30
    assert assistant.memory.answers.seen.tokens.count(NOTHING) == 6


@pytest.mark.parametrize("drafts", [True, False], ids=["beside a draft", "alone"])
def test_in_transformers_own_loop(drafts: bool) -> None:
    target = tiny("llama", initializer_range=0.05)
    plain, speculation = generate(target, max_new_tokens=100), SpeculationConfig(rule="threshold", lookup=True)
    if drafts:
        assistant = SpecDecPPAssistant.from_draft(partly_agreeing(target), speculation=speculation)
    else:
        assistant = assist(target, "lookup", speculation=speculation, default=False)
        assistant.detach()
    assert torch.equal(generate(target, assistant, max_new_tokens=100), plain)
    assert assistant.stats.accepted_lookups > 20
    assert generate(target, assistant, max_new_tokens=20, do_sample=True).shape[1] == PROMPT.shape[1] + 20


# What is remembered, and stored. --------------------------------------------------------------------------------------


def test_a_request_that_comes_again_is_answered_from_memory() -> None:
    target = tiny("llama")
    assistant = lookup_for(target, **RULES["throughput"], lookup="history")
    first, before = generate(target, assistant), assistant.stats
    assert torch.equal(first, generate(target, assistant))
    assert assistant.stats.target_passes < 0.5 * before.target_passes
    assistant.memory.clear()
    assert len(assistant.memory.answers.seen) == 0
    generate(target, assistant)
    assert assistant.stats.target_passes == before.target_passes


def test_the_example_of_the_choice() -> None:
    choice, seconds = Choice(0.01, 150.0), torch.tensor([10.0, 11.0, 12.0, 13.0]).numpy() / 1000
    assert (choice.length([[0.9, 0.8, 0.7]], seconds), choice.length([[0.1, 0.1, 0.1]], seconds)) == (3, 0)
    assert choice.length([[0.9, 0.8, 0.7], [], [], []], seconds * 4) < 3, "rows that find nothing pay as well"
    assert choice.further(0.9, [0.9, 0.9, 0.1], seconds - seconds[0]) == 2
    assert choice.further(0.05, [0.9, 0.9, 0.1], seconds - seconds[0]) == 0


@pytest.mark.parametrize(("estimates", "has_draft", "count"), [
    ([0.9, 0.8, 0.5, 0.5], True, 3), ([0.6, 0.8], True, 0), ([0.6, 0.8], False, 2), ([], False, 0),
])  # fmt: skip
def test_by_estimate(estimates: list[float], has_draft: bool, count: int) -> None:
    """A draft's candidates are accepted with probability 0.7 before any was tested."""
    lookup = LookingUp(TextLookup(), LookupRates(), 31, has_draft)
    lookup.estimates = estimates
    assert lookup.count_alone() == count


def test_every_token_teaches_whether_it_was_proposed_or_not() -> None:
    """A draft that nothing beats is always asked, and still the lookups' rates follow the text."""
    target = tiny("llama", initializer_range=0.05)
    assistant = assistant_for(target, mix=1.0, lookup=True, rule="fixed", num_tokens=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidate_generator, "counts_of", lambda rows: [0 for _ in rows])
        generate(target, assistant, max_new_tokens=100)
    (learned,) = assistant.memory.lookups[target].values()
    assert isinstance(learned.rates, LookupRates)
    assert assistant.stats.looked_up == 0
    assert sum(learned.rates.judged) > 50
    assert sum(learned.rates.right) > 30
