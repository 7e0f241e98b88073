"""Prompts and answers: shared by training, benchmarks and the demonstration."""
