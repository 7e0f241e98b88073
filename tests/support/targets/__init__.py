"""Models of every family, and what calls of `generate()` return and ask for."""
