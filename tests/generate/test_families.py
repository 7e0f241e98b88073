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
from support.families import IMAGE, VOCAB_SIZE, informed_draft, model_of
from support.models import prompt, tiny
from support.outputs import RECORDS, assert_same, assert_same_cache
from support.watchers import no_work, tokenizer
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(12)
DOORS: dict[str, dict[str, Any]] = {
    "chain": {"rule": "fixed", "num_tokens": 4},
    "tree": {"tree": [2, 2, 1]},
    "unattached": {"rule": "fixed", "num_tokens": 4},
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
    "aya vision": with_image(4, pixels(1)),
    "cohere2 vision": with_image(4, pixels(1)),
    "git": {"input_ids": PROMPT, "pixel_values": pixels(1)},
    "idefics2": with_image(2, pixels(1, 1)),
    "idefics3": with_image(4, pixels(1, 1)),
    "mllama": with_image(
        1,
        pixels(1, 1, 1),
        aspect_ratio_mask=torch.ones(1, 1, 1).long(),
        aspect_ratio_ids=torch.ones(1, 1).long(),
        cross_attention_mask=torch.ones(1, 13, 1, 1).long(),
    ),  # fmt: skip
    "paligemma": with_image(4, pixels(1), token_type_ids=torch.zeros(1, 16).long()),
    "smolvlm": with_image(4, pixels(1, 1)),
}


@contextmanager
def assisted(target: CausalLM, text: Tensor, door: str) -> Iterator[SpecDecPPAssistant]:
    """An assistant that knows most of `text`."""
    draft = informed_draft(text, target.config.get_text_config().vocab_size)
    speculation = SpeculationConfig(**DOORS[door])
    assistant = SpecDecPPAssistant.from_draft(draft, None if door == "unattached" else target, speculation=speculation)
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


# Right ----------------------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("door", ["chain", "tree"])
@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "granite4 of attention", "llama4", "ettin"])
def test_text(family: str, door: str) -> None:
    """Four-dimensional hidden states, keys shared between layers, a class that is stateful in other sizes."""
    assert_equal(model_of(family, "eager"), door, input_ids=PROMPT, **RECORD)


@pytest.mark.parametrize("family", ["lfm2", "lfm3", *MLLAMA])
def test_chains(family: str) -> None:
    """Layers without keys, which return no attentions; cross-attention layers that read nothing."""
    assert_equal(model_of(family, "eager"), "chain", input_ids=PROMPT, **RECORD)


@pytest.mark.every(5)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("family", ["aya vision", "cohere2 vision", "idefics2", "idefics3", "smolvlm"])
def test_images(family: str, door: str) -> None:
    """Windows of the text model, and images that are longer with the prompt than those."""
    assert_equal(model_of(family), door, return_dict_in_generate=True, use_cache=True, **IMAGES[family])


@pytest.mark.parametrize("family", ["git", "paligemma"])
def test_images_in_chains(family: str) -> None:
    assert_equal(model_of(family), "chain", return_dict_in_generate=True, **IMAGES[family])


def test_a_cache_that_its_config_switches_off() -> None:
    target = model_of("mpt")
    assert not target.generation_config.use_cache
    assert_refused(target, "chain", "use_cache=False.*in the model's own config.*Pass use_cache=True", input_ids=PROMPT)
    assert_equal(target, "chain", input_ids=PROMPT, use_cache=True, return_dict_in_generate=True)


class Interrupted(BaseException):
    """Like Ctrl-C, which would stop the tests."""


class Interrupting(BaseStreamer):
    """Presses Ctrl-C when the text has `length` tokens; or breaks a layer of the target in the next pass."""

    def __init__(self, length: int, layer: nn.Module | None) -> None:
        self.seen: list[int] = []
        self.length, self.layer = length, layer
        self.handle: Any = None

    def put(self, value: Tensor) -> None:
        self.seen += value.flatten().tolist()
        if len(self.seen) < self.length or self.handle is not None:
            return
        if self.layer is None:
            raise Interrupted
        self.handle = self.layer.register_forward_pre_hook(self.stop)

    def stop(self, *_: Any) -> None:
        raise Interrupted

    def end(self) -> None: ...


@pytest.mark.every(5)
@pytest.mark.parametrize("where", ["streamer", "second layer", "last layer"])
@pytest.mark.parametrize("family", ["lfm2", "lfm3", "gemma3n"])
def test_an_interrupted_text_can_be_continued(family: str, where: str) -> None:
    """From the user's cache, whose layers of several kinds are all rolled back to the text that was emitted."""
    target = model_of(family)
    plain, cache = target.generate(PROMPT, **ARGUMENTS), DynamicCache(config=target.config)
    layers = target.model.layers
    streamer = Interrupting(20, {"streamer": None, "second layer": layers[1], "last layer": layers[-1]}[where])
    with assisted(target, plain, "chain") as assistant, pytest.raises(Interrupted):
        target.generate(PROMPT, assistant_model=assistant, past_key_values=cache, streamer=streamer, **ARGUMENTS)
    if streamer.handle is not None:
        streamer.handle.remove()
    assert len(streamer.seen) < plain.shape[1]
    left = {**ARGUMENTS, "max_new_tokens": plain.shape[1] - len(streamer.seen)}
    assert torch.equal(target.generate(torch.tensor([streamer.seen]), past_key_values=cache, **left), plain)


# Refused --------------------------------------------------------------------------------------------------------------

KEEPS_NO_CACHE = "does not use a key-value cache of transformers"
BOTH_WAYS = {"input_ids": PROMPT, "token_type_ids": torch.zeros_like(PROMPT)}


@pytest.mark.parametrize(("family", "doors", "message", "inputs"), [
    ("minimax", ("chain",), KEEPS_NO_CACHE, {}),
    ("openai-gpt", ("chain", "unattached"), KEEPS_NO_CACHE, {}),
    ("xlnet", ("chain",), KEEPS_NO_CACHE, {}),
    ("blt", ("chain",), "reads bytes in patches", {}),
    ("imagegpt", ("chain", "unattached"), "predicts 47 of its 48 tokens", {}),
    ("lfm2", ("unattached",), "keeps states of convolutions in its cache", {}),
    ("lfm3", ("unattached",), "keeps states of convolutions in its cache", {}),
    ("mllama", ("chain", "unattached"), "keeps its image in cross-attention layers", IMAGES["mllama"]),
    ("paligemma", ("tree", "unattached"), "reads its prompt in both directions", BOTH_WAYS),
    ("llama", ("chain", "unattached"), "The prompt is empty", {"input_ids": PROMPT[:, :0]}),
])  # fmt: skip
def test_refused(family: str, doors: tuple[str, ...], message: str, inputs: dict[str, Any]) -> None:
    for door in doors:
        assert_refused(model_of(family), door, message, **(inputs or {"input_ids": PROMPT}))


def test_rows_of_an_image_that_are_no_tokens() -> None:
    target = model_of("git")
    with assisted(target, PROMPT, "tree") as assistant, pytest.raises(ValueError, match="12 tokens.*rows in its cache"):
        target.generate(assistant_model=assistant, **ARGUMENTS, **IMAGES["git"])


def test_sampling_with_another_tokenizer() -> None:
    """transformers would rebuild the LM head of the assistant, which is not a causal LM."""
    target, theirs = model_of("llama"), tokenizer()
    ours = PreTrainedTokenizerFast(tokenizer_object=theirs.backend_tokenizer)
    ours.add_tokens(["another"])
    draft = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE + 1, hidden_size=16, num_hidden_layers=1,
                                         intermediate_size=16, num_attention_heads=2))  # fmt: skip
    assistant = SpecDecPPAssistant.from_draft(draft.double())
    arguments: dict[str, Any] = {"tokenizer": theirs, "assistant_tokenizer": ours, "max_new_tokens": 8}
    with no_work(target), pytest.raises(ValueError, match="assistant_tokenizer: transformers samples"):
        target.generate(PROMPT, assistant_model=assistant, do_sample=True, **arguments)
    plain = target.generate(PROMPT, do_sample=False, max_new_tokens=8)
    assert torch.equal(target.generate(PROMPT, assistant_model=assistant, do_sample=False, **arguments), plain)


# Adapters and offloading ----------------------------------------------------------------------------------------------

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
        for door in ("chain", "tree"):
            with assisted(target, plain.sequences, door) as assistant:
                text = target.generate(PROMPT, assistant_model=assistant, **ARGUMENTS)
            assert assistant.stats.accepted > 0
            assert torch.equal(text, plain.sequences)
        with pytest.raises(ValueError, match="is offloaded.*Use an independent draft"):
            SpecDecPPAssistant.from_early_exit(target, 1)
        assert_refused(target, "unattached", "The target is offloaded.*Attach", input_ids=PROMPT)


# Drafts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("family", ["llama4", MLLAMA[1], "lfm2", "granite4 of attention", "idefics3"])
def test_drafts_of_their_own(family: str) -> None:
    """As an early exit, and as a draft for itself, which always agrees."""
    target = model_of(family)
    plain, speculation = target.generate(PROMPT, **ARGUMENTS), SpeculationConfig("fixed", num_tokens=4)
    for make in (
        lambda: SpecDecPPAssistant.from_early_exit(target, 2, speculation=speculation),
        lambda: SpecDecPPAssistant.from_draft(target, target, speculation=speculation),
    ):
        assistant = make()
        assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **ARGUMENTS), plain)
        assistant.detach()
    assert assistant.stats.acceptance_rate == 1.0


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
