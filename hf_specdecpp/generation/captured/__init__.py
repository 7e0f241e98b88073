"""Rounds and target passes as CUDA graphs."""
