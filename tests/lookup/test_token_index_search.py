"""Where the end of a text stood before: compared with a search by hand, and what it costs."""

import random
import tracemalloc
from pathlib import Path

import pytest

from hf_specdecpp.lookup.token_index import EQUAL, MOST_SINGLE, NOTHING, Answers, Continuation, TextLookup, TokenIndex


def matching(seen: list[int], text: list[int], place: int) -> int:
    """How many tokens up to `place` of `seen` are those at the end of the text."""
    length = 0
    while length <= place and length < len(text) and seen[place - length] == text[-1 - length]:
        length += 1
    return length


def by_hand(text: list[int], most: int, earlier: list[int], after: list[int], never: set[int]) -> list[int]:
    """What a lookup finds, by its definition."""
    whole, found = [*text, *after], Continuation()
    places = [(source, place) for source in (text, earlier) for place in range(len(source))]
    if source_end := len(text) - (not after):
        places = [(s, p) for s, p in places if s is not text or p < source_end]
    lengths = [(matching(s, whole, p), s, p) for s, p in places]
    longest = max((each[0] for each in lengths), default=0)
    if longest == 1:  # the latest of each text
        alike = [[each for each in lengths if each[1] is source and each[0] == 1] for source in (text, earlier)]
        lengths = [each for found_there in alike for each in found_there[-MOST_SINGLE:]]
    lengths = [each for each in lengths if each[0] >= 1]
    alive = [(s, p + 1) for length, s, p in lengths if min(length, EQUAL) == min(longest, EQUAL)]
    while len(found) < most and alive:
        beyond = [*after, *found.tokens]
        at = [s[p] if p < len(s) else beyond[p - len(s)] for s, p in alive]
        counts = {token: at.count(token) for token in at}
        ranks = [(s is text, p) for s, p in alive]
        latest = {token: max(rank for rank, each in zip(ranks, at, strict=True) if each == token) for token in counts}
        best = max(counts, key=lambda token: (counts[token], latest[token]))
        if best in never or best < 0:
            break
        found.tokens.append(best)
        found.classes.append(0)
        alive = [(s, p + 1) for (s, p), each in zip(alive, at, strict=True) if each == best]
    return found.tokens


@pytest.mark.parametrize("seed", range(30))
def test_what_is_found_is_what_a_search_finds(seed: int) -> None:
    draw = random.Random(seed)
    size, earlier = draw.choice([2, 3, 5, 40]), Answers(1000)
    for _ in range(draw.choice([0, 3])):
        earlier.add([draw.randrange(size) for _ in range(12)])
    never = {1} if seed % 5 == 4 else set()
    text = [draw.randrange(size) for _ in range(40)]
    lookup = TextLookup(never, None, earlier.seen)
    lookup.read_prompt(text[:25])
    for token in text[25:]:
        lookup.read(token)
    for after in ([], [text[3]], text[3:6]):
        found = lookup.ahead(9, after)
        assert found.tokens == by_hand(text, 9, list(earlier.seen.tokens), after, never)
        assert len(found.classes) == len(found.tokens)


def test_the_oldest_answers_go() -> None:
    answers = Answers(20)
    for first in range(0, 60, 3):
        answers.add([first, first + 1, first + 2])
        assert len(answers) <= 20
    assert 57 in answers.seen.tokens
    assert 0 not in answers.seen.tokens
    answers.add(range(1000))
    assert list(answers.seen.tokens)[-3:] == [998, 999, NOTHING]
    assert len(answers) <= 20
    answers.clear()
    assert len(answers) == 0
    nothing = Answers(0)
    nothing.add([1, 2])
    assert len(nothing) == 0
    latest = Answers(1)
    for first in (1, 3):
        latest.add([first, first + 1])
        assert list(latest.seen.tokens) == [first, first + 1, NOTHING]


def test_answers_are_saved_on_purpose_and_loaded_again(tmp_path: Path) -> None:
    answers, others = Answers(100), Answers(100)
    answers.add([1, 2, 3])
    answers.add([4])
    answers.save(tmp_path / "answers.json")
    others.load(tmp_path / "answers.json")
    assert list(others.seen.tokens) == list(answers.seen.tokens)
    for damaged in ("[]", '{"answers": [[-1]]}', '{"answers": [["a"]]}', '{"answers": 3}'):
        (tmp_path / "damaged.json").write_text(damaged)
        with pytest.raises(ValueError, match="holds no answers"):
            others.load(tmp_path / "damaged.json")


def like_text(length: int) -> list[int]:
    """Token ids as frequent as words are, with passages that come again."""
    draw = random.Random(0)
    tokens = draw.choices(range(1000, 31_000), [1.0 / rank for rank in range(1, 30_001)], k=length)
    for begin in range(500, length - 100, 500):
        tokens[begin : begin + 60] = tokens[begin - 400 : begin - 340]
    return tokens


def test_memory_a_token() -> None:
    tokens = like_text(8000)
    tracemalloc.start()
    seen, taken = TokenIndex(tokens), tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken / len(seen) < 108  # a pair takes 8 bytes more from Python 3.14 on: tuples keep their hash
