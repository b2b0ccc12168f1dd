"""Plans of the chaos bench use every device."""

from __future__ import annotations

import pytest

from manyhands_bench.chaos.coordinator import plan_for
from manyhands_bench.chaos.draw import (
    COORDINATOR,
    SHARES,
)


@pytest.mark.parametrize("share", [share for share in SHARES if share != "split"])
@pytest.mark.parametrize("count", [3, 4])
def test_a_plan_uses_every_device(share: str, count: int) -> None:
    names = tuple(f"w{place}" for place in range(count))
    assert set(plan_for(share, names).devices) == set(names)
    assert COORDINATOR not in names
