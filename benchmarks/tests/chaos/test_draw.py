"""Drawn faults: repeatable, and every kind meets every way of sharing."""

from __future__ import annotations

from itertools import islice

import pytest

from manyhands.facts.errors import BadValue, UnknownName
from manyhands_bench.chaos.draw import (
    FAULTS_EACH,
    KINDS,
    SHARES,
    SHORT_STOP_SECONDS,
    chosen_kinds,
    scenario,
    scenarios,
)

ALL = tuple(KINDS)


def test_the_same_seed_draws_the_same_faults_and_another_draws_others() -> None:
    once, again, other = ([*scenarios(seed, ALL, 100)] for seed in (5, 5, 6))
    assert once == again
    assert once != other


def test_a_scenario_is_drawn_without_those_before_it() -> None:
    for one in islice(scenarios(9, ALL, None), 12):
        assert scenario(9, one.number, ALL) == one


def test_so_many_faults_are_drawn_as_are_asked_for() -> None:
    drawn = [*scenarios(1, ALL, 2 * FAULTS_EACH + 3)]
    assert [len(one.faults) for one in drawn] == [FAULTS_EACH, FAULTS_EACH, 3]


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_meets_every_way_of_sharing(seed: int) -> None:
    pack = sum(kind.cards for kind in KINDS.values())
    turns = -(-pack // FAULTS_EACH)
    drawn = islice(scenarios(seed, ALL, None), turns * len(SHARES))
    met = {(fault.kind, one.share) for one in drawn for fault in one.faults}
    assert met == {(kind, share) for kind in KINDS for share in SHARES}


def test_victims_are_among_the_devices() -> None:
    for one in islice(scenarios(3, ALL, None), 30):
        assert len(one.devices) == 2 if one.share == "split" else len(one.devices) in (3, 4)
        for fault in one.faults:
            assert len(set(fault.victims)) == len(fault.victims) == (2 if fault.kind == "partition" else 1)
            is_coordinator = fault.victims == (-1,)
            assert all(0 <= place < len(one.devices) for place in fault.victims) or (
                is_coordinator and fault.kind == "clock"
            )


def test_a_short_stop_is_no_reason_to_give_a_device_up() -> None:
    stops = [
        fault for one in islice(scenarios(2, ("stop",), None), 4) for fault in one.faults
    ]  # fmt: skip
    assert {fault.is_fatal for fault in stops} == {True, False}
    assert all(fault.is_fatal == (fault.seconds > SHORT_STOP_SECONDS) for fault in stops)


def test_kinds_that_cannot_be_had_are_left_out() -> None:
    assert chosen_kinds((), ("partition", "oom")) == tuple(kind for kind in KINDS if kind not in ("partition", "oom"))
    assert chosen_kinds(("junk", "kill")) == ("kill", "junk")
    with pytest.raises(UnknownName, match="kil"):
        chosen_kinds(("kil",))
    with pytest.raises(BadValue, match="None of the faults asked for can be made here: oom"):
        chosen_kinds(("oom",), ("oom",))
