"""Gemma 4 assistants: their checkpoints, the target's keys and values that they read, their side of a generation."""
