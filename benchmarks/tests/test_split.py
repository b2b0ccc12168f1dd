"""`manyhands bench split`: where a trace is played from, what is compared with what, and the pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manyhands.facts.trace import LinkTrace, Trace
from manyhands.planner.split import Cut, Deployment, SplitProfile
from manyhands.split.controller import Redeployed
from manyhands.split.job import SplitResult
from manyhands_bench.command import app
from manyhands_bench.split.bench import bench_split
from manyhands_bench.split.plots import Course, Study, draw_course, draw_lines, draw_studies
from manyhands_bench.split.site import Round, TimedSplit, mean_rates, rounds_of
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
    sim_error,
    skipped,
)

SHARED = Path(__file__).parents[3] / "shared/data"


def profile() -> SplitProfile:
    """One cut that costs 1 s at the edge, 1 MB up, 1 s at the server, 1 MB down; all at the edge: 10 s."""
    cuts = (
        Cut(layer=1, upstream_forward_seconds=0.25, upstream_backward_seconds=0.5, downstream_forward_seconds=0.4,
            downstream_backward_seconds=0.6, feature_bytes=1e6, returned_bytes=1e6, edge_bytes=5.0, history_bytes=1.0,
            least_bits=32),
        Cut(layer=2, upstream_forward_seconds=4, upstream_backward_seconds=6, downstream_forward_seconds=0,
            downstream_backward_seconds=0, edge_bytes=100.0),
    )  # fmt: skip
    return SplitProfile(network="n", fingerprint="f", batch_size=8, cuts=cuts, layer_bytes=(1.0, 1.0))


def timed(rounds: list[Round], mode: str = "window", deployment: Deployment | None = None, **own: Any) -> TimedSplit:
    result = object.__new__(SplitResult)
    result.split, result.deployment = profile(), deployment or Deployment(1, 5, 32)
    result.changes = own.pop("changes", [])
    return TimedSplit(sum(one.steps for one in rounds), rounds, result, mode)


def steady(seconds: float, steps: int, **own: Any) -> TimedSplit:
    return timed([Round(0.0, seconds, 0, steps)], **own)


def link(rate: float = 1e6) -> LinkTrace:
    return LinkTrace.constant(rate, rate)


# Where a trace is played from


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


# What is compared


def test_steps_that_were_told_together_are_a_round() -> None:
    seen = [(2.0, 0, 0.5), (2.0, 1, 0.5), (2.001, 2, 0.5), (4.0, 3, 0.7), (4.0, 4, 0.7)]
    assert list(rounds_of(seen)) == [
        Round(pytest.approx(0.5), 2.0, 0, 3),  # type: ignore[arg-type]
        Round(pytest.approx(2.6), 4.0, 3, 2),  # type: ignore[arg-type]
    ]


def test_seconds_count_pauses_and_only_what_all_have_seen() -> None:
    one = timed([Round(1.0, 3.0, 0, 4), Round(5.0, 6.0, 4, 4)])
    assert one.seconds_of_100 == pytest.approx(100 * 5 / 8)
    assert one.done_at(2.0) == pytest.approx(2)
    assert one.done_at(4.0) == pytest.approx(4)
    assert one.done_at(9.0) == pytest.approx(8)
    assert one.seconds_within(2.0, 5.5) == pytest.approx(100 * 3.5 / 4)
    assert one.seconds_within(3.5, 4.5) == math.inf


def test_a_gain_is_over_the_best_rival() -> None:
    found = Contest("x", link(), 0.0, alone=300.0)
    found.timed = {OURS: steady(10, 10), "k0": steady(10, 5), "jointdnn": steady(12, 4)}
    assert found.window == (0.0, 10.0)
    assert (found.best_rival, found.gain()) == ("k0", pytest.approx(2.0))
    found.alone = 80.0
    assert (found.best_rival, found.gain()) == (ALONE, pytest.approx(0.8))
    assert "one direction" not in found.text


def test_predictions_are_by_stretches_without_a_change() -> None:
    before, after = Deployment(1, 0, 32), Deployment(2)
    change = Redeployed(4, before, after, "rates")
    rounds = [Round(0.0, 15.0, 0, 4), Round(20.0, 44.0, 4, 2)]
    one = timed(rounds, deployment=after, changes=[change])
    # 0.75 + 1 + 1 + 1 s a batch at 1 MB/s; 10 s at the edge
    assert one.predictions(link()) == [pytest.approx((15.0, 15.0)), pytest.approx((20.0, 24.0))]
    stalled = LinkTrace(*[Trace((0.0, 10.0, 1000.0), (0.0, 1e6, 1e6))] * 2)
    assert one.predictions(stalled)[0][0] == pytest.approx(25.0)
    assert one.moments() == [(0.0, 1), (20.0, 2)]
    contest = Contest("x", link(), 0.0, {OURS: one})
    assert sim_error([contest], OURS) == pytest.approx((0 + 1 / 6) / 2)


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


# Pictures


def test_pictures_are_drawn(tmp_path: Path) -> None:
    rates = [(0.01 * place, 5.0 + place % 3) for place in range(1000)]
    course = Course(rates, rates, [(0.0, 3), (6.0, 9)], [(0.0, 10.0), (6.0, 4.0)], 10.0, 12)
    drawn = [
        draw_course(course, tmp_path / "18.png", "Fig. 18"),
        draw_lines({"ours": [(1, 2), (2, 3)], "k0": [(1, 1), (2, 2)]}, tmp_path / "16.png", across="x", up="y",
                   title="Fig. 16", is_logarithmic=True),
        draw_studies([Study("K", ["1", "5"], {"32 bits": [0.5, 0.4]}), Study("bits", ["2"], {"a": [0.1]})], 0.6,
                     tmp_path / "6.png", "Fig. 6-8"),
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


# With workers


@pytest.mark.slow
def test_without_data_only_bytes_are_measured(tmp_path: Path) -> None:
    figures = bench_split(quick=True, traces=tmp_path / "none", pictures=tmp_path / "none.npz")
    assert 0.25 <= float(figures["bytes_ratio_8bit"]) <= 0.26
    assert "--traces" in str(figures["traces_skipped"])
    assert "--pictures" in str(figures["accuracy_skipped"])


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="there is no ../shared/data")
def test_the_command_measures_every_figure(tmp_path: Path) -> None:
    words = ["split", "--quick", "--json", "--out", str(tmp_path), "--traces", str(SHARED / "traces")]
    result = CliRunner().invoke(app, [*words, "--pictures", str(SHARED / "cifar10_jpeg.npz")])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    for key in ("worst_vs_best_rival", "gain_geomean", "sim_error", "edge_memory_ratio", "edge_energy_ratio"):
        assert 0 < figures[key] < 100, key
    assert {"accuracy_normal", "accuracy_drop_pipeline", "accuracy_drop_8bit", "foot_seconds_ours"} <= figures.keys()
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "eq_6.png", "fig_16.png", "fig_18.png", "fig_6_7_8.png",
    ]  # fmt: skip
