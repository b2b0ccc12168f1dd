"""One browser for all tests of the page; without one they are skipped, and say so."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from browser import Browser, found_browser

from manyhands.dashboard import reader


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if found_browser() is None:
        if os.environ.get("CI"):
            pytest.fail("CI must have a browser: .ci/run installs Chromium")
        pytest.skip("no Chromium here: apt-get install chromium")
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits a second for what changed."""
    monkeypatch.setattr(reader, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(reader, "IDLE_LOOK_SECONDS", 0.2)
