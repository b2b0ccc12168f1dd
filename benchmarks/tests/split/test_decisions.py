"""The decision engine over whole links, by a virtual clock."""

from __future__ import annotations

import pytest

from manyhands.facts.trace import LinkTrace, Trace
from manyhands.planner.rates import EngineSettings
from manyhands.planner.split import Deployment, LinkRates, SplitProfile
from manyhands_bench.split import decisions
from manyhands_bench.split.decisions import Decided, Drive, batch_seconds, decided, decision_figures, drawn_links
from manyhands_bench.split.traces import MBIT
from split_runs import profile

SETTINGS = EngineSettings(tau=100.0)


def turning(first: float, then: float, seconds: float) -> LinkTrace:
    """A link of one rate for half the time, then of another (Mbit/s)."""
    way = Trace((0.0, seconds / 2), (first * MBIT, then * MBIT))
    return LinkTrace(way, way, is_one_way=True, name="turning")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> SplitProfile:
    made = profile()
    monkeypatch.setattr(decisions, "profile_of", lambda model, edge: made)
    return made


def test_what_is_kept_completes_what_its_seconds_say(small: SplitProfile) -> None:
    trace = LinkTrace.constant(20 * MBIT, 20 * MBIT)
    kept = Drive(small, trace, 60.0).kept()
    for deployment in (Deployment(small.edge_only), max(kept, key=kept.__getitem__)):
        each = batch_seconds(small, LinkRates(20 * MBIT, 20 * MBIT), deployment)
        assert kept[deployment] == pytest.approx(60.0 / each, rel=0.01)


def test_on_an_even_link_nothing_changes() -> None:
    row = decided("even", LinkTrace.constant(20 * MBIT, 20 * MBIT), "x", "y", SETTINGS, 60.0)
    assert row.changes == 0
    assert row.ours == pytest.approx(row.frozen, rel=0.05)
    assert row.ours <= row.hindsight * 1.001


def test_where_the_link_turns_for_good_deciding_again_pays() -> None:
    rows = [
        decided("turning", turning(*rates, 900.0), "x", "y", SETTINGS, 900.0) for rates in ((0.05, 400.0), (400.0, 0.5))
    ]
    assert all(row.changes >= 1 for row in rows)
    assert all(row.ours > row.frozen for row in rows)


def test_figures_are_means_of_ratios() -> None:
    alone = Deployment(5)
    rows = [
        Decided("a", "m", "tx2", 20.0, 10.0, 20.0, 1, 1.0, 0.0, alone, alone),
        Decided("b", "m", "pi4", 10.0, 10.0, 20.0, 0, 0.0, 0.0, alone, alone),
    ]
    figures = decision_figures(rows, 180.0)
    assert figures["gain_over_frozen"] == pytest.approx(2**0.5)
    assert figures["gain_over_hindsight"] == pytest.approx(0.5**0.5)
    assert (figures["redeployments"], figures["jobs_that_changed"]) == (1, 1)
    assert figures["gain_over_frozen_where_changed"] == pytest.approx(2.0)


def test_drawn_links_are_the_same_every_time() -> None:
    assert drawn_links(30.0)["wifi_far"].up == drawn_links(30.0)["wifi_far"].up
    assert drawn_links(30.0)["wifi_near"].up.mean > drawn_links(30.0)["wifi_far"].up.mean
