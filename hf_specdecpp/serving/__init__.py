"""Drafts as other engines serve them: plain models written and checked, and the commands that serve them."""
