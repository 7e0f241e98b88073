"""Generations, timed."""
