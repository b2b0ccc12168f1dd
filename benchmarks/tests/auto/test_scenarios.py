"""Drawn scenarios: the same every time, and of every kind."""

from __future__ import annotations

import pytest

from manyhands_bench.auto.scenarios import (
    BATCHES,
    COUNT,
    DEVICES,
    LINKS,
    RATES_MBIT,
    SUBJECTS,
    drawn_scenarios,
)


@pytest.mark.slow
def test_scenarios_are_always_the_same_and_another_seed_draws_others() -> None:
    assert drawn_scenarios() == drawn_scenarios()
    assert list(map(str, drawn_scenarios(seed=1))) != list(map(str, drawn_scenarios()))


def test_scenarios_cover_every_network_batch_rate_and_size_of_cluster() -> None:
    found = drawn_scenarios()
    assert len(found) == COUNT >= 60
    assert {(one.model, one.shape) for one in found} == set(SUBJECTS)
    assert {one.batch_size for one in found} == set(BATCHES)
    assert (min(BATCHES), max(BATCHES)) == (1, 256)
    assert {one.rate_mbit for one in found} == set(RATES_MBIT)
    assert {len(one.cluster.devices) for one in found} == set(DEVICES)
    assert {one.links for one in found} == set(LINKS)
    assert all(len({device.gflops for device in one.cluster.devices}) > 1 for one in found), "devices are unequal"


def test_links_differ_where_they_are_drawn_so_and_none_is_slower_than_the_slowest_rate() -> None:
    for one in drawn_scenarios():
        rates = [link.link.bytes_per_second for link in one.cluster.links]
        assert bool(rates) == (one.links != "alike")
        assert all(rate >= RATES_MBIT[0] * 1e6 / 8 for rate in rates)
        if rates and one.rate_mbit > RATES_MBIT[0]:
            assert min(rates) < one.cluster.link.bytes_per_second
