"""Traces, and methods compared over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.facts.trace import LinkTrace, Trace
from manyhands.planner.split import Deployment
from manyhands_bench.split.site import Round, mean_rates
from manyhands_bench.split.traces import (
    ALONE,
    BESIDE,
    OURS,
    TRACES,
    Contest,
    batches_in,
    joules,
    part,
    section,
    skipped,
)
from split_runs import SHARED, link, profile, steady, timed


def test_a_trace_is_played_from_where_it_moves_most_and_not_over_its_end() -> None:
    rates = [10.0] * 60 + [1.0, 100.0] * 15 + [10.0] * 60 + [90.0] * 30
    way = Trace(tuple(5.0 * place for place in range(len(rates))), tuple(rates))
    found, begin = section(LinkTrace(way, way, is_one_way=True, name="x"), 60.0)
    assert 300 <= begin < 450
    assert found.is_one_way
    assert [found.up.rate(second) for second in (0, 5, 10)] == [way.rate(begin + second) for second in (0, 5, 10)]
    short = Trace((0.0, 10.0), (1.0, 2.0))
    assert section(LinkTrace(short, short))[1] == 0


def test_a_part_of_a_trace_passes_as_many_bytes() -> None:
    way = Trace((0.0, 1.0, 2.5, 7.0), (5.0, 0.0, 3.0, 8.0))
    own = part(way, 0.7, 9.0)
    assert own.seconds[0] == 0
    for begin, end in ((0.0, 1.0), (0.5, 4.0), (2.0, 8.9)):
        assert own.integral(begin, end) == pytest.approx(way.integral(0.7 + begin, 0.7 + end))
    assert mean_rates(LinkTrace(own, own), 0.5, 2.5).up_bytes_per_second == pytest.approx(way.integral(1.2, 3.2) / 2)


def test_a_gain_is_over_the_best_baseline() -> None:
    found = Contest("x", link(), 0.0, alone=300.0)
    found.timed = {OURS: steady(10, 10), "k0": steady(10, 5), "jointdnn": steady(12, 4)}
    assert found.window == (0.0, 10.0)
    assert (found.best_baseline, found.gain()) == ("k0", pytest.approx(2.0))
    found.alone = 80.0
    assert (found.best_baseline, found.gain()) == (ALONE, pytest.approx(0.8))
    assert "one direction" not in found.text


def test_each_runs_what_it_should_do_in_the_same_seconds() -> None:
    known = profile()
    k0 = batches_in(known, "k0", link(), 75.0, 1000)
    ours, window = (batches_in(known, who, link(), 75.0, 1000) for who in (OURS, BESIDE))
    assert k0 == 20
    assert ours % 6 == window % 6 == 0
    assert 66 <= window <= 78  # 1 s a batch
    assert k0 < ours < window  # which waits for every group to be done
    assert batches_in(known, OURS, link(), 75.0, 24) == 24
    assert batches_in(known, OURS, link(), 0.1, 24) == 12
    stalled = LinkTrace(*[Trace((0.0, 10.0, 20.0), (0.0, 1e6, 1e6))] * 2)
    assert batches_in(known, "k0", stalled, 10.0, 24) == 3


def test_an_edge_that_waits_spends_less_than_one_that_computes() -> None:
    alone = timed([Round(0.0, 20.0, 0, 2)], deployment=Deployment(2))
    split = timed([Round(0.0, 20.0, 0, 2)], deployment=Deployment(1, 0, 32))
    assert joules(alone, link()) == pytest.approx(15.0 * 10)
    assert joules(split, link()) == pytest.approx(3.0 * 10 + 12.0 * 0.75 + 0.5 * 2)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    assert "--traces" in skipped(tmp_path / "none")
    assert skipped(tmp_path)


@pytest.mark.skipif(not (SHARED / "traces").exists(), reason="there is no ../shared/data/traces")
def test_the_traces_are_there() -> None:
    assert len(TRACES) >= 6
    assert not skipped(SHARED / "traces")
