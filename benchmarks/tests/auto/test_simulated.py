"""What counts as a gain over the corners."""

from __future__ import annotations

import math

import pytest

from manyhands.facts.cluster import Cluster
from manyhands.planner.strategies import CORNERS
from manyhands_bench.auto.scenarios import (
    PlanningScenario,
)
from manyhands_bench.auto.simulated import ScenarioResult, bench_simulated, figures_of


def answer(corners: tuple[float, float, float, float], seconds: float, mixed: bool, number: int = 0) -> ScenarioResult:
    return ScenarioResult(
        number, "a network", dict(zip(CORNERS, corners)), seconds, mixed, "tiles x2 | single x1", 1.0, 2.0
    )


@pytest.mark.slow
def test_two_small_scenarios_are_answered_and_auto_is_never_behind_a_corner() -> None:
    devices = [{"name": "a", "kind": "pi4"}, {"name": "b", "kind": "pi5"}]
    link = {"rate": "1000 Mbit/s", "delay": "0.3 ms"}
    cluster = Cluster.from_dict({"name": "two", "devices": devices, "link": link})
    tiny = [
        PlanningScenario(n, "tiny", (1, 16, 16), cluster, 1000, 1.0, "alike", size) for n, size in enumerate((1, 8))
    ]
    figures, found = bench_simulated(tiny, lambda text: None, at_once=1)
    assert figures["profile_machine"] == "estimated from the device catalogue"
    assert [one.number for one in found] == [0, 1]
    assert figures["count"] == figures["count_compared"] == 2
    assert all(one.gain >= 1 - 1e-9 for one in found)
    assert all(set(one.corners) == set(CORNERS) for one in found)
    assert found[0].corners["samples"] == math.inf, "one sample cannot be shared"
    assert "batch 8 on 1 pi4, 1 pi5" in str(figures["scenarios"])


def test_gains_are_over_the_best_corner_and_what_does_not_fit_is_counted_apart() -> None:
    nothing = math.inf
    found = [
        answer((4.0, 2.0, 3.0, nothing), 1.0, True),
        answer((1.0, 2.0, 3.0, 4.0), 1.0, False),
        answer((nothing,) * 4, 5.0, True),
        answer((nothing,) * 4, nothing, False),
    ]
    figures = figures_of(found, 8.0)
    assert figures["mixed_share"] == pytest.approx(2 / 3), "of three in which anything fits"
    assert figures["gain_geomean"] == pytest.approx(math.sqrt(2.0))
    assert figures["gain_geomean_mixed"] == pytest.approx(2.0)
    assert (figures["gain_min"], figures["gain_max"]) == (1.0, 2.0)
    assert (figures["count"], figures["count_compared"]) == (4, 2)
    assert (figures["count_nothing_fits"], figures["count_only_mixed_fits"]) == (1, 1)
    assert (figures["wins_mixed"], figures["wins_single"], figures["wins_other"]) == (2, 1, 0)
    assert figures["scenario_seconds"] == 2.0


def test_a_mixed_plan_as_fast_as_a_corner_has_not_won_and_one_behind_is_seen() -> None:
    same = figures_of([answer((1.0, 2.0, 3.0, 4.0), 1.0, True)], 1.0)
    assert (same["mixed_share"], same["wins_single"]) == (0.0, 1)
    behind = figures_of([answer((1.0, 2.0, 3.0, 4.0), 1.25, False)], 1.0)
    assert behind["gain_min"] == 0.8
