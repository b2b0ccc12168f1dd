"""How lost rounds are counted."""

from __future__ import annotations

import pytest

from manyhands_bench.chaos.scenario import rounds_lost


@pytest.mark.parametrize(
    ("recorded", "lost"),
    [([0, 1, 2], 0), ([0, 2], 1), ([0, 1, 1, 2], 1), ([0, 1, 2, 3], 1), ([], 3), ([2, 0, 1], 0), ([0, 0, 0], 4)],
)
def test_rounds_are_lost_that_are_not_recorded_exactly_once(recorded: list[int], lost: int) -> None:
    assert rounds_lost(recorded, 3) == lost
