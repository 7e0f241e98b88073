"""On a real GPU, where torch sees one (`make test-gpu`): captured texts are those of uncaptured and plain generation.

In float64, so that passes over several tokens have the likeliest tokens of passes over one."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices.capturing import CHAIN, SETTINGS, Waiting, assert_captured_as_uncaptured, generate
from support.devices.whole_rounds import KINDS as WHOLE
from support.devices.whole_rounds import SAMPLED, TREE, batch, made, together
from support.targets.models import assistant_of, configured, quiet_later_layers, tiny

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.cuda_graphs.captured_target import captured_target
from hf_specdecpp.models.causal_lm import CausalLM

GPU = torch.device("cuda")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

KINDS = ("independent", "early_exit", "conditioned", "eagle3")
OTHERS: dict[str, dict[str, Any]] = {
    "throughput": {"rule": "throughput", "max_tokens": 7},
    "corrected": {**CHAIN, "draft_successors": True, "draft_temperature": 0.8},
    "dyspec throughput": {"tree": "dyspec", "rule": "throughput", "tree_budget": 7, "tree_depth": 4},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 6, "tree_depth": 3},
}


def on_gpu(family: str = "llama", **overrides: Any) -> CausalLM:
    return quiet_later_layers(tiny(family, **overrides)).to(GPU)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_as_uncaptured(kind: str, name: str) -> None:
    assert_captured_as_uncaptured(kind, on_gpu(), **SETTINGS[name])


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "gpt2"])
def test_families(family: str) -> None:
    assert_captured_as_uncaptured("early_exit", on_gpu(family), **CHAIN)


@pytest.mark.parametrize("name", OTHERS)
def test_other_rules(name: str) -> None:
    """After `warm_up` nothing more is captured; costs are measured in it."""
    target = on_gpu()
    assistant = assistant_of("conditioned", target, **OTHERS[name])
    assistant.warm_up(280)
    passes = captured_target(target)
    before = len(passes.graphs)
    for length in (12, 240):
        assert torch.equal(generate(target, assistant, length), generate(target, None, length))
        assert assistant.stats.uncaptured is None
    assert assistant.stats.graphs == before


@pytest.mark.parametrize(("name", "rows", "times"), [("fixed", 50, 80), ("fixed", 1, 600), ("dyspec", 1, 600)])
def test_sampled_texts_have_the_distribution_of_the_target(name: str, rows: int, times: int) -> None:
    """The first two tokens of three, by Pearson's statistic; batches run uncaptured."""
    target = on_gpu(vocab_size=8)
    assistant = assistant_of("conditioned", target, **SETTINGS[name])
    ids = torch.tensor([[1, 5, 2, 7]], device=GPU)
    with torch.no_grad():
        first = target(ids).logits[0, -1].softmax(-1)
        after = torch.cat((ids.expand(8, -1), torch.arange(8, device=GPU)[:, None]), dim=1)
        p = (first[:, None] * target(after).logits[:, -1].softmax(-1)).cpu()
    how: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "pad_token_id": 0}
    torch.manual_seed(0)
    counts = torch.zeros_like(p)
    for _ in range(times):
        for one, two in target.generate(ids.expand(rows, -1), assistant_model=assistant, **how)[:, 4:6].tolist():
            counts[one, two] += 1
    expected = rows * times * p
    often = expected > 5
    statistic, freedom = ((counts - expected).square() / expected)[often].sum(), int(often.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("rows", [2, 3, 8])
@pytest.mark.parametrize("kind", WHOLE)
def test_batches(kind: str, rows: int, tmp_path: Path) -> None:
    if kind == "gemma 4":
        return  # which drafts for no batches
    target, assistant = made(kind, tmp_path, "cuda", **CHAIN)
    ids, mask = batch(rows, vocab=target.config.vocab_size, device="cuda")
    for how in ({}, SAMPLED):
        text = together(target, assistant, ids, mask, **how)
        assert how or torch.equal(text, together(target, None, ids, mask))
        assert assistant.stats.decided["rounds"] == "captured"
        assert assistant.stats.uncaptured is None


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_pieces(kind: str) -> None:
    target = on_gpu()
    assistant = assistant_of(kind, target, **CHAIN, compile=True)
    for length in (12, 33, 17):
        assert torch.equal(generate(target, assistant, length), generate(target, None, length))
        assert assistant.stats.decided["rounds"] == "captured"


@pytest.mark.parametrize("rule", ["fixed", "threshold", "throughput", "tree"])
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_rounds(kind: str, rule: str, tmp_path: Path) -> None:
    """Of every kind of draft, twice the same text, greedy and sampled, the second one without a capture."""
    if rule == "tree" and kind == "mtp 3":
        return  # which drafts no trees
    rules: dict[str, Any] = {"fixed": CHAIN, "tree": TREE}
    target, assistant = made(kind, tmp_path, "cuda", **rules.get(rule, {"rule": rule, "max_tokens": 5}))
    for how in ({}, SAMPLED, {"repetition_penalty": 1.4}):
        graphs = 0
        for turn in range(2):
            text, stats = generate(target, assistant, 236, **how), assistant.stats
            assert stats.decided["rounds"] == "captured"
            assert stats.uncaptured is None
            assert "do_sample" in how or torch.equal(text, generate(target, None, 236, **how))
            assert rule not in ("fixed", "tree") or turn == 0 or stats.graphs == graphs  # others choose shapes
            graphs = stats.graphs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fixed", "dyspec"])
def test_half_precision(dtype: torch.dtype, name: str) -> None:
    """A draft that is the target agrees with nearly all that the target says."""
    target = on_gpu().to(dtype)
    assistant = configured(SpecDecPPAssistant.from_draft(target, target), **SETTINGS[name])
    for sampled in (False, True):
        assert generate(target, assistant, do_sample=sampled, max_new_tokens=40).shape == (1, 52)
        assert assistant.stats.uncaptured is None
        assert assistant.stats.accepted > 24


@pytest.mark.parametrize("where", ["target", "draft"])
def test_what_cannot_be_captured(where: str) -> None:
    """The GPU goes on, uncaptured, and other models are captured after it."""
    target = on_gpu()
    assistant = assistant_of("independent", target, **CHAIN)
    model: Any = target if where == "target" else assistant.ready_drafter().model
    model.model.layers[1].mlp = Waiting(model.model.layers[1].mlp)
    for _ in range(2):
        assert torch.equal(generate(target, assistant), generate(target, None))
    assert (assistant.stats.uncaptured is None) == (where == "draft")
    assert (assistant.ready_drafter().captured[1] is not None) == (where == "target")
    other = on_gpu()
    assistant = assistant_of("independent", other, **CHAIN)
    assert torch.equal(generate(other, assistant), generate(other, None))
    assert assistant.stats.uncaptured is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")
def test_another_device_than_the_current_one() -> None:
    """Where nothing would be captured of what is launched there, replays would return what the capture left."""
    target = on_gpu().to("cuda:1")
    assistant = assistant_of("early_exit", target, **CHAIN)
    for length in (12, 20):
        assert torch.equal(generate(target, assistant, length), generate(target, None, length))
    assert assistant.stats.uncaptured is None


def test_memory_is_freed_with_the_target() -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def text() -> int:
        target = on_gpu()
        assistant = assistant_of("independent", target, **CHAIN)
        generate(target, assistant, 240)
        return assistant.stats.graph_bytes

    for _ in range(2):
        text()  # libraries keep their workspaces
    before = used()
    assert text() > 0
    assert used() <= before
