"""How fast messages come, as their receiver sees it; and links whose rate changes while messages are under way."""

from __future__ import annotations

import socket
import time

import pytest
import torch
from endpoint_pairs import joined, wait_until

from manyhands.facts.link import Link
from manyhands.facts.trace import Trace
from manyhands.transport.connection import is_far
from manyhands.transport.event_loop import EventLoop
from manyhands.transport.frames import CHUNK_BYTES, Header
from manyhands.transport.mailbox import Mailbox
from manyhands.transport.security import Security
from manyhands.transport.shaping import STOPPED_BYTES_PER_SECOND
from manyhands.transport.tcp import TcpEndpoint
from manyhands.transport.timing import SMALLEST_TIMED_BYTES, TOLD_EARLY_SECONDS, TimedTransfer
from manyhands.transport.wire import Wire

MBIT = 1e6 / 8


def rate_of(timed: list[TimedTransfer]) -> float:
    return sum(one.bytes for one in timed) / sum(one.seconds for one in timed)


def sent(sender: TcpEndpoint, receiver: TcpEndpoint, sizes: dict[str, int], step: int = 0) -> list[TimedTransfer]:
    """Messages back to back, and how they were timed."""
    for topic, size in sizes.items():
        sender.send(receiver.name, step, topic, [torch.zeros(size, dtype=torch.uint8)])
    for topic, size in sizes.items():
        receiver.mailbox.receive(sender.name, step, topic, [torch.zeros(size, dtype=torch.uint8)])
    return receiver.mailbox.take_timed()


@pytest.mark.quick(every=10)
@pytest.mark.parametrize(
    ("mbit", "size"), [(2, 10_000), (8, 40_000), (40, 20_000), (100, 60_000), (100, 2 * CHUNK_BYTES)]
)
def test_the_rate_of_a_shaped_link_is_seen(security: Security, mbit: float, size: int) -> None:
    """Of the best of some attempts: other processes run here too."""
    rate = mbit * MBIT
    number = max(2, int(rate * 0.25 / size))
    topics = {f"x{one}": size for one in range(number)}
    found: list[float] = []
    with joined(security, topics) as (a, b):
        a.shape({"b": Link(rate, 0.0)})
        for step in range(6):
            b.mailbox.begin_step(step)
            timed = sent(a, b, topics, step)
            assert all(one.source == "a" and one.bytes > 0 and one.seconds > 0 for one in timed)
            assert sum(one.bytes for one in timed) <= number * (size + 1000)
            if timed:
                found.append(rate_of(timed))
                if found[-1] == pytest.approx(rate, rel=0.1):
                    return
    raise AssertionError(f"{rate:.0f} B/s was taken for {found}")


@pytest.mark.quick(every=2)
def test_idle_time_does_not_count(security: Security) -> None:
    rate = 8 * MBIT
    with joined(security, {"x": 50_000}) as (a, b):
        a.shape({"b": Link(rate, 0.05)})
        timed = []
        for step in range(4):
            b.mailbox.begin_step(step)
            timed += sent(a, b, {"x": 50_000}, step)
            time.sleep(0.1)
        assert len(timed) == 4
        assert rate_of(timed) > rate * 0.7  # with the pauses: 0.25


@pytest.mark.quick(every=2)
def test_small_messages_and_state_are_not_timed(security: Security) -> None:
    with joined(security, {"small": SMALLEST_TIMED_BYTES - 1, "large": SMALLEST_TIMED_BYTES}) as (a, b):
        a.shape({"b": Link(4 * SMALLEST_TIMED_BYTES, 0.0)})
        assert sent(a, b, {"small": SMALLEST_TIMED_BYTES - 1}) == []
        assert len(sent(a, b, {"large": SMALLEST_TIMED_BYTES})) == 1
        b.mailbox.expect("a", "state", 20_000)
        assert sent(a, b, {"state": 20_000}) == []


@pytest.mark.quick(every=2)
def test_a_message_that_takes_long_is_told_of_while_it_comes(security: Security) -> None:
    size = 40_000
    with joined(security, {"x": size}) as (a, b):
        a.shape({"b": Link(size / 2.5, 0.0)})
        a.send("b", 0, "x", [torch.zeros(size, dtype=torch.uint8)])
        begin = time.monotonic()
        timed: list[TimedTransfer] = []
        wait_until(lambda: bool(timed.extend(b.mailbox.take_timed()) or timed))
        assert TOLD_EARLY_SECONDS <= time.monotonic() - begin < 2.3
        assert timed[0].seconds >= TOLD_EARLY_SECONDS
        a.shape({"b": Link(size * 10, 0.0)})
        b.mailbox.receive("a", 0, "x", [torch.zeros(size, dtype=torch.uint8)])
        timed += b.mailbox.take_timed()
        assert sum(one.bytes for one in timed) <= size + 1000  # no byte twice
        assert sum(one.seconds for one in timed) <= time.monotonic() - begin


def test_messages_that_share_a_connection_are_not_counted_twice() -> None:
    mailbox = Mailbox("b")
    mailbox.open(0, {("a", "x"): 10_000, ("a", "y"): 10_000})
    headers = {topic: Header("a", 0, 0, topic, 10_000, 0, 10_000) for topic in "xy"}
    for topic, came in (("x", 100), ("y", 1000)):
        mailbox.accept("a", headers[topic])
        mailbox.progressed(headers[topic], came)
    time.sleep(0.01)
    mailbox.wrote(headers["x"], 12_000)
    time.sleep(0.01)
    mailbox.wrote(headers["y"], 20_000)
    first, second = mailbox.take_timed()
    assert (first.bytes, second.bytes) == (11_900, 8_000)
    assert second.ended_at - second.seconds == pytest.approx(first.ended_at)
    assert mailbox.take_timed() == []
    mailbox.join("a")  # another connection, which counts anew
    mailbox.open(1, {("a", "x"): 10_000})
    again = Header("a", 1, 0, "x", 10_000, 0, 10_000)
    mailbox.accept("a", again)
    mailbox.progressed(again, 50)
    time.sleep(0.001)
    mailbox.wrote(again, 10_050)
    assert [one.bytes for one in mailbox.take_timed()] == [10_000]


@pytest.mark.quick(every=2)
def test_as_much_passes_as_a_steep_trace_says(security: Security) -> None:
    """Ten changes a second between nothing and 64 Mbit/s, over one long message; of the best of some attempts."""
    rates = [64, 4, 0, 40, 1, 64, 0, 16, 2, 32]
    trace = Trace(tuple(0.05 * place for place in range(len(rates))), tuple(rate * MBIT for rate in rates))
    size = 8 * 2**20
    misses = []
    for _attempt in range(4):
        with joined(security, {"x": size}) as (a, _):
            a.shape({"b": Link(STOPPED_BYTES_PER_SECOND, 0.0)})
            a.send("b", 0, "x", [torch.zeros(size, dtype=torch.uint8)])
            begin = time.monotonic()
            for place in range(10):
                rate = max(trace.rate((place + 0.5) * 0.05), STOPPED_BYTES_PER_SECOND)
                a.shape({"b": Link(rate, 0.0)})
                time.sleep(max(0.0, begin + 0.05 * (place + 1) - time.monotonic()))
            a.shape({"b": Link(STOPPED_BYTES_PER_SECOND, 0.0)})
            time.sleep(0.02)
            came = a._connections["b"].outbox._bulk or a._connections["b"].outbox._turns
            left = came[0].start.bytes - came[0].offset + sum(map(len, a._connections["b"].outbox._frame))
            ideal = trace.integral(0, 0.5)
            misses.append((size - left) / ideal - 1)
            if abs(misses[-1]) < 0.05:
                return
    raise AssertionError(f"off by {misses}")


@pytest.mark.quick("encrypted")
def test_nothing_passes_a_stopped_link_and_it_is_not_dead(security: Security) -> None:
    with joined(security, {"x": 20_000}, silence_seconds=1.6) as (a, b):
        a.shape({"b": Link(STOPPED_BYTES_PER_SECOND, 0.0)})
        a.send("b", 0, "x", [torch.zeros(20_000, dtype=torch.uint8)])
        time.sleep(2.0)
        assert not b.mailbox.has_arrived("a", 0, "x")
        assert b.mailbox.received_bytes["a"] == 0
        a.shape({"b": Link(1e6, 0.0)})
        b.mailbox.receive("a", 0, "x", [torch.zeros(20_000, dtype=torch.uint8)])


def looks_of(*, are_parts: bool) -> int:
    """How often an engine's thread that always finds something looks in a tenth of a second, with nobody waiting."""
    looks: list[float] = []

    def turn(limit_seconds: float) -> bool:
        looks.append(limit_seconds)
        time.sleep(0.0005)
        return are_parts

    wheel = EventLoop("engine", turn, lambda: None, lambda: False, lambda: None, 0.5)
    time.sleep(0.1)
    wheel.close()
    return len(looks)


def test_parts_of_messages_gather_while_nobody_waits() -> None:
    assert looks_of(are_parts=True) < looks_of(are_parts=False) / 3


def test_only_parts_from_other_machines_gather(security: Security) -> None:
    with joined(security, {"x": 10_000}) as (a, b):
        connection = b._connections["a"]
        assert not connection._is_far
        a.shape({"b": Link(STOPPED_BYTES_PER_SECOND, 0.0)})
        a.send("b", 0, "x", [torch.zeros(10_000, dtype=torch.uint8)])
        a.shape({"b": Link(0.5 * MBIT, 0.0)})
        wait_until(lambda: connection.inbox.is_inside)
        assert not connection.trickles
        connection._is_far = True
        assert connection.trickles
        b.mailbox.receive("a", 0, "x", [torch.zeros(10_000, dtype=torch.uint8)])
        assert not connection.trickles


def test_a_peer_that_left_at_once_is_no_error() -> None:
    near, far = socket.socketpair()
    wire = Wire(near)
    far.close()
    wire.close()
    assert not is_far(wire)
