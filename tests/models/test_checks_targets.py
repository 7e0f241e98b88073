"""Targets that read several tokens at once otherwise than one by one, or generate in a way of their own: refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.targets.families import informed_draft
from support.targets.models import partly_agreeing, prompt, tiny
from support.targets.snapshots import has_our_methods, of_own_class
from support.targets.zoo import WINDOW, tiny_config, tiny_of
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.choosing import assist
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.generation.entry.attached import check_reading
from hf_specdecpp.generation.refusals import check_inputs
from hf_specdecpp.models import foreign
from hf_specdecpp.models.causal_lm import CausalLM, longest_text
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.early_exit import early_exit

PROMPT = prompt(2 * WINDOW)
BATCH = torch.cat((PROMPT, prompt(2 * WINDOW, seed=5)))
CHAIN, TREE = SpeculationConfig("fixed", num_tokens=4), SpeculationConfig(tree=[2, 2, 1])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}


def from_config(name: str, family: str) -> CausalLM:
    """A tiny random model of a class that no Auto class of the zoo has."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} does not have {name}")
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(tiny_config(family)).to(torch.float64).eval()


# Modules that are no models of transformers ---------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "says"), [
    (nn.DataParallel(nn.Linear(2, 2)), r"a DataParallel. Pass the model that it has: wrapper\.module"),
    (nn.Linear(2, 2), "a Linear, which is no PreTrainedModel of transformers. If there is one inside it, pass that"),
], ids=["a wrapper", "a layer"])  # fmt: skip
@pytest.mark.parametrize("make", [
    assist, lambda module: assist(tiny("llama"), module), lambda module: SpecDecPPAssistant.from_early_exit(module, 1),
], ids=["a target", "a draft", "an early exit"])  # fmt: skip
def test_modules_that_are_no_models(make: Callable[[Any], Any], module: nn.Module, says: str) -> None:
    with pytest.raises(TypeError, match=f"A model is needed here, and this is {says}"):
        make(module)


# Windows of the cache alone -------------------------------------------------------------------------------------------

DRAFTS: dict[str, Callable[[CausalLM], SpecDecPPAssistant]] = {
    "chain": lambda target: SpecDecPPAssistant.from_draft(tiny("llama"), target, speculation=CHAIN),
    "early exit": lambda target: SpecDecPPAssistant.from_early_exit(target, 1, speculation=CHAIN),
    "lookup": lambda target: assist(target, "lookup", speculation=CHAIN, default=False),
    "by a call": lambda _: SpecDecPPAssistant.from_draft(tiny("llama"), speculation=CHAIN),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_window_that_the_model_ignores(kind: str) -> None:
    """Its cache slides all the same, so that candidates see what single tokens would not."""
    target = tiny("llama", sliding_window=WINDOW)
    with pytest.raises(ValueError, match=rf"over \[{WINDOW}\] tokens in its cache but not in its mask"):
        target.generate(PROMPT, **GREEDY, assistant_model=DRAFTS[kind](target))


# States that several tokens change otherwise --------------------------------------------------------------------------


@pytest.mark.daily("nemotron_h-dtype0")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_steps_that_are_clamped_among_several_tokens_only(family: str, dtype: torch.dtype) -> None:
    """`time_step_min` counts in passes over several tokens. The logits of a short text hardly show that."""
    target = tiny_of(family).to(dtype)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith("dt_bias"):
                parameter.fill_(-8.0)
    with pytest.raises(ValueError, match="does not go on from there over several tokens at once as it does one"):
        check_reading(target)


def test_caches_beside_the_cache() -> None:
    target = from_config("VoxtralRealtimeForConditionalGeneration", "voxtral_realtime")
    with pytest.raises(ValueError, match="keeps (encoder_cache, )?padding_cache beside its cache"):
        check_target(target)


@pytest.mark.parametrize("state", [DynamicCache(), iter([1])])
def test_states_among_the_arguments(state: object) -> None:
    """As Kyutai's are, and the sound that Voxtral Realtime is given piece by piece."""
    with pytest.raises(ValueError, match="encoder_state: beside its cache"):
        check_inputs(PROMPT, {"cache": DynamicCache(), "encoder_state": state})


# Positions and loops of their own -------------------------------------------------------------------------------------


class CountsItself(LlamaForCausalLM):
    """As EXAONE 4.5 and others do."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "position_ids": None}


class LoopsItself(LlamaForCausalLM):
    """As CSM and Higgs Audio V2 do, for several codebooks."""

    def _sample(self, input_ids: Tensor, **_: Any) -> Any:  # type: ignore[override]
        return torch.cat((input_ids, input_ids), dim=1)


@pytest.mark.parametrize("prompts", [PROMPT, BATCH])
def test_positions_that_a_forward_counts_itself(prompts: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "KNOWN", {*foreign.KNOWN, __name__})  # like a class of transformers
    target = tiny("llama")
    target.__class__ = CountsItself
    plain = target.generate(prompts, **GREEDY)
    shape = CHAIN if len(prompts) > 1 else TREE
    tree = SpecDecPPAssistant.from_draft(informed_draft(plain[:1]), target, speculation=shape)
    with pytest.raises(ValueError, match="counts positions within its forward|takes no positions of its own"):
        target.generate(prompts, **GREEDY, assistant_model=tree)
    tree.attach(target, default=True)
    assert torch.equal(target.generate(prompts, **GREEDY), plain)
    assert tree.stats.refusal is not None
    chain = SpecDecPPAssistant.from_draft(informed_draft(plain[:1]), target, speculation=CHAIN)
    assert torch.equal(target.generate(PROMPT, **GREEDY, assistant_model=chain)[0], plain[0])


def test_a_loop_of_its_own() -> None:
    target = tiny("llama")
    assist(target, "lookup", default=True)  # which has a `_sample`, too
    check_target(target)
    target = tiny("llama")
    target.__class__ = LoopsItself
    with pytest.raises(ValueError, match=r"generates with a loop of its own \(_sample\)"):
        assist(target, "lookup", default=False)


@pytest.mark.daily("dtype0")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_in_half_precision_after_a_stream_in_float32(dtype: torch.dtype) -> None:
    target = tiny_of("mamba2").to(dtype)
    plain = target.generate(PROMPT, **GREEDY)
    assistant = SpecDecPPAssistant.from_draft(tiny_of("mamba2").to(dtype), target, speculation=CHAIN)
    assert torch.equal(target.generate(PROMPT, **GREEDY, assistant_model=assistant), plain)
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize("family", ["blip-2", "idefics", "instructblip", "kosmos-2"])
def test_drafts_that_need_an_image(family: str) -> None:
    model = tiny_of(family, kind="image")
    with pytest.raises(ValueError, match="does not read a token by itself.*it cannot draft"):
        Drafter(model, shares_target=True)


def test_layers_in_several_lists() -> None:
    with pytest.raises(ValueError, match="XLMWithLMHeadModel does not read a token by itself"):
        SpecDecPPAssistant.from_early_exit(tiny_of("xlm"), 2)
    assert early_exit(tiny_of("llama"), 2).config.num_hidden_layers == 2


@pytest.mark.daily("gpt2-512", "bart-512", "ctrl-512", "llama-inf")
@pytest.mark.parametrize(
    ("family", "most"),
    [("gpt2", 512), ("opt", 512), ("bert", 512), ("bart", 512), ("pegasus", 512), ("roberta", 511), ("ctrl", 512),
     ("codegen", 512), ("gptj", 512), ("llama", float("inf")), ("xglm", float("inf"))],
)  # fmt: skip
def test_the_longest_text(family: str, most: float) -> None:
    """So many tokens can be read, and where positions come from a table, not one more."""
    model = tiny_of(family)
    assert longest_text(model) == most
    text = torch.arange(int(min(most, 600)) + 1)[None] % 40 + 5
    with torch.no_grad():
        model(input_ids=text[:, :-1], use_cache=False)
        if most < 600:
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=text, use_cache=False)


def test_windows_shrink_again_in_later_turns_without_an_assistant() -> None:
    target, record = tiny_of("mistral"), {"return_dict_in_generate": True}
    plain = target.generate(PROMPT, **GREEDY, **record)
    assistant = SpecDecPPAssistant.from_draft(informed_draft(plain.sequences), target, speculation=CHAIN)
    first = target.generate(PROMPT, **GREEDY, **record, assistant_model=assistant)
    assistant.detach()
    cache = first.past_key_values
    target.generate(first.sequences, **{**GREEDY, "max_new_tokens": 3 * WINDOW}, past_key_values=cache)
    assert {layer.keys.shape[-2] for layer in cache.layers} == {WINDOW - 1}


@pytest.mark.apart
def test_a_compiled_target_is_attached_behind_its_wrapper() -> None:
    target = of_own_class(tiny("llama"))
    compiled: Any = torch.compile(target)
    draft = partly_agreeing(target)
    assistant = SpecDecPPAssistant.from_draft(draft, compiled, speculation=SpeculationConfig(rule="fixed"))
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    plain = target.generate(prompt(), **how)
    assert torch.equal(compiled.generate(prompt(), assistant_model=assistant, **how), plain)
    assert assistant.stats.accepted > 0
    assistant.detach(compiled)
    assert not has_our_methods(target)


def test_batches_with_an_adapter_for_each_row() -> None:
    """PEFT tells its layers about all rows, and rows that end leave a batch."""
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    target: Any = get_peft_model(tiny("llama"), config)
    target.add_adapter("other", config)
    target.eval()
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=SpeculationConfig(rule="fixed"))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    one = {"input_ids": prompt(), "adapter_names": ["other"], **options}
    assert torch.equal(target.generate(**one, assistant_model=assistant), target.generate(**one))
    rows = {"input_ids": torch.cat((prompt(), prompt(seed=1))), "adapter_names": ["default", "other"], **options}
    with pytest.raises(ValueError, match="each row has an adapter of its own"):
        target.generate(**rows, assistant_model=assistant)


def test_a_class_that_passes_all_arguments_on() -> None:
    target = tiny("llama")

    class PassesOn(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    target.__class__ = PassesOn
    check_target(target)
    plain = target.generate(PROMPT, **GREEDY)
    assistant = SpecDecPPAssistant.from_draft(informed_draft(plain), target, speculation=CHAIN)
    assert torch.equal(target.generate(PROMPT, **GREEDY, assistant_model=assistant), plain)
    assert assistant.stats.accepted > 0
