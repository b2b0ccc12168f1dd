"""TILE's chapter 6 in the lab: what is run, and the figures of what was."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from manyhands.executor.log import MeasuredSpan
from manyhands.facts.errors import BadFile
from manyhands.files.documents import write_document
from manyhands_bench.tile.lab_study import (
    PLANNED,
    STORED,
    StoredSteps,
    TileLabExtent,
    TileStep,
    _split,
    _stored,
    baseline_runs,
    figures_of,
    played,
    speedup_runs,
)
from manyhands_bench.tile.setup import TiledNetwork

EXTENT = TileLabExtent(devices=2, tiles=2, batches=(1,), batches_of_baselines=(1, 4))


def step(part: str, way: str, seconds: float, bare: float = 0.0, computing: float = 0.0) -> TileStep:
    return TileStep(part, way, 0, seconds, bare or seconds, computing or seconds)


def test_every_number_of_devices_and_tiles_is_run_and_every_way_to_share_a_batch(subject: TiledNetwork) -> None:
    runs = speedup_runs(subject, EXTENT)
    assert [run.way for run in runs] == ["1x1", "1x2", "2x1", "2x2"]
    assert [len(run.plan().devices) for run in runs] == [1, 2, 2, 4]
    ways = {run.way: run.plan().batch_size for run in baseline_runs(subject, EXTENT)}
    assert ways["data parallel, 4"] == ways["tiles, 4"] == ways["layer partition, 4"] == 4
    assert len(ways) == 6


def test_devices_are_played_with_room_for_their_processes() -> None:
    lab = played("pi3x6", "x", 2, EXTENT)
    assert [device.memory_bytes for device in lab.cluster.devices] == [4 * 10**9] * 2
    assert (lab.slots, lab.scale, lab.cluster.name) == (2, EXTENT.scale, "x")


def test_a_step_is_split_by_the_busiest_device_and_the_last_backward() -> None:
    spans = [
        MeasuredSpan("a", "compute", 1.0, 3.0, "forward", ""), MeasuredSpan("a", "compute", 3.0, 4.0, "backward", ""),
        MeasuredSpan("b", "compute", 1.5, 2.0, "forward", ""), MeasuredSpan("b", "receive", 2.0, 4.5, "receive", ""),
        MeasuredSpan("b", "compute", 4.5, 6.0, "backward", ""), MeasuredSpan("a", "send", 6.0, 9.0, "reduce", ""),
    ]  # fmt: skip
    assert _split(spans) == (5.0, 3.0)


def test_figures_are_in_the_devices_own_time_and_leave_out_what_is_missing() -> None:
    stored = StoredSteps("x", 0.2, [
        step("speedups", "1x1", 20.0), step("speedups", "2x2", 8.0, 6.0, 5.0),
        step("batches", "1 group, 1", 4.0), step("batches", "every layer, 1", 3.0),
        step("batches", "optimal, 1", 2.5), step("batches", f"{PLANNED}, 1", 2.0),
        step("baselines", "tiles, 1", 2.0), step("baselines", "data parallel, 1", 8.0),
    ])  # fmt: skip
    figures = figures_of(stored, EXTENT)
    assert figures["fig_6_1_seconds_1x1"] == pytest.approx(100.0)
    assert figures["fig_6_1_speedup_2x2"] == pytest.approx(2.5)
    assert figures["fig_6_1_weights_seconds_2x2"] == pytest.approx(10.0)
    assert figures["fig_6_1_boundary_seconds_2x2"] == pytest.approx(5.0)
    assert "fig_6_1_speedup_1x2" not in figures
    assert figures["fig_6_3_planned_vs_every_layer_least"] == pytest.approx(1.5)
    assert figures["fig_6_6_data_parallel_over_tiles_1"] == pytest.approx(4.0)
    assert "fig_6_6_layer_partition_over_tiles_1" not in figures


def test_a_folder_at_another_scale_is_refused(tmp_path: Path) -> None:
    write_document(tmp_path / STORED, msgspec.to_builtins(StoredSteps("x", 0.2, [step("speedups", "1x1", 20.0)])))
    again = _stored(tmp_path, "x", 0.2)
    assert again is not None
    assert again.steps == [step("speedups", "1x1", 20.0)]
    with pytest.raises(BadFile, match=r"at scale 0\.2"):
        _stored(tmp_path, "x", 0.25)
