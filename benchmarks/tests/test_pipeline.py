"""`manyhands bench pipeline`, what is planned and simulated of it: the figures hold together."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands_bench.pipeline import bench
from manyhands_bench.pipeline.studies import draw_pipeline_studies


def quiet(text: str) -> None:
    pass


def test_no_gap_to_exhaustive_search() -> None:
    figures = bench.bench_optimality(True, quiet)
    assert abs(float(figures["optimality_gap"])) < 1e-9
    assert int(figures["optimality_instances"]) > 20
    assert 0 <= float(figures["recurrence_misses_part"]) < 0.5
    gaps = [float(figures[f"algorithm_1_gap_block_{block}"]) for block in (1, 2, 4)]
    assert gaps[0] <= min(gaps[1:])
    assert min(gaps) >= -1e-12


@pytest.mark.slow
def test_plans_are_quick_predicted_and_never_slower_than_rivals() -> None:
    planned = bench.bench_planner(True, quiet)
    assert int(planned["plan_layers"]) >= 200
    assert float(planned["plan_seconds"]) < 30
    assert float(bench.bench_prediction(True, quiet)["prediction_error"]) < 0.2
    table = bench.bench_table_4(True, quiet)
    assert float(table["table4_min_vs_rivals"]) >= 1 - 1e-9
    assert float(table["volume_mb_hpp_mobilenetv2"]) > 0


@pytest.mark.slow
def test_studies_are_drawn(tmp_path: Path) -> None:
    figures = draw_pipeline_studies(tmp_path, True, quiet)
    for name in ("fig_15a", "fig_15b_policies", "fig_15b_memory", "fig_18_mobilenetv2", "fig_14_env-c"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert float(figures["policy_ours_peak_mb"]) < float(figures["policy_c_peak_mb"])
    assert float(figures["policy_ours_samples_per_second"]) > 0.95 * float(figures["policy_c_samples_per_second"])
    assert float(figures["joules_ratio"]) > 1
