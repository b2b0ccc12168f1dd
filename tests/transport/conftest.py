"""Every test of a connection runs plain and encrypted."""

from __future__ import annotations

import pytest

from manyhands.transport.security import Security, new_token


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def security(request: pytest.FixtureRequest) -> Security:
    return Security(new_token(), bool(request.param))
