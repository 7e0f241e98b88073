"""EAGLE-3 drafts (arXiv 2503.01840): the model, its input, and checkpoints of the original and speculators formats."""
