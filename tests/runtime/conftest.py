"""Tests of processes that join each other: each begins without knowing any device."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _strangers(strangers: None) -> None:
    """See `strangers`, in the conftest above."""
