"""Memory of tiles, counted and resident."""

from __future__ import annotations

import pytest

from manyhands.session.session import Session
from manyhands_bench.tile.memory import PARTS, bare_import_bytes, bench_memory, resident_peaks
from manyhands_bench.tile.setup import TiledNetwork

pytestmark = pytest.mark.xdist_group("bench_tile")


def quiet(text: str) -> None:
    """No progress."""


@pytest.mark.slow
def test_memory_is_told_by_part(subject: TiledNetwork) -> None:
    figures = bench_memory(subject, True, quiet)
    for tiles in (1, 2, 4):
        parts = sum(int(figures[f"memory_{part}_bytes_{tiles}"]) for part in PARTS)
        assert parts == figures[f"memory_bytes_{tiles}"]
    assert float(figures["memory_ratio_4_without_weights"]) > float(figures["memory_ratio_2_without_weights"]) > 1.5


@pytest.mark.slow
def test_resident_memory_is_more_than_torch(subject: TiledNetwork, session: Session) -> None:
    plan = subject.single(session.cluster.names[0])
    peaks = resident_peaks(subject, session, plan, 1)
    assert list(peaks) == [session.cluster.names[0]]
    assert peaks[session.cluster.names[0]] > bare_import_bytes() > 50e6
