"""A headless Chromium of the system (`apt-get install chromium`) driven by playwright, or the test is skipped."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# It runs as root in containers, draws without a graphics card, and looks nothing up at its maker's.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
           "--disable-component-update", "--disable-sync"]  # fmt: skip


@contextmanager
def page(**options: Any) -> Iterator[Any]:
    """A new page; `options` are playwright's, such as `reduced_motion="reduce"`."""
    playwright = pytest.importorskip("playwright.sync_api", reason="make test-space installs it")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if binary is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=binary, args=OPTIONS)
        try:
            yield browser.new_page(**options)
        finally:
            browser.close()
