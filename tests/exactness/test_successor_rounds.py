"""The exact distribution of whole generations whose draft is mixed with what the target said lately.

Everything is product code; only the random numbers are replaced by a `Replay`. The table begins empty and is filled by
the rounds themselves, so that the draft of later rounds follows what was drawn, accepted and rejected in earlier ones.
Mutants: q is told as it was before it was mixed; or as the table has it once it knows what was drawn."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support.enumeration.stock_rounds import VOCAB
from support.enumeration.whole_generations import Enumerate, assert_caught, assert_exactly_p
from support.files.stand_ins import BlockDraft
from support.targets.models import assistant_for, assistant_of, configured, partly_agreeing, tiny
from support.targets.watchers import heard
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator, SpecDecPPConfig
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.sampling import ngram_corrections
from hf_specdecpp.sampling.ngram_corrections import Mixing, contexts_of
from hf_specdecpp.sampling.processors import Processing

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"rule": "fixed", "num_tokens": 2},
    "token by token": {"rule": "fixed", "num_tokens": 2, "verification": "token"},
    "dyspec": {"tree": "dyspec", "tree_budget": 3, "tree_depth": 2},
    "static": {"tree": [2, 1], "verification": "token"},
}
KINDS = ("independent", "early_exit", "conditioned", "eagle3")
Again = Callable[[Processing, Tensor, list[int], int, Tensor], Tensor]


@pytest.fixture(autouse=True)
def heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the target said once counts for much, so that it decides what is drawn."""
    monkeypatch.setattr(ngram_corrections, "DECAY", 0.1)
    monkeypatch.setattr(ngram_corrections, "MOST_LIKELY", 3)


def pair(kind: str, shape: str) -> tuple[CausalLM, SpecDecPPAssistant]:
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=3)
    settings = {**SHAPES[shape], "draft_successors": True}
    if kind in KINDS:
        return target, assistant_of(kind, target, **settings)
    assistant = configured(SpecDecPPAssistant(SpecDecPPConfig(), BlockDraft(partly_agreeing(target, 0.9))), **settings)
    assistant.attach(target)
    return target, assistant


@pytest.mark.daily("independent-chain", takes=3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*KINDS, "block"])
def test_generate_emits_exactly_p(kind: str, shape: str, enumerate_torch: Enumerate) -> None:
    target, assistant = pair(kind, shape)
    assert_exactly_p(target, assistant, enumerate_torch)
    assert max(max(r.values()) for r in assistant.memory.corrections[target].successors.values()) > 0.4


@pytest.mark.takes(3)
def test_with_a_draft_vocabulary_and_a_temperature(enumerate_torch: Enumerate) -> None:
    target = tiny("llama", 7, vocab_size=VOCAB, num_hidden_layers=3)
    draft = assistant_for(target, mix=0.9).drafter.model
    assistant = SpecDecPPAssistant.from_draft(draft, target, draft_vocab=[0, 1, 3])
    assistant.speculation.rule, assistant.speculation.num_tokens = "fixed", 2
    assistant.decisions = Decisions(draft_successors=True, draft_temperature=0.7)
    assert_exactly_p(target, assistant, enumerate_torch)


def tell_q_again(monkeypatch: pytest.MonkeyPatch, again: Again) -> None:
    """Let chains and trees be drawn from q, and tell what `again` makes of the processing, the text, a path, the token
    that was drawn after it, and the draft's own logits there."""
    propose = SpecDecPPCandidateGenerator.propose
    own: dict[tuple[int, ...], Tensor] = {}

    def note(_: Mixing, input_ids: Tensor, scores: Tensor) -> None:
        own[tuple(input_ids[0].tolist())] = scores[0]

    def tell(self: SpecDecPPCandidateGenerator, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        drafted, processing = propose(self, input_ids, *args, **kwargs), self.draft_processing
        drafted.distributions.clear()
        for node in drafted.scores:
            if children := drafted.children[node]:
                path = drafted.path(node)
                text = (*input_ids[0].tolist(), *path)
                told: Any = again(processing, input_ids, path, drafted.tokens[children[0]], own[text])
                drafted.scores[node] = told if again is truly else told.clamp_min(-10.0)  # what was drawn has some q
        return drafted

    heard(monkeypatch, Mixing, "__call__", note)
    monkeypatch.setattr(SpecDecPPCandidateGenerator, "propose", tell)


def unmixed(processing: Processing, text: Tensor, path: list[int], _drawn: int, logits: Tensor) -> Tensor:
    return Processing(processing.processors[1:]).one(text, path, logits)


def knowing_the_drawn(processing: Processing, text: Tensor, path: list[int], drawn: int, logits: Tensor) -> Tensor:
    """As if the table took note of a draw before its q is asked for. Not as of a certain one: a q of 1 for whatever was
    drawn is that of a candidate that was looked up, which is verified rightly."""
    mixing, *others = processing.processors
    table = copy.deepcopy(cast(Mixing, mixing).corrections)
    table.record(contexts_of(text, [path]), torch.zeros(1, VOCAB).index_fill(1, torch.tensor([drawn]), 1.0))
    return Processing([Mixing(table, greedy=False), *others]).one(text, path, logits)


def truly(processing: Processing, text: Tensor, path: list[int], _drawn: int, logits: Tensor) -> Tensor:
    return processing.one(text, path, logits)


@pytest.mark.daily("unmixed-chain", takes=3)
@pytest.mark.parametrize("shape", ["chain", "dyspec"])
@pytest.mark.parametrize("again", [unmixed, knowing_the_drawn])
def test_another_q_than_the_mixed_one_is_caught(
    again: Again, shape: str, enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, assistant = pair("early_exit", shape)
    tell_q_again(monkeypatch, again)
    assert_caught(target, assistant, enumerate_torch)


@pytest.mark.daily("chain", takes=3)
@pytest.mark.parametrize("shape", ["chain", "dyspec"])
def test_the_q_told_again_is_right(shape: str, enumerate_torch: Enumerate, monkeypatch: pytest.MonkeyPatch) -> None:
    target, assistant = pair("early_exit", shape)
    tell_q_again(monkeypatch, truly)
    assert_exactly_p(target, assistant, enumerate_torch)
