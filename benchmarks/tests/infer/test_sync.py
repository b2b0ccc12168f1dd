"""Where channels of a decoupled network wait for each other."""

from __future__ import annotations

import pytest

from infer_methods import TINY
from manyhands_bench.infer.networks import GROUPS, Library
from manyhands_bench.infer.sync import bench_sync


@pytest.mark.slow
def test_channels_wait_for_each_other_at_shuffles_only(library: Library) -> None:
    figures = bench_sync(library, TINY, lambda text: None)
    shuffles = sum(op.channels == "shuffle" for op in library.graph(TINY, decoupled=True).network.ops)
    assert figures["sync_points_channels"] == shuffles > 0
    assert figures["messages_channels"] == shuffles * GROUPS * (GROUPS - 1)
    assert figures["sync_points_channels_with_classifier"] > figures["sync_points_channels"]  # type: ignore[operator]
    assert figures["sync_points_1d"] == figures["sync_points_2d"]
    assert figures["messages_2d"] == 2 * figures["messages_1d"]  # type: ignore[operator]
