"""Both transports keep the same promises; the one inside a process breaks them when told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from endpoint_pairs import wait_until

from manyhands.facts.errors import AddressTaken, BadValue, ManyhandsError, Refused, TimedOut, WorkerLost
from manyhands.transport.frames import CHUNK_BYTES
from manyhands.transport.inprocess import InProcessTransport
from manyhands.transport.security import Security, new_token
from manyhands.transport.transport import ConnectedEndpoint, ControlChannel, TcpTransport, Transport
from manyhands.transport.wire import write_all

PLAIN = Security(new_token(), encrypted=False)
HERE = "127.0.0.1"


@pytest.fixture(params=[TcpTransport, InProcessTransport], ids=["tcp", "in process"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param()  # type: ignore[no-any-return]


@pytest.fixture
def played() -> InProcessTransport:
    return InProcessTransport(limit_seconds=10.0)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(transport: Transport, closing: ExitStack, name: str = "a") -> tuple[ControlChannel, ControlChannel]:
    """A worker's end and the coordinator's."""
    listener = transport.listen("coordinator", HERE, 0, PLAIN)
    near = transport.reach(name, *listener.address, PLAIN, 5.0)
    far = listener.accept(5.0)
    assert far is not None
    for one in (near, far, listener):
        closing.callback(one.close)
    return near, far


def at_once(*whats: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run(what: Callable[[], Any]) -> None:
        try:
            what()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(what,)) for what in whats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def meet(endpoints: Sequence[ConnectedEndpoint], limit_seconds: float = 10.0) -> None:
    peers = {one.name: one.address for one in endpoints}
    at_once(*(lambda one=one: one.connect(peers, limit_seconds) for one in endpoints))  # type: ignore[misc]


def connected(transport: Transport, closing: ExitStack, size: int = 4, names: str = "ab") -> list[ConnectedEndpoint]:
    """Endpoints that expect 'x' of each other, in generation 0."""
    found = [transport.endpoint(name, PLAIN, host=HERE) for name in names]
    for one in found:
        closing.callback(one.close)
        one.mailbox.limit_seconds = 10.0
        one.mailbox.open(0, {(other, "x"): size for other in names if other != one.name})
    meet(found)
    return found


def taken(endpoint: ConnectedEndpoint, source: str, step: int, size: int = 4) -> torch.Tensor:
    into = torch.zeros(size, dtype=torch.uint8)
    endpoint.mailbox.receive(source, step, "x", [into])
    return into


def octets(value: int, size: int = 4) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


# What both keep


def test_control_messages_both_ways_in_order(transport: Transport, closing: ExitStack) -> None:
    near, far = pair(transport, closing)
    for one, other in ((near, far), (far, near)):
        assert one.receive(0.01) is None
        for number in range(5):
            other.send(bytes([number]) * number)
        assert [one.receive(5.0) for _ in range(5)] == [bytes([number]) * number for number in range(5)]
        assert one.unfinished_bytes == 0
        assert one.local_host == one.peer_host == HERE


@pytest.mark.parametrize("own", [True, False], ids=["own side", "other side"])
def test_a_close_ends_both_sides(transport: Transport, closing: ExitStack, own: bool) -> None:
    near, far = pair(transport, closing)
    far.send(b"last")
    if own:
        assert near.receive(5.0) == b"last"
        timer = threading.Timer(0.1, near.close)
        timer.start()
        with pytest.raises(WorkerLost, match="broke: it was closed on this side"):
            near.receive(10.0)
        timer.join()
    else:
        far.close()
        assert near.receive(5.0) == b"last"
        with pytest.raises(WorkerLost, match=r"The connection to 127\.0\.0\.1 broke"):
            near.receive(5.0)
    with pytest.raises(WorkerLost):
        near.send(b"word")
    near.close()
    with pytest.raises(WorkerLost):
        far.receive(5.0)


def test_a_message_too_large_is_not_sent(transport: Transport, closing: ExitStack) -> None:
    near, _ = pair(transport, closing)
    with pytest.raises(BadValue, match="at most"):
        near.send(bytes(64 * 2**20 + 1))


def test_who_may_join(transport: Transport, closing: ExitStack) -> None:
    listener = transport.listen("coordinator", HERE, 0, PLAIN)
    closing.callback(listener.close)
    with pytest.raises(AddressTaken, match="already in use"):
        transport.listen("coordinator", *listener.address, PLAIN)
    with pytest.raises(Refused, match="the token is not the one it asks for"):
        transport.reach("a", *listener.address, Security("the other token", encrypted=False), 5.0)
    with pytest.raises(Refused, match="is plain, this side encrypted"):
        transport.reach("a", *listener.address, Security(PLAIN.token, encrypted=True), 5.0)
    assert listener.accept(0.0) is None
    listener.close()
    with pytest.raises(TimedOut, match="Nobody answered at"):
        transport.reach("a", *listener.address, PLAIN, 0.2)
    again = transport.listen("coordinator", *listener.address, PLAIN)
    closing.callback(again.close)
    assert again.address == listener.address


@pytest.mark.parametrize("size", [0, 4, CHUNK_BYTES + 3])
def test_data_arrives(transport: Transport, closing: ExitStack, size: int) -> None:
    a, b = connected(transport, closing, size)
    a.send("b", 0, "x", [octets(7, size)])
    b.send("a", 0, "x", [octets(9, size)], urgent=True)
    a.release()
    assert torch.equal(taken(b, "a", 0, size), octets(7, size))
    assert torch.equal(taken(a, "b", 0, size), octets(9, size))
    assert a.sent_bytes["b"] == b.mailbox.received_bytes["a"] == size
    a.flush(5.0)
    assert a.is_connected("b")
    assert not a.is_connected("c")


def test_bytes_that_are_not_the_plans_are_counted_apart(transport: Transport, closing: ExitStack) -> None:
    a, b = connected(transport, closing, 4)
    b.mailbox.expect("a", "state", 6)
    a.send("b", 0, "state", [octets(7, 6)], unplanned=True)
    a.send("b", 0, "x", [octets(9, 4)])
    for topic, octet, size in (("state", 7, 6), ("x", 9, 4)):
        into = octets(0, size)
        b.mailbox.receive("a", 0, topic, [into])
        assert torch.equal(into, octets(octet, size))
    assert a.sent_bytes["b"] == b.mailbox.received_bytes["a"] == 4
    assert a.unplanned_bytes == {"b": 6}


def test_data_of_another_generation_is_refused(transport: Transport, closing: ExitStack) -> None:
    a, b = connected(transport, closing)
    b.mailbox.open(1, {("a", "x"): 4})
    a.send("b", 0, "x", [octets(1)])
    wait_until(lambda: b.mailbox.refused == 1)
    a.mailbox.open(1, {})
    a.send("b", 0, "x", [octets(2)])
    assert torch.equal(taken(b, "a", 0), octets(2))


def test_a_peer_that_is_dropped_fails_waits_here_and_there_and_may_come_back(
    transport: Transport, closing: ExitStack
) -> None:
    a, b = connected(transport, closing)
    timer = threading.Timer(0.1, a.lose, args=("b",))
    timer.start()
    with pytest.raises(WorkerLost, match=r"a was lost: its connection to b broke"):
        taken(b, "a", 0)
    timer.join()
    with pytest.raises(WorkerLost, match=r"b was lost: its connection to a broke \(a dropped it\)"):
        taken(a, "b", 0)
    a.send("b", 0, "x", [octets(1)])  # no error here
    meet([a, b])
    for one in (a, b):
        one.mailbox.open(1, {("a", "x"): 4})
    a.send("b", 0, "x", [octets(2)])
    assert torch.equal(taken(b, "a", 0), octets(2))


def test_a_closed_endpoint_is_lost_to_others(transport: Transport, closing: ExitStack) -> None:
    a, b = connected(transport, closing)
    b.send("a", 0, "x", [octets(3)])
    wait_until(lambda: a.mailbox.has_arrived("b", 0, "x"))
    a.close()
    assert torch.equal(taken(a, "b", 0), octets(3))  # it has come before
    with pytest.raises(WorkerLost):
        taken(b, "a", 0)


def test_those_who_do_not_come_are_named(transport: Transport, closing: ExitStack) -> None:
    a, b = (transport.endpoint(name, PLAIN, host=HERE) for name in "ab")
    for one in (a, b):
        closing.callback(one.close)
    with pytest.raises(ManyhandsError, match=r"\ba\b"):
        b.connect({"a": a.address}, 0.2)  # a was never told
    with pytest.raises(WorkerLost, match="never connected"):
        a.send("b", 0, "x", [octets(1)])
    with pytest.raises(Refused, match="is b, not c"):
        a.connect({"c": b.address}, 5.0)


def test_a_message_under_way_can_be_seen(closing: ExitStack) -> None:
    """One who is still speaking is not silent, however slow the link."""
    transport = TcpTransport()
    near, far = pair(transport, closing)
    content = b"\x0a\x00\x00\x000123456789"
    for end in (2, 4, 9):
        write_all(near._wire, content[:end][far.unfinished_bytes :], time.monotonic() + 5)  # type: ignore[attr-defined]
        assert far.receive(0.05) is None
        assert far.unfinished_bytes == end
    write_all(near._wire, content[9:], time.monotonic() + 5)  # type: ignore[attr-defined]
    assert far.receive(5.0) == b"0123456789"
    assert far.unfinished_bytes == 0


# What is broken when told


def test_a_cut_ends_everything_of_one(played: InProcessTransport, closing: ExitStack) -> None:
    near, far = pair(played, closing, "a")
    other_near, other_far = pair(played, closing, "c")
    a, b, c = connected(played, closing, names="abc")
    near.send(b"before")
    errors: dict[str, BaseException] = {}

    def waits(name: str, what: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            try:
                what()
            except WorkerLost as error:
                errors[name] = error

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    threads = [
        waits("own control", lambda: near.receive(10.0)),
        waits("own data", lambda: taken(a, "c", 0)),
        waits("its peer", lambda: taken(b, "a", 0)),
    ]
    time.sleep(0.05)
    assert not errors
    played.cut("a")
    for thread in threads:
        thread.join(5.0)
    assert set(errors) == {"own control", "own data", "its peer"}
    assert "a was cut off" in str(errors["its peer"])
    assert far.receive(1.0) == b"before"
    with pytest.raises(WorkerLost, match="a was cut off"):
        far.receive(5.0)
    with pytest.raises(WorkerLost):
        a.connect({"b": b.address}, 5.0)
    a.send("b", 0, "x", [octets(1)])  # to nobody
    # Nobody else is concerned.
    c.send("b", 0, "x", [octets(5)])
    assert torch.equal(taken(b, "c", 0), octets(5))
    other_near.send(b"here")
    assert other_far.receive(5.0) == b"here"


def test_one_that_was_cut_may_come_back(played: InProcessTransport, closing: ExitStack) -> None:
    _, b = connected(played, closing)
    played.cut("a")
    again = played.endpoint("a", PLAIN, host=HERE)
    closing.callback(again.close)
    meet([again, b])
    b.mailbox.open(1, {("a", "x"): 4})
    again.mailbox.open(1, {})
    again.send("b", 0, "x", [octets(8)])
    assert torch.equal(taken(b, "a", 0), octets(8))
    near, far = pair(played, closing, "a")
    near.send(b"back")
    assert far.receive(5.0) == b"back"


def test_the_coordinator_can_be_cut_too(played: InProcessTransport, closing: ExitStack) -> None:
    listener = played.listen("coordinator", HERE, 0, PLAIN)
    near = played.reach("a", *listener.address, PLAIN, 5.0)
    played.cut("coordinator")
    with pytest.raises(WorkerLost, match="coordinator was cut off"):
        near.receive(5.0)
    timer = threading.Timer(0.1, lambda: played.listen("coordinator", *listener.address, PLAIN))
    timer.start()
    played.reach("a", *listener.address, PLAIN, 5.0).send(b"again")
    timer.join()


def test_a_freeze_is_silent_and_a_thaw_brings_everything_in_order(
    played: InProcessTransport, closing: ExitStack
) -> None:
    near, far = pair(played, closing, "a")
    a, b = connected(played, closing)
    played.freeze("a")
    for number in range(3):
        near.send(bytes([number]))
        far.send(bytes([number]))
        a.send("b", number, "x", [octets(number)])
    b.send("a", 0, "x", [octets(9)])
    assert near.receive(0.05) is None
    assert far.receive(0.05) is None
    assert not b.mailbox.has_arrived("a", 0, "x")
    assert a.is_connected("b")
    with pytest.raises(TimedOut, match="still has messages under way"):
        a.flush(0.05)
    with pytest.raises(TimedOut):
        played.reach("a", HERE, 40001, PLAIN, 0.05)
    played.thaw("a")
    a.flush(1.0)
    for channel in (near, far):
        assert [channel.receive(1.0) for _ in range(3)] == [b"\0", b"\1", b"\2"]
    for number in range(3):
        assert torch.equal(taken(b, "a", number), octets(number))
    assert torch.equal(taken(a, "b", 0), octets(9))


def test_a_frozen_one_learns_after_its_thaw_that_it_was_given_up(
    played: InProcessTransport, closing: ExitStack
) -> None:
    near, far = pair(played, closing, "a")
    a, b = connected(played, closing)
    played.freeze("a")
    far.close()
    b.lose("a")
    a.send("b", 0, "x", [octets(1)])
    assert near.receive(0.05) is None
    assert a.is_connected("b")
    played.thaw("a")
    with pytest.raises(WorkerLost, match="closed on the other side"):
        near.receive(1.0)
    with pytest.raises(WorkerLost, match="b dropped it"):
        taken(a, "b", 0)
    assert b.mailbox.refused == 0, "a connection that is gone delivers nothing"


def test_a_frozen_one_that_is_killed_is_lost_at_once(played: InProcessTransport, closing: ExitStack) -> None:
    _, far = pair(played, closing, "a")
    played.freeze("a")
    assert far.receive(0.05) is None
    played.cut("a")
    with pytest.raises(WorkerLost):
        far.receive(1.0)
    near, far = pair(played, closing, "a")
    near.send(b"a new one is not frozen")
    assert far.receive(1.0) is not None


def test_a_fault_at_a_message_of_ones_choice(played: InProcessTransport, closing: ExitStack) -> None:
    a, b = connected(played, closing)
    fired: list[tuple[str, str, int, str]] = []

    def before_send(*message: Any) -> None:
        if message == ("a", "b", 2, "x"):
            fired.append(message)
            played.cut("a")

    played.before_send = before_send
    for step in range(4):
        a.send("b", step, "x", [octets(step)])
    assert len(fired) == 1
    for step in range(2):
        assert torch.equal(taken(b, "a", step), octets(step))
    with pytest.raises(WorkerLost):
        taken(b, "a", 2)
    with pytest.raises(WorkerLost):
        a.mailbox.check()
