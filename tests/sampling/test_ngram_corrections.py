"""The target's latest successors of contexts, how far they are trusted, and what they make of logits."""

import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from hf_specdecpp.sampling import ngram_corrections
from hf_specdecpp.sampling.ngram_corrections import (
    BUCKETS,
    DECAY,
    MAX_CHANCE,
    MOST_CONTEXTS,
    MOST_LIKELY,
    ORDERS,
    Mixing,
    NgramCorrections,
    contexts_of,
)
from hf_specdecpp.sampling.processors import Processing

VOCAB = 12
IMPOSSIBLE = float("-inf")


def logits_of(**probs: float) -> Tensor:
    """Logits `[1, VOCAB]` of probabilities: `_3=0.8` is that of token 3."""
    p = torch.zeros(1, VOCAB)
    for token, value in probs.items():
        p[0, int(token[1:])] = value
    return p.log()


def row(table: NgramCorrections, *tokens: int) -> Tensor:
    """What is kept after just these tokens, `[VOCAB]`; nothing is 0."""
    found = torch.zeros(VOCAB)
    for token, p in table.successors.get(tokens, {}).items():
        found[token] = p
    return found


def mixed_rows(table: NgramCorrections, contexts: list[tuple[int, ...]], scores: Tensor, greedy: bool) -> Tensor:
    """The mixed logits `[n, VOCAB]` of several contexts."""
    rows = zip(contexts, scores.split(1), strict=True)
    return torch.cat([table.mixed(context, logits, greedy) for context, logits in rows])


def test_the_longest_known_part_of_a_context_counts() -> None:
    table = NgramCorrections(VOCAB)
    table.record([(4, 5, 7)], logits_of(_1=1.0))
    table.record([(6, 5, 7)], logits_of(_2=1.0))
    table.record([(6, 8, 7)], logits_of(_3=1.0))

    def likeliest(*tokens: int) -> tuple[int, int]:
        order, r = table._known(tokens)
        return order, max(r, key=r.__getitem__)

    assert [likeliest(4, 5, 7), likeliest(9, 5, 7), likeliest(9, 9, 7)] == [(3, 1), (2, 2), (1, 3)]
    assert table._known((9, 9, 9)) == (0, {})


def test_the_example_of_the_contexts() -> None:
    text = torch.tensor([[4, 5]])
    assert contexts_of(text, [[], [6], [6, 7, 8]]) == [(4, 5), (4, 5, 6), (6, 7, 8)]
    assert contexts_of(torch.tensor([[1, 2, 3, 4, 5]]), [[], [6]]) == [(3, 4, 5), (4, 5, 6)]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), min_size=1, max_size=5), min_size=1, max_size=8
    )
)
def test_it_is_what_a_dictionary_would_keep(rounds: list[list[tuple[int, int]]]) -> None:
    """The tokens of a round follow each other."""
    table = NgramCorrections(VOCAB)
    expected: dict[tuple[int, ...], dict[int, float]] = {}
    for said in rounds:
        tokens = [token for token, _ in said]
        logits = torch.stack([4.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(s)) for _, s in said])
        table.record([tuple(tokens[: place + 1])[-ORDERS:] for place in range(len(tokens))], logits)
        for place, p in enumerate(logits.softmax(-1)):
            likely, ids = p.topk(MOST_LIKELY)
            new = dict(zip(ids.tolist(), likely.tolist(), strict=True))
            for order in range(1, min(place + 1, ORDERS) + 1):
                context = tuple(tokens[place + 1 - order : place + 1])
                old = expected.get(context)
                known = new if old is None else {t: DECAY * (old.get(t, 0.0) + new.get(t, 0.0)) for t in {*old, *new}}
                best = sorted(known, key=known.__getitem__, reverse=True)[:MOST_LIKELY]
                expected[context] = {each: known[each] for each in best}
    assert DECAY == 1 - DECAY
    for context, kept in expected.items():
        wanted = torch.zeros(VOCAB)
        for each, value in kept.items():
            wanted[each] = value
        assert_close(row(table, *context), wanted, atol=1e-5, rtol=0.0)
    assert table.successors.keys() == expected.keys()
    for r in table.successors.values():
        assert len(r) == MOST_LIKELY
        assert sum(r.values()) <= 1.0 + 1e-6


def test_what_was_seen_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that is gone has what is kept of its last token."""
    monkeypatch.setattr(ngram_corrections, "MOST_CONTEXTS", 4)
    table = NgramCorrections(VOCAB)
    table.record([(1, 7), (2, 7), (3, 5)], torch.cat((logits_of(_3=1.0), logits_of(_4=1.0), logits_of(_6=1.0))))
    assert list(table.successors) == [(7,), (2, 7), (5,), (3, 5)]
    order, r = table._known((1, 7))
    assert order == 1
    assert max(r.values()) == 0.5


def test_how_far_it_is_trusted_follows_what_came_true() -> None:
    """By length of the context and by how sure it was: here always certain, and right after 5 6 8 only."""
    table, sure = NgramCorrections(VOCAB), BUCKETS - 1
    for place in range(60):
        table.record([(9,)], logits_of(**{f"_{place % 2}": 1.0}))
        table.record([(5, 6, 8)], logits_of(_3=1.0))
    came_true = {bucket: table.correct[bucket] / trials for bucket, trials in table.trials.items()}
    assert came_true[3, sure] > 0.95 > came_true[2, sure] == (sure + 0.5) / BUCKETS
    assert came_true[1, 5] < 0.4, "after 9 the one that came last never came next"


@pytest.mark.takes(3)
def test_its_memory_is_what_is_documented() -> None:
    """At most, because further contexts take the place of others."""
    table, count = NgramCorrections(150_000), MOST_CONTEXTS + 1000
    tracemalloc.start()
    try:
        for place in range(count):
            tokens = range(1000 + 8 * (place % 10_000), 1008 + 8 * (place % 10_000))
            table._learn((place, place + 1, place + 2), {int(token): 0.1 + place / 1e6 for token in tokens})
        assert len(table.successors) == MOST_CONTEXTS
        with_table, _ = tracemalloc.get_traced_memory()
        del table
        freed = with_table - tracemalloc.get_traced_memory()[0]  # threads of earlier tests may have memory, too
    finally:
        tracemalloc.stop()
    assert 20e6 < freed < 50e6


def taught() -> NgramCorrections:
    table = NgramCorrections(VOCAB)
    for _ in range(20):
        table.record([(7,), (8,)], torch.cat((logits_of(_3=0.8, _4=0.2), logits_of(_5=1.0))))
    return table


def mixture(scores: Tensor, greedy: bool) -> Tensor:
    """By the definition: what `taught` makes of logits `[3, VOCAB]` after the tokens 7, 8 and 1."""
    q, r = scores.double().softmax(-1), torch.zeros(3, VOCAB, dtype=torch.float64)
    r[0, 3], r[0, 4], r[1, 5] = 0.8, 0.2, 1.0
    t, table = q.amax(-1, keepdim=True), taught()
    buckets = (1, int(0.8 * BUCKETS)), (1, BUCKETS - 1), (1, 0)  # the last one does not matter: r is 0
    came_true = [min(table.correct[each] / table.trials[each], MAX_CHANCE) for each in buckets]
    m = torch.tensor(came_true, dtype=torch.float64)[:, None]
    ratio = (m / (1 - m)) / (t / (1 - t))
    odds = ratio**2 if greedy else ratio / 2
    mixed = (q + odds * r) / (1 + odds)
    return (mixed / mixed.sum(-1, keepdim=True)).float()


@pytest.mark.parametrize("greedy", [True, False])
def test_the_softmax_is_the_mixture(greedy: bool) -> None:
    scores = 2.0 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    q = mixed_rows(taught(), [(7,), (8,), (1,)], scores, greedy).softmax(-1)
    assert_close(q, mixture(scores, greedy), atol=1e-5, rtol=0.0)
    assert float((q - scores.softmax(-1))[:2].abs().amax(-1).min()) > 0.05
    assert_close(q[2], scores[2].softmax(-1))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(0.1, 300.0), st.booleans())
def test_logits_of_any_size_stay_numbers(seed: int, scale: float, greedy: bool) -> None:
    scores = scale * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed))
    before, q = scores.clone(), mixed_rows(taught(), [(7,), (8,), (1,)], scores, greedy).softmax(-1)
    assert torch.equal(scores, before), "a block draft gives its logits to several nodes"
    assert_close(q, mixture(scores, greedy), atol=1e-4, rtol=0.0)


def test_what_the_draft_cannot_say_the_target_may_have_said() -> None:
    scores = torch.zeros(3, VOCAB)
    scores[:, 3] = IMPOSSIBLE
    scores[1] = IMPOSSIBLE  # a block's end
    scores[2, :11] = IMPOSSIBLE  # a draft that is certain
    mixed = mixed_rows(taught(), [(7,)] * 3, scores, True)
    assert mixed[0].softmax(-1)[3] > 0.5
    assert mixed[0].softmax(-1)[4] > scores[0].softmax(-1)[4]
    assert torch.equal(mixed[1:].isneginf(), scores[1:].isneginf())
    assert mixed[2].softmax(-1)[11] == 1.0


@pytest.mark.parametrize(("greedy", "temperature"), [(True, 1.0), (False, 0.8)])
def test_processors_come_after_it(greedy: bool, temperature: float) -> None:
    """What they forbid stays forbidden, each place has the token before it, and the draft's temperature is of q."""
    processors = [SuppressTokensLogitsProcessor([3], "cpu"), TemperatureLogitsWarper(0.5)]
    mixing = Processing([Mixing(taught(), greedy), *processors]).cooled(temperature)
    text, scores = torch.tensor([[1, 7]]), torch.randn(2, VOCAB)
    by_hand = mixed_rows(taught(), [(1, 7), (7, 2, 8)], scores / temperature, greedy) / 0.5
    by_hand[:, 3] = IMPOSSIBLE
    assert_close(mixing.after_each(text, [[], [2, 8]], scores), by_hand)
    assert_close(mixing.one(text, [], scores[0]), by_hand[0])
    assert_close(mixing.one(text, [torch.tensor(2), torch.tensor(8)], scores[1]), by_hand[1])


def test_each_node_is_mixed_once() -> None:
    """Also where a processor looks at its path."""
    mixing = Processing([Mixing(taught(), True), RepetitionPenaltyLogitsProcessor(1.3)])
    text, paths, scores = torch.tensor([[1, 7]]), [[], [2, 8]], torch.randn(2, VOCAB)
    alone = [mixing.one(text, path, row) for path, row in zip(paths, scores, strict=True)]
    assert_close(mixing.after_each(text, paths, scores), torch.stack(alone))
