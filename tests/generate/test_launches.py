"""What a captured round asks of the host: one launch and one read, or two of each, where processors are called in
between; on pretended graphs of a pretended device."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.devices.pretend_cuda import pretend_graphs_on_devices
from support.devices.pretend_devices import on_device
from support.devices.pretend_graph import pretend_graphs
from support.targets.calls import our_calls, our_instructions
from support.targets.models import assistant_for, assistant_of, configured, prompt, quiet_later_layers, tiny
from torch import Tensor
from torch.nn import functional

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.caches import masks
from hf_specdecpp.cuda_graphs import model_copy
from hf_specdecpp.cuda_graphs.graphs import Graphs
from hf_specdecpp.generation.captured.entering import BETWEEN
from hf_specdecpp.generation.captured.parts import GraphDrafts
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.output_text import OutputText
from hf_specdecpp.models.cpu import faster_products
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.trees.tree import DraftTree

RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.9, "max_tokens": 5},
    "throughput": {"rule": "throughput", "max_tokens": 5},
    "tree": {"rule": "fixed", "tree": "dyspec", "tree_budget": 15},
    "lookups": {"rule": "fixed", "num_tokens": 4, "lookup": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.2},
}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int, int]]]:
    """Captures, replays, reads and launches of each round of a text but the first, in which the prompt is read."""
    found: list[tuple[int, int, int, int]] = []
    make = AssistedDecoding.round
    with pretend_graphs_on_devices() as (graphs, devices):

        def counted(decoding: AssistedDecoding) -> None:
            before, drafts = (graphs.copy(), devices.copy()), decoding.drafts
            is_first = isinstance(drafts, GraphDrafts) and not drafts.made
            make(decoding)
            if isinstance(drafts, GraphDrafts) and not is_first:
                changes = [graphs[name] - before[0][name] for name in ("captured", "replayed")]
                found.append((*changes, *(devices[name] - before[1][name] for name in ("read", "launch"))))  # type: ignore[arg-type]

        monkeypatch.setattr(AssistedDecoding, "round", counted)
        yield found


def texts(ids: Tensor, target: Any, assistant: Any, **how: Any) -> Tensor:
    defaults: dict[str, Any] = {"max_new_tokens": 24, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    torch.manual_seed(0)
    text: Tensor = target.generate(ids, assistant_model=assistant, **defaults | how)
    return text.cpu()


def two_texts(rule: str, rows: int, rounds: list[Any], **how: Any) -> tuple[Any, list[Tensor], Tensor]:
    """An assistant, two texts with it, of which `rounds` are the second's, and plain generation's."""
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
    ids, found = torch.cat([prompt(9, seed=row) for row in range(rows)]), []
    ids = torch.cat((ids, ids), dim=1) if rule == "lookups" else ids
    plain = texts(ids, target, None, **how)
    assistant = assistant_of("early_exit", on_device(target), **RULES[rule])
    for _ in range(2):
        rounds.clear()
        found.append(texts(on_device(ids), target, assistant, **how))
    return assistant, found, plain


def by_rows(*rules: str) -> list[Any]:
    """Rules with one row and with three; trees with one, because batches draft chains only."""
    return [
        pytest.param(rule, rows, id=f"{rule}-{rows}")
        for rule in rules
        for rows in (1, 3)
        if (rule, rows) != ("tree", 3)
    ]


@pytest.mark.daily("greedy-fixed-1", takes=8)
@pytest.mark.parametrize(("rule", "rows"), by_rows(*RULES))
@pytest.mark.parametrize("how", WAYS)
def test_one_launch_and_one_read(rule: str, how: str, rows: int, rounds: list[tuple[int, int, int, int]]) -> None:
    assistant, found, plain = two_texts(rule, rows, rounds, **WAYS[how])
    assert how == "sampled" or torch.equal(found[1], plain)
    assert assistant.stats.decided["rounds"] == "captured"
    assert assistant.stats.lookup_rounds or rule != "lookups" or how != "greedy"
    assert len(rounds) > 3
    for captured, replayed, read, launched in rounds:
        assert captured == 0 or rule in ("throughput", "lookups")  # which take other shapes
        if captured:
            continue
        assert replayed == read == 1
        assert launched - replayed <= 1  # the calibration of estimates, or the looked-up candidates, go to the device


@pytest.mark.daily("greedy-fixed-1", takes=8)
@pytest.mark.parametrize(("rule", "rows"), by_rows("fixed", "tree"))
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_two_launches_and_two_reads_with_processors_between(
    rule: str, sampled: bool, rows: int, rounds: list[tuple[int, int, int, int]]
) -> None:
    """The processors, which read nothing by themselves, launch what they launch."""
    how: dict[str, Any] = {"bad_words_ids": [[3], [5, 7], [11, 12]], "do_sample": sampled, "top_k": 1}
    assistant, found, plain = two_texts(rule, rows, rounds, **how)
    assert all(torch.equal(text, plain) for text in found)
    assert assistant.stats.decided["rounds"] == BETWEEN
    assert len(rounds) > 3
    for captured, replayed, read, _ in rounds:
        assert (captured, replayed, read) == (0, 2, 2)


def test_a_draft_beside_captured_passes_leaves_out_cudnns_attention() -> None:
    """Where rounds are made step by step the draft's text grows, uncaptured."""
    target, seen = quiet_later_layers(tiny("llama", num_hidden_layers=2)), []
    with pretend_graphs_on_devices():
        on_device(target)
        assistant = assistant_of("independent", target, **RULES["fixed"])
        inner: Any = assistant.ready_drafter().model.get_decoder()
        inner.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
        texts(on_device(prompt(9)), target, assistant)
        assert "step by step" in assistant.stats.decided["rounds"]
        assert assistant.stats.uncaptured is None
    assert len(seen) > 4
    assert not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled()


# Kernels of a round, counted on the pretended graph. ------------------------------------------------------------------


@torch.library.custom_op("pretended::rms_norm", mutates_args=())
def one_norm(hidden: Tensor, shape: list[int], weight: Tensor | None, eps: float) -> Tensor:
    """One kernel, as on CUDA; a CPU composes a norm of eight."""
    return functional.rms_norm(hidden, shape, weight, eps).clone()


def kernels(layers: int, **settings: Any) -> dict[str, int]:
    """Launches of each graph of a greedy text in bfloat16; the draft is the first of so many layers."""
    found: dict[str, int] = {}
    add = Graphs._add

    def counted(graphs: Graphs, key: Any, *arguments: Any) -> None:
        add(graphs, key, *arguments)
        recorded: Any = graphs._graphs[key][0]
        found[key[0]] = len(recorded.launches)

    attention = functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch, pretend_graphs():
        patch.setattr(Graphs, "_add", counted)
        patch.setattr(model_copy, "F", SimpleNamespace(rms_norm=one_norm, scaled_dot_product_attention=attention))
        target = tiny("llama", num_hidden_layers=layers).to(torch.bfloat16)
        assistant = configured(SpecDecPPAssistant.from_early_exit(target, 1), adapt=False, **settings)
        texts(prompt(9), target, assistant, do_sample=False)
        assert assistant.stats.decided["rounds"] == "captured"
    return found


def kernels_of(layers: int, graph: str, **settings: Any) -> int:
    """As `kernels`, from two and three layers: each further layer launches as much as the third."""
    few, more = (kernels(count, **settings)[graph] for count in (2, 3))
    return few + (layers - 2) * (more - few)


FIVE: dict[str, Any] = {"rule": "fixed", "num_tokens": 5}
THIRTY: dict[str, Any] = {"rule": "fixed", "tree": "dyspec", "tree_budget": 30}


@pytest.mark.daily("tree of 30", "plain pass")
@pytest.mark.takes(6)
@pytest.mark.parametrize(
    ("layers", "graph", "settings", "most"),
    [(30, "round", FIVE, 1250), (32, "read", FIVE, 880), (32, "round", THIRTY, 1600)],
    ids=["chain of 5", "plain pass", "tree of 30"],
)  # fmt: skip
def test_few_kernels(layers: int, graph: str, settings: dict[str, Any], most: int) -> None:
    """They were 1,898, 1,329 and 2,385."""
    assert most * 0.8 < kernels_of(layers, graph, **settings) <= most


@pytest.mark.takes(6)
@pytest.mark.parametrize(
    "mutant",
    [
        (model_copy, "_use_fast_norm", lambda _: None),
        (masks.Nodes, "mask", lambda nodes, model: masks.as_mask(nodes.columns(), model)),
    ],
    ids=["norms of eight kernels", "masks of each pass"],
)
def test_more_kernels_are_noticed(mutant: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    few = kernels(2, **FIVE)["round"]
    monkeypatch.setattr(*mutant)
    assert kernels(2, **FIVE)["round"] > few + 20


# What one round runs of the package: counted in functions and files, which no clock disturbs. -------------------------


# Settings, and the most functions and files of a round: what a reader can follow, not what happens to be.
CHAIN, TREE = (60, 12), (90, 14)
ROUNDS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "fixed": ({"rule": "fixed", "num_tokens": 3}, CHAIN),
    "threshold": ({"rule": "threshold"}, CHAIN),
    "tree": ({"rule": "fixed", "tree": "dyspec", "tree_budget": 8}, TREE),
}


def run_by_rounds(monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any]) -> list[set[tuple[str, str]]]:
    """The files and functions of each round but the first two of the second text of an assistant."""
    found: list[set[tuple[str, str]]] = []
    original = AssistedDecoding.round

    def watched(self: AssistedDecoding) -> None:
        with our_calls() as calls:
            original(self)
        found.append({(code.co_filename, f"{code.co_name} at line {code.co_firstlineno}") for code in calls})

    target = tiny("llama").float()
    assistant = assistant_for(target, mix=0.9, **speculation)
    with monkeypatch.context() as patch:
        patch.setattr(AssistedDecoding, "round", watched)
        for _ in range(2):
            found.clear()
            target.generate(prompt(9), assistant_model=assistant, max_new_tokens=30, do_sample=False)
    return found[2:]


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_is_few_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speculation, (functions, files) = ROUNDS[name]
    rounds = run_by_rounds(monkeypatch, speculation)
    assert len(rounds) > 3
    # Some rounds learn, which takes a few functions more.
    usual = sorted(rounds, key=len)[len(rounds) // 2]
    assert len(usual) <= functions, "\n".join(sorted(f"{file} {function}" for file, function in usual))
    assert len({file for file, _ in usual}) <= files


def test_more_functions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a text asks its processors though there are none."""
    speculation = ROUNDS["threshold"][0]
    few, original = max(map(len, run_by_rounds(monkeypatch, speculation))), Processing.__init__

    def asked(self: Processing, processors: Any) -> None:
        original(self, processors)
        self.does_nothing = False

    monkeypatch.setattr(Processing, "__init__", asked)
    assert max(map(len, run_by_rounds(monkeypatch, speculation))) > few


# The host's work in captured rounds, which delays the next launch: counted in instructions of Python. -----------------


# 25 ns each, and some operations of PyTorch: 0.15 ms. They were 3,100 for a chain, 8,900 for a tree.
INSTRUCTIONS = {"fixed": 2_500, "threshold": 3_000, "throughput": 4_000, "tree": 6_000}


def instructions(rule: str, monkeypatch: pytest.MonkeyPatch, new_tokens: int = 24) -> tuple[list[Counter[str]], bool]:
    """Of the rounds of a second text that capture nothing, and whether it equals plain generation's."""
    found: list[Counter[str]] = []
    make = AssistedDecoding.round

    def counted(decoding: AssistedDecoding) -> None:
        drafts = decoding.drafts
        if is_first or not isinstance(drafts, GraphDrafts) or not drafts.made:
            return make(decoding)
        captured = len(drafts.rounds.graphs)
        with our_instructions() as own:
            make(decoding)
        if len(drafts.rounds.graphs) == captured:
            found.append(own)
        return None

    monkeypatch.setattr(AssistedDecoding, "round", counted)
    with pretend_graphs_on_devices():
        target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
        settings = THIRTY if rule == "tree" else {**RULES[rule], "tree": False}
        plain = texts(ids := prompt(9), target, None, max_new_tokens=new_tokens, do_sample=False)
        assistant = assistant_of("early_exit", on_device(target), **settings)
        for is_first in (True, False):  # noqa: B007 - read above
            ours = texts(on_device(ids), target, assistant, max_new_tokens=new_tokens, do_sample=False)
    return found, torch.equal(ours, plain)


def usual(rounds: list[Counter[str]]) -> Counter[str]:
    """The median round: in some a rate is fitted, and some have few candidates."""
    return sorted(rounds, key=Counter.total)[len(rounds) // 2]


@pytest.mark.takes(8)
@pytest.mark.daily("fixed", "throughput")
@pytest.mark.parametrize("rule", INSTRUCTIONS)
def test_few_instructions(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chains with every rule, and of a tree. Which shapes `throughput` would try depends on this machine's clock."""
    rounds, same = instructions(rule, monkeypatch)
    assert same
    assert len(rounds) > 3
    assert 500 < (own := usual(rounds)).total() <= INSTRUCTIONS[rule], own.most_common(20)


def one_by_one(parents: list[int], tokens: list[int], estimates: list[float]) -> DraftTree:
    tree = DraftTree()
    for parent, token, estimate in zip(parents, tokens, estimates, strict=True):
        tree.add(parent, token, estimate=estimate)
    return tree


@pytest.mark.takes(8)
def test_more_instructions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the nodes of a tree are added one by one."""
    monkeypatch.setattr(DraftTree, "of", one_by_one)
    rounds, same = instructions("tree", monkeypatch)
    assert same
    assert usual(rounds).total() > INSTRUCTIONS["tree"]


@pytest.mark.daily("True")
@pytest.mark.takes(4)
@pytest.mark.parametrize("keeps", [True, False])
def test_emitted_tokens_are_uploaded_once(
    keeps: bool, rounds: list[tuple[int, int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the text is returned. A mutant does so in each round, for each row."""
    if not keeps:
        emit = OutputText.emit
        monkeypatch.setattr(OutputText, "emit", lambda text, result: (emit(text, result), text.ids)[0])
    _, found, plain = two_texts("fixed", 3, rounds, do_sample=False)
    assert torch.equal(found[1], plain)
    launched = sorted(launches - replayed for _, replayed, _, launches in rounds)
    assert (launched[len(launched) // 2] == 0) == keeps  # in some a row ends, which the device is told


# What a `generate()` does before its first round: counted in calls of our functions, which no clock disturbs. ---------


MOST_CALLS = 550  # they were 2,763 when each look at the modules called several functions for each of them
IDS = torch.arange(8)[None]


def calls_before_the_first_round(layers: int) -> int:
    """Calls of functions of the package, of the second text of an assistant."""
    target, draft = (tiny("llama", seed, num_hidden_layers=layers).float() for seed in range(2))
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig(rule="threshold"))
    # Long enough for all passes that are made beside those of rounds.
    target.generate(IDS, assistant_model=assistant, max_new_tokens=20, do_sample=False)
    with our_calls() as calls:
        target.generate(IDS, assistant_model=assistant, max_new_tokens=8, do_sample=False)
    return calls.index(AssistedDecoding.round.__code__) + 1


def test_few_calls() -> None:
    assert 100 < calls_before_the_first_round(3) < MOST_CALLS


def test_modules_cost_no_calls() -> None:
    """All modules are looked at, and nothing is called for a usual one: a layer costs its attention in the prompt's
    pass and looks at its cache."""
    few, many = (calls_before_the_first_round(layers) for layers in (2, 12))
    assert many - few <= 10 * 10


@pytest.mark.takes(2)
def test_more_calls_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each module is asked whether it is compiled."""

    def asks_each(models: Any, seen: Any = None) -> Any:
        return (module for model in models for module in model.modules() if faster_products._recompiles(module))

    few = calls_before_the_first_round(12)
    monkeypatch.setattr(faster_products, "large_layers", asks_each)
    assert calls_before_the_first_round(12) > few + 200
