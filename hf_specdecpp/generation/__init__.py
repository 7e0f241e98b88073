"""One `generate()` call: entry, decoding loop, statistics, refusals."""
