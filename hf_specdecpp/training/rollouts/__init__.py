"""The target writes answers to prompts."""
