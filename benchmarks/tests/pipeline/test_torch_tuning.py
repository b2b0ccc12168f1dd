"""The settings that PyTorch's pipelines are tried with."""

from __future__ import annotations

import pytest

from manyhands_bench.pipeline.torch_tuning import shared_out, splits

pytestmark = pytest.mark.xdist_group("bench_pipeline")


def test_splits_follow_speeds() -> None:
    units = [(1.0, 1)] * 12
    assert splits(units, (1.0, 1.0), float("inf"), 1) == [(0, 6, 12)]
    assert splits(units, (3.0, 2.0, 1.0), float("inf"), 1) == [(0, 6, 10, 12)]
    assert splits(units, (1.0, 1.0), float("inf"), 3)[1:] == [(0, 5, 12), (0, 7, 12)]


def test_splits_avoid_slow_cuts() -> None:
    units = [(1.0, 1), (1.0, 1000), (1.0, 1), (1.0, 1)]
    assert splits(units, (1.0, 1.0), 100.0, 1) == [(0, 1, 4)]


def test_samples_are_shared_out() -> None:
    assert shared_out(16, (0.6, 0.4, 0.25)) == (8, 5, 3)
    assert shared_out(16, (1.0, 1.0, 1.0)) == (6, 5, 5)
    assert shared_out(3, (100.0, 1.0, 1.0)) == (1, 1, 1)
