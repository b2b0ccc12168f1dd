"""Planning time, optimality and prediction."""

from __future__ import annotations

import pytest

from manyhands_bench.pipeline import bench


def quiet(text: str) -> None:
    pass


@pytest.mark.slow
def test_no_gap_to_exhaustive_search() -> None:
    figures = bench.bench_optimality(True, quiet)
    assert abs(float(figures["optimality_gap"])) < 1e-9
    assert int(figures["optimality_instances"]) > 20
    assert 0 <= float(figures["recurrence_misses_part"]) < 0.5
    gaps = [float(figures[f"algorithm_1_gap_block_{block}"]) for block in (1, 2, 4)]
    assert gaps[0] <= min(gaps[1:])
    assert min(gaps) >= -1e-12


@pytest.mark.slow
def test_plans_are_quick_and_predicted() -> None:
    planned = bench.bench_planner(True, quiet)
    assert int(planned["plan_layers"]) >= 200
    assert float(planned["plan_seconds"]) < 30
    assert float(bench.bench_prediction(True, quiet)["prediction_error"]) < 0.2
