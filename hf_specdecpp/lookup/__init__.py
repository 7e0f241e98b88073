"""Candidates from text that was seen before: where it repeats, what followed there, and how often that was right."""
