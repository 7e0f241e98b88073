"""Targets with quantised weights: the text of plain generation, nothing copied, and what cannot work is refused.

`make test-quantised` installs torchao and bitsandbytes in a folder of their own: wherever torchao is installed, every
import of transformers loads it, too, with several lines of warnings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.devices.products import use_copies
from support.devices.quantised import (
    SHAPE,
    ordinary,
    quantised_in_place,
    with_bitsandbytes,
    with_torch_ao,
    with_torchao,
)
from support.files import dflash_files, gemma4_files
from support.files.mtp_files import Files
from support.files.repos import save_adapter
from support.targets.models import partly_agreeing, prompt, random_fusion, random_layer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.choosing import assist
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.models import early_exit as early_exit_module
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu.weight_copies import background
from hf_specdecpp.models.early_exit import early_exit
from hf_specdecpp.models.quantised import multiplies_in_half

pytestmark = pytest.mark.takes(60)

CHAIN = SpeculationConfig("fixed", num_tokens=4)
SETTINGS = {
    "chain": CHAIN,
    "threshold": SpeculationConfig("threshold"),
    "tree": SpeculationConfig(rule="threshold", tree="dyspec", tree_budget=12),
    "own products": SpeculationConfig("fixed", num_tokens=4, cpu_products="off"),
}
TARGETS: dict[str, Callable[[], CausalLM]] = {
    "torchao int8": with_torchao,
    "bitsandbytes 4 bits": lambda: with_bitsandbytes(4),
    "bitsandbytes 4 bits, scales too": lambda: with_bitsandbytes(
        4, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
}
DRAFTS = ["early exit", "merged", "beside", "independent", "quantised", "conditioned", "eagle3"]
VOCAB = list(range(0, 64, 2))


def generate(target: CausalLM, assistant: Any = None, ids: Tensor | None = None, **arguments: Any) -> Tensor:
    ids = prompt() if ids is None else ids
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    output: Tensor = target.generate(ids, assistant_model=assistant, **{**options, **arguments})
    return output


def adapter_in(folder: Path, targets: tuple[str, ...] = ("q_proj", "up_proj")) -> str:
    """A LoRA adapter that was trained on two layers that are not quantised."""
    return save_adapter(ordinary(num_hidden_layers=2), folder, targets=targets)


def assistant_of(kind: str, target: CausalLM, build: Any, folder: Path, speculation: SpeculationConfig) -> Any:
    if kind in ("merged", "beside"):
        return SpecDecPPAssistant.from_early_exit(
            target, 2, adapter=adapter_in(folder), speculation=speculation, merge=kind == "merged"
        )
    if kind in ("independent", "quantised"):
        draft = partly_agreeing(ordinary()) if kind == "independent" else build()
        return SpecDecPPAssistant.from_draft(draft, target, speculation=speculation)
    if kind == "eagle3":
        return SpecDecPPAssistant.from_draft(random_layer(target), target, speculation=speculation)
    if kind == "conditioned":
        fusion = random_fusion(target, share=0.02)
        return SpecDecPPAssistant.from_conditioned(target, 1, (0, 1), fusion, speculation=speculation)
    return SpecDecPPAssistant.from_early_exit(target, 2, speculation=speculation)


@pytest.mark.daily(
    "early exit-chain-torchao int8", "early exit-tree-bitsandbytes 4 bits",
    "merged-chain-bitsandbytes 4 bits, scales too", "merged-own products-torchao int8",
    "beside-threshold-bitsandbytes 4 bits", "beside-own products-bitsandbytes 4 bits, scales too",
    "independent-tree-torchao int8", "quantised-chain-bitsandbytes 4 bits",
    "quantised-tree-bitsandbytes 4 bits, scales too", "conditioned-threshold-torchao int8",
    "conditioned-own products-bitsandbytes 4 bits", "eagle3-threshold-bitsandbytes 4 bits, scales too",
)  # fmt: skip
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", DRAFTS)
def test_the_text_of_plain_generation(kind: str, setting: str, name: str, tmp_path: Path) -> None:
    plain, target = generate(TARGETS[name]()), TARGETS[name]()
    assistant = assistant_of(kind, target, TARGETS[name], tmp_path / "adapter", SETTINGS[setting])
    assert torch.equal(generate(target, assistant), plain)  # attached before its first pass
    assert assistant.stats.accepted > 0
    assert int(generate(target, assistant, do_sample=True).max()) < 64
    if setting != "tree":
        ids = torch.cat((prompt(), prompt(seed=3)))
        assert torch.equal(generate(target, assistant, ids), generate(target, ids=ids))
    assistant.detach()
    assert torch.equal(generate(target), plain)


def bytes_in(thing: Any, sizes: dict[int, int], seen: set[int]) -> dict[int, int]:
    """The storages of all tensors that a model holds, those inside quantised tensors and beside them too."""
    if id(thing) in seen:
        return sizes
    seen.add(id(thing))
    inside: Any = ()
    if isinstance(thing, Tensor):
        if not hasattr(thing, "tensor_data_names"):  # torchao's have no storage of their own
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        inside = vars(thing).values()
    elif isinstance(thing, nn.Module) or type(thing).__module__.startswith("bitsandbytes"):
        inside = vars(thing).values()
    elif isinstance(thing, dict | list | tuple):
        inside = thing.values() if isinstance(thing, dict) else thing
    for each in inside:
        bytes_in(each, sizes, seen)
    return sizes


def own_bytes(target: CausalLM) -> int:
    shared, of_draft = (bytes_in(model, {}, set()) for model in (target, early_exit(target, 2)))
    assert sum(of_draft.values()) > sum(shared.values()) / 2
    return sum(size for place, size in of_draft.items() if place not in shared)


@pytest.mark.parametrize("first", [False, True], ids=["before the first pass", "after it"])
@pytest.mark.parametrize("name", TARGETS)
def test_an_early_exit_has_no_bytes_of_its_own(name: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TARGETS[name]()
    if first:
        generate(target)
    assert own_bytes(target) == 0
    if name.startswith("bitsandbytes"):  # control: by its parameters alone it would copy the scales
        monkeypatch.setattr(early_exit_module, "states_of", lambda _: ())
        assert own_bytes(target) > 0


class TakenOut:
    """What `MatmulLtState` does with the numbers of a weight."""

    __module__ = "bitsandbytes.autograd"

    def __init__(self) -> None:
        self.numbers: Tensor | None = None


class TakesOut(nn.Linear):
    """As `Linear8bitLt`: the first pass takes the numbers out of the weight, so a second taker would find nothing."""

    __module__ = "bitsandbytes.nn.modules"

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight, self.state = nn.Parameter(layer.weight.detach().clone(), requires_grad=False), TakenOut()

    def forward(self, input: Tensor) -> Tensor:
        if self.state.numbers is None:
            self.state.numbers = self.weight.clone()
            self.weight.zero_()
        return nn.functional.linear(input, self.state.numbers)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "control"])
def test_a_target_that_is_attached_before_its_first_pass(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes' 8 bits in small: without the layers' state, draft and target empty one weight."""
    target, expected = ordinary(), generate(ordinary())
    for layer in target.model.layers:
        layer.mlp.up_proj = TakesOut(layer.mlp.up_proj)
    if not shared:
        monkeypatch.setattr(early_exit_module, "states_of", lambda _: ())
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=CHAIN)
    assert torch.equal(generate(target, assistant), expected) == shared
    assistant.detach()
    assert torch.equal(generate(target), expected) == shared


def test_only_layers_that_are_not_quantised_have_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    use_copies(monkeypatch)
    target, bare = with_torchao(), ordinary()
    target.lm_head = bare.lm_head
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=CHAIN)
    plain = generate(target)
    background.wait()
    assert torch.equal(generate(target, assistant), plain)
    copied = {layer.weight for layer, copy in assistant.copies._copies.items() if copy.made}
    assert copied == {bare.lm_head.weight}  # of the target's LM head, and of the draft's, which shares it


HEADS: dict[str, Callable[[], CausalLM]] = {
    "torchao": with_torchao,
    "torchao, embeddings": lambda: with_torchao(kinds=(nn.Linear, nn.Embedding)),
    "torchao, groups": lambda: with_torchao("IntxWeightOnlyConfig"),
    "bitsandbytes 4 bits": lambda: with_bitsandbytes(4, llm_int8_skip_modules=["none"]),
}


@pytest.mark.parametrize("kind", ["all tokens", "some", "conditioned", "eagle3"])
@pytest.mark.parametrize("name", HEADS)
def test_a_quantised_lm_head(name: str, kind: str) -> None:
    target = HEADS[name]()
    if kind == "conditioned":
        assistant = SpecDecPPAssistant.from_conditioned(target, 1, speculation=CHAIN)
    elif kind == "eagle3":
        assistant = SpecDecPPAssistant.from_draft(random_layer(target), target, speculation=CHAIN)
    else:
        vocab = VOCAB if kind == "some" else None
        assistant = SpecDecPPAssistant.from_early_exit(target, 2, draft_vocab=vocab, speculation=CHAIN)
    assert torch.equal(generate(target, assistant), generate(target))
    assert assistant.stats.accepted > 0
    drafter = assistant.ready_drafter()
    if kind == "some":
        hidden = torch.randn(3, SHAPE["hidden_size"])
        error = 0.05 if multiplies_in_half(target) else 1e-4
        expected = target.lm_head(hidden)[:, VOCAB].float()
        torch.testing.assert_close(drafter.head_logits(hidden), expected, rtol=error, atol=error)


def test_an_adapter_cannot_stand_beside_quantised_embeddings(tmp_path: Path) -> None:
    """Where the adapter's folder holds no embeddings that could be compared."""
    folder, path = adapter_in(tmp_path, ("q_proj", "embed_tokens")), tmp_path / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "base_layer" not in name}, path)
    SpecDecPPAssistant.from_early_exit(with_torchao(), 2, adapter=folder, speculation=CHAIN)
    target = with_torchao(kinds=(nn.Linear, nn.Embedding))
    with pytest.raises(ValueError, match=r"changes model\.embed_tokens, which is quantised \(Int8Tensor\)"):
        SpecDecPPAssistant.from_early_exit(target, 2, adapter=folder, speculation=CHAIN)


ACTIVATIONS: dict[str, Callable[[], CausalLM]] = {
    "torchao": lambda: with_torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao, any bits": lambda: with_torchao("Int8DynamicActivationIntxWeightConfig"),
    "bitsandbytes": lambda: with_bitsandbytes(8),
    "bitsandbytes, no outliers": lambda: with_bitsandbytes(8, llm_int8_threshold=0.0),
    "torch.ao": with_torch_ao,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantised_activations_are_refused(name: str) -> None:
    target = ACTIVATIONS[name]()
    plain, layer = generate(target), random_layer(ordinary())
    for make in (
        lambda: SpecDecPPAssistant.from_early_exit(target, 2),
        lambda: SpecDecPPAssistant.from_conditioned(target, 1),
        lambda: SpecDecPPAssistant.from_draft(layer, target),
        lambda: SpecDecPPAssistant.from_draft(ordinary(), target),
        lambda: generate(target, SpecDecPPAssistant.from_draft(ordinary())),
    ):
        with pytest.raises(ValueError, match=r"quantizes activations .* Quantize weights only"):
            make()
    assert torch.equal(generate(target), plain)


def test_products_in_half_precision_are_known() -> None:
    """Trees are tried on the model, which then rounds more."""
    assert multiplies_in_half(with_bitsandbytes(4, bnb_4bit_compute_dtype=torch.bfloat16))
    assert not multiplies_in_half(ordinary())


def test_a_draft_may_quantise_its_activations() -> None:
    """Whatever it says is verified."""
    target, draft = ordinary(), with_torchao("Int8DynamicActivationInt8WeightConfig")
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=CHAIN)
    assert torch.equal(generate(target, assistant), generate(target))
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize("settings", ["chain", "tree"])
@pytest.mark.parametrize("kind", ["dflash", "gemma4"])
def test_drafts_of_others(kind: str, settings: str, tmp_path: Path) -> None:
    """They read the states or the cache of a quantised target, and its embeddings and LM head."""
    if kind == "dflash":
        target = quantised_in_place(dflash_files.target_for().float())
        draft = dflash_files.VARIANTS["plain"].save(tmp_path)
        assistant = SpecDecPPAssistant.from_pretrained(draft, target=target, speculation=SETTINGS[settings])
    else:
        target = quantised_in_place(gemma4_files.target_for().float())
        theirs = gemma4_files.VARIANTS["plain"].theirs().float()
        assistant = SpecDecPPAssistant.from_draft(theirs, target, speculation=SETTINGS[settings])
    ids = 1 + prompt() % 11
    assert torch.equal(generate(target, assistant, ids), generate(target, None, ids))
    assert assistant.stats.drafted > 0


@pytest.mark.parametrize("how", ["torchao", "bitsandbytes"])
def test_multi_token_layers_of_the_original(how: str, tmp_path: Path) -> None:
    """They are read as they are, from files beside those of a quantised target, and draft with its LM head."""
    if how == "torchao":
        torchao = pytest.importorskip("torchao.quantization", exc_type=ImportError)
        config: Any = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    else:
        pytest.importorskip("bitsandbytes", exc_type=ImportError)
        config = BitsAndBytesConfig(load_in_4bit=True)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "first_k_dense_replace": 3}
    Files("glm4_moe", 1, seed=7, dtype=torch.float32, overrides=sizes).save(tmp_path)
    target: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
    assistant, ids = assist(target, "mtp", speculation=CHAIN, default=False), 1 + prompt() % 11
    assert torch.equal(generate(target, assistant, ids), generate(target, None, ids))
    assert assistant.stats.drafted > 0
    layer = assistant.drafter.model.model.layers[0]
    assert all(type(part) is nn.Linear for part in layer.modules() if isinstance(part, nn.Linear))
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}
