"""Moments of a run that was struck."""

from __future__ import annotations

import pytest

from manyhands.runtime.outcome import JobOutcome
from manyhands_bench.recovery.site import Trip

pytestmark = pytest.mark.xdist_group("bench_recovery")


def test_a_trip_tells_moments_from_the_signal() -> None:
    trip = Trip(
        JobOutcome(began_at=[11.0], recoveries=[{"seconds": 0.5}]),
        struck_at=10.0,
        steps=[(9.0, 0, 1.0), (10.2, 1, 0.9), (12.5, 2, 0.8)],
        events=[(10.4, "lost", {}), (10.6, "replanned", {}), (12.0, "recovered", {"seconds": 0.5})],
    )
    found = [
        trip.recovery_seconds, trip.detect_seconds, trip.replan_seconds, trip.first_round_seconds,
        trip.caught_up_seconds,
    ]  # fmt: skip
    assert found == pytest.approx([1.0, 0.4, 0.2, 2.0, 2.5])
    assert trip.recoveries_after("lost") == [0.5]
    assert trip.recoveries_after("joined") == []


@pytest.mark.parametrize(
    ("steps", "lost"), [((0, 1, 2), 0), ((0, 2), 1), ((0, 1, 1, 2), 1), ((), 3), ((0, 1, 2, 3), 1)]
)
def test_a_round_that_is_missing_or_comes_twice_is_lost(steps: tuple[int, ...], lost: int) -> None:
    trip = Trip(steps=[(float(place), step, 0.0) for place, step in enumerate(steps)])
    assert trip.rounds_lost(3) == lost
