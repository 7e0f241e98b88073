"""Trees that are drafted with compiled passes are those of uncompiled ones, compiled once, with a few launches."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hf_specdecpp.caches.fixed import FixedCache
from hf_specdecpp.drafting.compiled_trees import CompiledTreeSession
from packaging.version import Version
from support.compiling import generate, graphs
from support.models import assistant_of, prompt, quiet_later_layers, tiny
from support.pretend_devices import on_device, pretend_devices
from support.tree_generation import TREES
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.caches import static_targets
from hf_specdecpp.drafting import compiled, compiled_trees
from hf_specdecpp.drafting.session import DraftSession
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.attention import inputs_in_place, tree_inputs
from hf_specdecpp.trees.tree import DraftTree, relations

pytestmark = [
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.23"),
        reason="makes masks that dynamo cannot trace, so nothing compiles",
    ),
    pytest.mark.usefixtures("traced_drafts"),
]

FAMILIES = ("llama", "gemma3_text", "mistral", "gpt2", "granite")
KINDS = ("independent", "early_exit", "conditioned", "eagle3")
LENGTHS = (3, 240)
COSTS = {"draft": 0.1, "verify": [1.0, 1.0, 1.05, 1.1, 1.2]}


def outcomes(
    target: CausalLM,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    is_compiled: bool,
    growth: str,
    lengths: tuple[int, ...] = LENGTHS,
) -> list[Any]:
    """Texts, and what each round drew and accepted."""
    assistant = assistant_of(kind, target, **TREES[growth], compile=is_compiled, adapt=False)
    found: list[Any] = []
    update = SpecDecPPCandidateGenerator.update_tree

    def note(generator: Any, tree: DraftTree, path: list[int]) -> None:
        assert isinstance(generator.session, CompiledTreeSession if is_compiled else DraftSession)
        found.append((tree.tokens, tree.parents, path))
        update(generator, tree, path)

    with monkeypatch.context() as patch:
        patch.setattr(SpecDecPPCandidateGenerator, "update_tree", note)
        for length in lengths:
            found.append(generate(target, assistant, length).tolist())
            found.append(generate(target, assistant, length, do_sample=True).tolist())
    steps = assistant.ready_drafter().steps
    assert (steps is not None and steps.works) == is_compiled
    assistant.detach()
    return found


@pytest.mark.every(31)
@pytest.mark.parametrize("growth", TREES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_trees_as_uncompiled(family: str, kind: str, growth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a prompt of 3 tokens, and from one of almost a cache's room, which the text outgrows."""
    target = quiet_later_layers(tiny(family))
    ours = outcomes(target, kind, monkeypatch, True, growth)
    assert ours == outcomes(target, kind, monkeypatch, False, growth)
    texts = [each for each in ours if isinstance(each, list)]
    assert texts[::2] == [generate(target, None, length).tolist() for length in LENGTHS]
    assert any(path for *_, path in (each for each in ours if isinstance(each, tuple)))


def keeps_all(session: CompiledTreeSession, path: list[int]) -> None:
    session._lineage = None


def sees_siblings(*args: Any) -> dict[str, Any]:
    model, room, ancestors, *rest = args
    return inputs_in_place(model, room, ancestors.cummax(dim=1).values, *rest)


def stands_behind_all(*args: Any) -> dict[str, Any]:
    found = inputs_in_place(*args)
    ids = found["position_ids"]
    return found | {"position_ids": ids + torch.arange(ids.shape[1])}


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (CompiledTreeSession, "keep", keeps_all),
        (compiled_trees, "inputs_in_place", sees_siblings),
        (compiled_trees, "inputs_in_place", stands_behind_all),
    ],
    ids=["keeps all", "sees siblings", "stands behind all"],
)
def test_passes_that_are_wrong_are_noticed(
    owner: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what is drafted: greedy texts are verified."""
    monkeypatch.setattr(compiled, "_compile", lambda function, _: function)
    target = quiet_later_layers(tiny("llama"))

    def drafted(is_compiled: bool) -> list[Any]:
        return outcomes(target, "independent", monkeypatch, is_compiled, "static", LENGTHS[:1])

    expected = drafted(False)
    assert drafted(True) == expected
    monkeypatch.setattr(owner, name, mutant)
    found = drafted(True)
    texts, plain = ([each for each in some if isinstance(each, list)] for some in (found, expected))
    assert texts[0] == plain[0]
    assert found != expected


@pytest.mark.parametrize("kind", ["independent", pytest.param("conditioned", marks=pytest.mark.slow)])
def test_nothing_is_compiled_again(kind: str) -> None:
    """For any growth, whatever the lengths, the paths that are accepted and the sampling."""
    target = quiet_later_layers(tiny("llama")) if kind == "conditioned" else tiny("llama", num_hidden_layers=1)
    assistant = assistant_of(kind, target, **TREES["static"], compile=True)
    growths = [
        *(SpeculationConfig(**each, compile=True) for each in TREES.values()),
        SpeculationConfig(tree="dyspec", rule="throughput", tree_budget=12, costs=COSTS, compile=True),
    ]

    def texts(*lengths: int) -> None:
        for growth in growths:
            assistant.speculation = growth
            for length in lengths:
                generate(target, assistant, length)
                generate(target, assistant, length, do_sample=True, temperature=1.3)

    texts(5, 300)
    before = graphs()
    assert 3 <= before <= 8  # tokens and levels of 4, 8 and 16 nodes, in a cache of 256 and in any other
    texts(17, 249)
    assert graphs() == before


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_masks_and_positions_in_place(family: str) -> None:
    """Those of a cache that grows, with what it does not hold hidden."""

    model = tiny(family)
    text, tokens = prompt(11), torch.tensor([[1, 2, 3, 4]])
    ancestors, depths = relations([-1, 0, 0, 1])
    cache = DynamicCache(config=model.config)
    model(text, past_key_values=cache)
    cache.activate_past_recording()
    growing = tree_inputs(model, cache, ancestors, depths, 11)
    fixed = inputs_in_place(
        model, 32, torch.nn.functional.pad(ancestors, (0, 4)), torch.nn.functional.pad(depths, (0, 4)), depths,
        torch.tensor(11),
    )  # fmt: skip
    assert torch.equal(growing["position_ids"], fixed["position_ids"])
    in_place = FixedCache(3, 32, torch.device("cpu"))
    with torch.inference_mode():
        model(text, past_key_values=in_place)
        in_place.length.add_(11)
        ours = model(tokens, past_key_values=in_place, **fixed).logits
    torch.testing.assert_close(ours, model(tokens, past_key_values=cache, **growing).logits)


# Launches -------------------------------------------------------------------------------------------------------------


def as_graph(counts: Counter[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """What it launches is replayed with one launch, after its inputs have been copied to where it reads them."""

    def call(*args: Any, **inputs: Any) -> Any:
        before = Counter(counts)
        outputs = function(*args, **inputs)
        counts["read"] = before["read"]  # of a mask, which is traced
        counts["launch"] = before["launch"] + 1 + sum(isinstance(each, Tensor) for each in (*args, *inputs.values()))
        return outputs

    return call


def launched(
    is_compiled: bool, do_sample: bool, layers: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Counter[str], list[int]]:
    """What the rounds of a text cost after the first one, a round on average, and the text."""
    target, rounds = quiet_later_layers(tiny("llama", num_hidden_layers=layers)), []
    take = AssistedDecoding._round
    speculation = SpeculationConfig(tree="dyspec", tree_budget=15, tree_depth=4, compile=is_compiled)
    with pretend_devices() as counts, torch.no_grad(), monkeypatch.context() as patch:

        def counted(decoding: AssistedDecoding, ids: Tensor) -> Any:
            before = Counter(counts)
            result = take(decoding, ids)
            rounds.append(Counter(counts) - before)
            return result

        patch.setattr(AssistedDecoding, "_round", counted)
        patch.setattr(compiled, "_compile", lambda function, _: as_graph(counts, function))
        patch.setattr(static_targets, "CompiledPasses", lambda model, _: as_graph(counts, model.__call__))
        on_device(target)
        assistant = SpecDecPPAssistant.from_conditioned(target, 1, reads=[1, 2], speculation=speculation)
        torch.manual_seed(0)
        text: Any = target.generate(
            on_device(prompt()), assistant_model=assistant, do_sample=do_sample, max_new_tokens=16, pad_token_id=0,
            cache_implementation="static" if is_compiled else None,
        )  # fmt: skip
    assert assistant.stats.accepted > 0
    total: Counter[str] = sum(rounds[1:], Counter())
    return Counter({name: round(count / len(rounds[1:])) for name, count in total.items()}), text.host.tolist()


@pytest.mark.parametrize(
    ("layers", "do_sample", "uncompiled", "most"),
    [
        (8, False, 650, 110),
        pytest.param(28, False, 1900, 190, marks=pytest.mark.slow),
        pytest.param(28, True, 1900, 320, marks=pytest.mark.slow),
    ],
)
def test_what_a_compiled_round_launches(
    layers: int, do_sample: bool, uncompiled: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft and target compiled, beside neither. It waits no more often."""
    eager, text = launched(False, do_sample, layers, monkeypatch)
    ours, same = launched(True, do_sample, layers, monkeypatch)
    assert same == text
    assert eager["launch"] >= uncompiled
    assert ours["launch"] <= min(most, eager["launch"] / 3)
    assert ours["read"] <= eager["read"]
    assert ours["upload"] <= eager["upload"]
    assert ours["sync"] == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_with_generated_code(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    target = quiet_later_layers(tiny("llama"))
    expected = outcomes(target, kind, monkeypatch, False, "dyspec")
    assert outcomes(target, kind, monkeypatch, True, "dyspec") == expected
