"""The harness of the executor's tests trains here too; what is registered for a test is unregistered after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "executor"))


@pytest.fixture
def registered() -> Iterator[None]:
    import interleaved

    interleaved.register()
    yield
    interleaved.unregister()
