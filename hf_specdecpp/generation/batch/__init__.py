"""Drafts and target of a batch of sequences."""
