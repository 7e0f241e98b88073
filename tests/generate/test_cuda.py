"""On a real GPU, where torch sees one (`make test-gpu`): plain generation's texts, uncompiled and with CUDA graphs.

In float64, so that passes over several tokens have the likeliest tokens of passes over one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.models import assistant_of, prompt, quiet_later_layers, random_fusion, tiny
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
compiles = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="drafts are not compiled there"
)

KINDS = ("independent", "early_exit", "conditioned", "eagle3")
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.6},
    "throughput": {"rule": "throughput", "max_tokens": 7},
    "corrected": {"rule": "fixed", "num_tokens": 4, "draft_successors": True, "draft_temperature": 0.8},
    "lookup": {"rule": "fixed", "num_tokens": 3, "lookup": True},
    "dyspec": {"tree": "dyspec", "tree_budget": 12, "tree_depth": 4},
    "dyspec throughput": {"tree": "dyspec", "rule": "throughput", "tree_budget": 7, "tree_depth": 4},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 6, "tree_depth": 3},
    "static": {"tree": "static", "tree_shape": [2, 2, 1]},
}
COMPILED = ("fixed", "throughput", "corrected", "dyspec", "dyspec throughput")
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "no_repeat_ngram_size": 2}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "max_new_tokens": 40, "pad_token_id": 0}
STATIC: dict[str, Any] = {"cache_implementation": "static"}
LONG = 240  # tokens of a prompt whose text outgrows a draft's first cache


def target_on_gpu() -> CausalLM:
    return quiet_later_layers(tiny("llama")).to(GPU)


def on_gpu(length: int = 12, seed: int = 0) -> Tensor:
    return prompt(length, seed).to(GPU)


def assistant_on_gpu(kind: str, target: CausalLM, name: str, **further: Any) -> SpecDecPPAssistant:
    settings = {**SETTINGS[name], **further}
    if kind != "conditioned":
        return assistant_of(kind, target, **settings)
    fusion = random_fusion(target.cpu()).to(GPU)
    return SpecDecPPAssistant.from_conditioned(
        target.to(GPU), 2, fusion=fusion, speculation=SpeculationConfig(**settings)
    )


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_of_plain_generation(kind: str, name: str) -> None:
    target = target_on_gpu()
    assistant = assistant_on_gpu(kind, target, name)
    for length in (12, LONG):
        ids = on_gpu(length)
        assert torch.equal(target.generate(ids, assistant_model=assistant, **GREEDY), target.generate(ids, **GREEDY))
    assert assistant.stats.target_seconds > 0.0


@pytest.mark.parametrize("name", SETTINGS)
def test_a_seed_repeats_sampled_texts(name: str) -> None:
    target = target_on_gpu()
    texts = []
    for _ in range(2):
        assistant = assistant_on_gpu("conditioned", target, name)
        if "throughput" in name:
            assistant.speculation.costs = {"draft": 0.05, "verify": [1.0, 1.0, 1.0, 1.2], "branch": 0.01}
        torch.manual_seed(3)
        texts.append(target.generate(on_gpu(), assistant_model=assistant, **SAMPLED))
    assert torch.equal(*texts)


@pytest.mark.parametrize(("name", "rows", "times"), [("fixed", 50, 80), ("fixed", 1, 600), ("dyspec", 1, 600)])
def test_sampled_texts_have_the_distribution_of_the_target(name: str, rows: int, times: int) -> None:
    """The first two tokens of three, by Pearson's statistic."""
    target = tiny("llama", vocab_size=8)
    assistant = assistant_on_gpu("conditioned", target, name)
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


@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind: str) -> None:
    target = target_on_gpu()
    ids = torch.cat([on_gpu(seed=seed) for seed in range(3)])
    plain = target.generate(ids, **GREEDY)
    assistant = assistant_on_gpu(kind, target, "fixed")
    assert torch.equal(target.generate(ids, assistant_model=assistant, **GREEDY), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fixed", "throughput", "dyspec"])
def test_half_precision(dtype: torch.dtype, name: str) -> None:
    """A draft that is the target agrees with nearly all that the target says."""
    target = target_on_gpu().to(dtype)
    assistant = SpecDecPPAssistant.from_draft(target, target, speculation=SpeculationConfig(**SETTINGS[name]))
    for how in (GREEDY, SAMPLED):
        assert target.generate(on_gpu(), assistant_model=assistant, **how).shape == (1, 52)
        if name == "fixed":
            assert assistant.stats.accepted > 24


# Compiled, with CUDA graphs. ------------------------------------------------------------------------------------------


def texts(target: CausalLM, assistant: SpecDecPPAssistant, count: int = 3, **how: Any) -> list[Tensor]:
    """Sampled and greedy in turn, of several lengths."""
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        options = {**(GREEDY if seed % 2 else SAMPLED), **how}
        ids = on_gpu(LONG if seed == 2 else 12 + seed, seed)
        found.append(target.generate(ids, assistant_model=assistant, **options))
    return found


def but_for_the_end(texts: list[Tensor]) -> list[Tensor]:
    """Where a static cache ends chains are shorter, so that random numbers are drawn for fewer candidates."""
    return [text[:, :-8] for text in texts]


@pytest.mark.parametrize("parts", ["target", "draft", "both"])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
@compiles
def test_compiled_texts_are_those_of_uncompiled_ones(kind: str, name: str, parts: str) -> None:
    """Sampled ones under the same seed, too, and greedy ones are those of plain generation."""
    target = target_on_gpu()
    costs = {"costs": {"draft": 0.05, "verify": [1.0, 1.0, 1.0, 1.2]}} if name == "throughput" else {}
    assistant = assistant_on_gpu(kind, target, name, **costs)
    expected = texts(target, assistant)
    how = STATIC if parts != "draft" else {}
    assistant.speculation.compile = parts != "target"
    for _ in range(2):
        assistant.memory.clear()
        found = texts(target, assistant, **how)
        assert torch.equal(found[1], target.generate(on_gpu(13, 1), **GREEDY))
        if "throughput" not in name and name != "corrected":
            assert all(map(torch.equal, but_for_the_end(found), but_for_the_end(expected)))
        assert assistant.ready_drafter().is_compiled == (parts != "target")


@pytest.mark.parametrize("name", ["throughput", "dyspec throughput"])
@pytest.mark.parametrize("kind", ["conditioned", "independent"])
@pytest.mark.slow
@compiles
def test_after_warm_up_nothing_is_compiled(kind: str, name: str) -> None:
    target = target_on_gpu()
    assistant = assistant_on_gpu(kind, target, name, compile=True)
    assistant.warm_up(300, do_sample=False)
    torch._dynamo.utils.counters.clear()
    found = texts(target, assistant, **STATIC)
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert torch.equal(found[1], target.generate(on_gpu(13, 1), **GREEDY))
