"""Texts that are kept of generations, beside what the target computes of them from scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import assistant_of, prompt, quiet_later_layers, tiny
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.learning.kept import MOST_LIKELY, Keeper, KeptText, KeptTexts, States, logits_of
from hf_specdecpp.models.causal_lm import CACHE, CausalLM, cache_among
from hf_specdecpp.models.target_states import TargetStates

CHAIN: dict[str, Any] = {"rule": "fixed", "num_tokens": 3}
TREE: dict[str, Any] = {"tree": "dyspec", "tree_budget": 7, "tree_depth": 3}
KINDS = ("independent", "early_exit", "conditioned", "eagle3")


@torch.no_grad()
def assert_is(kept: KeptText, text: Tensor, begin: int, target: CausalLM, assistant: SpecDecPPAssistant) -> None:
    """What was kept is the text `[n]` whose answer begins there, and what the target computes of it."""
    assert kept.tokens.tolist() == text.tolist()
    assert kept.begin == begin
    p = target(text[None]).logits[0, begin - 1 : -1].float().softmax(-1)
    found = p.gather(-1, kept.likely.long())
    torch.testing.assert_close(found, kept.probs.float(), rtol=2e-3, atol=1e-6)
    assert torch.equal(kept.likely[:, 0].long(), p.argmax(-1))
    reads = assistant.ready_drafter().reads
    if reads is None:
        assert kept.states is None
        return
    with TargetStates(target, reads) as caught:
        target(text[None])
        states: Any = caught.take()
    assert kept.states is not None
    error = (kept.states.read() - states[0, :-1]).abs().amax(-1) / states[0, :-1].abs().amax(-1)
    assert float(error.max()) < 0.04


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sample", [False, True])
def test_what_the_target_said_along_its_answer_is_kept(kind: str, shape: dict[str, Any], sample: bool) -> None:
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of(kind, target, **shape, keep_texts=1000)
    torch.manual_seed(0)
    options: Any = {"do_sample": sample, "temperature": 0.7, "top_k": 5} if sample else {"do_sample": False}
    output = target.generate(prompt(), assistant_model=assistant, max_new_tokens=25, **options)
    (kept,) = assistant.memory.texts.texts
    assert_is(kept, output[0], 12, target, assistant)
    assert 0 < assistant.stats.accepted < assistant.stats.drafted


class Shift(LogitsProcessor):
    """Of users; called once for each emitted token, in order."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1)


def test_processors_and_an_end_within_a_round_do_not_change_what_is_kept() -> None:
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("conditioned", target, **CHAIN, keep_texts=1000)
    for length in range(1, 6):
        assistant.memory.texts.clear()
        output = target.generate(
            prompt(), assistant_model=assistant, max_new_tokens=length, do_sample=False,
            logits_processor=LogitsProcessorList([Shift()]),
        )  # fmt: skip
        (kept,) = assistant.memory.texts.texts
        assert_is(kept, output[0], 12, target, assistant)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_are_texts_without_their_padding(kind: str) -> None:
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of(kind, target, **CHAIN, keep_texts=1000)
    ids, mask = prompt(9).repeat(2, 1), torch.ones(2, 9, dtype=torch.long)
    ids[1, :3], mask[1, :3] = 0, 0
    output = target.generate(
        ids, attention_mask=mask, assistant_model=assistant, max_new_tokens=15, do_sample=False, pad_token_id=0
    )
    first, second = assistant.memory.texts.texts
    assert_is(first, output[0], 9, target, assistant)
    assert_is(second, output[1, 3:], 6, target, assistant)
    assert [first.number, second.number] == [0, 1]


def test_of_a_cache_that_is_carried_on_the_known_part_is_kept() -> None:
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("conditioned", target, **CHAIN, keep_texts=1000)
    options: Any = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    first = target.generate(prompt(), assistant_model=assistant, **options)
    longer = torch.cat((first.sequences, prompt(4, seed=1)), dim=1)
    second = target.generate(longer, assistant_model=assistant, **{CACHE: cache_among(first)}, **options)
    kept = assistant.memory.texts.texts[1]
    assert kept.tokens.tolist() == second.sequences[0, -len(kept) :].tolist()
    assert len(kept) < second.sequences.shape[1]
    assert len(kept.likely) == 10
    assert kept.states is not None
    assert len(kept.states.numbers) == len(kept) - 1


def test_nothing_is_kept_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("something was kept")

    for name in ("read", "say", "text"):
        monkeypatch.setattr(Keeper, name, fail)
    target = tiny("llama")
    assistant = assistant_of("conditioned", target, **CHAIN)
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=8, do_sample=False)
    assert not assistant.memory.texts.texts
    with pytest.raises(ValueError, match="keep_texts=-1"):
        SpeculationConfig(keep_texts=-1)


def test_the_memory_is_bounded_and_can_be_cleared() -> None:
    target = tiny("llama")
    assistant = assistant_of("conditioned", target, **CHAIN, keep_texts=45)
    for seed in range(3):
        output = target.generate(prompt(seed=seed), assistant_model=assistant, max_new_tokens=8, do_sample=False)
    texts = assistant.memory.texts
    assert [text.number for text in texts.texts] == [1, 2]
    assert (len(texts), texts.nbytes) == (40, sum(text.nbytes for text in texts.texts))
    assistant.speculation.keep_texts = 10
    output = target.generate(prompt(), assistant_model=assistant, max_new_tokens=8, do_sample=False)
    (kept,) = texts.texts
    assert kept.tokens.tolist() == output[0, -10:].tolist()
    assert (kept.begin, len(kept.likely)) == (2, 8)
    assistant.memory.clear()
    assert (len(texts), texts.nbytes) == (0, 0)


def test_bytes_of_a_token_of_smollm2() -> None:
    """As the first lines of `learning/kept.py` and docs/using.md say."""

    def text(prompt_tokens: int) -> KeptText:
        keeper = Keeper(reads_states=True)
        keeper.read(torch.ones(1, 101), torch.randn(1, 100, 4 * 576))
        keeper.say(torch.randn(101 - prompt_tokens, 1000))
        kept = keeper.text()
        assert kept is not None
        return kept

    assert (text(1).nbytes - text(51).nbytes) / 50 == 192
    assert text(51).nbytes == 101 * 4 + 50 * 192 + 100 * (2304 + 36)
    assert 4 + 192 + 2304 + 36 == 2536 < 4096


def test_states_in_a_byte_a_number() -> None:
    states = torch.randn(7, 600) * torch.logspace(-3, 3, 7)[:, None]
    states[:, 5] *= 1000  # one number of a state may be far larger than the others
    error = (States.of(states).read() - states).abs()
    assert bool((error <= states.abs() / 16 + states.abs().amax(-1, keepdim=True) * 2e-5).all())
    assert torch.equal(States.of(torch.zeros(2, 3)).read(), torch.zeros(2, 3))


def test_pieces_of_a_text() -> None:
    kept = KeptText(torch.arange(10), 4, torch.arange(6)[:, None], torch.ones(6, 1), States.of(torch.randn(9, 4)), 6)
    first, second = kept.piece(0, 6), kept.piece(5, 10)
    assert (first.begin, first.likely.flatten().tolist(), second.begin) == (4, [0, 1], 1)
    assert second.likely.flatten().tolist() == [2, 3, 4, 5]
    assert second.tokens.tolist() == [5, 6, 7, 8, 9]
    assert [len(each.states.numbers) for each in (first, second)] == [5, 4]  # type: ignore[union-attr]
    assert len(kept.piece(0, 3).likely) == 0


def test_the_rest_of_the_probability_is_spread() -> None:
    logits = logits_of(torch.tensor([[4, 0]]), torch.tensor([[0.6, 0.2]]), 6)
    torch.testing.assert_close(logits.softmax(-1), torch.tensor([[0.2, 0.05, 0.05, 0.05, 0.6, 0.05]]))
    assert bool(logits_of(torch.tensor([[1]]), torch.tensor([[1.0]]), 3).isfinite().all())


def test_a_text_longer_than_the_memory_and_without_an_answer_in_it() -> None:
    texts = KeptTexts(most=3)
    texts.add(KeptText(torch.arange(9), 9, torch.zeros(0, MOST_LIKELY), torch.zeros(0, MOST_LIKELY), None, 50))
    assert not texts.texts
