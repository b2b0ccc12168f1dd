"""Speed of tiles in small."""

from __future__ import annotations

import os

import pytest

from manyhands.session.session import Session
from manyhands_bench.tile.bench import bench_speed
from manyhands_bench.tile.setup import TiledNetwork

pytestmark = pytest.mark.xdist_group("bench_tile")


def quiet(text: str) -> None:
    """No progress."""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores")
@pytest.mark.slow
def test_speed_figures_fit_together(subject: TiledNetwork, session: Session) -> None:
    figures = bench_speed(subject, session, 1, 1, quiet)
    assert figures["efficiency_vs_limit_2"] == figures["speedup_2"] / figures["limit_2"]  # type: ignore[operator]
    ways = [f"speedup_2_grid_{grid}{where}" for grid in ("2x1", "1x2") for where in ("", "_beside_sums")]
    assert figures["speedup_2"] in [figures[way] for way in ways if way in figures]
    assert min(float(value) for value in figures.values() if not isinstance(value, str)) > 0
