"""The part of the time in which devices waited for data, and when something is said of it."""

from __future__ import annotations

import pytest

from manyhands.data.waits import DataWaits


def test_the_first_steps_are_not_counted() -> None:
    waits = DataWaits(2)
    waits.add(10.0, 10.0)
    waits.add(10.0, 10.0)
    assert waits.share == waits.recent_share == 0.0
    waits.add(2.0, 0.5)
    assert waits.share == waits.recent_share == 0.25
    waits.add(2.0, 99.0)
    assert waits.share == pytest.approx(2.5 / 4), "no step waits longer than it takes"


def test_it_is_said_once_and_only_of_what_is_much() -> None:
    waits = DataWaits(0)
    for _ in range(30):
        waits.add(1.0, 0.05)
        assert waits.news() == ""
    assert waits.summary() == ""
    news = []
    for _ in range(30):
        waits.add(1.0, 0.5)
        news.append(waits.news())
    (said,) = filter(None, news)
    assert said.startswith("Data is the bottleneck: the devices wait for it 1")
    assert "num_workers" in said
    assert waits.summary().startswith("The devices waited for data 28% of the time.")
