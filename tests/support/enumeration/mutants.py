"""Mistakes that are made on purpose, to see that a test would notice them."""

import pytest

from hf_specdecpp.generation import output_text as verification


def accept_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy verification takes whatever was drafted, so that texts have to change."""
    monkeypatch.setattr(
        verification, "verify_greedy", lambda tree, likeliest: (tree.nodes_to(len(tree)), likeliest(len(tree)))
    )
