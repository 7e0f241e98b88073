"""The exact distribution of whole generations with EAGLE-3 drafts, Gemma 4 assistants, multi-token layers and PARD, and
with drafts that have a temperature of their own.

Everything is product code and transformers' own classes, from the files that layers are read from and the hooks that
catch the target's states to the caches that are rolled back; only the random numbers are replaced by a `Replay`.
Mutants: a q of another temperature, or told without its own, one as if the draft could have proposed all tokens, one
that is told as that of the next candidate, and candidates that are dropped because of what they are."""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.enumeration.stock_rounds import VOCAB
from support.enumeration.whole_generations import NEW_TOKENS, Enumerate, assert_caught, assert_exactly_p, change_drafts
from support.files.gemma4_files import FULL, SLIDING, Variant, target_for
from support.files.mtp_files import Files
from support.targets.models import configured, of_pard, random_layer, tiny
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.generation import setup
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.tree import Chain, DraftTree

TOKEN = {"verification": "token"}
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 2}
DYSPEC: dict[str, Any] = {"tree": "dyspec", "tree_budget": 3, "tree_depth": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "chain, block": FIXED,
    "chain, token": {**FIXED, **TOKEN},
    "chain, threshold": {"rule": "threshold", "threshold": 0.6, "max_tokens": 2},
    "chain, throughput": {"rule": "throughput", "max_tokens": 2, "costs": {"draft": 0.05, "verify": [1.0]}},
    "dyspec, block": DYSPEC,
    "dyspec, token": {**DYSPEC, **TOKEN},
    "static, block": {"tree": [2, 1]},
    "static, token": {"tree": [2, 1], **TOKEN},
}
Pair = tuple[CausalLM, SpecDecPPAssistant]


def eagle3(ids: list[int] | None) -> Pair:
    """Of all tokens, or of `ids`."""
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=2)
    layer = random_layer(target, vocab=None if ids is None else torch.tensor(ids))
    return target, SpecDecPPAssistant.from_draft(layer, target)


def gemma4(variant: Variant) -> Pair:
    """With clusters two of the four tokens are drafted."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "sliding_window": 4}
    target = target_for(seed=7, num_hidden_layers=2, layer_types=[SLIDING, FULL], **sizes)
    return target, SpecDecPPAssistant.from_draft(variant.theirs(**sizes), target=target)


@cache
def mtp(family: str, num_layers: int) -> Pair:
    with TemporaryDirectory() as folder:
        target = Files(family, num_layers, seed=3, overrides={"vocab_size": VOCAB}).load(Path(folder))
        return target, assist(target, "mtp", default=False)


def early_exit() -> Pair:
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=3)
    return target, SpecDecPPAssistant.from_early_exit(target, 2)


def pard() -> Pair:
    """The mask token may be drafted, too."""
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=2)
    return target, SpecDecPPAssistant.from_draft(of_pard(target, 0.7), target)


PAIRS: dict[str, Callable[[], Pair]] = {
    "pard": pard,
    "eagle3, all": partial(eagle3, None),
    "eagle3, some": partial(eagle3, [1, 3]),
    "gemma4, all": partial(gemma4, Variant((SLIDING, FULL))),
    "gemma4, clusters": partial(gemma4, Variant((FULL,), clusters=True)),
    "mtp": partial(mtp, "glm4_moe", 1),
    "mtp, two layers": partial(mtp, "glm4_moe", 2),
    "mtp, hybrid target": partial(mtp, "qwen3_5_text", 1),
    "early exit, colder": early_exit,
    "early exit, hotter": early_exit,
}
TEMPERATURES = {"early exit, colder": 0.6, "early exit, hotter": 1.5}  # of the draft; it has the target's otherwise
NO_TREES = ("mtp, two layers", "mtp, hybrid target")
CASES = [(name, shape) for name in PAIRS for shape in SHAPES if shape.startswith("chain") or name not in NO_TREES]


def pair(name: str, **speculation: Any) -> Pair:
    target, assistant = PAIRS[name]()
    return target, configured(assistant, **speculation, draft_temperature=TEMPERATURES.get(name, 1.0))


@pytest.mark.daily(
    "eagle3, some-chain, throughput", "gemma4, all-static, block", "mtp-chain, token", "pard-dyspec, token", takes=5,
)  # fmt: skip
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_generate_emits_exactly_p(name: str, shape: str, enumerate_torch: Enumerate) -> None:
    assert_exactly_p(*pair(name, **SHAPES[shape]), enumerate_torch)


@pytest.mark.slow
def test_two_layers_go_on_by_themselves(enumerate_torch: Enumerate) -> None:
    """A third candidate, which the second layer drafts of what it has just returned."""
    assert_exactly_p(*pair("mtp, two layers", rule="fixed", num_tokens=3), enumerate_torch, NEW_TOKENS + 1)


def telling(change: Callable[[Tensor], Tensor]) -> Callable[[DraftTree], DraftTree]:
    """Chains and trees are drawn from q, and the one of changed scores is told."""

    def told_another(tree: DraftTree) -> DraftTree:
        tree.distributions.clear()
        tree.scores = {node: change(row) for node, row in tree.scores.items()}
        return tree

    return told_another


HOTTER = telling(lambda scores: scores * 0.7)
AS_IF_OF_ALL = telling(lambda scores: scores.where(scores.isfinite(), scores[scores.isfinite()].mean()))
WITHOUT_ITS_OWN_TEMPERATURE = telling(lambda scores: scores * TEMPERATURES["early exit, colder"])


def of_the_next(chain: Any) -> Any:
    rows = chain.drawn_from
    chain.distributions = {place: row.softmax(-1) for place, row in enumerate([*rows[1:], *rows[:1]])}
    return chain


def unlikely(chain: Any) -> Any:
    """Dropped because of its own value: the less likely one of the two that may come."""
    if len(chain) > 1 and float(chain.q(len(chain) - 1)[chain.tokens[-1]]) < 0.5:
        return Chain(chain.candidates[:-1], chain.drawn_from[:-1])
    return chain


def not_the_likeliest(chain: Any) -> Any:
    """Dropped, too, where there is no other candidate."""
    if len(chain) and chain.tokens[-1] != int(chain.drawn_from[-1].argmax()):
        return Chain(chain.candidates[:-1], chain.drawn_from[:-1])
    return chain


BY_RULE: dict[str, Any] = {"rule": "throughput", "max_tokens": 2, "costs": {"draft": 0.01, "verify": [1.0, 1.2]}}
TAKES_LONG = [name for name in PAIRS if name not in (*NO_TREES, "early exit, colder", "eagle3, all")]


@pytest.mark.daily("eagle3, all")
@pytest.mark.takes(5)
@pytest.mark.parametrize("name", ["early exit, colder", "eagle3, all", *TAKES_LONG])
def test_rounds_that_the_rule_makes_trees_or_chains_emit_exactly_p(
    name: str, enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a tree is a chain, whose verification is another one, depends on what was drawn."""
    kinds = set()

    def note(tree: DraftTree) -> DraftTree:
        kinds.add((isinstance(tree, Chain), len(tree)))
        return tree

    monkeypatch.setattr(setup, "CHECK", 0.0)
    change_drafts(monkeypatch, note)
    assert_exactly_p(*pair(name, **BY_RULE), enumerate_torch, NEW_TOKENS + 1)
    assert kinds >= {(True, 0), (True, 2), (False, 2)} or name in TAKES_LONG


@pytest.mark.takes(5)
@pytest.mark.parametrize("mutate", [HOTTER, not_the_likeliest], ids=["hotter", "shorter"])
def test_mutants_of_trees_by_the_rule_are_caught(
    mutate: Any, enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "CHECK", 0.0)
    change_drafts(monkeypatch, lambda tree: mutate(tree) if isinstance(tree, Chain) else tree)
    assert_caught(*pair("eagle3, all", **BY_RULE), enumerate_torch)


@pytest.mark.daily(
    "eagle3, some-dyspec, block-told_another1", "gemma4, clusters-dyspec, block-told_another0",
    "early exit, colder-chain, block-told_another", "pard-chain, token-of_the_next", takes=4,
)  # fmt: skip
@pytest.mark.parametrize(("name", "shape", "mutate"), [
    *product(("eagle3, some", "gemma4, clusters"), ("chain, block", "dyspec, block"), (AS_IF_OF_ALL, HOTTER)),
    ("mtp", "dyspec, block", HOTTER),
    ("pard", "dyspec, block", HOTTER),
    ("pard", "chain, token", of_the_next),
    ("early exit, colder", "chain, block", WITHOUT_ITS_OWN_TEMPERATURE),
    ("gemma4, all", "chain, token", not_the_likeliest),
    *product([name for name in PAIRS if name[:3] == "mtp"], ["chain, token"], (HOTTER, of_the_next, unlikely)),
])  # fmt: skip
def test_mutants_are_caught(
    name: str, shape: str, mutate: Any, enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_drafts(monkeypatch, mutate)
    assert_caught(*pair(name, **SHAPES[shape]), enumerate_torch)
