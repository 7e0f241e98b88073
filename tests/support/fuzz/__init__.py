"""Random cases of `generate()` with an assistant, each compared with plain `generate()`."""
