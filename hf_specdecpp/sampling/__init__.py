"""Randomness, logits processors, drawing without replacement, and the verification of a chain."""
