"""`manyhands bench split` in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands_bench.command import app
from manyhands_bench.split.bench import bench_split
from split_runs import SHARED


@pytest.mark.slow
def test_without_data_only_bytes_are_measured(tmp_path: Path) -> None:
    figures = bench_split(quick=True, traces=tmp_path / "none", pictures=tmp_path / "none.npz")
    assert 0.25 <= float(figures["bytes_ratio_8bit"]) <= 0.26
    assert "--traces" in str(figures["traces_skipped"])
    assert "--pictures" in str(figures["accuracy_skipped"])


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="there is no ../shared/data")
def test_the_command_measures_every_figure(tmp_path: Path) -> None:
    words = ["split", "--quick", "--json", "--out", str(tmp_path), "--traces", str(SHARED / "traces")]
    result = CliRunner().invoke(app, [*words, "--pictures", str(SHARED / "cifar10_jpeg.npz")])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    for key in ("worst_vs_best_rival", "gain_geomean", "sim_error", "edge_memory_ratio", "edge_energy_ratio"):
        assert 0 < figures[key] < 100, key
    assert {"accuracy_normal", "accuracy_drop_pipeline", "accuracy_drop_8bit", "foot_seconds_ours"} <= figures.keys()
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "eq_6.png", "fig_16.png", "fig_18.png", "fig_6_7_8.png",
    ]  # fmt: skip
