"""Tests use one thread each, so that two run side by side, and a cache folder of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# In CI the same examples every time: a change is judged by what it changes. At home each run draws new ones.
settings.register_profile("house", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("house")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is read from or written to the user's cache."""
    root: Path = tmp_path_factory.getbasetemp() / "home"
    os.environ["MANYHANDS_HOME"] = str(root)
