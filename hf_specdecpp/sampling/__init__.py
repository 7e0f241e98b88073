"""Random numbers, logits processors, and the target's latest distributions after each token."""
