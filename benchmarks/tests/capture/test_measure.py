"""`manyhands bench capture` in small."""

from __future__ import annotations

import json

import pytest

from manyhands.models.registry import ZOO
from manyhands_bench.capture import measure as bench


@pytest.mark.slow
def test_the_figures_are_flat_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = bench.CaptureSetting("tiny", 2)
    monkeypatch.setattr(bench, "OVERHEAD", (tiny,))
    monkeypatch.setattr(bench, "KERNEL_GAIN", tiny)
    monkeypatch.setattr(bench, "KERNELS", (tiny,))
    monkeypatch.setattr(bench, "QUICK", bench.Budget(3, 0.1, 0.2, 0.1, 0.2, 0.1))
    progress: list[str] = []
    figures = bench.bench_capture(quick=True, on_progress=progress.append)
    assert json.loads(json.dumps(figures)) == figures
    assert all(isinstance(value, (int, float, str)) for value in figures.values())
    for key in ("capture_overhead", "kernel_choice_gain", "kernel_choice_gain_min", "capture_seconds_tiny"):
        assert isinstance(figures[key], float)
        assert figures[key] > 0
    assert figures["threads"] == 1
    assert progress


def test_every_setting_is_a_model_of_the_zoo() -> None:
    for setting in (*bench.OVERHEAD, bench.KERNEL_GAIN, *bench.KERNELS):
        assert ZOO[setting.model].kind == "image"
    assert str(bench.KERNEL_GAIN) == "yolov2-16 3x608x608 batch 1"
