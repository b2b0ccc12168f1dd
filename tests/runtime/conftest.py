"""Tests of processes that join each other: each begins without knowing any device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.engine.proofs import DIALLED


@pytest.fixture(autouse=True)
def _strangers() -> Iterator[None]:
    """A port that another test's device had may be another's by now; its key is not to be missed there."""
    DIALLED.reset()
    yield
    DIALLED.reset()
    for name in ("devices.json", "audit.jsonl"):
        (Path(os.environ["MANYHANDS_HOME"]) / name).unlink(missing_ok=True)
