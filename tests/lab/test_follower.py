"""A lab's port along a trace: which rates the kernel is told, without a kernel."""

from __future__ import annotations

from typing import Any

import pytest

from hand_made import cluster
from manyhands.facts.lab import SLOWEST_BYTES_PER_SECOND, Played
from manyhands.facts.link import Link
from manyhands.facts.trace import LinkTrace, Trace
from manyhands.lab.follower import TraceFollower


class Rates:
    """In place of the lab's namespaces."""

    def __init__(self) -> None:
        self.set: list[tuple[str, float, float]] = []

    def set_rates(self, device: str, up: float, down: float) -> None:
        self.set.append((device, up, down))


def follower(trace: LinkTrace, scale: float = 2.0) -> tuple[Any, TraceFollower]:
    rates: Any = Rates()
    network = cluster(["edge", "cloud"], Link(1e6, 0.0), up_bytes_per_second=1e6, down_bytes_per_second=1e6)
    return rates, TraceFollower(rates, Played(scale, 1, network, ()), "edge", trace)


def test_one_direction_serves_both() -> None:
    trace = Trace((0, 3), (8e6, 0.0))
    rates, found = follower(LinkTrace(trace, trace, is_one_way=True))
    found.follow(found.began)
    found.follow(found.began + 5.9)  # not yet: an hour in the lab is two
    assert [rest for _, *rest in rates.set] == [[4e6, 4e6]]
    found.follow(found.began + 6.1)
    assert [rest for _, *rest in rates.set[1:]] == [[SLOWEST_BYTES_PER_SECOND / 2] * 2]


def test_each_direction_follows_its_own() -> None:
    rates, found = follower(LinkTrace(Trace((0, 1, 2), (2e6, 4e6, 6e6)), Trace((0, 2, 4), (10e6, 0.0, 8e6))), 1.0)
    for moment in (0.0, 0.5, 1.01, 2.01, 3.01):
        found.follow(found.began + moment)
    assert [rest for _, *rest in rates.set] == [
        [2e6, 10e6], [4e6, 10e6], [6e6, SLOWEST_BYTES_PER_SECOND], [2e6, SLOWEST_BYTES_PER_SECOND],
    ]  # fmt: skip
    assert found.due == pytest.approx(found.began + 4.0)
