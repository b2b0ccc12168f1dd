"""Small messages between workers of one machine: by the board where there is one, by the connection otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from harness import plan_for, schedule_of
from manyhands.executor.device_boards import DeviceBoards, _tensors_in
from manyhands.executor.messages import expected_messages
from manyhands.executor.reducer import Reducer
from manyhands.facts.errors import ManyhandsError, TimedOut, WorkerLost
from manyhands.facts.plan import BySamples, ByTiles, Stage
from manyhands.schedule.actions import Message, Receive, Reduce
from manyhands.schedule.policy import Schedule
from manyhands.transport.board import TensorShape
from manyhands.transport.security import DeviceSecurity
from manyhands.transport.sharing import SharingSetting
from manyhands.transport.tcp import TcpEndpoint
from small_networks import captured

STEPS = 6
MOST_ROUNDS = 500
"""After so many, with a pause after each, two devices have found the memory they have in common."""


def form_of(peer: str, message: Message) -> tuple[TensorShape, ...]:
    """Every message here is of float32."""
    return tuple(TensorShape(torch.float32, part.box.shape) for part in message.parts)


class Device:
    """One of two tiles, without its executor."""

    def __init__(self, schedule: Schedule, name: str, sharing: SharingSetting | None) -> None:
        security = DeviceSecurity("a secret of this test", encrypted=False)
        self.endpoint = TcpEndpoint(name, security, limit_seconds=2.0, sharing=sharing)
        self.boards = DeviceBoards(self.endpoint, schedule, form_of, lambda reduce: False, is_used=True)
        received = [action for action in schedule.actions[name] if isinstance(action, Receive)]
        receives = [action for action in received if action.source in ("a", "b")]
        self.message = receives[0].message
        self.endpoint.mailbox.open(
            1, {(action.source, action.message.topic): action.message.bytes for action in receives}
        )

    def tensors(self, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [torch.randn(part.box.shape) for part in self.message.parts]


@contextmanager
def tiles(sharing: SharingSetting | None = None) -> Iterator[tuple[Device, Device]]:
    graph = captured("small", dtype=torch.float32)
    end, last = graph.network.find_layer("avg_pool2d"), len(graph.network.layers)
    stages = [Stage((0, end), ("a", "b"), ByTiles((1, 1), (1,))), Stage((end, last), ("b",))]
    schedule = schedule_of(graph, plan_for(graph, stages, batch_size=4, order="sequential"))
    a, b = (Device(schedule, name, sharing) for name in ("a", "b"))
    try:
        addresses = {"a": a.endpoint.address, "b": b.endpoint.address}
        other = threading.Thread(target=a.endpoint.connect, args=(addresses, 5.0))
        other.start()
        b.endpoint.connect(addresses, 5.0)
        other.join()
        yield a, b
    finally:
        a.endpoint.close()
        b.endpoint.close()


def pass_on(a: Device, b: Device, step: int) -> bool:
    """A message of b's from a; return whether it went by the board."""
    topic, tensors = b.message.topic, b.tensors(step)
    for device in (a, b):
        device.endpoint.mailbox.begin_step(step)
        device.boards.begin_round(step)
    is_put = a.boards.put("b", topic, tensors)
    if not is_put:
        a.endpoint.send("b", step, topic, tensors, urgent=True)
    assert b.boards.has_place("a", topic)
    assert all(map(torch.equal, b.boards.take("a", step, topic), tensors))
    for device in (a, b):
        device.boards.end_round()
    return is_put


def found(a: Device, b: Device) -> int:
    """Pass messages on until one goes by the board; return the next step."""
    for step in range(MOST_ROUNDS):
        if pass_on(a, b, step):
            return step + 1
        time.sleep(0.01)
    raise AssertionError(f"no board in {MOST_ROUNDS} rounds")


def test_messages_go_by_the_board_once_there_is_one() -> None:
    with tiles() as (a, b):
        first = found(a, b)
        assert all(pass_on(a, b, step) for step in range(first, first + STEPS))
        assert a.endpoint.sent_bytes["b"] == b.endpoint.mailbox.received_bytes["a"] == (first + STEPS) * b.message.bytes


def test_without_memory_in_common_they_go_over_the_connection() -> None:
    with tiles(SharingSetting(ring_bytes=0)) as (a, b):
        assert not any(pass_on(a, b, step) for step in range(STEPS))


def test_a_place_that_is_still_read_sends_the_next_over_the_connection() -> None:
    with tiles() as (a, b):
        step = found(a, b)
        finish, b.boards.end_round = b.boards.end_round, lambda: None  # type: ignore[method-assign]
        assert [pass_on(a, b, step + number) for number in range(4)] == [True, True, False, False]
        b.boards.end_round = finish  # type: ignore[method-assign]
        pass_on(a, b, step + 4)
        assert pass_on(a, b, step + 5)


def test_a_row_goes_to_several_peers_as_it_can() -> None:
    """By the board where there is one, and back to the caller for the others."""
    with tiles() as (a, b):
        topic, size = b.message.topic, b.message.bytes
        row = torch.arange(size // 4, dtype=torch.float32)
        targets = [("b", topic), ("stranger", topic)]
        step = found(a, b)
        for device in (a, b):
            device.endpoint.mailbox.begin_step(step)
            device.boards.begin_round(step)
        assert [*a.boards.put_row(targets, row)] == targets[1:]
        taken = b.boards.take("a", step, topic)
        assert torch.equal(torch.cat([part.flatten() for part in taken]), row)
        before = a.endpoint.sent_bytes["b"]
        a.boards.end_round()
        assert a.endpoint.sent_bytes["b"] - before == size


@pytest.mark.parametrize("pause_seconds", [0.0, 0.05])
def test_a_waiting_thread_is_woken(pause_seconds: float) -> None:
    """Whether it still looks, or sleeps at its sockets."""
    with tiles() as (a, b):
        step = found(a, b)
        topic, tensors = b.message.topic, b.tensors(step)
        came: list[float] = []
        for device in (a, b):
            device.endpoint.mailbox.begin_step(step)
            device.boards.begin_round(step)

        def wait() -> None:
            assert all(map(torch.equal, b.boards.take("a", step, topic), tensors))
            came.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(pause_seconds)
        start = time.monotonic()
        assert a.boards.put("b", topic, tensors)
        thread.join(5)
        assert came[0] - start < 0.4, "it did not sleep until its next heartbeat"


def test_a_wait_has_a_limit_and_names_its_owner() -> None:
    with tiles() as (a, b):
        step = found(a, b)
        b.endpoint.mailbox.limit_seconds = 0.2
        b.endpoint.mailbox.begin_step(step)
        b.boards.begin_round(step)
        with pytest.raises(TimedOut, match=r"b has waited 0\.2 s for .* from a"):
            b.boards.take("a", step, b.message.topic)


def test_a_thread_that_still_waits_when_boards_are_closed_leaves_them_asleep() -> None:
    """Else the next generation's messages would wake nobody."""
    with tiles() as (a, b):
        step = found(a, b)
        for device in (a, b):
            device.endpoint.mailbox.begin_step(step)
            device.boards.begin_round(step)
        errors: list[ManyhandsError] = []

        def wait() -> None:
            try:
                b.boards.take("a", step, b.message.topic)
            except ManyhandsError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        b.boards.close()
        b.endpoint.mailbox.interrupt(WorkerLost("the generation ends"))
        thread.join(5)
        assert len(errors) == 1, "it did not wait"
        assert a.boards._writing["b"].is_reader_asleep


def test_a_lost_peer_ends_the_wait() -> None:
    with tiles() as (a, b):
        step = found(a, b)
        b.endpoint.mailbox.begin_step(step)
        b.boards.begin_round(step)
        threading.Timer(0.05, a.endpoint.close).start()
        with pytest.raises(WorkerLost, match="a was lost"):
            b.boards.take("a", step, b.message.topic)


def test_what_outlives_its_round_is_a_copy() -> None:
    with tiles() as (a, b):
        step = found(a, b)
        kept = {}
        for number, outlives_round in enumerate((True, False)):
            for device in (a, b):
                device.endpoint.mailbox.begin_step(step + number)
                device.boards.begin_round(step + number)
            assert a.boards.put("b", b.message.topic, b.tensors(7))
            taken = b.boards.take("a", step + number, b.message.topic, outlives_round=outlives_round)
            kept[outlives_round] = [tensor.clone() for tensor in taken], taken
            for device in (a, b):
                device.boards.end_round()
        pass_on(a, b, step + 2)
        pass_on(a, b, step + 3)
        before, copied = kept[True]
        assert all(map(torch.equal, before, copied))
        before, lying = kept[False]
        assert not all(map(torch.equal, before, lying)), "it lies where the round after the next one's is now"


def test_tensors_of_different_types_in_one_message() -> None:
    flags, numbers = torch.tensor([True, False, True]), torch.tensor([1.5, -2.0])
    content = bytearray(flags.numpy().tobytes() + numbers.numpy().tobytes())
    shapes = [TensorShape(torch.bool, (3,)), TensorShape(torch.float32, (2,)), TensorShape(torch.float32, (0, 3))]
    first, second, nothing = _tensors_in(memoryview(content), shapes)
    assert torch.equal(first, flags)
    assert torch.equal(second, numbers)
    assert nothing.shape == (0, 3)


def test_sums_of_gradients_go_by_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right in every round, and sent over the connection only until both have found the boards."""
    graph = captured("small", dtype=torch.float32)
    stage = Stage((0, len(graph.network.layers)), ("a", "b"), BySamples((2, 2)))
    schedule = schedule_of(graph, plan_for(graph, [stage], batch_size=4))
    sums = [act for act in schedule.actions["a"] if isinstance(act, Reduce) and act.what == "gradients"]
    security = DeviceSecurity("a secret of this test", encrypted=False)
    with ExitStack() as stack:
        ends = {name: TcpEndpoint(name, security, limit_seconds=2.0) for name in ("a", "b")}
        reducers, boards, sent = {}, {}, []
        for name, end in ends.items():
            stack.callback(end.close)
            boards[name] = DeviceBoards(end, schedule, lambda *_: None, lambda _: False, is_used=True)
            end.mailbox.open(1, expected_messages(sums, name, graph.network))
            reducers[name] = Reducer(end, graph.network, lambda *_: None, boards=boards[name])
            stack.callback(reducers[name].close)
        addresses = {name: end.address for name, end in ends.items()}
        other = threading.Thread(target=ends["a"].connect, args=(addresses, 5.0))
        other.start()
        ends["b"].connect(addresses, 5.0)
        other.join()
        send = TcpEndpoint.send
        monkeypatch.setattr(
            TcpEndpoint, "send", lambda self, *words, **options: (sent.append(words), send(self, *words, **options))
        )
        for step in range(MOST_ROUNDS):
            sent.clear()
            gradients = {name: [torch.randn(act.bytes // 4) for act in sums] for name in ends}
            for name, end in ends.items():
                end.mailbox.begin_step(step)
                boards[name].begin_round(step)
            right = [own + theirs for own, theirs in zip(gradients["a"], gradients["b"])]
            for name, reducer in reducers.items():
                for act, gradient in zip(sums, gradients[name]):
                    reducer.start(act, step, [gradient])
            for name, reducer in reducers.items():
                reducer.wait()
                assert all(map(torch.equal, gradients[name], right))
            for name in ends:
                boards[name].end_round()
            if not sent and step > STEPS:
                break
            time.sleep(0.01)
        assert not sent, f"sums did not go by boards in {MOST_ROUNDS} rounds"
        total = (step + 1) * sum(act.bytes for act in sums)
        assert ends["a"].sent_bytes["b"] == ends["b"].mailbox.received_bytes["a"] == total
