"""Rounds that decide on a CPU as they do on a device, where reads are slow."""

import pytest

from hf_specdecpp.generation import text as verification
from hf_specdecpp.sampling import verification as at_once


def pretend_that_reads_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds decide as they do on a device."""
    for module in (verification, at_once):
        monkeypatch.setattr(module, "waits_for_reads", lambda device: True)
