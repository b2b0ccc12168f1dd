"""Outcomes made by hand: shared by the tests of `manyhands bench chaos`."""

from __future__ import annotations

from typing import Any

from manyhands_bench.chaos.summary import (
    FaultOutcome,
    ScenarioOutcome,
)


def outcome(number: int = 0, *faults: FaultOutcome, seed: int = 1, **given: Any) -> ScenarioOutcome:
    return ScenarioOutcome(seed, number, "tiles", given.pop("planned_faults", len(faults)), list(faults), **given)


def kill(seconds: float | None, *, has_fired: bool = True) -> FaultOutcome:
    return FaultOutcome("kill", "tiles", has_fired, seconds)
