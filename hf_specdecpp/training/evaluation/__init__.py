"""The head is judged beside its rivals."""
