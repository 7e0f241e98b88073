"""What `generate()` returns beside the tokens, and what it leaves in the cache, on an attached target."""

from typing import Any

import pytest
import torch
from support.models import assistant_for, prompt, tiny
from support.outputs import RECORDS, NoRepeat, assert_same, assert_same_cache, prefill
from support.watchers import no_work, tokenizer
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(12)  # longer than the sliding window
FAMILIES = ["llama", "gemma3_text", "mistral"]


def generate(target: CausalLM, ids: Tensor = PROMPT, **arguments: Any) -> Any:
    return target.generate(ids, **{"do_sample": False, "max_new_tokens": 24, **arguments})


# Records --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDS)
def test_records_come_only_when_asked_for(name: str) -> None:
    target = tiny("llama", attn_implementation="eager", num_hidden_layers=2)
    arguments: dict[str, Any] = {"return_dict_in_generate": True, f"output_{name}": True}
    ours = generate(target, assistant_model=assistant_for(target), **arguments)
    assert {other for other in RECORDS if getattr(ours, other) is not None} == {name}


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [{}, {"tree": "dyspec"}], ids=["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attentions_of_a_target_that_returns_none(family: str, settings: dict[str, Any]) -> None:
    """With `sdpa` plain generation has an empty tuple for each token, in batches, too."""
    target = tiny(family, attn_implementation="sdpa")
    arguments = {"return_dict_in_generate": True, "output_attentions": True}
    for ids in (PROMPT, PROMPT.repeat(2, 1)) if not settings else (PROMPT,):
        ours = generate(target, ids, assistant_model=assistant_for(target, **settings), **arguments)
        assert ours.attentions == generate(target, ids, **arguments).attentions


def test_sampled_scores_are_those_of_the_text() -> None:
    target = tiny("llama", num_hidden_layers=2)
    ours = target.generate(
        PROMPT, assistant_model=assistant_for(target), do_sample=True, temperature=0.7, top_k=0, max_new_tokens=24,
        return_dict_in_generate=True, output_logits=True, output_scores=True,
    )  # fmt: skip
    with torch.no_grad():
        logits = target(ours.sequences).logits[0, PROMPT.shape[1] - 1 : -1].float()
    assert_same(torch.cat(ours.logits), logits)
    assert_same(torch.cat(ours.scores), logits / 0.7)


def test_logits_are_those_of_the_model() -> None:
    """Also where a processor writes into its scores. Plain `generate()` returns what that left of them as logits."""
    target = tiny("llama", num_hidden_layers=2)
    arguments: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    arguments["logits_processor"] = [NoRepeat()]
    plain = generate(target, **arguments)
    ours = generate(target, assistant_model=assistant_for(target), **arguments)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same(ours.scores, plain.scores)
    with torch.no_grad():
        logits = target(ours.sequences).logits[0, PROMPT.shape[1] - 1 : -1].float()
    assert_same(torch.cat(ours.logits), logits)
    assert torch.cat(plain.logits).isinf().any()


def test_records_are_refused_without_attaching() -> None:
    target = tiny("llama", attn_implementation="eager", num_hidden_layers=2)
    assistant = assistant_for(target, attached=False)
    arguments: dict[str, Any] = {"return_dict_in_generate": True, "assistant_model": assistant}
    for wanted in ({"output_hidden_states": True}, {"output_attentions": True}):
        with pytest.raises(ValueError, match="wrong hidden states and attentions.*Attach"):
            generate(target, **arguments | wanted)
    plain = generate(target, return_dict_in_generate=True, output_scores=True, output_logits=True)
    ours = generate(target, output_scores=True, output_logits=True, **arguments)
    assert_same(ours.scores, plain.scores)
    assert_same(ours.logits, plain.logits)


# Caches ---------------------------------------------------------------------------------------------------------------


@pytest.mark.every(5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("end", ["max length", "eos", "stop string"])
def test_the_cache_holds_the_text_but_its_last_token(family: str, end: str) -> None:
    target = tiny(family, seed=1)
    text = generate(target)[0, PROMPT.shape[1] :].tolist()
    index = next(i for i in range(7, 24) if text[i] not in text[:i])
    ends = {
        "max length": {"max_new_tokens": 21},
        "eos": {"eos_token_id": text[index], "pad_token_id": 0},
        "stop string": {"stop_strings": [tokenizer().decode(text[index])], "tokenizer": tokenizer()},
    }
    for num_tokens in range(1, 7):  # so that the end falls on every place of a block
        assistant = assistant_for(target, rule="fixed", num_tokens=num_tokens)
        ours = generate(target, assistant_model=assistant, return_dict_in_generate=True, **ends[end])
        assistant.detach()
        emitted = ours.sequences
        assert emitted[0, PROMPT.shape[1] :].tolist() == text[: 21 if end == "max length" else index + 1]
        assert_same_cache(ours.past_key_values, prefill(target, emitted[:, :-1]))


@pytest.mark.parametrize("max_new_tokens", [1, 24])  # for one token transformers asks for no candidates
def test_a_second_turn_is_refused_without_attaching(max_new_tokens: int) -> None:
    target = tiny("llama", num_hidden_layers=2)
    first, assistant = generate(target, return_dict_in_generate=True), assistant_for(target, attached=False)
    arguments: dict[str, Any] = {"past_key_values": first.past_key_values, "max_new_tokens": max_new_tokens}
    with no_work(target), pytest.raises(ValueError, match="(past_key_values|cache) holds an earlier turn.*Attach"):
        generate(target, first.sequences, assistant_model=assistant, **arguments)


@pytest.mark.parametrize("is_attached", [True, False], ids=["attached", "unattached"])
def test_a_left_padded_prompt(is_attached: bool) -> None:
    target, padded = tiny("gemma3_text"), torch.cat((torch.zeros((1, 5), dtype=torch.long), PROMPT), dim=1)
    mask = torch.cat((torch.zeros((1, 5), dtype=torch.long), torch.ones_like(PROMPT)), dim=1)
    plain = generate(target, padded, attention_mask=mask)
    assert torch.equal(plain[:, 5:], generate(target)), "padding is invisible to plain generate"
    assistant = assistant_for(target, is_attached)
    assert torch.equal(generate(target, padded, attention_mask=mask, assistant_model=assistant), plain)
    padded_rate = assistant.stats.acceptance_rate
    generate(target, assistant_model=assistant)
    assert padded_rate == assistant.stats.acceptance_rate, "and to the draft"


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("tree", [None, "dyspec"])
def test_padding_that_eager_attention_turns_into_nan(tree: Any, how: dict[str, Any]) -> None:
    """Plain generation recovers once the padding has left the windows, which depends on its cache: refused by name, and
    as a default plain generation's very text."""
    target = tiny("mistral", attn_implementation="eager")
    padded = torch.cat((torch.zeros((1, 5), dtype=torch.long), PROMPT), dim=1)
    options = {"attention_mask": (padded.cumsum(dim=1) > 0).long(), **how}
    plain = generate(target, padded, **options, return_dict_in_generate=True, output_logits=True)
    spoilt = [bool(logits.isnan().any()) for logits in plain.logits]
    if not spoilt[0]:
        pytest.skip("this transformers computes no NaN there")
    assert not spoilt[-1], "it recovers"
    speculation = SpeculationConfig("fixed", num_tokens=3, tree=tree)
    assistant = SpecDecPPAssistant.from_early_exit(target, 1, speculation=speculation, default=True)
    assert torch.equal(generate(target, padded, **options), plain.sequences)
    assert "This prompt begins with padding, and MistralForCausalLM computes NaN" in str(assistant.stats.refusal)
    with pytest.raises(ValueError, match="This prompt begins with padding, and MistralForCausalLM computes NaN"):
        generate(target, padded, **options, assistant_model=assistant)
    target.set_attn_implementation("sdpa")
    plain = generate(target, padded, **options)
    assert torch.equal(generate(target, padded, **options, assistant_model=assistant), plain)
    assert assistant.stats.drafted > 0


def test_a_padded_second_turn_with_only_new_ids() -> None:
    """The mask then covers the first turn, too, which the draft is not shown."""
    target, ids = tiny("llama"), torch.cat((torch.zeros((1, 5), dtype=torch.long), PROMPT), dim=1)
    mask = torch.cat((torch.zeros((1, 5), dtype=torch.long), torch.ones_like(PROMPT)), dim=1)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids, attention_mask=mask, past_key_values=cache)
    new = prompt(5, seed=2)
    mask, assistant = torch.cat((mask, torch.ones_like(new)), dim=1), assistant_for(target)
    lengths: list[int] = []
    hook = assistant.drafter.model.get_decoder().register_forward_pre_hook(
        lambda _, __, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    generate(target, new, past_key_values=cache, attention_mask=mask, assistant_model=assistant)
    hook.remove()
    assert lengths[0] == new.shape[1] + 1, "the new tokens and the first answer: nothing of it is padding"


@pytest.mark.parametrize("implementation", ["dynamic", "offloaded"])
def test_cache_implementations_that_can_be_rolled_back(implementation: str) -> None:
    if implementation == "offloaded" and not torch.accelerator.is_available():
        pytest.skip("offloading needs a device to offload from")
    target = tiny("gemma3_text")
    text = generate(target, cache_implementation=implementation, assistant_model=assistant_for(target))
    assert torch.equal(text, generate(target))
