"""`manyhands bench core` in small: every transport is measured."""

from __future__ import annotations

import pytest

from manyhands_bench.core.links import SIZES
from manyhands_bench.core.transports import bench_engine


@pytest.mark.slow
def test_the_benchmark() -> None:
    progress: list[str] = []
    found = bench_engine(quick=True, on_progress=progress.append)
    for kind in ("raw", "tcp", "tls", "shm", "gloo"):
        assert float(found[f"{kind}_latency_us"]) > 0
        assert float(found[f"{kind}_throughput_mb_per_s"]) > 0
        assert found[f"{kind}_kill_seconds"]
    assert float(found["exchange_efficiency"]) > 0
    assert float(found["latency_ratio"]) > 1
    for size in SIZES:
        for figure in ("shm_latency_us", "tcp_latency_us", "shm_stream_gb_s", "tcp_stream_gb_s"):
            assert float(found[f"{figure}_{size}"]) > 0
        assert float(found[f"shm_stream_ratio_{size}"]) > 0
    assert progress
