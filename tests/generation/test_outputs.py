"""What `generate()` returns beside the tokens, and what it leaves in the cache, on an attached target."""

import copy
import functools
from typing import Any

import pytest
import torch
from support.targets.models import assistant_for, prompt, tiny
from support.targets.outputs import NoRepeat, assert_same
from support.targets.tree_generation import TREES, target_of
from support.targets.watchers import unnoticed
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.single_target import TargetContext
from hf_specdecpp.models.causal_lm import CACHE, CausalLM

PROMPT = prompt(12)  # longer than the sliding window


def generate(target: CausalLM, ids: Tensor = PROMPT, **arguments: Any) -> Any:
    return target.generate(ids, **{"do_sample": False, "max_new_tokens": 24, **arguments})


def test_logits_are_those_of_the_model() -> None:
    """Also where a processor writes into its scores. Plain `generate()` returns what that left of them as logits."""
    target = tiny("llama", num_hidden_layers=2)
    arguments: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    arguments["logits_processor"] = [NoRepeat()]
    plain = generate(target, **arguments)
    ours = generate(target, assistant_model=assistant_for(target), **arguments)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same(ours.scores, plain.scores)
    assert ours.hidden_states is ours.attentions is None, "records come only when asked for"
    with torch.no_grad():
        logits = target(ours.sequences).logits[0, PROMPT.shape[1] - 1 : -1].float()
    assert_same(torch.cat(ours.logits), logits)
    assert torch.cat(plain.logits).isinf().any()


@pytest.mark.parametrize("settings", [{"rule": "fixed", "num_tokens": 4}, TREES["dyspec"]], ids=["chain", "tree"])
def test_records_hold_nothing_of_rejected_candidates(settings: dict[str, Any]) -> None:
    target = tiny("llama", num_hidden_layers=2, attn_implementation="eager")
    asked: dict[str, Any] = dict.fromkeys(
        ("output_scores", "output_logits", "output_hidden_states", "output_attentions"), True
    )
    assistant = assistant_for(target, mix=0.9, **settings)
    found = generate(target, assistant_model=assistant, return_dict_in_generate=True, **asked)
    assert assistant.stats.accepted < assistant.stats.drafted
    for records in (found.scores, found.logits, *found.hidden_states[1:], *found.attentions[1:]):
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in records)


def test_a_left_padded_prompt() -> None:
    target, padded = tiny("gemma3_text"), torch.cat((torch.zeros((1, 5), dtype=torch.long), PROMPT), dim=1)
    mask = torch.cat((torch.zeros((1, 5), dtype=torch.long), torch.ones_like(PROMPT)), dim=1)
    plain = generate(target, padded, attention_mask=mask)
    assert torch.equal(plain[:, 5:], generate(target)), "padding is invisible to plain generate"
    assistant = assistant_for(target)
    assert torch.equal(generate(target, padded, attention_mask=mask, assistant_model=assistant), plain)
    padded_rate = assistant.stats.acceptance_rate
    generate(target, assistant_model=assistant)
    assert padded_rate == assistant.stats.acceptance_rate, "and to the draft"


@pytest.mark.daily("None-static", "dyspec-dynamic")
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
    assert "Row 0 of the prompts has padding, in which MistralForCausalLM computes NaN" in str(assistant.stats.refusal)
    with pytest.raises(ValueError, match="Row 0 of the prompts has padding, in which MistralForCausalLM computes NaN"):
        generate(target, padded, **options, assistant_model=assistant)
    target.set_attn_implementation("sdpa")
    plain = generate(target, padded, **options)
    assert torch.equal(generate(target, padded, **options, assistant_model=assistant), plain)
    assert assistant.stats.drafted > 0


# Where the text goes on after the prompt ------------------------------------------------------------------------------


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


def test_positions_counted_from_the_mask_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant is what trees did once: they stood where the number of visible tokens says."""
    target, text = target_of("llama"), prompt(14)
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "no_repeat_ngram_size": 6}
    arguments |= {"position_ids": 2 * torch.arange(14)[None], "attention_mask": torch.ones_like(text)}
    plain, made = target.generate(text, **arguments), TargetContext.tree_inputs

    def counted(self: TargetContext, input_ids: Tensor, *tree: Any, **options: Any) -> dict[str, Any]:
        self.model_kwargs["position_ids"] = torch.arange(input_ids.shape[1])[None]
        self._spare = 0  # what was made ahead for further rounds is not used
        return made(self, input_ids, *tree, **options)

    monkeypatch.setattr(TargetContext, "tree_inputs", counted)
    assistant = assistant_for(target, mix=0.9, **TREES["dyspec"])
    with_mutant = target.generate(text, assistant_model=assistant, **arguments)
    assistant.detach()
    assert not torch.equal(with_mutant, plain)


def test_a_forward_that_returns_another_cache() -> None:
    """As models outside of transformers do: plain generation goes on with the cache of the outputs."""
    target = tiny("llama", num_hidden_layers=2)
    assistant, own = assistant_for(target, mix=0.9), target.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs | {CACHE: copy.deepcopy(kwargs.get(CACHE))})

    target.forward = functools.wraps(own)(unnoticed(forward))
    plain = generate(target)
    assert torch.equal(generate(target, assistant_model=assistant), plain)
    assert assistant.stats.accepted > 0
    batch = torch.cat((PROMPT, prompt(12, seed=1)))
    plain = generate(target, batch, pad_token_id=0)
    assistant.attach(target, default=True)
    assert torch.equal(generate(target, batch, pad_token_id=0), plain)
    assert "returns another cache" in str(assistant.stats.refusal)


def test_a_forward_that_returns_the_last_logits_only(pretended: Any) -> None:
    """As models outside of transformers do: nothing can be verified, also on a GPU."""
    target = tiny("llama", num_hidden_layers=2)
    assistant, own = assistant_for(target, mix=0.9), target.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs | {"logits_to_keep": 1})

    target.forward = functools.wraps(own)(unnoticed(forward))
    plain, batch = generate(target), torch.cat((PROMPT, prompt(12, seed=1)))
    for graphs in ("auto", "off"):
        assistant.speculation.graphs = graphs
        assert torch.equal(generate(target, assistant_model=assistant), plain)
        assert "returns logits after 1 of 5 tokens" in str(assistant.stats.refusal)
    plain = generate(target, batch, pad_token_id=0)
    assistant.attach(target, default=True)
    assert torch.equal(generate(target, batch, pad_token_id=0), plain)
    assert "returns logits after 1 of 5 tokens" in str(assistant.stats.refusal)


@pytest.mark.parametrize("held", [14, 15])
def test_the_whole_prompt_is_in_the_cache_already(held: int) -> None:
    """Plain generation then reads the last token twice, and so do chains; trees say what to do, and then work."""
    target = target_of("llama")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text = prompt(14)

    def cache() -> DynamicCache:
        found = DynamicCache(config=target.config)
        with torch.no_grad():
            target(torch.cat((text, text[:, :1]), dim=1)[:, :held], **{CACHE: found}, use_cache=True)
        return found

    def texts(cropped: int | None, **speculation: Any) -> list[Tensor]:
        assistant, found = assistant_for(target, **speculation), []
        for options_of in ({}, {"assistant_model": assistant}):
            own = cache()
            if cropped is not None:
                own.crop(cropped)
            found.append(target.generate(text, **{CACHE: own}, **options, **options_of))
        return found

    plain, ours = texts(None, rule="fixed", num_tokens=4)
    assert torch.equal(ours, plain)
    with pytest.raises(ValueError, match=rf"held {held} tokens already.*has 14.*crop\({13 - held}\)"):
        texts(None, tree="dyspec")
    plain, ours = texts(13 - held, tree="dyspec")
    assert torch.equal(ours, plain)
