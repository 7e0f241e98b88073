"""Fixtures that several test files use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, point_client_at

from hf_specdecpp import vocabulary


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """An empty Hub that this process talks to, with a token, and an empty cache. Tests use the same ids again."""
    with HubServer() as server:
        point_client_at(monkeypatch, server, tmp_path / "cache", token="secret")  # noqa: S106
        vocabulary._load_tokenizer.cache_clear()
        yield server
    vocabulary._load_tokenizer.cache_clear()
