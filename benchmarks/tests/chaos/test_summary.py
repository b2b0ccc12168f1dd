"""Figures of all scenarios together."""

from __future__ import annotations

from typing import Any

import pytest

from chaos_outcomes import kill, outcome
from manyhands_bench.chaos.summary import (
    by_kind,
    summarize,
)


def test_figures_of_all_scenarios_together() -> None:
    figures = summarize(
        [
            outcome(0, kill(0.5), kill(3.0), rounds=40, weights_differ=1e-15, seconds=10.0),
            outcome(
                1, kill(1.0), kill(9.0, has_fired=False), planned_faults=4, rounds=20, rounds_lost=2, hangs=1,
                failure="it hangs", weights_differ=1e-13, processes_left=3, false_evictions=["w1", "w1"], seconds=5.0,
            ),
        ]
    )  # fmt: skip
    wanted = {
        "faults": 6, "faults_fired": 3, "rounds_lost": 2, "weights_differ": 1e-13, "processes_left": 3, "hangs": 1,
        "recovery_seconds_median": 1.0, "recovery_seconds_worst": 3.0, "false_evictions": 2, "scenarios": 2,
        "failures": 1, "rounds": 60, "seconds": 15.0,
    }  # fmt: skip
    assert {key: figures[key] for key in wanted} == wanted
    assert by_kind(figures) == {"kill": (3, 1.0, 3.0)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"failure": "it hangs"}, {"rounds_lost": 1}, {"weights_differ": 2e-10}, {"processes_left": 1},
        {"false_evictions": ["w1"]}, {"planned_faults": 2},
    ],
)  # fmt: skip
def test_a_scenario_with_anything_wrong_is_not_good(wrong: dict[str, Any]) -> None:
    assert outcome(0, kill(1.0), weights_differ=1e-12).is_good
    assert not outcome(0, kill(1.0), **wrong).is_good
    assert not outcome(0, kill(1.0, has_fired=False)).is_good
