"""The README's table of limits: each cell is tried on tiny models of the families that its row names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices.quantised import with_bitsandbytes, with_torch_ao, with_torchao
from support.targets.families import informed_draft, model_of
from support.targets.models import prompt, tiny
from support.targets.multimodal import multimodal
from support.targets.zoo import tiny_of
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration, WhisperConfig, WhisperForConditionalGeneration

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

pytestmark = pytest.mark.takes(60)

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
CHAIN, TREE = SpeculationConfig("fixed", num_tokens=4), SpeculationConfig(tree=[2, 2, 1])
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
TINY: dict[str, Any] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_heads"), 2),
    "d_model": 32,
    "d_ff": 32,
    "d_kv": 16,
    "vocab_size": 48,
}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
Built = tuple[Any, dict[str, Tensor]]


def text(model: Callable[[], Any]) -> Callable[[], Built]:
    return lambda: (model(), {"input_ids": prompt(), "attention_mask": torch.ones(1, 12, dtype=torch.long)})


# Each name in the table: the model, and a prompt of one row.
TARGETS: dict[str, Callable[[], Built]] = {
    "Llama": text(lambda: tiny("llama")),
    "Qwen3": text(lambda: tiny("qwen3")),
    "GPT-2": text(lambda: tiny("gpt2")),
    "DeepSeek-V3": text(lambda: tiny_of("deepseek_v3")),
    "Gemma 3": text(lambda: tiny("gemma3_text")),
    "Mistral": text(lambda: tiny("mistral")),
    "Llama 4": text(lambda: model_of("llama4")),
    "Gemma 3n": text(lambda: model_of("gemma3n")),
    "Bloom": text(lambda: tiny_of("bloom")),
    "torchao int8": text(with_torchao),
    "bitsandbytes 4 bits": text(lambda: with_bitsandbytes(4)),
    "torchao dynamic": text(lambda: with_torchao("Int8DynamicActivationInt8WeightConfig")),
    "bitsandbytes int8": text(lambda: with_bitsandbytes(8)),
    "PyTorch dynamic": text(with_torch_ao),
    "LFM2": text(lambda: model_of("lfm2")),
    "Qwen3.5": text(lambda: tiny_of("qwen3_5_text")),
    "Qwen3-Next": text(lambda: tiny_of("qwen3_next")),
    "Granite 4": text(lambda: tiny_of("granitemoehybrid")),
    "Jamba": text(lambda: tiny_of("jamba")),
    "Bamba": text(lambda: tiny_of("bamba")),
    "Mamba": text(lambda: tiny_of("mamba")),
    "Mamba2": text(lambda: tiny_of("mamba2")),
    "RWKV": text(lambda: tiny_of("rwkv")),
    "MiniMax-01": text(lambda: model_of("minimax")),
    "Qwen2.5-VL": lambda: multimodal("qwen2.5 vl"),
    "LLaVA": lambda: multimodal("llava"),
    "Voxtral": lambda: multimodal("voxtral"),
    "T5": text(lambda: T5ForConditionalGeneration(T5Config(**TINY, **SPECIAL))),
    "Whisper": text(lambda: WhisperForConditionalGeneration(WhisperConfig(**TINY, **SPECIAL))),
}


def cells() -> list[tuple[str, str, str]]:
    """Of each family that a row names, and each column: the family, the column, and why it is refused, or nothing.

    Example: of "trees: ALiBi; batches: takes no positions", the reason of the column "trees" is "ALiBi"."""
    found = re.findall(r"^\| (.+) \|$", README[README.index("## Limits") :], flags=re.MULTILINE)
    (_, *columns, _), *rows = ([cell.strip() for cell in line.split(" |")] for line in found)
    return [
        (name, column, reason_for(column, why) if cell != "✅" else "")
        for kind, *row, why in rows
        for name in kind.partition(": ")[2].split(", ")
        for column, cell in zip(columns, row, strict=True)
    ]


def reason_for(column: str, why: str) -> str:
    reasons = [part.partition(": ") for part in why.split("; ")]
    return next(last or first for first, _, last in reasons if not last or first == column)


def two_rows(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prompt, and under it the same, or without images the same with its first two tokens masked."""
    batch = {name: torch.cat((each, each)) for name, each in inputs.items()}
    if len(inputs) == 2:
        batch["attention_mask"][1, :2] = 0
    return batch


def generate(target: Any, inputs: dict[str, Tensor], column: str, plain: Tensor) -> Tensor:
    if column == "early exit":
        last = target.config.get_text_config().num_hidden_layers - 1
        assistant = SpecDecPPAssistant.from_early_exit(target, [0, last], speculation=CHAIN)
    else:
        draft = informed_draft(plain[:1], target.config.get_text_config().vocab_size)
        speculation = TREE if column == "trees" else CHAIN
        assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=speculation)
    try:
        output: Tensor = target.generate(**inputs, assistant_model=assistant, **OPTIONS)
        assert assistant.stats.drafted > 0
        return output
    finally:
        assistant.detach()


@pytest.mark.daily(
    "Llama-chains-", "GPT-2-early exit-", "Mistral-batches-", "Qwen2.5-VL-trees-", "Bloom-chains-",
    "bitsandbytes 4 bits-early exit-", "Qwen3-Next-batches-LinearAttention", "Mamba2-trees-no position_ids",
    "RWKV-chains-does not use a key-value cache", "torchao dynamic-early exit-quantizes activations",
    "T5-batches-is an encoder-decoder model",
)  # fmt: skip
@pytest.mark.parametrize(("name", "column", "reason"), cells())
def test_each_cell(name: str, column: str, reason: str) -> None:
    target, inputs = TARGETS[name]()
    inputs = two_rows(inputs) if column == "batches" else inputs
    if not reason:
        plain = target.generate(**inputs, **OPTIONS)
        assert torch.equal(generate(target, inputs, column, plain), plain)
    else:
        with pytest.raises(ValueError, match=re.escape(reason)):
            generate(target, inputs, column, inputs["input_ids"])


def test_every_target_is_in_the_table() -> None:
    assert {name for name, _, _ in cells()} == set(TARGETS)
