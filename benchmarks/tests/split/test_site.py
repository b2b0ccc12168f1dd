"""Rounds, seconds and predictions of a split run."""

from __future__ import annotations

import math

import pytest

from manyhands.facts.trace import LinkTrace, Trace
from manyhands.planner.split import Deployment
from manyhands.split.controller import Redeployed
from manyhands_bench.split.site import Round, rounds_of
from manyhands_bench.split.traces import (
    OURS,
    Contest,
    sim_error,
)
from split_runs import link, timed


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
