"""The TCP engine between threads of one process, plain and encrypted."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from endpoint_pairs import Guest, join_all, joined, wait_until

from manyhands.facts.errors import AddressTaken, ManyhandsError, Refused, TimedOut, WorkerLost
from manyhands.transport import rendezvous
from manyhands.transport.frames import CHUNK_BYTES, PRELUDE, decode, header_bytes
from manyhands.transport.security import Security, new_token
from manyhands.transport.tcp import TcpEndpoint
from manyhands.transport.wire import read_exactly


@contextmanager
def alone(security: Security, expected: dict[str, int]) -> Iterator[TcpEndpoint]:
    """'b', which expects these topics from 'a' and 'A'."""
    endpoint = TcpEndpoint("b", security, limit_seconds=10.0)
    try:
        endpoint.mailbox.open(0, {(peer, topic): size for peer in "aA" for topic, size in expected.items()})
        yield endpoint
    finally:
        endpoint.close()


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("count", [0, 1, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, 5 * CHUNK_BYTES + 17])
@pytest.mark.parametrize("is_posted", [True, False], ids=["posted", "early"])
def test_sizes(security: Security, count: int, is_posted: bool) -> None:
    with joined(security, {"x": count}) as (a, b):
        content, into = random_bytes(count), torch.zeros(count, dtype=torch.uint8)
        if is_posted:
            b.mailbox.post("a", 0, "x", [into])
        a.send("b", 0, "x", [content])
        if not is_posted:
            wait_until(lambda: b.mailbox.has_arrived("a", 0, "x"))
        b.mailbox.receive("a", 0, "x", [into])
        assert torch.equal(content, into)
        assert a.sent_bytes["b"] == b.mailbox.received_bytes["a"] == count
        a.flush(5)


@pytest.mark.slow
@pytest.mark.quick("encrypted")
def test_released_memory_may_change(security: Security) -> None:
    """Far more than a link holds: most of it has not left when the sender changes it, and nothing gets stuck."""
    count = 64 * CHUNK_BYTES + 5
    topics = [f"x{number}" for number in range(3)]
    with joined(security, dict.fromkeys(topics, count)) as (a, b):
        contents = [random_bytes(count) for _ in topics]
        kept = [content.clone() for content in contents]
        with b.mailbox.writing:  # b reads nothing as long as this is held
            for topic, content in zip(topics, contents):
                a.send("b", 0, topic, [content])
            assert a._connections["b"].outbox.has_work, "all has left: nothing to release"
            a.release()
            a.release()
            for content in contents:
                content.zero_()
        for topic, content in zip(topics, kept):
            assert torch.equal(torch.frombuffer(b.mailbox.take("a", 0, topic), dtype=torch.uint8), content)


def test_many_parts_to_many_destinations(security: Security) -> None:
    """More pieces of memory than one system call takes, on both sides."""
    parts = [random_bytes(1 + 37 * number % 5000) for number in range(300)]
    total = sum(map(len, parts))
    with joined(security, {"x": total}) as (a, b):
        into = [torch.zeros(total // 200, dtype=torch.uint8) for _ in range(200)]
        into.append(torch.zeros(total - 200 * (total // 200), dtype=torch.uint8))
        b.mailbox.post("a", 0, "x", into)
        a.send("b", 0, "x", parts)
        b.mailbox.receive("a", 0, "x", into)
        assert torch.equal(torch.cat(parts), torch.cat(into))


@pytest.mark.quick(every=2)
def test_all_pairs_at_once_from_many_threads(security: Security) -> None:
    sizes = {f"{number}": 1 + 100_000 * number for number in range(12)}
    with joined(security, sizes, "a", "b", "c") as endpoints:

        def exchange(endpoint: TcpEndpoint) -> bool:
            others = [other.name for other in endpoints if other is not endpoint]

            def send(topic: str) -> None:
                for other in others:
                    content = torch.full((sizes[topic],), int(topic), dtype=torch.uint8)
                    endpoint.send(other, 0, topic, [content], urgent=topic == "3")

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(send, sizes))
            for other in others:
                for topic, size in sizes.items():
                    into = torch.zeros(size, dtype=torch.uint8)
                    endpoint.mailbox.receive(other, 0, topic, [into])
                    assert (into == int(topic)).all()
            return True

        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(exchange, endpoints))
        for endpoint in endpoints:
            endpoint.flush(5)
            assert endpoint.mailbox.refused == 0
            assert sum(endpoint.sent_bytes.values()) == 2 * sum(sizes.values())


REFUSALS = {
    "wrong size": ({"size": 200}, "200 bytes; the plan says 100"),
    "wrong topic": ({"topic": "y"}, "not in the plan"),
    "generation": ({"generation": 1}, "generation 1; this is 0"),
    "origin": ({"origin": "c"}, "comes from c"),
    "out of order": ({"size": 100, "offset": 60}, "byte 60; 0 are at hand"),
    "stale": ({"step": -1}, "comes at step 0"),
}


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refused_frame_is_thrown_away_and_the_next_one_read(security: Security, kind: str) -> None:
    changes, reason = REFUSALS[kind]
    with alone(security, {"x": 100}) as b:
        guest = Guest(b, security)
        guest.frame(bytes(100 - changes.get("offset", 0)), **changes)  # type: ignore[arg-type,operator]
        guest.frame(b"\7" * 100)
        into = torch.zeros(100, dtype=torch.uint8)
        b.mailbox.receive("a", 0, "x", [into])
        assert (into == 7).all()
        assert b.mailbox.refused == 1
        assert reason in b.mailbox.refusals[0]
        guest.frame(b"\7" * 100)
        wait_until(lambda: b.mailbox.refused == 2)
        assert "has come already" in b.mailbox.refusals[1]
        guest.wire.close()


def test_a_large_refused_frame(security: Security) -> None:
    with alone(security, {"x": 100}) as b:
        guest = Guest(b, security)
        guest.frame(bytes(CHUNK_BYTES), topic="y")
        guest.frame(b"\7" * 100)
        b.mailbox.receive("a", 0, "x", [torch.zeros(100, dtype=torch.uint8)])
        assert b.mailbox.refused == 1
        guest.wire.close()


def test_a_frame_byte_by_byte(security: Security) -> None:
    with alone(security, {"x": 3}) as b:
        guest = Guest(b, security)
        writes: list[bytes] = []
        guest.write = writes.append  # type: ignore[method-assign]
        guest.frame(b"abc")
        del guest.write
        for byte in b"".join(writes):
            guest.write(bytes([byte]))
        into = torch.zeros(3, dtype=torch.uint8)
        b.mailbox.receive("a", 0, "x", [into])
        assert bytes(into.tolist()) == b"abc"
        guest.wire.close()


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"mhf1\xff\xff\xff\xff", b"mhf1\x04\0\0\0\xc1\xc1\xc1\xc1"]
)
def test_garbage_ends_that_connection_only(security: Security, garbage: bytes) -> None:
    with alone(security, {"x": 3}) as b:
        guest, other = Guest(b, security, "a"), Guest(b, security, "A")
        guest.write(garbage)
        with pytest.raises(WorkerLost, match=r"a was lost: its connection to b broke \(what it sent is no frame"):
            b.mailbox.receive("a", 0, "x", [torch.zeros(3, dtype=torch.uint8)])
        assert not b.is_connected("a")
        other.frame(b"abc")
        b.mailbox.receive("A", 0, "x", [torch.zeros(3, dtype=torch.uint8)])
        guest.wire.close()
        other.wire.close()


@pytest.mark.quick(every=2)
def test_an_urgent_message_overtakes_a_large_one(security: Security) -> None:
    """The guest does not read until both were handed over."""
    size = 32 * 2**20
    with alone(security, {}) as b:
        guest = Guest(b, security)
        b.send("a", 0, "bulk", [torch.zeros(size, dtype=torch.uint8)])
        b.send("a", 0, "bulk too", [torch.zeros(size, dtype=torch.uint8)])
        b.send("a", 0, "word", [torch.zeros(8, dtype=torch.uint8)], urgent=True)
        order: list[str] = []
        deadline = time.monotonic() + 20
        left = 2 * size + 8
        while left:
            prelude = read_exactly(guest.wire, PRELUDE.size, deadline)
            header = decode(read_exactly(guest.wire, header_bytes(prelude), deadline))
            read_exactly(guest.wire, header.length, deadline)
            if header.origin:
                order.append(header.topic)
                left -= header.length
        frames = size // CHUNK_BYTES
        assert order.index("word") < frames
        assert order.index("bulk too") < frames, "large ones take turns"
        guest.wire.close()


@pytest.mark.quick("encrypted")
def test_a_heartbeat_keeps_an_idle_connection(security: Security) -> None:
    with joined(security, {"x": 1}, silence_seconds=0.8) as (a, b):
        time.sleep(1.8)
        a.send("b", 0, "x", [random_bytes(1)])
        b.mailbox.receive("a", 0, "x", [random_bytes(1)])
        assert b.mailbox.refused == 0


def test_a_silent_peer_is_lost(security: Security) -> None:
    with joined(security, {"x": 1}, silence_seconds=0.3) as (a, b):
        start = time.monotonic()
        a._loop._send_heartbeats = lambda now: None  # type: ignore[method-assign]
        with pytest.raises(WorkerLost, match=r"a was lost: .* \(silent for \d+\.\d s\)"):
            b.mailbox.receive("a", 0, "x", [random_bytes(1)])
        assert time.monotonic() - start < 15  # waits themselves have a limit of 20


@pytest.mark.quick(every=2)
def test_a_reset_is_noticed_at_once_and_the_rest_goes_on(security: Security) -> None:
    with joined(security, {"x": 1}, "a", "b", "c") as (a, b, c):
        a.close()
        start = time.monotonic()
        for one in (b, c):
            with pytest.raises(WorkerLost, match=f"a was lost: its connection to {one.name} broke"):
                one.mailbox.receive("a", 0, "x", [random_bytes(1)])
        assert time.monotonic() - start < 8  # silence is noticed after 10
        b.send("a", 0, "x", [random_bytes(1)])
        assert b.sent_bytes["a"] == 0
        b.send("c", 0, "x", [random_bytes(1)])
        c.mailbox.receive("b", 0, "x", [random_bytes(1)])
        with pytest.raises(WorkerLost, match="never connected to it, only to c"):
            b.send("d", 0, "x", [random_bytes(1)])


def test_messages_before_a_close_still_count(security: Security) -> None:
    content = random_bytes(3 * 2**20)
    with joined(security, {"x": len(content)}) as (a, b):
        a.send("b", 0, "x", [content])
        a.flush(5)
        a.close()
        into = torch.zeros_like(content)
        b.mailbox.receive("a", 0, "x", [into])
        assert torch.equal(content, into)


def test_a_dropped_peer_may_come_back_when_it_is_named(security: Security) -> None:
    with joined(security, {"x": 1}) as (a, b):
        b.lose("a")
        with pytest.raises(WorkerLost, match="b dropped it"):
            b.mailbox.receive("a", 0, "x", [random_bytes(1)])
        wait_until(lambda: not a.is_connected("b"))
        join_all([a, b])
        a.send("b", 0, "x", [random_bytes(1)])
        b.mailbox.receive("a", 0, "x", [random_bytes(1)])


def test_connecting_again_keeps_live_connections(security: Security) -> None:
    with joined(security, {"x": 1}) as (a, b):
        before = a._connections["b"]
        join_all([a, b])
        assert a._connections["b"] is before


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", ["a", "b"], ids=["it connects", "it is connected to"])
def test_another_process_under_a_known_name(security: Security, name: str) -> None:
    """The end of the first one was not heard of: the connection to it must not pass for the other one's."""
    with joined(security, {"x": 1}) as (a, b):
        known = a if name == "b" else b
        other = TcpEndpoint(name, security, limit_seconds=10.0)
        try:
            other.mailbox.open(0, {(known.name, "x"): 1})
            join_all([known, other])
            known.send(name, 0, "x", [torch.tensor([7], dtype=torch.uint8)])
            into = random_bytes(1)
            other.mailbox.receive(known.name, 0, "x", [into])
            assert into.item() == 7
        finally:
            other.close()


def test_an_interruption_ends_a_wait_at_once(security: Security) -> None:
    with joined(security, {"x": 1}) as (_, b):
        timer = threading.Timer(0.1, b.mailbox.interrupt, (ManyhandsError("stop"),))
        timer.start()
        start = time.monotonic()
        with pytest.raises(ManyhandsError, match="stop"):
            b.mailbox.receive("a", 0, "x", [random_bytes(1)])
        assert time.monotonic() - start < 10
        timer.join()


# Who may connect


def test_another_token_is_refused(security: Security) -> None:
    with joined(security, {"x": 1}, "b", "c") as (b, c):
        stranger = TcpEndpoint("a", Security(new_token(), security.encrypted))
        try:
            with pytest.raises(Refused, match="the token is not the one"):
                stranger.connect({"b": b.address}, 5)
        finally:
            stranger.close()
        b.send("c", 0, "x", [random_bytes(1)])
        c.mailbox.receive("b", 0, "x", [random_bytes(1)])


@pytest.mark.quick(every=2)
def test_a_name_that_is_taken(security: Security) -> None:
    with joined(security, {"x": 1}) as (_, b):
        second = TcpEndpoint("a", security)
        try:
            with pytest.raises(Refused, match="is connected to a a already"):
                second.connect({"b": b.address}, 1.0)
        finally:
            second.close()
        assert b.is_connected("a")


@pytest.mark.quick(every=2)
def test_a_name_nobody_knows(security: Security, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PENDING_SECONDS", 0.1)
    b = TcpEndpoint("b", security, silence_seconds=0.4)
    stranger = TcpEndpoint("a", security)
    try:
        with pytest.raises(Refused, match="does not know a"):
            stranger.connect({"b": b.address}, 1.0)
        assert not b.is_connected("a")
    finally:
        b.close()
        stranger.close()


def test_the_address_of_another(security: Security) -> None:
    with joined(security, {"x": 1}, "b", "c") as (b, _):
        stranger = TcpEndpoint("a", security)
        try:
            with pytest.raises(Refused, match="is b, not bb"):
                stranger.connect({"bb": b.address}, 5)
        finally:
            stranger.close()


def test_a_peer_that_does_not_come(security: Security) -> None:
    b = TcpEndpoint("b", security)
    try:
        with pytest.raises(TimedOut, match=r"b waited 0\.2 s for a"):
            b.connect({"a": ("127.0.0.1", 1)}, 0.2)
        with pytest.raises(TimedOut, match=r"127\.0\.0\.1:1 within 0\.2 s \(connection refused\)"):
            b.connect({"c": ("127.0.0.1", 1)}, 0.2)
    finally:
        b.close()


def test_a_peer_that_is_late(security: Security) -> None:
    """One calls connect() before the other even listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    a = TcpEndpoint("a", security)
    b: list[TcpEndpoint] = []
    thread = threading.Thread(target=a.connect, args=({"b": ("127.0.0.1", port)}, 10.0))
    thread.start()
    time.sleep(0.2)
    b.append(TcpEndpoint("b", security, port=port))
    time.sleep(0.2)
    b[0].connect({"a": a.address}, 10.0)
    thread.join()
    assert a.is_connected("b")
    a.close()
    b[0].close()


def test_a_taken_port(security: Security) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(AddressTaken, match=rf"127\.0\.0\.1:{port}: address already in use"):
            TcpEndpoint("a", security, port=port)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.quick(every=2)
def test_nothing_is_left_after_a_close(security: Security) -> None:
    with joined(security, {"x": 1}):
        pass  # the certificate, and whatever else is made once
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with joined(security, {"x": 2**26}, "a", "b", "c") as (a, b, c):
        b.lose("c")
        silent = socket.create_connection(b.address)  # never says a word
        guest = Guest(a, security, "0")
        for _ in range(3):
            a.send("0", 0, "x", [torch.zeros(2**26, dtype=torch.uint8)])  # stuck: nobody reads
        wait_until(lambda: not c.is_connected("b"))
        start = time.monotonic()
        for endpoint in (a, b, c):
            endpoint.close()
            endpoint.close()
        assert time.monotonic() - start < 15
        silent.close()
        guest.wire.close()
    wait_until(lambda: threading.active_count() == threads)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_close_ends_waits_and_connects(security: Security) -> None:
    a = TcpEndpoint("a", security)
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            a.connect({"b": ("127.0.0.1", 1)}, 30)
        except ManyhandsError as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    time.sleep(0.05)
    a.close()
    thread.join(15)
    assert errors
