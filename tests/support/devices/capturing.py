"""Captured texts beside those of the same assistant uncaptured, and of plain generation; on a CPU or on a GPU."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator
from hf_specdecpp.cuda_graphs import captured_target
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.tree import Chain, DraftTree
from support.devices.pretend_graph import pretend_graphs
from support.targets.models import Rounds, assistant_of, prompt
from support.targets.watchers import heard, unnoticed

CHAIN: dict[str, Any] = {"rule": "fixed", "num_tokens": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": CHAIN,
    "threshold": {"rule": "threshold", "threshold": 0.9},
    "lookup": {**CHAIN, "lookup": True, "lookup_tokens": 12},
    "dyspec": {"tree": "dyspec", "tree_budget": 12, "tree_depth": 4},
    "static": {"tree": [3, 2, 1]},
}
LENGTHS = (3, 236)  # of prompts: the second's text outgrows a room of 256
PADDING = 5  # tokens before the second


@pytest.fixture
def pretended() -> Iterator[Counter[str]]:
    """How often something was captured and replayed, which can be done on every device. Caches are made for prompts,
    and grow with the texts, as where their length is not known."""
    # Not the fixture `monkeypatch`, which would be undone after `pretend_graphs`, and put its functions back.
    with pytest.MonkeyPatch.context() as patch, pretend_graphs() as counts:
        patch.setattr(captured_target, "AHEAD", -(1 << 30))
        yield counts


def generate(target: CausalLM, assistant: Any, length: int = 12, padding: int = 0, **options: Any) -> Any:
    """A text to a prompt of so many tokens, before them padding, under one seed."""
    ids = prompt(length).to(target.device) % target.config.get_text_config().vocab_size
    if padding:
        ids = torch.cat((ids.new_zeros((1, padding)), ids), dim=1)
        options = {"attention_mask": (ids != 0).long(), **options}
    torch.manual_seed(0)
    defaults = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    return target.generate(ids, assistant_model=assistant, **{**defaults, **options})


class Waiting(nn.Module):
    """A layer that asks the device for a number."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    @unnoticed
    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) * (1.0 if float(hidden.sum()) < 1e9 else 0.0)


class Drawn(Rounds):
    """What rounds drew and accepted, of trees and of rounds that are captured whole, too."""

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__(monkeypatch)
        self.trees: list[Any] = []
        heard(monkeypatch, SpecDecPPCandidateGenerator, "record_outcome", self.note)

    def note(self, _: Any, tree: DraftTree, path: list[int], length: int) -> None:
        if not isinstance(tree, Chain):
            self.trees.append((list(tree.tokens), list(tree.parents), list(path)))


def drawn(target: CausalLM, assistant: SpecDecPPAssistant, sampled: bool) -> tuple[list[Tensor], list[Any]]:
    """Greedy texts, and sampled ones, and what the rounds of each drew, with nothing learned before."""
    assistant.memory.clear()
    ways: list[dict[str, Any]] = [{}, {"do_sample": True, "temperature": 0.9}]
    found, rounds = [], []
    for how in ways[: 1 + sampled]:
        for length, padding in zip(LENGTHS, (0, PADDING), strict=True):
            with pytest.MonkeyPatch.context() as patch:
                noted = Drawn(patch)
                found.append(generate(target, assistant, length, padding, **how))
            rounds.append(noted.trees or noted.outcomes)
    return found, rounds


def assert_captured_as_uncaptured(kind: str, target: CausalLM, **settings: Any) -> None:
    """Texts are plain generation's and, of the assistant uncaptured, all that rounds drew and accepted; and nothing is
    captured for a room a second time.

    Rounds that are captured whole draw other numbers, and are not cut where the text ends; those whose rule stops may
    be shorter."""
    assistant = assistant_of(kind, target, adapt=False, draft_successors=False, **settings)
    is_whole = "tree" not in settings
    found, rounds = drawn(target, assistant, sampled=not is_whole)
    stats = assistant.stats
    assert stats.uncaptured is None
    assert stats.accepted > 0
    assert torch.equal(found[0], generate(target, None, LENGTHS[0]))
    assert torch.equal(found[1], generate(target, None, LENGTHS[1], PADDING))
    before = stats.graphs
    assistant.memory.clear()  # else lookups of other lengths would be made
    again = [generate(target, assistant, LENGTHS[0]), generate(target, assistant, LENGTHS[1], PADDING)]
    assert assistant.stats.graphs == before > 0
    assert all(map(torch.equal, again, found))
    assistant.speculation.graphs = "off"
    expected, uncaptured_rounds = drawn(target, assistant, sampled=not is_whole)
    assert assistant.stats.graphs == 0
    assert all(map(torch.equal, found, expected))
    if not is_whole:
        assert rounds == uncaptured_rounds
    elif settings["rule"] == "fixed" and "lookup" not in settings:
        for ours, theirs in zip(rounds, uncaptured_rounds, strict=True):
            full = [each for each in theirs if each[0] == settings["num_tokens"]]
            assert len(full) > 2
            assert ours[: len(full) - 1] == full[:-1]
