"""What `lab check` sets out to measure, and for how long, without measuring it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.errors import LabError
from manyhands.facts.lab import Played, Seat
from manyhands.facts.link import DirectedLink, Link
from manyhands.lab import check as checks
from manyhands.lab import measure
from manyhands.lab.check import Finding, check, slow_pairs

MBIT = 125_000.0


def cluster(count: int, port: float, link: Link, links: tuple[DirectedLink, ...] = ()) -> Cluster:
    devices = tuple(
        Device(name=f"d{number}", gflops=1, memory_bytes=10**9, up_bytes_per_second=port, down_bytes_per_second=port)
        for number in range(1, count + 1)
    )
    return Cluster("x", devices, link, links)


class FakeGroups:
    def __init__(self) -> None:
        self.shares: dict[str, float | None] = {}

    def share(self, lab: str, device: str) -> float | None:
        return self.shares.get(device, 0.5)

    def set_cpu(self, lab: str, device: str, share: float | None) -> None:
        self.shares[device] = share


def lab_of(network: Cluster, processes: int = 0, traces: tuple[tuple[str, str], ...] = ()) -> Any:
    seats = tuple(Seat(name, 0.5, (0,), 10**6) for name in network.names)
    return SimpleNamespace(
        name="a", played=Played(1.0, 1, network, seats, traces), groups=FakeGroups(),
        status=lambda: [SimpleNamespace(name=name, processes=processes) for name in network.names],
    )  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is measured; all of it is as asked."""
    seen: list[tuple[Any, ...]] = []

    def rate(lab: Any, sender: str, receiver: str, wanted: float, round_trip: float = 0.0) -> float:
        seen.append(("rate", sender, receiver, wanted, round_trip))
        return wanted

    def round_trip(lab: Any, one: str, other: str, wanted: float) -> float:
        seen.append(("round trip", one, other, wanted))
        return wanted

    monkeypatch.setattr(measure, "rate", rate)
    monkeypatch.setattr(measure, "round_trip", round_trip)
    monkeypatch.setattr(measure, "shares", lambda lab, names, seconds: dict.fromkeys(names, 0.5))
    monkeypatch.setattr(measure, "memory_at_death", lambda lab, device: 10**6)
    return seen


def silent(text: str) -> None:
    del text


def test_pairs_slower_than_their_ports_are_measured_both_ways(asked: list[tuple[Any, ...]]) -> None:
    lab = lab_of(cluster(3, 100 * MBIT, Link(10 * MBIT, 0.005)))
    found = list(check(lab, silent))
    pairs = [one for one in found if one.what == "rate of pair"]
    assert {one.who for one in pairs} == {f"d{a}, d{b}" for a in (1, 2, 3) for b in (1, 2, 3) if a != b}
    assert all(one.asked == 10 * MBIT and one.is_good for one in pairs)
    assert ("rate", "d1", "d2", 10 * MBIT, 0.01) in asked
    assert ("round trip", "d3", "d1", 0.01) in asked
    assert set(lab.groups.shares.values()) == {0.5}, "a device is as fast afterwards as before"


def test_only_the_direction_that_is_slower_than_both_ports() -> None:
    slow = DirectedLink("d2", "d1", Link(MBIT, 0.0))
    assert slow_pairs(cluster(2, 10 * MBIT, Link(10 * MBIT, 0.0), (slow,))) == [("d2", "d1")]
    assert slow_pairs(cluster(2, 10 * MBIT, Link(math.inf, 0.0))) == []
    assert slow_pairs(cluster(1, 10 * MBIT, Link(MBIT, 0.0))) == []
    assert len(slow_pairs(cluster(2, 10 * MBIT, Link(MBIT, 0.0)))) == 2
    assert len(slow_pairs(cluster(6, 10 * MBIT, Link(MBIT, 0.0)))) == 12


def test_what_follows_a_trace_is_not_held_against_it(asked: list[tuple[Any, ...]]) -> None:
    lab = lab_of(cluster(2, 100 * MBIT, Link(10 * MBIT, 0.005)), traces=(("d1", "file"),))
    assert [one.what for one in check(lab, silent)] == [
        "rate up", "rate down", "round trip", "round trip", "share", "share", "memory",
    ]  # fmt: skip


def test_nothing_is_checked_where_something_runs(asked: list[tuple[Any, ...]]) -> None:
    with pytest.raises(LabError, match="Something runs on d1, d2") as caught:
        next(check(lab_of(cluster(2, MBIT, Link(MBIT, 0.0)), processes=1), silent))
    assert "manyhands lab kill d1 --lab a" in caught.value.hint
    assert asked == []


def test_a_finding_may_be_off_by_a_tenth_or_its_slack() -> None:
    assert Finding("share", "x", "of a core", 1.0, 1.09).is_good
    assert not Finding("share", "x", "of a core", 1.0, 1.11).is_good
    assert Finding("round trip", "x, y", "s", 1e-4, 2e-4, slack=checks.LEAST_SECONDS).is_good
    assert not Finding("memory", "x", "B", 1.0, None).is_good
    assert Finding("memory", "x", "B", 1.0, None, "not tried").is_good


@pytest.mark.parametrize(("seconds", "count"), [(0.0, 60), (0.001, 60), (0.08, 60), (0.5, 20), (2.7, 3), (100.0, 3)])
def test_about_ten_seconds_of_pings(seconds: float, count: int) -> None:
    assert measure.ping_count(seconds) == count


@pytest.mark.parametrize("rate", [100.0, 1000.0, 6250.0, 125e6])
@pytest.mark.parametrize("round_trip", [0.0, 0.01, 2.7])
def test_a_rate_takes_about_a_minute_at_the_most(rate: float, round_trip: float) -> None:
    plan = measure.rate_plan(rate, round_trip)
    assert plan.seconds >= 1.5
    assert plan.whole_seconds <= 110 if rate < 400 else plan.whole_seconds <= 90
    assert plan.head_seconds >= round_trip


def test_fast_ports_are_measured_as_ever() -> None:
    plan = measure.rate_plan(12.5e6)
    assert plan[:3] == (30_000, 0.0, 1.5)
    assert measure.rate_plan(12_000).seconds == 5.0


def test_small_shares_are_measured_for_longer() -> None:
    assert checks.share_seconds([0.5, 0.1]) == 2.0
    assert checks.share_seconds([0.5, 0.004]) == 10.0
    assert checks.share_seconds([0.001]) == 20.0
