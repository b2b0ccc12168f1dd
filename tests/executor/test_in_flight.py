"""When the memory of micro-batches is let go: as the next pass begins after the one that ended, and not before."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.executor.in_flight import InFlightMicroBatches
from manyhands.executor.in_flight_micro_batch import InFlightMicroBatch, Phase
from manyhands.facts.plan import Plan, Replay, Stage


class NotingRunner:
    """Notes what one stage is told to let go of."""

    def __init__(self, stage: int, calls: list[tuple[str, int, int]]) -> None:
        self.stage, self.calls = stage, calls

    def drop(self, number: int) -> None:
        self.calls.append(("drop", self.stage, number))

    def settle(self, number: int) -> None:
        self.calls.append(("settle", self.stage, number))


class Feed:
    """Notes which micro-batches were taken, and at which step."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []

    def take(self, batch: InFlightMicroBatch, step: int) -> None:
        self.taken.append((batch.number, step))


class Device:
    """Two stages of one device, with the micro-batches of a round."""

    def __init__(self, order: Any = "1f1b", **options: Any) -> None:
        self.calls: list[tuple[str, int, int]] = []
        plan = Plan("net", 8, (Stage((0, 1), ("a",)), Stage((1, 2), ("b",))), 4, order, **options)
        self.feed = Feed()
        runners: Any = {0: NotingRunner(0, self.calls), 2: NotingRunner(2, self.calls)}
        feed: Any = self.feed
        self.in_flight = InFlightMicroBatches(plan, runners, {0: (0, 2), 2: (1, 2)}, feed, seed=5)
        self.in_flight.begin_round(10)
        self.calls.clear()

    def forward(self, stage: int, number: int, *, is_frozen: bool = False) -> InFlightMicroBatch:
        self.in_flight.begin_pass(stage, number)
        batch = self.in_flight.fed(number)
        batch.enter(stage, Phase.FORWARD)
        awaits_gradients = self.in_flight.plan.is_training and not is_frozen
        self.in_flight.end_forward(stage, batch, awaits_gradients=awaits_gradients)
        return batch

    def backward(self, stage: int, number: int) -> None:
        self.in_flight.begin_pass(stage, number)
        batch = self.in_flight[number]
        batch.enter(stage, Phase.BACKWARD)
        self.in_flight.end_backward(stage, batch)


def test_a_micro_batch_is_fed_once() -> None:
    device = Device()
    assert device.in_flight.fed(1) is device.in_flight.fed(1)
    assert device.in_flight.fed(0) is not device.in_flight.fed(1)
    assert device.feed.taken == [(1, 10), (0, 10)]
    assert device.in_flight.numbers() == [0, 1]


def test_training_settles_after_forward_and_lets_go_after_backward() -> None:
    device = Device()
    device.forward(0, 0)
    assert device.calls == []  # what was made may yet have to be sent
    device.forward(0, 1)
    assert device.calls == [("settle", 0, 0)]
    device.backward(0, 0)
    assert device.calls == [("settle", 0, 0), ("settle", 0, 1)]
    device.in_flight.begin_pass(0, 0)  # weight gradients that were put off
    assert len(device.calls) == 2
    device.backward(0, 1)
    assert device.calls[2:] == [("drop", 0, 0)]
    device.in_flight.begin_pass()
    assert device.calls[3:] == [("drop", 0, 1)]


def test_inference_lets_go_when_the_next_pass_begins() -> None:
    device = Device("stream")
    device.forward(0, 0)
    device.forward(2, 0)
    assert device.calls == [("drop", 0, 0)]
    device.forward(0, 1)
    assert device.calls == [("drop", 0, 0), ("drop", 2, 0)]


def test_a_stage_that_trains_nothing_lets_go_when_the_next_pass_begins() -> None:
    device = Device()
    batch = device.forward(0, 0, is_frozen=True)
    assert (batch.phases, device.calls) == ({0: Phase.DONE}, [])  # what was made may yet have to be sent
    device.forward(2, 0)
    assert device.calls == [("drop", 0, 0)]
    device.backward(2, 0)
    assert device.calls == [("drop", 0, 0), ("settle", 2, 0)]


def test_what_is_discarded_is_let_go_in_every_stage() -> None:
    device = Device("replay", replay=Replay(1))
    batch = device.forward(0, 0)
    device.in_flight.begin_pass(0, 0)
    device.in_flight.discard(0, 0)
    assert batch.phases == {0: Phase.DISCARDED}
    assert device.in_flight.get(0) is None
    device.in_flight.discard(2, 0)
    device.in_flight.begin_pass(0, 1)
    assert device.calls == [("settle", 0, 0), ("drop", 0, 0), ("drop", 2, 0)]


@pytest.mark.parametrize(
    ("order", "step", "first"), [("1f1b", 10, 2 * 2 + 1), ("replay", 12, 1)], ids=["one step", "step by step"]
)
def test_operators_are_told_step_and_place(order: str, step: int, first: int) -> None:
    device = Device(order, **({"replay": Replay(1)} if order == "replay" else {}))
    device.in_flight.fed(2)
    context = device.in_flight.context(2, 2)
    assert (context.step, context.first_sample, context.samples, context.seed) == (step, first, 1, 5)
    assert device.in_flight.context(2, 2) is context


def test_a_round_begins_with_nothing() -> None:
    device = Device()
    device.forward(0, 3)
    device.in_flight.begin_round(11)
    assert device.in_flight.numbers() == []
    assert sorted(device.calls) == [("drop", stage, number) for stage in (0, 2) for number in range(4)]
