"""The table of the target's latest successors, against a dictionary of plain numbers; and what it makes of logits."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.successors import DECAY, MOST_LIKELY, MixedProcessing, Successors

VOCAB, CPU = 12, torch.device("cpu")
IMPOSSIBLE = float("-inf")


def logits_of(**probs: float) -> Tensor:
    """Logits `[1, VOCAB]` of probabilities: `_3=0.8` is that of token 3."""
    p = torch.zeros(1, VOCAB)
    for token, value in probs.items():
        p[0, int(token[1:])] = value
    return p.log()


def row(table: Successors, token: int) -> Tensor:
    """What is kept of a token, `[VOCAB]`."""
    return torch.zeros(VOCAB).scatter(0, table.ids[token].long(), table.probs[token])


def test_what_is_kept_follows_what_is_said() -> None:
    """The numbers of the docstring."""
    table = Successors(VOCAB, CPU)
    assert not table.probs.any()
    table.learn([7], logits_of(_3=0.8, _4=0.2))
    assert_close(row(table, 7)[3:5], torch.tensor([0.4, 0.1]))
    table.learn([7], logits_of(_4=1.0))
    assert_close(row(table, 7)[3:5], torch.tensor([0.2, 0.55]))
    assert float(table.probs.sum()) == pytest.approx(0.75), "of no other token"


def test_of_several_places_after_one_token_the_last_counts_most() -> None:
    """As if each had been told by itself."""
    table, one_by_one = Successors(VOCAB, CPU), Successors(VOCAB, CPU)
    said = [(5, logits_of(_1=1.0)), (6, logits_of(_2=1.0)), (5, logits_of(_3=1.0)), (5, logits_of(_4=1.0))]
    for token, logits in said:
        one_by_one.learn([token], logits)
    table.learn([token for token, _ in said], torch.cat([logits for _, logits in said]))
    assert_close(row(table, 5), row(one_by_one, 5))
    assert row(table, 5)[[1, 3, 4]].tolist() == [0.125, 0.25, 0.5]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), min_size=1, max_size=5), min_size=1, max_size=8
    )
)
def test_it_is_what_a_dictionary_would_keep(rounds: list[list[tuple[int, int]]]) -> None:
    table = Successors(VOCAB, CPU)
    expected: dict[int, dict[int, float]] = defaultdict(dict)
    for said in rounds:
        logits = torch.stack([4.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(s)) for _, s in said])
        table.learn([token for token, _ in said], logits)
        for (token, _), p in zip(said, logits.softmax(-1), strict=True):
            likely, ids = p.topk(MOST_LIKELY)
            known = {each: DECAY * value for each, value in expected[token].items()}
            for each, value in zip(ids.tolist(), likely.tolist(), strict=True):
                known[each] = known.get(each, 0.0) + (1.0 - DECAY) * value
            best = sorted(known, key=known.__getitem__, reverse=True)[:MOST_LIKELY]
            expected[token] = {each: known[each] for each in best}
    for token in range(4):
        assert table.ids[token].unique().numel() == MOST_LIKELY, "no id twice, or it would be written to twice"
        wanted = torch.zeros(VOCAB)
        for each, value in expected[token].items():
            wanted[each] = value
        assert_close(row(table, token), wanted, atol=1e-5, rtol=0.0)
    assert float(table.probs.sum(-1).max()) <= 1.0 + 1e-6


def test_its_memory_is_what_is_documented_and_never_grows() -> None:
    table = Successors(49_152, CPU)
    size = table.nbytes
    assert size == 64 * 49_153
    for seed in range(5):
        tokens = torch.randint(0, 49_152, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        table.learn(tokens, torch.randn(6, 49_152))
    assert table.nbytes == size


def test_a_small_vocabulary_and_unknown_tokens() -> None:
    table = Successors(4, CPU)
    table.learn([9, 3], torch.eye(4)[:2] * 50.0)  # a prompt may end with what no logits belong to
    assert table.probs[3].max() == table.probs[4].max() == 1.0 - DECAY
    assert_close(
        table.mixed(torch.tensor([9, 1_000]), torch.zeros(2, 4)), table.mixed(torch.tensor([4, 4]), torch.zeros(2, 4))
    )


def test_what_is_no_number_counts_for_nothing() -> None:
    table = Successors(VOCAB, CPU)
    table.learn([1, 2], torch.stack([torch.full((VOCAB,), torch.nan), torch.full((VOCAB,), torch.inf)]))
    assert not table.probs.any()
    scores = torch.randn(1, VOCAB)
    assert_close(table.mixed(torch.tensor([1]), scores), scores)


def taught() -> Successors:
    table = Successors(VOCAB, CPU)
    for _ in range(20):
        table.learn([7, 8], torch.cat((logits_of(_3=0.8, _4=0.2), logits_of(_5=1.0))))
    return table


def mixture(scores: Tensor) -> Tensor:
    """By the definition: what `taught` makes of logits `[3, VOCAB]` after the tokens 7, 8 and 1."""
    q, r = scores.double().softmax(-1), torch.zeros(3, VOCAB, dtype=torch.float64)
    r[0, 3], r[0, 4], r[1, 5] = 0.8, 0.2, 1.0
    w = (1.0 - q.amax(-1, keepdim=True)) * r.amax(-1, keepdim=True)
    mixed = (1.0 - w) * q + w * r
    return (mixed / mixed.sum(-1, keepdim=True)).float()


def test_the_softmax_is_the_mixture() -> None:
    scores = 2.0 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    q = taught().mixed(torch.tensor([7, 8, 1]), scores).softmax(-1)
    assert_close(q, mixture(scores), atol=1e-5, rtol=0.0)
    assert float((q - scores.softmax(-1))[:2].abs().amax(-1).min()) > 0.05
    assert_close(q[2], scores[2].softmax(-1))


def test_the_numbers_of_the_docstring() -> None:
    table = Successors(3, CPU)
    table.ids[0], table.probs[0] = torch.tensor([1, 2, 0], dtype=torch.int32), torch.tensor([0.5, 0.2, 0.0])
    q = table.mixed(torch.tensor([0]), torch.tensor([[0.6, 0.4, 0.0]]).log()).softmax(-1)
    assert_close(q, torch.tensor([[0.48, 0.42, 0.0]]) / 0.9)


@given(st.integers(0, 1000), st.floats(0.1, 300.0))
def test_logits_of_any_size_stay_numbers(seed: int, scale: float) -> None:
    scores = scale * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed))
    before = scores.clone()
    q = taught().mixed(torch.tensor([7, 8, 1]), scores).softmax(-1)
    assert torch.equal(scores, before), "a block draft gives its logits to several nodes"
    assert_close(q, mixture(scores), atol=1e-4, rtol=0.0)


def test_what_the_draft_cannot_say_it_still_does_not_say() -> None:
    scores = torch.zeros(3, VOCAB)
    scores[:, 3] = IMPOSSIBLE
    scores[1] = IMPOSSIBLE  # a block's end
    scores[2, :11] = IMPOSSIBLE  # a draft that is certain
    mixed = taught().mixed(torch.tensor([7, 7, 7]), scores)
    assert torch.equal(mixed.isneginf(), scores.isneginf())
    assert mixed[0].softmax(-1)[4] > scores[0].softmax(-1)[4]
    assert mixed[2].softmax(-1)[11] == 1.0


def test_processors_come_after_it() -> None:
    """What they forbid stays forbidden, and each place has the token before it."""
    processors = [SuppressTokensLogitsProcessor([3], "cpu"), TemperatureLogitsWarper(0.5)]
    mixing, table = MixedProcessing(Processing(processors), taught()), taught()
    text, scores = torch.tensor([[1, 7]]), torch.randn(2, VOCAB)
    by_hand = table.mixed(torch.tensor([7, 8]), scores) / 0.5
    by_hand[:, 3] = IMPOSSIBLE
    assert_close(mixing.after_each(text, [[], [2, 8]], scores), by_hand)
    assert_close(mixing.one(text, [], scores[0]), by_hand[0])
    assert_close(mixing.one(text, [torch.tensor(2), torch.tensor(8)], scores[1]), by_hand[1])
    assert mixing.forbids_all(torch.full((VOCAB,), IMPOSSIBLE))
