"""Passes and whole rounds that a GPU runs as one launch: CUDA graphs, over texts in caches of fixed rooms."""
