"""Measure the cost of lookups: microseconds per round and bytes per token, by the length of the text.

    python examples/lookup_cost.py [FILE]

FILE is a text file; by default this repository's guides.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from pathlib import Path

from hf_specdecpp.lookup.token_index import LookupRates, TextLookup, TextRates, TokenIndex

LENGTHS = (1_000, 8_000, 50_000)
ROUNDS, ROUNDS_TIMED = 500, 100  # the fastest hundred count
AHEAD, ACCEPTED = 10, 3  # tokens that a round looks up, and accepts


def main() -> None:
    files = [Path(sys.argv[1])] if len(sys.argv) > 1 else sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    words = " ".join(file.read_text(encoding="utf-8") for file in files).replace(",", " ,").replace(".", " .").split()
    ids = {word: place for place, word in enumerate(dict.fromkeys(words))}
    tokens = [ids[word] for word in words] * 4
    print(f"{len(words)} words, of which {len(ids)} are distinct\n")
    print("tokens   us a round   bytes a token   ms to read them")
    for length in LENGTHS:
        if length + ROUNDS * ACCEPTED > len(tokens):
            break
        tracemalloc.start()
        seen = TokenIndex(tokens[:length])
        size = tracemalloc.get_traced_memory()[0] / len(seen)
        tracemalloc.stop()
        lookup, rates = TextLookup(), TextRates(LookupRates())
        begin = time.perf_counter()
        lookup.read_prompt(tokens[:length])
        read = time.perf_counter() - begin
        each = float("inf")
        for start in range(length, length + ROUNDS * ACCEPTED, ROUNDS_TIMED * ACCEPTED):
            begin = time.perf_counter()
            for first in range(start, start + ROUNDS_TIMED * ACCEPTED, ACCEPTED):
                for token in tokens[first : first + ACCEPTED]:
                    lookup.read(token)
                rates.estimates(lookup.ahead(AHEAD).classes)
            each = min(each, (time.perf_counter() - begin) / ROUNDS_TIMED)
        print(f"{length:6}   {1e6 * each:10.1f}   {size:13.0f}   {1e3 * read:15.1f}")


if __name__ == "__main__":
    main()
