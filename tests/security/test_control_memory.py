"""What a control connection takes in memory: what has arrived, and a bounded amount once it is decoded."""

from __future__ import annotations

import contextlib
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator

import msgspec
import pytest
from attacks import HELLO

from manyhands.facts.errors import BadData, ManyhandsError, Refused, WorkerLost
from manyhands.files.json_memory import decoded_bytes
from manyhands.runtime import control_messages, event_queue
from manyhands.runtime.control import (
    LARGEST_HELLO_BYTES,
    MOST_FROM_COORDINATOR_BYTES,
    MOST_FROM_WORKER_BYTES,
    decode_from_coordinator,
    decode_from_worker,
    encode,
)
from manyhands.runtime.control_messages import Heartbeat
from manyhands.runtime.control_parts import Facts, SiloFacts, TensorEntry
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.handshake import short
from manyhands.transport.channel import LARGEST_CONTROL_BYTES, Channel, Listener, connect
from manyhands.transport.security import Security, new_token
from manyhands.transport.wire import write_all

MIB = 2**20


@contextlib.contextmanager
def measured() -> Iterator[Callable[[], int]]:
    """Bytes that this process took at most since the beginning of the block."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def announce(channel: Channel, size: int) -> None:
    """The four bytes that say how long a message will be."""
    write_all(channel._wire, struct.pack("<I", size), time.monotonic() + 5)


# Before anything is known of a peer


@pytest.mark.slow
def test_four_bytes_reserve_next_to_nothing() -> None:
    """Before, each of these took 64 MiB: 40 connections took 2.8 GB."""
    security = Security(new_token(), encrypted=False)
    with contextlib.closing(Listener("127.0.0.1", 0, security)) as listener, measured() as most_bytes:
        for _ in range(10):
            client = connect(*listener.address, security, 5.0)
            server = listener.accept(5.0)
            assert server is not None
            announce(client, LARGEST_CONTROL_BYTES)
            assert server.receive(0.1) is None
            assert server.unfinished_bytes == 4
        assert most_bytes() < 4 * MIB


def test_a_hello_is_short() -> None:
    """Before a worker has said who it is, a longer message ends its connection as soon as it is announced."""
    with Coordinator() as coordinator:
        channel = connect(*coordinator.address, coordinator.security, 5.0)
        announce(channel, LARGEST_HELLO_BYTES + 1)
        with pytest.raises(WorkerLost):
            channel.receive(10.0)
        channel.close()


def test_a_worker_with_many_arrays_of_its_own_can_join() -> None:
    arrays = tuple(TensorEntry(f"inputs_of_a_silo_{number}", "float32", (3, 224, 224)) for number in range(150))
    facts = Facts("a machine", 8, 8, 10**10, "2.6", silo=SiloFacts(10**6, arrays))
    hello = msgspec.structs.replace(HELLO, facts=facts)
    assert len(encode(hello)) < LARGEST_HELLO_BYTES
    assert short(hello) is hello
    facts = msgspec.structs.replace(facts, silo=SiloFacts(10**6, arrays * 2))
    with pytest.raises(BadData, match=r"takes 2\d{4} bytes; a coordinator reads at most 16384") as caught:
        short(msgspec.structs.replace(HELLO, facts=facts))
    assert "300 arrays" in caught.value.hint


def test_a_long_message_arrives_in_pieces_and_whole() -> None:
    security = Security(new_token(), encrypted=False)
    with contextlib.closing(Listener("127.0.0.1", 0, security)) as listener:
        client = connect(*listener.address, security, 5.0)
        server = listener.accept(5.0)
        assert server is not None
        content = bytes(range(256)) * 1001
        wire = struct.pack("<I", len(content)) + content + struct.pack("<I", 0) + struct.pack("<I", 2) + b"ab"
        for place in range(0, len(wire), 70_000):
            write_all(client._wire, wire[place : place + 70_000], time.monotonic() + 5)
            if place == 0:
                assert server.receive(0.05) is None
        assert [server.receive(5.0) for _ in range(3)] == [content, b"", b"ab"]


# Decoding

STATE = b'{"type":"state","generation":1,"step":1,"tensors":null,"scalars":{"a":['
PROGRESS = b'{"type":"progress","generation":1,"step":1,"seconds":1,'
FAILED = b'{"type":"failed","generation":1,"kind":"","hint":"","message":"'
MEASURE = b'{"type":"measure","generation":1,"graph":{"nodes":['
Parts = tuple[bytes, bytes, bytes]
"""How a message begins, what is repeated in it, and how it ends."""
FROM_WORKER: tuple[Parts, ...] = (
    (PROGRESS + b'"losses":[', b"0,", b"0]}"),
    (PROGRESS + b'"staleness":[', b"999,", b"0]}"),
    (STATE, b"[],", b"[]]}}"),
    (STATE, b"{},", b"{}]}}"),
    (STATE, b'"a",', b"0]}}"),
    (b'{"type":"beat","arrivals":[', b'{"source":"","bytes":0,"seconds":0,"ago":0},', b"0]}"),
    (b'{"type":"done","generation":1,"log":{"device":"a","actions":[', b'"b",', b'""]}}'),
    (FAILED + "\U0001f600".encode(), b"a", b'"}'),
    (FAILED + b"\\ud83d\\ude00", b"a", b'"}'),
)
FROM_COORDINATOR: tuple[Parts, ...] = tuple(
    (MEASURE, repeated, b"0]}}") for repeated in (b"[],", b"{},", b'{"a":0},', b'"a",', b"1.5,", b"[[[[[[[[]]]]]]]],")
)


def long_message(parts: Parts, size: int) -> bytes:
    first, repeated, last = parts
    return first + repeated * (size // len(repeated)) + last


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("parts", FROM_WORKER)
def test_a_long_message_of_a_worker_is_bounded_in_memory(parts: Parts) -> None:
    """Before, 60 MiB of JSON took up to 1.5 GB."""
    message = long_message(parts, 60 * MIB)
    with measured() as most_bytes:
        with contextlib.suppress(ManyhandsError):
            decode_from_worker(message)
        assert most_bytes() <= MOST_FROM_WORKER_BYTES < 5 * len(message)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("parts", FROM_COORDINATOR)
def test_a_long_message_of_a_coordinator_is_bounded_in_memory(parts: Parts) -> None:
    message = long_message(parts, 60 * MIB)
    with measured() as most_bytes:
        with contextlib.suppress(ManyhandsError):
            decode_from_coordinator(message)
        assert most_bytes() <= MOST_FROM_COORDINATOR_BYTES <= 5 * len(message)


@pytest.mark.quick(every=15)
@pytest.mark.parametrize("parts", FROM_WORKER + FROM_COORDINATOR)
def test_what_is_counted_before_is_no_less_than_what_it_takes(parts: Parts) -> None:
    decode = decode_from_worker if parts in FROM_WORKER else decode_from_coordinator
    message = long_message(parts, MIB // 4)
    with measured() as most_bytes:
        with contextlib.suppress(ManyhandsError):
            decode(message)
        assert most_bytes() < decoded_bytes(message) + 10_000


def test_a_refusal_says_both_sizes() -> None:
    with pytest.raises(Refused, match="control message of 10 MB may take 730 MB decoded; at most 134 MB"):
        decode_from_worker(b'{"type":"beat","arrivals":[' + b"[]," * (10 * 10**6 // 3))


def test_each_side_reads_only_what_the_other_says() -> None:
    """A worker that sends the coordinator a job is refused before the job is decoded."""
    for message in (
        control_messages.Leave(),
        control_messages.Stop(1),
        control_messages.Survey(1, 0),
        control_messages.Start(1, 0, 1, ()),
    ):
        assert decode_from_coordinator(encode(message)) == message
        with pytest.raises(Refused):
            decode_from_worker(encode(message))
    for message in (
        control_messages.Leaving(),
        control_messages.Ready(1),
        control_messages.Clock(1, 0.5),
        control_messages.Held(1, "a", 2),
    ):
        assert decode_from_worker(encode(message)) == message
        with pytest.raises(Refused):
            decode_from_coordinator(encode(message))


def test_a_queue_counts_memory_and_not_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that nobody has taken yet are decoded already."""
    monkeypatch.setattr(event_queue, "MOST_WAITING_BYTES", 4 * MIB)
    said: list[str] = []
    with Coordinator(heartbeat_timeout_seconds=20.0, on_event=said.append) as coordinator:
        channel = connect(*coordinator.address, coordinator.security, 5.0)
        channel.send(encode(HELLO))
        assert channel.receive(5.0) is not None
        message = b'{"type":"progress","generation":1,"step":1,"seconds":1,"losses":[' + b"0," * 10_000 + b"0]}"
        with contextlib.suppress(ManyhandsError):
            for _ in range(20):  # 400 kB, and 14 MB of memory
                channel.send(message, 5.0)
        end = time.monotonic() + 10
        while not any("more than can be received" in text for text in said):
            assert time.monotonic() < end, said
            time.sleep(0.01)
        channel.close()


def test_a_beat_is_small() -> None:
    assert decoded_bytes(encode(Heartbeat())) < 1000
