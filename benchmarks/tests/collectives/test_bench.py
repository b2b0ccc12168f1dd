"""The figures of `manyhands bench collectives`, from a short run with real processes."""

from __future__ import annotations

import pytest

from manyhands.facts.plan import BUCKET_BYTES
from manyhands_bench.collectives import bench
from manyhands_bench.collectives.bench import CollectivesScope, bench_collectives
from manyhands_bench.collectives.member import buckets


@pytest.mark.parametrize("total", [4, BUCKET_BYTES, 2 * BUCKET_BYTES + 4])
def test_the_sums_of_a_round_have_all_bytes(total: int) -> None:
    network, sums = buckets(("a", "b"), total)
    assert sum(each.bytes for each in sums) == total
    assert max(each.bytes for each in sums) <= BUCKET_BYTES
    assert len(network.weights) == len({each.weights for each in sums}) == len(sums)


@pytest.mark.slow
def test_both_ways_are_measured_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUICK", CollectivesScope((3,), (1,), blocks=1, rounds=3, uncounted=1))
    figures = bench_collectives(quick=True)
    assert figures["sums_right"] == 1
    for name in ("builtin_ms", "torch_ms", "torch_over_builtin"):
        assert float(figures[f"{name}_3_workers_1_mb"]) > 0
    assert float(figures["builtin_spread_ms_3_workers_1_mb"]) >= 0
    assert figures["auto_takes_torch_3_workers_1_mb"] in (0, 1)
    assert float(figures["auto_over_faster"]) >= 1
