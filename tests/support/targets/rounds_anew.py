"""What rounds propose: of a draft, beside what the same draft proposes that reads the whole text anew; and of
transformers' own generators of candidates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import TargetStates
from support.files.gemma4_files import read_by


class Ear:
    """Hears the rounds of a draft's sessions.

    `rounds`: the text `[1, n]` that was read when a round began, and the logits of its first candidate."""

    def __init__(self, draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draft, self.session, self.rounds = draft, draft.session, list[tuple[Tensor, Tensor]]()
        monkeypatch.setattr(draft, "session", lambda vocab_size: self._heard(self.session(vocab_size)))

    def _heard(self, reading: Any) -> Any:
        begin_round, step, expand = reading.read_verified, reading.propose_next, reading.expand
        text = [torch.empty(1, 0, dtype=torch.long)]

        def begin(new_tokens: Tensor, *more: Any, **named: Any) -> None:
            text[0] = torch.cat((text[0], new_tokens.cpu()), dim=1)
            begin_round(new_tokens, *more, **named)

        def take_step(candidates: list[Tensor]) -> Any:
            found = step(candidates)
            if not candidates and found is not None:
                self.rounds.append((text[0], found[0].clone()))
            return found

        def look(tree: Any, nodes: list[int]) -> Any:
            found = expand(tree, nodes)
            if nodes == [0]:
                self.rounds.append((text[0], found[0][0].clone()))
            return found

        reading.read_verified, reading.propose_next, reading.expand = begin, take_step, look
        return reading

    def check(self, target: CausalLM, first: int = 0) -> None:
        """Compare the rounds that were heard.

        `first`: of how many tokens at the beginning of the text the draft has seen no states."""
        heard, self.rounds = self.rounds, []
        assert len(heard) > 1 or not self.draft.places
        for text, logits in heard:
            found = self._anew(target, text[:, int((text[0] != 0).nonzero()[0]) :], len(logits), first)
            torch.testing.assert_close(logits, found, rtol=3e-5, atol=3e-5)

    @torch.no_grad()
    def _anew(self, target: CausalLM, text: Tensor, vocab_size: int, first: int) -> Tensor:
        """The logits after a text that begins after its padding."""
        session = self.session(vocab_size)
        if self.draft.reads is None:
            session.read_verified(text, 0)
        else:
            with TargetStates(target, self.draft.reads) as caught:
                session.bind_cache(read_by(target, text))
                states: Any = caught.states_of()
            session.read_verified(text, 0, states[:, first:])
        found = session.propose_next([])
        assert found is not None
        return found[0]


def check_rounds(target: CausalLM, assistant: Any, text: Tensor, monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    """Greedy text is the target's, and each round drafts what a draft would that reads the whole text anew."""
    ear, how = Ear(assistant.ready_drafter(), monkeypatch), {"max_new_tokens": 24, "do_sample": False, **how}
    expected = target.generate(text, **how)
    assert torch.equal(target.generate(text, assistant_model=assistant, **how), expected)
    assert assistant.stats.drafted > 0
    ear.check(target)


class Proposed(NamedTuple):
    """What transformers' own generator proposed after a text `[1, n]`: the logits `[candidates, vocab]` are of their
    places, and `given` is what it was passed besides."""

    text: Tensor
    candidates: list[int]
    logits: Tensor
    given: dict[str, Any]


def proposed(monkeypatch: pytest.MonkeyPatch, generator: Any) -> list[Proposed]:
    """Of each round with candidates from now on, by the class of the generator."""
    found: list[Proposed] = []
    theirs = generator.get_candidates

    def hear(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = theirs(self, input_ids, *args, **kwargs)
        if logits is not None:
            candidates = ids[0, input_ids.shape[1] :].tolist()
            found.append(Proposed(input_ids.clone(), candidates, logits[0].clone(), kwargs))
        return ids, logits

    monkeypatch.setattr(generator, "get_candidates", hear)
    return found


def begun(draft: Any, text: Tensor, lengths: Sequence[int], vocab_size: int, states: Tensor | None = None) -> Any:
    """A session that has drafted at these lengths of a text but for the last, where a round has begun.

    `states`: what the draft reads of its target along the text, `[1, n, width]`."""
    session, before = draft.session(vocab_size), 0
    for length in lengths:
        if before:
            session.propose_next([])
        known = None if states is None else states[:, max(before - 1, 0) : length - 1]
        session.read_verified(text[:, before:length], 0, known)
        before = length
    return session


def block_of(session: Any, places: int) -> Tensor:
    """The logits `[places, vocab]` that a round's only pass drafts, whatever was drawn before each."""
    found = [session.propose_next([torch.tensor(0)] * place) for place in range(places)]
    assert session.propose_next([torch.tensor(0)] * places) is None
    assert session.passes == 1
    return torch.stack([logits for logits, _ in found])
