"""Toy models and rounds whose every outcome is enumerated."""
