"""The model that captured passes run: shared tensors, attention without copies, and when it no longer fits. A capture
counts once, and a failed one leaves what it changes as it was."""

import gc
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.devices.capturing import CHAIN, generate
from support.devices.pretend_graph import pretend_graphs
from support.targets.models import assistant_of, prompt, quiet_later_layers, tiny
from support.targets.outputs import prefill
from support.targets.zoo import tiny_of
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from hf_specdecpp.cuda_graphs import model_copy as copies
from hf_specdecpp.cuda_graphs.fixed_cache import why_not_copied, windows_of
from hf_specdecpp.cuda_graphs.graphs import CannotCaptureError, Graphs, write_lasting
from hf_specdecpp.cuda_graphs.identity import identity
from hf_specdecpp.cuda_graphs.model_copy import GROUPED, for_capture, grouped_attention
from hf_specdecpp.models.causal_lm import CausalLM

CPU = torch.device("cpu")


def attended(heads: int, shared: int, tokens: int, scaling: float | None) -> tuple[Tensor, Tensor]:
    """Ours, and PyTorch's with keys and values copied for the heads that share them."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, (key, value) = random(1, heads, tokens, 4), (random(1, shared, 16, 4) for _ in range(2))
    mask = torch.arange(16) <= 9 + torch.arange(tokens)[:, None]
    found, weights = grouped_attention(nn.Module(), query, key, value, mask[None, None], scaling=scaling)
    assert weights is None
    keys, values = (each.repeat_interleave(heads // shared, dim=1) for each in (key, value))
    return found, F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling).transpose(1, 2)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2), (4, 1)], ids=["multi head", "grouped", "multi query"])
def test_grouped_attention(heads: int, shared: int, tokens: int, scaling: float | None) -> None:
    torch.testing.assert_close(*attended(heads, shared, tokens, scaling))


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2)], ids=["multi head", "grouped"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_attention_over_a_long_cache(heads: int, shared: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of four rows, the last of which has no token that any query sees; a wrong scale is noticed."""
    monkeypatch.setattr(copies, "LONG", 16)
    monkeypatch.setattr(copies, "ROWS", 4)
    found, expected = attended(heads, shared, tokens, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    split = copies.split_attention
    monkeypatch.setattr(copies, "split_attention", lambda *given: split(*given[:4]))
    assert not torch.allclose(attended(heads, shared, tokens, 0.3)[0], expected)


def test_a_mask_for_other_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queries of a group lie head by head, so their masks must, too: one after another would be other tokens'."""
    attend = F.scaled_dot_product_attention

    def interleaved(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **how: Any) -> Tensor:
        if attn_mask.dim() == 4:
            attn_mask = attn_mask[:, :, : attn_mask.shape[2] // 3].repeat_interleave(3, dim=2)
        return attend(query, key, value, attn_mask=attn_mask, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", interleaved)
    found, expected = attended(6, 2, 5, None)
    assert not torch.allclose(found, expected)


@torch.no_grad()
def test_a_copy_shares_tensors_and_leaves_the_model_as_it_is() -> None:
    target = tiny("llama")
    expected, copied = target(prompt()).logits, for_capture(target)
    assert [each.data_ptr() for each in copied.parameters()] == [each.data_ptr() for each in target.parameters()]
    assert copied.config._attn_implementation == GROUPED
    assert target.config._attn_implementation == "sdpa"
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(copied(prompt(), attention_mask=mask).logits, expected)
    assert torch.equal(target(prompt()).logits, expected)


# What is done to a target, and its second layer.
CHANGES: dict[str, Callable[[CausalLM, Any], object]] = {
    "moved": lambda _, layer: setattr(layer.mlp.down_proj, "weight", nn.Parameter(layer.mlp.down_proj.weight + 1.0)),
    "converted": lambda target, _: target.float(),
    "another module": lambda _, layer: setattr(layer.mlp, "act_fn", nn.Tanh()),
    "hooked": lambda _, layer: layer.mlp.register_forward_hook(lambda *_: None),
    "another setting": lambda _, layer: setattr(layer.self_attn, "scaling", 2.0),
    "another config": lambda target, _: setattr(target.config, "final_logit_softcapping", 3.0),
    "in training": lambda target, _: target.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_identity(change: str) -> None:
    target = tiny("llama")
    before = identity(target)
    assert identity(target) == before
    CHANGES[change](target, target.model.layers[1])
    assert identity(target) != before


def test_what_generate_notes_of_its_caches_is_no_change() -> None:
    """transformers keeps the size of its last static cache with the model."""
    target = tiny("llama", num_hidden_layers=1)
    target.generate(prompt(), max_new_tokens=1)
    before = identity(target)
    target.generate(prompt(), max_new_tokens=2, cache_implementation="static")
    assert identity(target) == before


# Graphs, and which caches can be captured. ----------------------------------------------------------------------------


@pytest.mark.usefixtures("pretended")
def test_the_first_run_counts_once() -> None:
    """Though the function runs several times then; a tensor that is not named as changed is off."""
    for changes, expected in ((True, 1), (False, 6)):
        graphs, length = Graphs(CPU), torch.tensor(0)

        def add(length: Tensor = length) -> None:
            length.add_(1)

        graphs.run("one", add, [length] if changes else [])
        assert int(length) == expected


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.nonzero, bool])
@pytest.mark.usefixtures("pretended")
def test_what_cannot_be_captured_changes_nothing(read: Callable[[Tensor], Any]) -> None:
    graphs, length = Graphs(CPU), torch.tensor(3)

    def waits() -> None:
        length.add_(1)
        read(length)

    with pytest.raises(CannotCaptureError, match=r"aten\..* waits for the device|tolist waits for the device"):
        graphs.run("waits", waits, [length])
    assert (int(length), len(graphs)) == (3, 0)
    assert gc.isenabled()


@torch.no_grad()
def test_what_cannot_go_on_in_rooms() -> None:
    target = tiny("llama")
    assert why_not_copied(prefill(target, prompt(4))) is None
    assert why_not_copied(StaticCache(target.config, max_cache_len=8)) == "the text is in a StaticCache"
    shares = prefill(target, prompt(4))
    layer: Any = shares.layers[1]
    layer.keys = None
    assert why_not_copied(shares) == "layers share the keys of others"
    mixed = tiny_of("qwen3_5_text")
    assert windows_of(mixed.config) is None
    assert "keeps" in str(why_not_copied(DynamicCache(config=mixed.config)))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_mlps_and_rotary_embeddings_are_compiled(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where they are captured: prompts have any number of tokens, each of which would take seconds to compile."""
    compiled: list[str] = []

    def note(function: Any, shape: torch.Size) -> Any:
        compiled.append(function.__qualname__)
        return function

    monkeypatch.setattr(copies, "_compiled", note)
    target, ids = tiny(family, num_hidden_layers=2, layer_types=["full_attention"] * 2), prompt()
    expected, copied = target(ids).logits, for_capture(target, fuse=True)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    found: list[Tensor] = []

    def run() -> None:
        write_lasting(found, [copied(ids, attention_mask=mask, use_cache=False).logits])

    run()
    torch.testing.assert_close(found[0], expected)
    assert not compiled
    with pretend_graphs():
        Graphs(CPU).run("pass", run)
    torch.testing.assert_close(found[0], expected)
    mlp = "aMLP" if family == "llama" else "3MLP"
    assert {name.partition(".")[0][-4:] for name in compiled} == {"_emb", mlp}


@pytest.mark.daily("llama-traced", "gemma3_text-inductor")
@pytest.mark.apart
@pytest.mark.parametrize("backend", ["traced", "inductor"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_compiled_pieces_say_what_they_said(
    family: str, backend: str, pretended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts with `compile=True`, by torch.compile itself: as it traces functions, and with the code that it writes."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("It writes C++ for a CPU, and there is no compiler")
    traced, compile_ = [], torch.compile

    def trace(module: Any, _inputs: Any) -> Any:
        traced.append(module)
        return module.forward

    def compiled(function: Any, **how: Any) -> Any:
        return compile_(function, backend=trace if backend == "traced" else "inductor", **how)

    monkeypatch.setattr(torch, "compile", compiled)
    copies._compiled.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests
    target = quiet_later_layers(tiny(family))
    assistant = assistant_of("independent", target, **CHAIN, compile=True)
    for turn in range(2):
        before = pretended["captured"], len(traced)
        assert torch.equal(generate(target, assistant), generate(target, None))
        assert assistant.stats.decided["rounds"] == "captured"
        assert assistant.stats.accepted > 0
        assert (pretended["captured"] > before[0]) == (turn == 0)
        assert (len(traced) > before[1]) == (turn == 0 and backend == "traced")
    counts = torch._dynamo.utils.counters
    # MLPs and rotary embeddings, for all layers of both models, of 5 tokens (pass and window) and of 1 (a step).
    assert counts["stats"]["unique_graphs"] >= 4
    assert not counts["graph_break"]


# Norms. ---------------------------------------------------------------------------------------------------------------


def norms(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]


def off_by(dtype: torch.dtype, family: str) -> float:
    """The largest difference between norms of a copy and the model's own, in steps of the dtype."""
    model = tiny(family).to(dtype)
    with torch.no_grad():
        for each in norms(model):
            each.weight.uniform_(-1.0, 2.0, generator=torch.Generator().manual_seed(1))
        pairs, steps = list(zip(norms(model), norms(for_capture(model)), strict=True)), []
        assert all("forward" in vars(own) for _, own in pairs)
        for theirs, own in pairs:
            for scale in (1e-3, 1.0, 30.0):  # beside epsilon's root, and above
                hidden = scale * torch.randn(40, len(own.weight), generator=torch.Generator().manual_seed(2)).to(dtype)
                expected, found = theirs(hidden), own(hidden)
                assert found.dtype == expected.dtype
                size = torch.finfo(dtype).eps * expected.double().abs()
                steps.append(float(((found.double() - expected.double()).abs() / size.clamp_min(1e-30)).max()))
    return max(steps)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_norms_in_one_kernel(family: str) -> None:
    """In half precision two roundings become one, so they differ by one step at most; Gemma's round once anyway."""
    assert off_by(torch.bfloat16, family) <= (0.51 if family == "gemma3_text" else 1.01)
    assert off_by(torch.float32, family) < 8  # sums in another order
    assert off_by(torch.float64, family) < 2**-20 / torch.finfo(torch.float64).eps  # of float32, as theirs


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_other_formulas_of_norms_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not taken, so norms stay as they are."""
    own = {name: getattr(copies, name) for name in ("rms_norm", "rms_norm_around_one")}
    mutants: list[Any] = [
        lambda norm, weight, eps, hidden: norm(weight, 1e-5, hidden),
        lambda norm, weight, eps, hidden: 0.5 * weight * hidden,
    ]
    for mutant in mutants:
        for name, norm in own.items():
            monkeypatch.setattr(copies, name, partial(mutant, norm))
        with pytest.raises(AssertionError):
            off_by(torch.float32, family)


def test_norms_that_users_changed_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do beside the usual is not seen in two tokens."""
    model = tiny("llama", num_hidden_layers=1)
    kind = type(norms(model)[0])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda module, hidden: forward(module, hidden))
    assert not any("forward" in vars(each) for each in norms(for_capture(model)))
