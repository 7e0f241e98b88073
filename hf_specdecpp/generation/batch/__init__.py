"""Loops over several sequences at once, or over one in several processes."""
