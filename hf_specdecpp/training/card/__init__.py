"""The repository and its card are put together."""
