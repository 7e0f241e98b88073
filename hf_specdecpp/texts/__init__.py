"""Prompts, answers and what the draft would propose along them: shared by training and benchmarks."""
