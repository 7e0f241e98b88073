"""Prompts and answers, for training, benchmarks and the demonstration."""
