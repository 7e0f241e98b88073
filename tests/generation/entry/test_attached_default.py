"""`attach(model, default=True)`: `generate()` without an assistant uses it, and is plain where it cannot help."""

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.enumeration.mutants import accept_everything
from support.fuzz.arguments import Counting, Criterion
from support.targets.families import informed_draft, model_of
from support.targets.models import assistant_for, assistant_of, partly_agreeing, prompt, tiny
from support.targets.watchers import Recorder
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.entry import attached
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(12)
BATCH = torch.cat((PROMPT, prompt(12, seed=5)))
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny("llama")


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user is told."""
    said: list[str] = []
    monkeypatch.setattr(attached.logger, "warning_once", said.append)
    return said


@pytest.fixture
def assistant(target: CausalLM) -> Iterator[SpecDecPPAssistant]:
    made = assistant_for(target)
    made.attach(target, default=True)
    yield made
    made.detach()


# --- it is used ---


@pytest.mark.parametrize("ids", [PROMPT, BATCH], ids=["one", "batch"])
def test_it_is_the_same_call_as_with_the_assistant(ids: Tensor, target: CausalLM, assistant: Any) -> None:
    """Sampled with one seed: the same random numbers for the same decisions."""
    texts = []
    for arguments in ({}, {"assistant_model": assistant}, {"assistant_model": None}):
        assistant.memory.clear()
        torch.manual_seed(0)
        texts.append(target.generate(ids, do_sample=True, max_new_tokens=24, **arguments))
        assert assistant.stats.drafted > 0
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[2], texts[1])


def test_a_wrong_verification_would_be_seen(target: CausalLM, assistant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: texts above are those of our loop, so one that accepts everything has to change them."""
    with assistant.paused():
        plain = target.generate(PROMPT, **GREEDY)
    accept_everything(monkeypatch)
    assert not torch.equal(target.generate(PROMPT, **GREEDY), plain)


def test_through_peft(target: CausalLM) -> None:
    inner = copy.deepcopy(target)
    wrapped: Any = get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj"]))
    plain, made = wrapped.generate(input_ids=PROMPT, **GREEDY), assistant_for(inner)
    made.attach(wrapped, default=True)
    assert torch.equal(wrapped.generate(input_ids=PROMPT, **GREEDY), plain)
    assert made.stats.drafted > 0


# --- it cannot help: a plain call ---


LEFT_OUT: dict[str, tuple[Any, str]] = {
    "beams": (lambda: {"num_beams": 2}, "num_beams=2, and it proposes one continuation"),
    "no cache": (lambda: {"use_cache": False}, "use_cache=False"),
    "guidance in a batch": (
        lambda: {"input_ids": BATCH, "guidance_scale": 1.5},
        "transformers.generation.logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor may keep state",
    ),
    "embeddings": (lambda: {"input_ids": None, "inputs_embeds": torch.ones(1, 6, 32).double()}, "inputs_embeds"),
    "state in a batch": (lambda: {"input_ids": BATCH, "logits_processor": [Counting()]}, "Counting may keep state"),
    "static batch": (lambda: {"input_ids": BATCH, "cache_implementation": "static"}, "the 2 rows of a batch"),
    "criterion in a batch": (
        lambda: {"input_ids": BATCH, "stopping_criteria": [Recorder()], "pad_token_id": 0},
        "Recorder may keep state",
    ),
    "ends in a batch": (
        lambda: {"input_ids": BATCH, "stopping_criteria": [Criterion()], "eos_token_id": None},
        "there is no pad_token_id",
    ),
}


@pytest.mark.daily("*-greedy", "embeddings-sampled")
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_refused_calls_are_plain(name: str, sample: bool, target: CausalLM, assistant: Any, warned: list[str]) -> None:
    arguments, reason = LEFT_OUT[name]

    def answer(**more: Any) -> Tensor:
        torch.manual_seed(0)
        own = {"input_ids": PROMPT, "max_new_tokens": 16, "do_sample": sample, **arguments(), **more}
        return target.generate(**own)

    with assistant.paused():
        plain = answer()
    assert warned == []
    assert torch.equal(answer(), plain)
    assert assistant.stats.generated == 0
    assert reason in assistant.stats.refusal
    assert f"plain one, without its assistant: {assistant.stats.refusal}" in str(assistant.stats)
    assert warned == [f"This generate() of LlamaForCausalLM is a plain one, without its assistant, which "
                      f"cannot help here: {assistant.stats.refusal}"]  # fmt: skip
    with pytest.raises(ValueError, match=reason.partition(",")[0]):
        answer(assistant_model=assistant)


def test_what_shows_only_with_the_prompt_s_rows() -> None:
    """An image whose rows are no tokens: trees are refused once the target has read it."""
    target, options = model_of("git"), {**GREEDY, "input_ids": PROMPT, "pixel_values": torch.rand(1, 3, 16, 16)}
    plain = target.generate(**options)
    draft = informed_draft(plain, target.config.vocab_size)
    speculation = SpeculationConfig(rule="threshold", tree="dyspec")
    made = SpecDecPPAssistant.from_draft(draft, target, speculation=speculation, default=True)
    ours = target.generate(**options)
    made.detach()
    assert torch.equal(ours, plain)
    assert "rows in its cache" in str(made.stats.refusal)


@pytest.mark.parametrize("own_cache", [False, True])
def test_what_shows_only_in_a_batch_s_numbers(own_cache: bool) -> None:
    """NaN of eager attention after padding: found as the prompts have been read, with the cache in another form."""
    target = tiny("mistral", attn_implementation="eager")
    mask = torch.ones_like(BATCH)
    mask[0, :9] = 0

    def answer() -> Any:
        cache = {"past_key_values": transformers.DynamicCache(config=target.config)} if own_cache else {}
        options = {"attention_mask": mask, "pad_token_id": 0, "return_dict_in_generate": True, **cache}
        output = target.generate(BATCH, **GREEDY, **options)
        assert not own_cache or output.past_key_values is cache["past_key_values"]
        return output

    plain = answer()
    made = assistant_for(target)
    made.attach(target, default=True)
    ours = answer()
    made.detach()
    assert "Row 0 of the prompts has padding" in str(made.stats.refusal)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


def test_errors_of_the_user_are_no_refusals(target: CausalLM, assistant: Any, warned: list[str]) -> None:
    """What a processor raises is raised, and it is not asked again by a plain call."""
    calls = []

    def fails(_: int, input_ids: Tensor) -> list[int]:
        calls.append(len(input_ids))
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own"):
        target.generate(PROMPT, **GREEDY, prefix_allowed_tokens_fn=fails)
    assert (calls, warned) == ([12], [])


def test_other_ways_to_speculate_are_left_alone(target: CausalLM, assistant: Any, warned: list[str]) -> None:
    with assistant.paused():
        plain = target.generate(PROMPT, **GREEDY)
    other = assistant_for(target)
    models = ({"assistant_model": each} for each in (partly_agreeing(target), other))
    for arguments in ({"prompt_lookup_num_tokens": 3}, *models):
        assistant.stats = SpeculationStats()
        assert torch.equal(target.generate(PROMPT, **GREEDY, **arguments), plain)
        assert assistant.stats.target_passes == 0
    assert other.stats.drafted > 0
    assert warned == []


def test_as_a_draft_of_another_model_it_is_plain(target: CausalLM, assistant: Any, warned: list[str]) -> None:
    """transformers asks a draft for its scores, and stops it by them."""
    larger = partly_agreeing(target)
    plain = larger.generate(PROMPT, **GREEDY)
    assert torch.equal(larger.generate(PROMPT, **GREEDY, assistant_model=target), plain)
    assert (assistant.stats.target_passes, warned) == (0, [])


# --- beginning and end ---


def test_paused(target: CausalLM, assistant: Any) -> None:
    with assistant.paused():
        target.generate(PROMPT, **GREEDY)
        assert assistant.stats.target_passes == 0
        target.generate(PROMPT, **GREEDY, assistant_model=assistant)  # asked for by name
        assert assistant.stats.drafted > 0
    assistant.stats = SpeculationStats()
    with pytest.raises(KeyError), assistant.paused():
        raise KeyError
    target.generate(PROMPT, **GREEDY)
    assert assistant.stats.drafted > 0
    with assistant.paused():
        assistant.detach(target)
    assert not attached.is_attached(assistant, target)


def test_the_latest_default_is_the_only_one(target: CausalLM, assistant: Any) -> None:
    other = assistant_for(target)
    other.attach(target, default=True)
    target.generate(PROMPT, **GREEDY)
    assert (assistant.stats.target_passes, other.stats.drafted > 0) == (0, True)
    assistant.attach(target)  # says nothing about the other one
    assert attached.is_default(other, target)
    other.attach(target)
    other.stats = SpeculationStats()
    target.generate(PROMPT, **GREEDY)
    assert assistant.stats.target_passes == other.stats.target_passes == 0
    other.detach()


@pytest.mark.daily("independent", "eagle3")
@pytest.mark.parametrize("kind", ["independent", "early_exit", "conditioned", "eagle3"])
def test_the_target_keeps_it_and_takes_it_along(kind: str) -> None:
    """Nobody but the target holds an assistant that was made in passing. It knows parts of its target only: else the
    registry, which holds a target's default, would hold the target, too."""
    target = tiny("llama", vocab_size=50)  # of no other test, so that costs are measured here
    kept = weakref.ref(assistant_of(kind, target))
    gc.collect()
    assert kept() is None
    rule = "throughput" if kind == "independent" else "fixed"
    assistant_of(kind, target, rule=rule, lookup=True).attach(target, default=True)
    gc.collect()
    made = weakref.ref(attached.default_of(target))
    target.generate(PROMPT, **GREEDY)
    assert made().stats.generated == 24  # type: ignore[union-attr]
    lives = weakref.ref(target)
    del target
    gc.collect()
    assert lives() is None
    assert made() is None
