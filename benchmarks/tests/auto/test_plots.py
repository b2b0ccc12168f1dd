"""The pictures of `manyhands bench auto`."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands_bench.auto.plots import Gain, Sides, draw_gains, draw_sides


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    gains = [Gain("a", "mixed", 1.4), Gain("b", "single", 1.0), Gain("c", "mixed", None)]
    assert draw_gains(gains, tmp_path / "gains.png", "gains").stat().st_size > 5_000
    sides = [Sides("a net on b", {"mixed": 1.0, "tiles": 1.5}, {"mixed": 0.9, "tiles": 1.4})] * 3
    assert draw_sides(sides, tmp_path / "lab.png", "lab").stat().st_size > 5_000
