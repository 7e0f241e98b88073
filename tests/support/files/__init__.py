"""Checkpoints and repositories, as others write them, and damaged ones."""
