"""Who keeps a copy of whose state: whoever is lost, everything he had is somewhere else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn_plans import plans
from hand_made import chain, cluster
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.backup import (
    COPY_BYTES_PER_SECOND,
    COPY_PART,
    LINK_PART,
    MOST_REPLAYED_SECONDS,
    holders,
    rounds_between,
)
from manyhands.schedule.device_work import DeviceWork
from manyhands.schedule.policy import Schedule

NETWORK = chain(6, statistics=(1, 4), skips={3: 1})


def weights_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {name: work.weights() for name, work in work_of(plan).items()}


def stepped_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {name: work.stepped_weights() for name, work in work_of(plan).items()}


def work_of(plan: Plan) -> dict[str, DeviceWork]:
    resolved = resolve(plan, NETWORK, cluster(plan.devices))
    work = Schedule(resolved, NETWORK).lowering.work
    return {name: work[name] for name in resolved.devices}


@pytest.mark.slow
@given(plan=plans(NETWORK))
def test_one_that_is_lost_takes_nothing_with_it(plan: Plan) -> None:
    """Drawn plans of every kind, and every device of each: neither weights nor, with a gateway, its optimizer state."""
    weights, stepped = weights_of(plan), stepped_of(plan)
    found = holders(plan, weights, stepped)
    assert set(found) | set(found.values()) <= set(plan.devices)
    for state in (weights, stepped):
        for lost in plan.devices:
            left = {name for device, own in state.items() if device != lost for name in own}
            left |= {name for device, holder in found.items() if holder != lost for name in state[device]}
            if len({name for stage in plan.stages for name in stage.devices}) > 1:
                assert left == {name for own in state.values() for name in own}, (lost, found)
    for device, holder in found.items():
        assert holder != device
        alone = [
            set(state[device]) - {name for other, own in state.items() if other != device for name in own}
            for state in (weights, stepped)
        ]
        assert any(alone), "others have all of it: no copy needs to travel"
        assert weights[holder], "it takes part in the training itself"


def piped(*devices: tuple[str, ...]) -> Plan:
    """One layer for each stage, the last with the rest."""
    last = len(devices) - 1
    return Plan(
        "chain", 12,
        tuple(
            Stage((n, n + 1 if n < last else 6), own, BySamples((6,) * len(own)) if len(own) > 1 else Single())
            for n, own in enumerate(devices)
        ),
    )  # fmt: skip


def test_a_pipeline_goes_round() -> None:
    plan = piped(("a",), ("b",), ("c",))
    assert holders(plan, weights_of(plan)) == {"a": "b", "b": "c", "c": "a"}


def test_replicas_and_tiles_hold_each_other() -> None:
    plan = piped(("a", "b"), ("c", "d"))
    assert holders(plan, weights_of(plan)) == {}
    plan = Plan("chain", 12, (Stage((0, 6), ("a", "b"), ByTiles((2, 1))),))
    assert holders(plan, weights_of(plan)) == {}


def test_a_single_stage_among_shared_ones() -> None:
    plan = piped(("a", "b"), ("c",), ("d", "e"))
    assert holders(plan, weights_of(plan)) == {"c": "d"}
    plan = piped(("a", "b"), ("d", "e"), ("c",))
    assert holders(plan, weights_of(plan)) == {"c": "a"}


def test_a_device_of_several_stages_holds_nothing_for_itself() -> None:
    stages = (
        Stage((0, 2), ("a", "b"), ByTiles((1, 1))),
        Stage((2, 4), ("b",), Single()),
        Stage((4, 6), ("a",), Single()),
    )
    plan = Plan("chain", 12, stages, order="sequential")
    assert holders(plan, weights_of(plan)) == {"b": "a", "a": "b"}
    stages = (Stage((0, 3), ("a", "b"), ByTiles((1, 1))), Stage((3, 6), ("a",), Single()))
    plan = Plan("chain", 12, stages, order="sequential")
    assert holders(plan, weights_of(plan)) == {"a": "b"}


def test_one_alone_has_nobody() -> None:
    plan = piped(("a",))
    assert holders(plan, weights_of(plan)) == {}


SIZES = st.floats(0, 1e12)
RATES = st.floats(1e3, 1e12) | st.just(math.inf)
SECONDS = st.floats(1e-5, 1e4)


@given(state_bytes=SIZES, rate=RATES, seconds=SECONDS)
def test_backups_are_hardly_felt_and_never_too_rare(state_bytes: float, rate: float, seconds: float) -> None:
    rounds = rounds_between(state_bytes, rate, seconds)
    assert rounds >= 1
    between = rounds * seconds
    assert between - seconds <= MOST_REPLAYED_SECONDS * (1 + 1e-9)
    if between < MOST_REPLAYED_SECONDS:
        assert state_bytes / COPY_BYTES_PER_SECOND <= COPY_PART * between * (1 + 1e-9)
        assert state_bytes / rate <= LINK_PART * between * (1 + 1e-9)
    if rounds > 1:  # no rarer than they must be
        fewer = (rounds - 1) * seconds * (1 - 1e-9)
        dear = state_bytes / COPY_BYTES_PER_SECOND > COPY_PART * fewer or state_bytes / rate > LINK_PART * fewer
        assert dear


@given(state_bytes=SIZES, more=SIZES, rate=RATES, seconds=SECONDS, longer=st.floats(1, 100))
def test_more_to_copy_is_copied_less_often(
    state_bytes: float, more: float, rate: float, seconds: float, longer: float
) -> None:
    rounds = rounds_between(state_bytes, rate, seconds)
    assert rounds_between(state_bytes + more, rate, seconds) >= rounds
    assert rounds_between(state_bytes, rate * longer, seconds) <= rounds
    assert rounds_between(state_bytes, rate, seconds * longer) <= rounds


@pytest.mark.parametrize(
    ("state_bytes", "rate", "seconds", "rounds"),
    [
        (0, math.inf, 1.0, 1),
        (100e6, 125e6, 2.0, 4),
        (100e6, math.inf, 0.5, 5),
        (1e12, 1e6, 1.0, 30),
        (1e9, 1e6, 0.0, 30_000_000),
    ],
)
def test_some_numbers(state_bytes: float, rate: float, seconds: float, rounds: int) -> None:
    assert rounds_between(state_bytes, rate, seconds) == rounds
