"""`Decisions.draft_successors`: what whole generations make of what the target said lately."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.targets.models import assistant_for, assistant_of, configured, partly_agreeing, prompt, tiny
from torch import Tensor
from torch.testing import assert_close
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.generation.output_text import OutputText
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.sampling.ngram_corrections import NgramCorrections
from hf_specdecpp.throughput.known_costs import Rounds

CHAIN: dict[str, Any] = {"rule": "fixed", "num_tokens": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "throughput": {"rule": "throughput"},
    "tree": {"tree": "dyspec", "tree_budget": 12, "tree_depth": 4},
    "with lookups": {**CHAIN, "lookup": True},
}
NEW = 24


@pytest.fixture
def target() -> CausalLM:
    return tiny("llama")


def texts(target: CausalLM, assistant: SpecDecPPAssistant | None, seeds: Any = range(3), **options: Any) -> list[Any]:
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
        found.append(target.generate(prompt(seed=seed), assistant_model=assistant, **settings)[0].tolist())
    return found


@pytest.mark.daily("eagle3")
@pytest.mark.parametrize("kind", ["independent", "early_exit", "conditioned", "eagle3"])
def test_by_default_greedy_texts_of_drafts_that_read_states_are_corrected(target: CausalLM, kind: str) -> None:
    reads = kind in ("conditioned", "eagle3")
    for setting, sample, mixes in [
        (None, False, reads), (None, True, False), (True, False, True), (True, True, True), (False, False, False),
    ]:  # fmt: skip
        assistant = assistant_of(kind, target, **CHAIN, draft_successors=setting)
        texts(target, assistant, seeds=[0], do_sample=sample)
        assert bool(assistant.memory.corrections) == mixes, (setting, sample)
        assistant.detach()


@pytest.mark.daily("chain", takes=2)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_draft_that_knows_nothing_is_accepted_more_often(target: CausalLM, shape: str) -> None:
    """Of texts like those before: the very same ones."""
    draft, accepted = tiny("llama", 5), {}
    for mixes in (False, True):
        assistant = configured(SpecDecPPAssistant.from_draft(draft, target), **SHAPES[shape], draft_successors=mixes)
        for _ in range(2):
            texts(target, assistant, seeds=[0], max_new_tokens=60)
        accepted[mixes] = assistant.stats.accepted
    assert accepted[True] > accepted[False]


class Ear:
    """What tables are told: the last tokens and the target's logits after them, one entry a round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[list[tuple[int, ...]], Tensor]] = []
        learn = NgramCorrections.record

        def hear(table: NgramCorrections, contexts: list[tuple[int, ...]], logits: Tensor) -> None:
            self.told.append((contexts, logits.clone()))
            learn(table, contexts, logits)

        monkeypatch.setattr(NgramCorrections, "record", hear)


class NoSevens(LogitsProcessor):
    """Of a user, so that it is called in order; it changes the logits where they stand."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 7] = float("-inf")
        return scores


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("in_order", [False, True])
def test_every_place_is_learned(target: CausalLM, in_order: bool, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after a rejection, too, and the logits are those before processors."""
    assistant = assistant_for(target, mix=0.8, **SHAPES[shape], draft_successors=True)
    ear, verify = Ear(monkeypatch), OutputText.verify
    walked: list[tuple[list[int], Any]] = []

    def note(self: OutputText, each: Any) -> Any:
        walked.append((self.ids[0].tolist(), each.rows))
        return verify(self, each)

    monkeypatch.setattr(OutputText, "verify", note)
    options = {"logits_processor": LogitsProcessorList([NoSevens()])} if in_order else {"suppress_tokens": [7]}
    texts(target, assistant, seeds=[0], **options)
    assert assistant.stats.accepted < assistant.stats.drafted
    assert sum(len(tokens) for tokens, _ in ear.told) == assistant.stats.drafted + len(ear.told)
    for (text, tree_pass), (contexts, logits) in zip(walked[:6], ear.told[:6], strict=True):
        for node, context, row in zip(tree_pass.order, contexts, logits, strict=True):
            path = [*text, *tree_pass.tree.path(node)]
            assert context == tuple(path[-3:])
            with torch.no_grad():
                expected = target(torch.tensor([path])).logits[0, -1]
            assert_close(row.double(), expected, atol=1e-4, rtol=1e-4)


def test_lookups_go_without(target: CausalLM) -> None:
    looking = assist(target, "lookup", default=False)
    looking.decisions = Decisions(draft_successors=True)
    assert texts(target, looking) == texts(target, None)
    assert not len(looking.memory.corrections)


def test_its_price_is_another_one(target: CausalLM) -> None:
    rounds = Rounds(target, Drafter(partly_agreeing(target)), DraftProbability(), 4)
    assert rounds.key() != replace(rounds, mixes=True).key()
