"""Plain models of drafts: configs of chosen layers, and files that are not what the draft was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.repos import tokenizer
from support.targets.families import model_of
from support.targets.models import prompt, tiny
from support.targets.zoo import tiny_of

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.early_exit import early_exit
from hf_specdecpp.models.loading import load_model
from hf_specdecpp.serving import Destination, Exported, commands_for, write_plain_model

CONFIG = SpecDecPPConfig(draft_kind="early_exit", draft_layers=[0, 1])
LONG_WINDOW = 256  # no short text shows it


@pytest.fixture
def to(tmp_path: Path) -> Destination:
    (tmp_path / "out").mkdir()
    tokenizer().save_pretrained(tmp_path / "words")
    return Destination(tmp_path / "out", Path("out"), "org/target", None, 3)


def write(model: CausalLM, to: Destination, config: SpecDecPPConfig = CONFIG) -> Exported:
    return write_plain_model(model, str(to.folder.parent / "words"), None, config, to)


@pytest.mark.daily(
    "deepseek_v3-settings0-kept0-described0", "deepseek_v3-settings2-kept2-described2", "ernie4_5_moe-*",
    "qwen3_moe-settings5-kept5-described5", "smollm3-*",
)  # fmt: skip
@pytest.mark.parametrize(("family", "settings", "kept", "described"), [
    ("deepseek_v3", {"first_k_dense_replace": 2}, [1, 3], {"first_k_dense_replace": 1}),
    ("deepseek_v3", {"first_k_dense_replace": 1}, [2, 3], {"first_k_dense_replace": 0}),
    ("deepseek_v3", {"first_k_dense_replace": 3}, [0, 1], {"first_k_dense_replace": 2}),
    ("ernie4_5_moe", {"moe_layer_start_index": 2}, [0, 3], {"moe_layer_start_index": 1}),
    ("qwen3_moe", {"mlp_only_layers": [0, 2]}, [1, 2], {"mlp_only_layers": [1]}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, [1, 2], {"mlp_only_layers": [0, 1]}),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}, [1, 3], {"no_rope_layers": [0, 1]}),
    ("qwen2", {}, [1, 3], {"layer_types": ["full_attention", "sliding_attention"], "max_window_layers": 1}),
])  # fmt: skip
def test_configs_describe_the_chosen_layers(
    family: str, settings: dict[str, Any], kept: list[int], described: dict[str, Any], to: Destination
) -> None:
    draft = early_exit(tiny_of(family, **settings).float(), kept)
    write(draft, to)
    config = json.loads((to.folder / "config.json").read_text())
    assert ({name: config[name] for name in described}, config["num_hidden_layers"]) == (described, 2)
    with torch.no_grad():
        assert torch.equal(load_model(to.folder)(prompt(24)).logits, draft(prompt(24)).logits)


def test_the_target_keeps_its_config(to: Destination) -> None:
    target = tiny_of("deepseek_v3", first_k_dense_replace=2).float()
    before = target.config.to_json_string(), target.generation_config.to_json_string()
    write(early_exit(target, [1, 3]), to)
    assert (target.config.to_json_string(), target.generation_config.to_json_string()) == before


def shorten_windows(model: CausalLM) -> None:
    model.config.sliding_window = LONG_WINDOW // 2


def scale_logits(model: CausalLM) -> None:
    model.forward = lambda *inputs, forward=model.forward, **more: _scaled(forward(*inputs, **more))


def _scaled(output: Any) -> Any:
    output.logits = 1.01 * output.logits
    return output


@pytest.mark.parametrize(("spoil", "said"), [
    (shorten_windows, "weights or settings differ, such as model.layers.0.self_attn.sliding_window"),
    (scale_logits, "its logits differ by up to"),
])  # fmt: skip
def test_files_that_say_something_else(spoil: Callable[[CausalLM], None], said: str, to: Destination) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    draft = early_exit(tiny("gemma3_text", sliding_window=LONG_WINDOW, layer_types=kinds).float(), 2)
    spoil(draft)
    with pytest.raises(ValueError, match=said):
        write(draft, to)


def test_weights_are_compared_bit_by_bit(to: Destination, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight of a head is off by a rounding, which no logit of a short text shows enough."""

    def load(folder: Path) -> CausalLM:
        model = load_model(folder)
        with torch.no_grad():
            model.lm_head.weight[0, 0] = model.lm_head.weight[0, 0].nextafter(torch.tensor(9.0))
        return model

    monkeypatch.setattr("hf_specdecpp.serving.load_model", load)
    with pytest.raises(ValueError, match="1 weights or settings differ, such as lm_head.weight"):
        write(early_exit(tiny("llama").float(), 2), to)


@pytest.mark.parametrize(("family", "kept", "said"), [
    ("diffllama", [0, 2], "model.layers.1.self_attn.lambda_init"),  # reckoned from a layer's number
    ("minicpm3", [0, 1], "model.layers.0.residual_scale"),  # reckoned from the number of layers
    ("dory", [0, 1], "its config does not hold together"),
    ("gemma4_unified_text", [0, 1], "(store_full_length_kv|transformers cannot load them)"),
])  # fmt: skip
def test_families_that_do_not_come_back_are_refused(family: str, kept: list[int], said: str, to: Destination) -> None:
    try:
        draft = early_exit(tiny_of(family).float(), kept)
    except (KeyError, ValueError):
        pytest.skip("this version of transformers does not know or build the family")
    with pytest.raises(ValueError, match=f"loaded from the exported files differs from the draft.*{said}"):
        write(draft, to)


def test_a_model_of_images_is_refused(to: Destination) -> None:
    with pytest.raises(ValueError, match="reads more than text"):
        write(model_of("paligemma"), to)


def test_a_quantised_model_is_refused(to: Destination) -> None:
    model = early_exit(tiny("llama").float(), 2)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="quantised, so an adapter cannot be merged"):
        write(model, to)
    assert list(to.folder.iterdir()) == []


def test_a_model_without_tokenizer_is_refused(to: Destination) -> None:
    for file in (to.folder.parent / "words").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="has no tokenizer files"):
        write(early_exit(tiny("llama").float(), 2), to)


def test_tokenizer_files_are_copied_as_they_are(to: Destination) -> None:
    words = to.folder.parent / "words"
    (words / "tokenizer.model").write_bytes(b"what transformers would not write again")
    (words / "tokenizer_of_a_stranger.py").write_text("raise SystemExit")
    write(early_exit(tiny("llama").float(), 2), to)
    written = {file.name for file in to.folder.iterdir()}
    assert written == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer.model",
        "tokenizer_config.json",
    }  # fmt: skip
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        assert (to.folder / name).read_bytes() == (words / name).read_bytes()


def test_generation_config_has_the_ends_of_texts_and_no_way_to_sample(to: Destination) -> None:
    draft = early_exit(tiny("llama").float(), 2)
    draft.generation_config.update(eos_token_id=[5, 7], temperature=0.6, do_sample=False)  # refused by transformers
    write(draft, to)
    written = json.loads((to.folder / "generation_config.json").read_text())
    written.pop("transformers_version")
    assert written == {"eos_token_id": [5, 7], "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}


def test_other_vocabulary_sizes_are_noted(to: Destination) -> None:
    notes = write(early_exit(tiny("llama").float(), 2), to, SpecDecPPConfig(vocab_size=64)).notes
    assert notes == [
        "The draft has 48 token ids and the target 64. vLLM expects equal numbers and may refuse the pair."
    ]


def test_the_guide_has_these_commands() -> None:
    guide = (Path(__file__).parents[1] / "docs" / "serving.md").read_text("utf-8").replace(" \\\n  ", " ")
    commands = commands_for(Destination(Path("x"), Path("my-draft"), "org/target", None, 3))
    assert [command for engine in commands.values() for command in engine if command not in guide.splitlines()] == []
