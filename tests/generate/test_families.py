"""Families that are unlike Llama: their generations equal plain ones in everything, or are refused with the reason."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from packaging.version import Version
from support.targets.families import IMAGE, VOCAB_SIZE, informed_draft, model_of
from support.targets.models import prompt, random_layer, tiny
from support.targets.multimodal import MODELS, multimodal
from support.targets.outputs import RECORDS, assert_same, assert_same_cache
from support.targets.watchers import no_work, tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(12)
DOORS: dict[str, dict[str, Any]] = {
    "chain": {"rule": "fixed", "num_tokens": 4},
    "tree": {"tree": [2, 2, 1]},
    "by a call": {"rule": "fixed", "num_tokens": 4},
}
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "repetition_penalty": 1.1}
MLLAMA = [
    pytest.param(
        family,
        marks=pytest.mark.skipif(
            Version(transformers.__version__) < Version("5.22"),
            reason="transformers itself cannot crop layers that never held a row, as these without an image",
        ),
    )
    for family in ("mllama", "mllama text")
]
RECORD = {"return_dict_in_generate": True, **{f"output_{name}": True for name in RECORDS}}


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def with_image(places: int, images: Tensor, **inputs: Any) -> dict[str, Any]:
    ids = torch.cat((torch.full((1, places), IMAGE), PROMPT), dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images, **inputs}


IMAGES: dict[str, dict[str, Any]] = {
    "git": {"input_ids": PROMPT, "pixel_values": pixels(1)},
    "mllama": with_image(
        1,
        pixels(1, 1, 1),
        aspect_ratio_mask=torch.ones(1, 1, 1).long(),
        aspect_ratio_ids=torch.ones(1, 1).long(),
        cross_attention_mask=torch.ones(1, 13, 1, 1).long(),
    ),  # fmt: skip
    "paligemma": with_image(4, pixels(1), token_type_ids=torch.zeros(1, 16).long()),
}


@contextmanager
def assisted(target: CausalLM, text: Tensor, door: str) -> Iterator[SpecDecPPAssistant]:
    """An assistant that knows most of `text`."""
    draft = informed_draft(text, target.config.get_text_config().vocab_size)
    speculation = SpeculationConfig(**DOORS[door])
    assistant = SpecDecPPAssistant.from_draft(draft, None if door == "by a call" else target, speculation=speculation)
    try:
        yield assistant
    finally:
        assistant.detach()


def assert_equal(target: CausalLM, door: str, **inputs: Any) -> None:
    """With and without an assistant, everything that `generate()` returns is the same."""
    plain = target.generate(**{**ARGUMENTS, **inputs})
    with assisted(target, plain.sequences, door) as assistant:
        ours = target.generate(assistant_model=assistant, **{**ARGUMENTS, **inputs})
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    assert torch.equal(ours.sequences, plain.sequences)
    for name in RECORDS:
        assert_same(getattr(ours, name), getattr(plain, name))
    assert_same_cache(ours.past_key_values, plain.past_key_values)


def assert_refused(target: CausalLM, door: str, message: str, **inputs: Any) -> None:
    with (
        no_work(target),
        pytest.raises(ValueError, match=message),
        assisted(target, torch.cat((PROMPT, PROMPT), dim=1), door) as assistant,
    ):
        target.generate(assistant_model=assistant, **{**ARGUMENTS, **inputs})


@pytest.mark.daily("gemma3n-chain", "gemma4-tree", "llama4-chain", "ettin-tree")
@pytest.mark.parametrize("door", ["chain", "tree"])
@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "granite4 of attention", "llama4", "ettin"])
def test_text(family: str, door: str) -> None:
    """Four-dimensional hidden states, keys shared between layers, a class that is stateful in other sizes."""
    assert_equal(model_of(family, "eager"), door, input_ids=PROMPT, **RECORD)


@pytest.mark.parametrize("family", ["lfm2", "lfm3", *MLLAMA])
def test_chains(family: str) -> None:
    """Layers without keys, which return no attentions; cross-attention layers that read nothing."""
    assert_equal(model_of(family, "eager"), "chain", input_ids=PROMPT, **RECORD)


@pytest.mark.parametrize("family", ["git", "paligemma"])
def test_images_in_chains(family: str) -> None:
    assert_equal(model_of(family), "chain", return_dict_in_generate=True, **IMAGES[family])


def test_a_cache_that_its_config_switches_off() -> None:
    target = model_of("mpt")
    assert not target.generation_config.use_cache
    assert_refused(target, "chain", "use_cache=False.*in the model's own config.*Pass use_cache=True", input_ids=PROMPT)
    assert_equal(target, "chain", input_ids=PROMPT, use_cache=True, return_dict_in_generate=True)


KEEPS_NO_CACHE = "does not use a key-value cache of transformers"
BOTH_WAYS = {"input_ids": PROMPT, "token_type_ids": torch.zeros_like(PROMPT)}


@pytest.mark.parametrize(("family", "doors", "message", "inputs"), [
    ("openai-gpt", ("chain", "by a call"), KEEPS_NO_CACHE, {}),
    ("xlnet", ("chain",), KEEPS_NO_CACHE, {}),
    ("blt", ("chain",), "reads bytes in patches", {}),
    ("imagegpt", ("chain", "by a call"), "predicts 47 of its 48 tokens", {}),
    ("mllama", ("chain", "by a call"), "keeps its image in cross-attention layers", IMAGES["mllama"]),
    ("paligemma", ("tree",), "reads its prompt in both directions", BOTH_WAYS),
    ("llama", ("chain", "by a call"), "The prompt is empty", {"input_ids": PROMPT[:, :0]}),
])  # fmt: skip
def test_refused(family: str, doors: tuple[str, ...], message: str, inputs: dict[str, Any]) -> None:
    for door in doors:
        assert_refused(model_of(family), door, message, **(inputs or {"input_ids": PROMPT}))


def test_with_another_tokenizer() -> None:
    """Tokenizers are compared as it is attached; those of the call have no part in its text."""
    target, theirs = model_of("llama"), tokenizer()
    ours = PreTrainedTokenizerFast(tokenizer_object=theirs.backend_tokenizer)
    ours.add_tokens(["another"])
    draft = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE + 1, hidden_size=16, num_hidden_layers=1,
                                         intermediate_size=16, num_attention_heads=2))  # fmt: skip
    assistant = SpecDecPPAssistant.from_draft(draft.double())
    arguments: dict[str, Any] = {"tokenizer": theirs, "assistant_tokenizer": ours, "max_new_tokens": 8}
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 1}):
        plain = target.generate(PROMPT, max_new_tokens=8, **sampling)
        assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **sampling, **arguments), plain)


VIRTUAL = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "P-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("attach_to", ["wrapper", "base", None])
@pytest.mark.parametrize("kind", VIRTUAL)
def test_virtual_tokens(kind: str, attach_to: str | None) -> None:
    base = tiny("llama", num_hidden_layers=1)
    target = peft.get_peft_model(base, VIRTUAL[kind]).double().eval()
    attached_to = {"wrapper": target, "base": base, None: None}[attach_to]
    message = "puts virtual tokens before the prompt"
    if attach_to == "wrapper":
        with pytest.raises(ValueError, match=message):
            SpecDecPPAssistant.from_draft(informed_draft(PROMPT), attached_to)
        return
    assistant = SpecDecPPAssistant.from_draft(informed_draft(PROMPT), attached_to)
    with no_work(base), pytest.raises(ValueError, match=message):
        target.generate(input_ids=PROMPT, assistant_model=assistant, **ARGUMENTS)


def test_the_base_of_an_adapter_with_virtual_tokens_by_itself() -> None:
    base = tiny("llama", num_hidden_layers=1)
    plain = base.generate(PROMPT, **ARGUMENTS)
    peft.get_peft_model(base, VIRTUAL["prompt tuning"])
    with assisted(base, plain, "chain") as assistant:
        assert torch.equal(base.generate(PROMPT, assistant_model=assistant, **ARGUMENTS), plain)


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_offloaded_targets(kind: str) -> None:
    target = tiny("llama", num_hidden_layers=2)
    plain = target.generate(PROMPT, return_dict_in_generate=True, **ARGUMENTS)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "cpu":
            accelerate.cpu_offload(target, torch.device("cpu"))
        else:
            accelerate.disk_offload(target, folder, torch.device("cpu"))
        assert target.device.type == "meta"
        for door in DOORS:
            with assisted(target, plain.sequences, door) as assistant:
                text = target.generate(PROMPT, assistant_model=assistant, **ARGUMENTS)
            assert assistant.stats.accepted > 0
            assert torch.equal(text, plain.sequences)
        with pytest.raises(ValueError, match="is offloaded.*Use an independent draft"):
            SpecDecPPAssistant.from_early_exit(target, 1)


@pytest.mark.parametrize(("family", "layers", "message"), [
    ("gemma3n", 2, "shares keys and values between layers"),
    ("gemma4", 2, "has embeddings for each of its layers in one table"),
    ("lfm3", 2, "have no attention.*Choose layers with attention"),
    ("ettin", 2, "turns hidden states into logits in a way"),
    ("granite4", 1, "have no attention.*Choose layers with attention"),
])  # fmt: skip
def test_early_exits(family: str, layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecDecPPAssistant.from_early_exit(model_of(family), layers)


# Images and sound, of which the draft sees the prompt's text only ----------------------------------------------------


MEDIA: dict[str, Any] = {
    "max_new_tokens": 20, "do_sample": False, "repetition_penalty": 1.1, "pad_token_id": 0, "eos_token_id": None,
    "return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True,
}  # fmt: skip
CHAIN, TREE = SpeculationConfig("fixed", num_tokens=4), SpeculationConfig(tree=[2, 2, 1])


def assert_as_plain(target: Any, inputs: Any, assistant: SpecDecPPAssistant, plain: Any) -> None:
    ours = target.generate(**inputs, assistant_model=assistant, **MEDIA)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same(ours.scores, plain.scores)
    assert_same(ours.hidden_states, plain.hidden_states)
    assert_same_cache(ours.past_key_values, plain.past_key_values)


@pytest.mark.daily("gemma3", "qwen2.5 vl")
@pytest.mark.parametrize("name", MODELS)
def test_images_and_sound(name: str) -> None:
    """With a draft of text, in chains and trees, with an early exit of the language model and with an EAGLE-3 layer."""
    target, inputs = multimodal(name)
    plain = target.generate(**inputs, **MEDIA)
    assistant = SpecDecPPAssistant.from_draft(informed_draft(plain.sequences), target, speculation=CHAIN)
    assert_as_plain(target, inputs, assistant, plain)
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    assistant.speculation = TREE
    assert_as_plain(target, inputs, assistant, plain)
    assert assistant.stats.accepted > 0
    assistant.detach()
    early = SpecDecPPAssistant.from_early_exit(target, [0, 3], speculation=CHAIN)
    assert_as_plain(target, inputs, early, plain)
    early.detach()
    layer = SpecDecPPAssistant.from_draft(random_layer(target), target, speculation=TREE)
    assert_as_plain(target, inputs, layer, plain)
    assert layer.stats.drafted > 0
