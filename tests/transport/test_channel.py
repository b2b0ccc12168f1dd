"""Control messages: whole, in order, with limits."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from endpoint_pairs import wait_until

from manyhands.facts.errors import AddressTaken, BadValue, TimedOut, WorkerLost
from manyhands.transport.channel import Channel, Listener, connect
from manyhands.transport.security import Purpose, Security
from manyhands.transport.wire import Wire, write_all

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair(security: Security) -> Iterator[Pair]:
    listener = Listener("127.0.0.1", 0, security, largest_bytes=2**20)
    client = connect(*listener.address, security, 5, largest_bytes=2**20)
    server = listener.accept(5)
    assert server is not None
    listener.close()
    yield client, server
    client.close()
    server.close()


def send_many(channel: Channel, size: int, limit_seconds: float) -> None:
    for _ in range(100):
        channel.send(bytes(size), limit_seconds)


@pytest.mark.quick(every=10)
@pytest.mark.parametrize("size", [0, 1, 2**16 - 1, 2**16, 2**20])
def test_both_ways(pair: Pair, size: int) -> None:
    message = os.urandom(size)
    for one, other in (pair, pair[::-1]):
        thread = threading.Thread(target=one.send, args=(message,))
        thread.start()
        assert other.receive(5) == message
        thread.join()
    assert pair[0].peer_host == pair[0].local_host == "127.0.0.1"


@pytest.mark.quick(every=2)
def test_many_threads_send_while_one_receives(pair: Pair) -> None:
    client, server = pair
    messages = [bytes([number]) * (1 + 7919 * number % 100_000) for number in range(200)]

    def send(channel: Channel, first: int) -> None:
        for message in messages[first::4]:
            channel.send(message)

    threads = [threading.Thread(target=send, args=(one, first)) for one in pair for first in range(4)]
    for thread in threads:
        thread.start()
    found: list[bytes | None] = []
    back = threading.Thread(target=lambda: found.extend(client.receive(10) for _ in messages))
    back.start()
    assert sorted(server.receive(10) or b"" for _ in messages) == sorted(messages)
    back.join()
    assert sorted(message or b"" for message in found) == sorted(messages)
    for thread in threads:
        thread.join()


def test_a_limit_in_the_middle_of_a_message_loses_nothing(pair: Pair) -> None:
    client, server = pair
    content = struct.pack("<I", 10) + b"0123456789"
    deadline = time.monotonic() + 5
    for first, last in ((0, 2), (2, 4), (4, 9), (9, 13)):
        write_all(client._wire, content[first:last], deadline)
        assert server.receive(0.05) is None
    write_all(client._wire, content[13:], deadline)
    assert server.receive(5) == b"0123456789"
    assert server.receive(0) is None


def test_a_message_too_large_is_not_even_allocated(pair: Pair) -> None:
    client, server = pair
    with pytest.raises(BadValue, match=f"{2**20 + 1} bytes; at most {2**20}"):
        client.send(bytes(2**20 + 1))
    write_all(client._wire, struct.pack("<I", 2**32 - 1), time.monotonic() + 5)
    with pytest.raises(WorkerLost, match=f"announces a message of {2**32 - 1} bytes; at most {2**20}"):
        server.receive(5)
    with pytest.raises(WorkerLost):
        server.send(b"word")


def test_a_peer_that_goes(pair: Pair) -> None:
    client, server = pair
    client.send(b"last")
    client.close()
    assert server.receive(5) == b"last"
    with pytest.raises(WorkerLost, match=r"127\.0\.0\.1 broke"):
        server.receive(5)
    with pytest.raises(WorkerLost):
        send_many(server, 100_000, 5)


def test_a_peer_that_does_not_read(pair: Pair) -> None:
    client, _ = pair
    with pytest.raises(TimedOut, match=r"did not take a message of 1048576 bytes within 0\.2 s"):
        send_many(client, 2**20, 0.2)
    with pytest.raises(WorkerLost):
        client.send(b"word")


def test_a_close_from_another_thread_ends_a_wait(pair: Pair) -> None:
    client, _ = pair
    timer = threading.Timer(0.1, client.close)
    timer.start()
    start = time.monotonic()
    with pytest.raises(WorkerLost, match="closed"):
        client.receive(10)
    assert time.monotonic() - start < 5
    timer.join()


def test_a_coordinator_that_starts_late(security: Security) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found: list[Listener] = []
    timer = threading.Timer(0.3, lambda: found.append(Listener("127.0.0.1", port, security)))
    timer.start()
    channel = connect("127.0.0.1", port, security, 10)
    timer.join()
    channel.close()
    found[0].close()


def test_a_coordinator_that_never_starts(security: Security) -> None:
    with pytest.raises(TimedOut, match=r"127\.0\.0\.1:1 within 0\.3 s \(connection refused\)"):
        connect("127.0.0.1", 1, security, 0.3)


def test_a_taken_port(security: Security) -> None:
    first = Listener("127.0.0.1", 0, security)
    port = first.address[1]
    with pytest.raises(AddressTaken, match=rf"(?s)127\.0\.0\.1:{port}: address already in use.*ss -ltnp"):
        Listener("127.0.0.1", port, security)
    first.close()
    Listener("127.0.0.1", port, security).close()
    with pytest.raises(AddressTaken, match=r"192\.0\.2\.1:0: cannot assign"):
        Listener("192.0.2.1", 0, security)


def test_nothing_is_left_after_a_close(security: Security) -> None:
    Listener("127.0.0.1", 0, security).close()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    listener = Listener("127.0.0.1", 0, security)
    client = connect(*listener.address, security, 5)
    silent = socket.create_connection(listener.address)
    listener.close()  # with one that nobody accepted, and one that never spoke
    with pytest.raises(WorkerLost):
        client.receive(5)
    client.close()
    silent.close()
    wait_until(lambda: threading.active_count() == threads)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_one_who_was_let_in_stays_when_the_listener_closes(security: Security) -> None:
    """Also while the thread that let him in is not done: it was once taken for one that still asks him."""
    listener = Listener("127.0.0.1", 0, security)
    is_done, admit = threading.Event(), listener._admit

    def slowly(wire: Wire) -> None:
        admit(wire)
        assert is_done.wait(5)

    listener.peer_listener.receive(Purpose.CONTROL, security, slowly)
    client = connect(*listener.address, security, 5)
    server = listener.accept(5)
    assert server is not None
    closing = threading.Thread(target=listener.close)
    closing.start()
    wait_until(lambda: listener.peer_listener._is_closing)
    time.sleep(0.05)
    is_done.set()
    closing.join(5)
    assert not closing.is_alive()
    client.send(b"still here")
    assert server.receive(5) == b"still here"
    client.close()
    server.close()
