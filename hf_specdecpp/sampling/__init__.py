"""Randomness, logits processors, drawing without replacement, and what the target said lately."""
