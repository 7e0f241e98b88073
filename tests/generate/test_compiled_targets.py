"""Targets that transformers compiles: plain `generate()`'s texts, states for drafts, and nothing is compiled again.

Dynamo traces, and what it has traced is run as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compiling import graphs
from support.models import Rounds, assistant_of, prompt, quiet_later_layers, tiny
from support.static_caches import STATIC
from torch import Tensor
from transformers import CompileConfig

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.generation import prefix
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu_products import linear_layers
from hf_specdecpp.models.target_states import RETURNS_CHOSEN, TargetStates

SHORT: dict[str, Any] = {**STATIC, "max_new_tokens": 24}
COSTS = {"draft": 0.1, "verify": [1.0, 1.0, 1.05, 1.1, 1.2]}
LENGTHS = (60, 3, 17)
READING = ("conditioned", "eagle3")


class Texts:
    """Texts of an assistant on a compiled target, of several lengths and under several settings."""

    def __init__(self, target: CausalLM, kind: str, config: CompileConfig) -> None:
        self.target, self.config = target, config
        self.plain = {length: target.generate(prompt(length), **SHORT) for length in LENGTHS}
        assert graphs() == 0
        self.assistant: SpecDecPPAssistant = assistant_of(kind, target, rule="fixed", num_tokens=3)

    def __call__(self, length: int, speculation: SpeculationConfig | None = None, **further: Any) -> Tensor:
        if speculation is not None:
            self.assistant.speculation = speculation
        options = {**SHORT, "compile_config": self.config, **further}
        found: Tensor = self.target.generate(prompt(length), assistant_model=self.assistant, **options)
        return found


def fixed(count: int) -> SpeculationConfig:
    return SpeculationConfig("fixed", num_tokens=count)


@pytest.mark.parametrize(
    "kind", ["conditioned", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("independent", "eagle3"))]
)
def test_nothing_is_compiled_again(kind: str, traced_only: CompileConfig) -> None:
    """Whatever the prompts, the candidates that are rejected and the sampling."""
    if kind in READING and not RETURNS_CHOSEN:
        pytest.skip("such drafts leave the target uncompiled")
    target = quiet_later_layers(tiny("llama", num_hidden_layers=3 if kind in READING else 1))
    texts = Texts(target, kind, traced_only)
    for count in (1, 3, 7):
        texts(60, fixed(count))
    assert graphs() == 4  # over 1, 2, 4 and 8 tokens
    for count in (2, 4, 5, 7):
        for length, plain in texts.plain.items():
            assert torch.equal(texts(length, fixed(count)), plain)
        texts(9, do_sample=True, temperature=1.3)
    assert graphs() == 4
    target.generate(prompt(5), **SHORT, compile_config=traced_only)  # plain generation runs the pass over one token
    assert graphs() == 4 + 1, "it makes all of torch.compile's checks, and returns no states"


def drafted(
    target: CausalLM, assistant: SpecDecPPAssistant, monkeypatch: pytest.MonkeyPatch, **further: Any
) -> list[Any]:
    """Greedy and sampled texts, one of a prompt read in chunks, and what their rounds drafted and accepted."""
    found = []
    settings: list[dict[str, Any]] = [{}, {"do_sample": True, "temperature": 0.8}, {"prefill_chunk_size": 5}]
    for options in settings:
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            rounds = Rounds(patch)
            text = target.generate(prompt(), assistant_model=assistant, **{**SHORT, **options, **further})
        found.append((text.tolist(), rounds.outcomes))
    return found


@pytest.mark.skipif(not RETURNS_CHOSEN, reason="such drafts leave the target uncompiled")
@pytest.mark.every(7)
@pytest.mark.parametrize("rule", ["fixed", "threshold"])
@pytest.mark.parametrize("kind", READING)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_draft_that_reads_states_drafts_the_same(
    family: str, kind: str, rule: Any, traced_only: CompileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside the uncompiled target."""
    target = quiet_later_layers(tiny(family))
    alike = {"adapt": False, "draft_successors": False}  # whatever texts came before
    assistant = assistant_of(kind, target, rule=rule, threshold=0.9, num_tokens=3, **alike)
    expected = drafted(target, assistant, monkeypatch, disable_compile=True)
    assert graphs() == 0
    assert drafted(target, assistant, monkeypatch, compile_config=traced_only) == expected
    assert graphs() > 0
    plain = target.generate(prompt(), **SHORT).tolist()
    assert expected[0][0] == expected[2][0] == plain
    assert sum(accepted for _, accepted in expected[0][1]) > 0


def test_states_of_the_wrong_rows_are_noticed(traced_only: CompileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees it in what is drafted; the texts are verified."""
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("conditioned", target, rule="fixed", num_tokens=3)
    expected = drafted(target, assistant, monkeypatch)
    take = TargetStates.take
    monkeypatch.setattr(TargetStates, "take", lambda states, rows: take(states, rows).roll(1, dims=1))  # type: ignore[union-attr]
    found = drafted(target, assistant, monkeypatch)
    assert found != expected
    assert found[0][0] == expected[0][0]


def test_layers_of_a_compiled_target_keep_their_own_products() -> None:
    target = tiny("llama").float()
    assert list(linear_layers([target]))
    target._compiled_call = target.__call__  # as `get_compiled_call` leaves it
    assert not list(linear_layers([target]))


# Trees ----------------------------------------------------------------------------------------------------------------


def grown(name: Any, budget: int = 12, **further: Any) -> SpeculationConfig:
    shape: dict[str, Any] = {"tree_shape": [3, 2, 1]} if name == "static" else {}
    return SpeculationConfig(tree=name, tree_budget=budget, tree_depth=4, **shape, **further)


@pytest.mark.parametrize("kind", ["independent", pytest.param("conditioned", marks=pytest.mark.slow)])
def test_trees_compile_nothing_again(kind: str, traced_only: CompileConfig) -> None:
    """Whatever the growth, the prompts, the paths that are accepted and the sampling."""
    if kind == "conditioned" and not RETURNS_CHOSEN:
        pytest.skip("such drafts leave the target uncompiled")
    target = quiet_later_layers(tiny("llama", num_hidden_layers=3 if kind == "conditioned" else 1))
    texts = Texts(target, kind, traced_only)
    growths = [
        grown("dyspec"),
        grown("dyspec-exact"),
        grown("static"),
        grown("dyspec", rule="throughput", costs=COSTS),
        grown("dyspec", lookup=True),
    ]
    for further in ({}, {"do_sample": True, "temperature": 1.3}):
        for growth in growths:
            for length, plain in texts.plain.items():
                text = texts(length, growth, **further)
                assert further or torch.equal(text, plain)
                assert texts.assistant.stats.drafted > 0
    assert 2 < graphs() <= 5, "over one token, and over 2, 4, 8 and 16 rows of trees"


def test_trees_of_every_width_would_be_compiled(traced_only: CompileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(prefix, "width_of", lambda count: count)
    target = quiet_later_layers(tiny("llama", num_hidden_layers=1))
    texts = Texts(target, "independent", traced_only)
    for count in range(1, 7):
        texts(17, SpeculationConfig(tree="static", tree_shape=[count], tree_budget=12, lookup=True), max_new_tokens=6)
    assert graphs() > 5
