"""Throughput after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands_bench.recovery.plots import Passage, draw_passages, throughput

pytestmark = pytest.mark.xdist_group("bench_recovery")


@pytest.mark.slow
def test_throughput_is_nothing_until_rounds_begin_again(tmp_path: Path) -> None:
    rounds = (-1.5, -1.0, -0.5, 1.0, 1.5)
    edges, rates = throughput(Passage("light", rounds, 0.5, samples=8))
    assert edges == [-1.5, -1.0, -0.5, 0.5, 1.0, 1.5]
    assert rates == [16.0, 16.0, 0.0, 16.0, 16.0]
    passages = [Passage(name, rounds, 0.5, 8) for name in ("light", "heavy")]
    assert draw_passages(passages, tmp_path / "17.png", "Fig. 17").read_bytes().startswith(b"\x89PNG")
