"""What a step of an EAGLE-3 layer launches, beside one of a conditioned draft with the same vocabulary."""

from typing import Any

import torch
from support.models import prompt, random_fusion, tiny
from support.pretend_devices import on_device, pretend_devices

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.drafting.session import DraftSession
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.training.distillation import initial_layer
from hf_specdecpp.trees.tree import DraftTree

LEVELS = (5, 5, 5)  # below the root: a tree of 16 nodes
READS = [0, 1]


def conditioned(target: CausalLM) -> SpecDecPPAssistant:
    vocab, fusion = on_device(torch.arange(20)), on_device(random_fusion(tiny("llama"), READS).double())
    return SpecDecPPAssistant.from_conditioned(target, [2], fusion=fusion, draft_vocab=vocab)


def eagle3(target: CausalLM) -> SpecDecPPAssistant:
    plain, vocab = tiny("llama"), torch.arange(20)
    model = initial_layer.untrained(initial_layer.settings_for(plain, READS, vocab), plain, vocab)
    return SpecDecPPAssistant.from_draft(on_device(model.double()), target)


def launches(make: Any) -> dict[str, int]:
    """Of a step after another candidate, and of a tree of 16 nodes."""
    found = {}
    with pretend_devices() as counts, torch.inference_mode():
        target = on_device(tiny("llama"))
        drafter = make(target).ready_drafter()
        states = on_device(torch.zeros(1, 8, drafter.reads.width, dtype=torch.float64))
        session = DraftSession(drafter, 48)
        session.begin_round(on_device(prompt(8)), 0, states)
        candidates = [on_device(torch.tensor(3)), on_device(torch.tensor(4))]
        session.step([])
        session.step(candidates[:1])
        before = counts["launch"]
        session.step(candidates)
        found["step"] = counts["launch"] - before

        session = DraftSession(drafter, 48)
        session.begin_round(on_device(prompt(8)), 0, states)
        tree, parents = DraftTree(1), [0]
        before = counts["launch"]
        session.expand(tree, [0])
        for width in LEVELS:
            parents = [tree.add(parents[0], token) for token in range(width)]
            session.expand(tree, parents)
        found["tree"] = counts["launch"] - before
    return found


def test_no_more_than_a_conditioned_draft() -> None:
    ours, theirs = launches(eagle3), launches(conditioned)
    assert theirs["step"] > 20
    assert ours["step"] <= theirs["step"]
    assert ours["tree"] <= theirs["tree"]


def test_a_norm_apart_is_noticed(monkeypatch: Any) -> None:
    from hf_specdecpp.drafts.eagle3.model import FirstLayer

    def apart(self: Any, pairs: torch.Tensor) -> torch.Tensor:
        embedding, state = pairs.unbind(-2)
        return torch.stack((self.input_layernorm(embedding), self.hidden_norm(state)), dim=-2)

    usual = launches(eagle3)
    monkeypatch.setattr(FirstLayer, "_normed", apart)
    assert launches(eagle3)["step"] > usual["step"]
