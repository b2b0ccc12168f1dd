"""The demonstration's predictions: each run finds nothing stored, and leaves the environment as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manyhands.files.documents import cache_folder
from manyhands_bench.core.demo import WORKERS, bench_demo, nothing_stored


@pytest.mark.parametrize("before", [None, "/elsewhere"])
def test_what_is_measured_is_kept_in_an_empty_folder(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is None:
        monkeypatch.delenv("MANYHANDS_HOME", raising=False)
    else:
        monkeypatch.setenv("MANYHANDS_HOME", before)
    with nothing_stored(tmp_path / "home"):
        assert cache_folder().is_relative_to(tmp_path)
    assert os.environ.get("MANYHANDS_HOME") == before


@pytest.mark.slow
def test_the_demonstration_is_predicted() -> None:
    figures = bench_demo(True, lambda text: None)
    for workers in WORKERS:
        error = figures[f"demo_sim_error_{workers}"]
        assert isinstance(error, float)
        assert 0 <= error < 5
        assert "predicted and measured" in str(figures[f"demo_sim_error_{workers}_setting"])
