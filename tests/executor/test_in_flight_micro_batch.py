"""The life cycle of an in-flight micro-batch: every step of it in order, and no other."""

from __future__ import annotations

import pytest

from manyhands.executor.in_flight_micro_batch import InFlightMicroBatch, Phase

FORWARD, AWAITING, BACKWARD, DONE = Phase.FORWARD, Phase.AWAITING_GRADIENTS, Phase.BACKWARD, Phase.DONE


@pytest.mark.parametrize(
    "phases",
    [
        (FORWARD, FORWARD, AWAITING, BACKWARD, BACKWARD, DONE),
        (FORWARD, DONE),
        (FORWARD, AWAITING, FORWARD, AWAITING, BACKWARD, DONE),
        (FORWARD, AWAITING, Phase.DISCARDED),
        (Phase.DISCARDED,),
    ],
    ids=["training", "inference", "run again", "too late", "never begun"],
)
def test_a_micro_batch_goes_through_its_phases(phases: tuple[Phase, ...]) -> None:
    batch = InFlightMicroBatch(3)
    for phase in phases:
        batch.enter(1, phase)
        assert batch.phases == {1: phase}


@pytest.mark.parametrize(
    ("before", "phase"),
    [
        ((), AWAITING),
        ((), BACKWARD),
        ((), DONE),
        ((FORWARD,), BACKWARD),
        ((FORWARD, AWAITING), DONE),
        ((FORWARD, AWAITING, BACKWARD), FORWARD),
        ((FORWARD, DONE), FORWARD),
        ((FORWARD, AWAITING, Phase.DISCARDED), BACKWARD),
    ],
)
def test_a_step_that_the_life_cycle_has_not_is_refused(before: tuple[Phase, ...], phase: Phase) -> None:
    batch = InFlightMicroBatch(3)
    for one in before:
        batch.enter(0, one)
    with pytest.raises(AssertionError, match=f"m3 in s0 is .*; it cannot be {phase.value}"):
        batch.enter(0, phase)


def test_stages_of_one_device_are_apart() -> None:
    batch = InFlightMicroBatch(0)
    batch.enter(0, FORWARD)
    batch.enter(0, AWAITING)
    batch.enter(2, FORWARD)
    assert batch.phases == {0: AWAITING, 2: FORWARD}
