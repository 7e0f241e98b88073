"""The head is calibrated and judged beside its rivals."""
