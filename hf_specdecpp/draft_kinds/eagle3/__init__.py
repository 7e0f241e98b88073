"""EAGLE-3 drafts (arXiv 2503.01840): the layer, its input, and the checkpoints of both dialects."""
