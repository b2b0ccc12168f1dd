"""Grids of tiles, and workers on cores."""

from __future__ import annotations

import os

import pytest

from manyhands.facts.errors import BadValue
from manyhands.session.session import Session
from manyhands_bench.tile.bench import bench_tile
from manyhands_bench.tile.setup import square_grid, usable

pytestmark = pytest.mark.xdist_group("bench_tile")


def test_grids_are_square_as_far_as_they_go() -> None:
    assert [square_grid(count) for count in (1, 2, 4, 6, 8, 16, 24, 7)] == [
        (1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (4, 4), (6, 4), (7, 1),
    ]  # fmt: skip


@pytest.mark.slow
def test_workers_stay_on_their_cores(session: Session) -> None:
    cores = usable()
    for number, name in enumerate(session.cluster.names):
        process = session.coordinator.members[name].facts.pid
        threads = [int(thread) for thread in os.listdir(f"/proc/{process}/task")]
        assert len(threads) > 1
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {
            frozenset({cores[number % len(cores)]})
        }


def test_more_workers_than_cores_are_refused() -> None:
    with pytest.raises(BadValue, match=r"--workers 4096: this machine has \d+ core"):
        bench_tile(4096)
