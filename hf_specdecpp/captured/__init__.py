"""Passes that a GPU runs as one launch: CUDA graphs of a model over a text in a cache of fixed rooms."""
