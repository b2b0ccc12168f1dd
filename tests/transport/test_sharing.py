"""Endpoints of one machine find memory in common by themselves, and never use it where they must not."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
import torch
from endpoint_pairs import Guest, joined, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue, WorkerLost
from manyhands.facts.link import Link
from manyhands.transport.frames import (
    ANSWER,
    CHUNK_BYTES,
    OFFER,
    PRELUDE,
    SHARED_CHUNK_BYTES,
    BadFrame,
    Header,
    control,
    decode,
    encode,
)
from manyhands.transport.frames import header_bytes as size_of_header
from manyhands.transport.security import Security
from manyhands.transport.shared_memory import FillingRing
from manyhands.transport.sharing import (
    RING_BYTES,
    SHARING_VARIABLE,
    SMALLEST_SHARED_BYTES,
    MemorySharing,
    Offer,
    SharingSetting,
    ends,
)
from manyhands.transport.tcp import TcpEndpoint
from manyhands.transport.wire import Wire, read_exactly

LARGE = 2 * SHARED_CHUNK_BYTES + 17
SMALL = SMALLEST_SHARED_BYTES - 1


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def sharing(endpoint: TcpEndpoint, peer: str) -> MemorySharing:
    return endpoint._connections[peer].sharing


def shared_bytes(endpoint: TcpEndpoint, peer: str) -> int:
    """How many payload bytes went through memory in common."""
    ring = sharing(endpoint, peer).filling
    return ring._passed if ring is not None else 0


def pass_on(a: TcpEndpoint, b: TcpEndpoint, step: int, topic: str, count: int) -> None:
    content, into = random_bytes(count), torch.zeros(count, dtype=torch.uint8)
    b.mailbox.post(a.name, step, topic, [into])
    a.send(b.name, step, topic, [content])
    b.mailbox.receive(a.name, step, topic, [into])
    assert torch.equal(content, into)


def agree(a: TcpEndpoint, b: TcpEndpoint, topic: str = "first") -> None:
    """The first large message, and what it leads to."""
    pass_on(a, b, 0, topic, LARGE)
    wait_until(lambda: sharing(a, b.name).filling is not None)


TOPICS = {"first": LARGE, "large": LARGE, "small": SMALL, "x": 100}


@pytest.mark.quick(every=2)
def test_large_messages_go_through_memory_small_ones_do_not(security: Security) -> None:
    with joined(security, TOPICS) as (a, b):
        agree(a, b)
        before = shared_bytes(a, "b")
        pass_on(a, b, 0, "large", LARGE)
        assert shared_bytes(a, "b") - before == 2 * SHARED_CHUNK_BYTES, "the last 17 bytes are small"
        pass_on(a, b, 0, "small", SMALL)
        assert shared_bytes(a, "b") - before == 2 * SHARED_CHUNK_BYTES
        assert a.sent_bytes["b"] == b.mailbox.received_bytes["a"] == 2 * LARGE + SMALL
        assert sharing(b, "a").filling is None, "nothing is made for a direction without large messages"
        agree(b, a)
        a.flush(5)
        assert a.mailbox.refused == b.mailbox.refused == 0


def test_small_messages_alone_make_nothing(security: Security) -> None:
    with joined(security, TOPICS) as (a, b):
        pass_on(a, b, 0, "small", SMALL)
        assert sharing(a, "b").may_offer
        assert sharing(b, "a").emptying is None


@pytest.mark.quick(every=2)
def test_released_memory_may_change_with_a_ring(security: Security) -> None:
    count, topics = 40 * CHUNK_BYTES, [f"x{number}" for number in range(3)]
    with joined(security, TOPICS | dict.fromkeys(topics, count)) as (a, b):
        agree(a, b)
        contents = [random_bytes(count) for _ in topics]
        kept = [content.clone() for content in contents]
        with b.mailbox.writing:  # b takes nothing as long as this is held
            for topic, content in zip(topics, contents):
                a.send("b", 0, topic, [content])
            assert a._connections["b"].outbox.has_work
            a.release()
            for content in contents:
                content.zero_()
        for topic, content in zip(topics, kept):
            assert torch.equal(torch.frombuffer(b.mailbox.take("a", 0, topic), dtype=torch.uint8), content)


@pytest.mark.quick(every=2)
def test_a_full_ring_holds_nobody_up(security: Security) -> None:
    """The receiver takes nothing: the ring fills, then the link. Small messages pass as soon as it does again."""
    setting = SharingSetting(2 * CHUNK_BYTES)
    count = 64 * CHUNK_BYTES
    with joined(security, TOPICS | {"big": count}, sharing=setting) as (a, b):
        agree(a, b)
        content = random_bytes(count)
        with b.mailbox.writing:
            start = time.monotonic()
            a.send("b", 0, "big", [content])
            a.send("b", 0, "x", [random_bytes(100)], urgent=True)
            assert time.monotonic() - start < 8
            time.sleep(0.2)
            assert a._connections["b"].outbox.has_work
            ring = sharing(a, "b").filling
            assert ring is not None
            assert ring.put([memoryview(bytes(ring.size))], ring.size) == -1
        b.mailbox.receive("a", 0, "x", [torch.zeros(100, dtype=torch.uint8)])
        into = torch.zeros(count, dtype=torch.uint8)
        b.mailbox.receive("a", 0, "big", [into])
        assert torch.equal(content, into)
        a.flush(5)
        assert a.sent_bytes["b"] == b.mailbox.received_bytes["a"] == count + 100 + LARGE


@pytest.mark.quick(every=2)
def test_a_refused_message_frees_its_room(security: Security) -> None:
    setting = SharingSetting(2 * CHUNK_BYTES)
    with joined(security, TOPICS, sharing=setting) as (a, b):
        agree(a, b)
        before = shared_bytes(a, "b")
        for step in range(100, 110):
            a.send("b", step, "large", [random_bytes(LARGE)])
        wait_until(lambda: b.mailbox.refused >= 10)
        a.flush(5)
        pass_on(a, b, 0, "large", LARGE)
        assert shared_bytes(a, "b") > before


@pytest.mark.quick(every=2)
def test_a_new_generation_in_the_middle(security: Security) -> None:
    with joined(security, TOPICS) as (a, b):
        agree(a, b)
        a.send("b", 0, "large", [random_bytes(LARGE)])
        for one, other in ((a, "b"), (b, "a")):
            one.mailbox.open(1, {(other, topic): size for topic, size in TOPICS.items()})
        pass_on(a, b, 0, "large", LARGE)


@pytest.mark.quick(every=2)
def test_nothing_is_left_after_a_close_with_rings(security: Security) -> None:
    with joined(security, TOPICS):
        pass  # the certificate, and whatever else is made once
    names, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    with joined(security, TOPICS) as (a, b):
        agree(a, b)
        agree(b, a)
        assert set(os.listdir("/dev/shm")) == names
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with joined(security, TOPICS) as (a, b):
        guest = Guest(a, security, "0")
        a.send("0", 0, "large", [random_bytes(LARGE)])  # an offer that nobody answers
        wait_until(lambda: sharing(a, "0")._offered is not None)
        guest.wire.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == descriptors)


# Where it is not used


def test_switched_off(security: Security, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARING_VARIABLE, "0")
    with joined(security, TOPICS) as (a, b):
        pass_on(a, b, 0, "large", LARGE)
        assert not sharing(a, "b").may_offer
        assert sharing(a, "b")._offered is None


@pytest.mark.quick(every=2)
def test_switched_off_on_one_side(security: Security) -> None:
    with joined(security, TOPICS) as (a, b):
        sharing(b, "a")._setting = SharingSetting(0)
        pass_on(a, b, 0, "large", LARGE)
        wait_until(lambda: sharing(a, "b").refusal)
        pass_on(a, b, 1, "large", LARGE)
        assert shared_bytes(a, "b") == 0


def test_the_size_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SharingSetting.of_environment().ring_bytes == RING_BYTES
    monkeypatch.setenv(SHARING_VARIABLE, "2 MiB")
    assert SharingSetting.of_environment().ring_bytes == 2 * 2**20
    for text in ("1 kB", "2 TB", "-1", "much"):
        monkeypatch.setenv(SHARING_VARIABLE, text)
        with pytest.raises(BadValue):
            SharingSetting.of_environment()


def test_a_system_without(security: Security, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.transport.shared_memory._IS_AVAILABLE", False)
    with joined(security, TOPICS) as (a, b):
        pass_on(a, b, 0, "large", LARGE)
        assert sharing(a, "b").refusal == "not on this system"


def test_a_system_that_has_none_left(security: Security, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    with joined(security, TOPICS) as (a, b):
        pass_on(a, b, 0, "large", LARGE)
        assert sharing(a, "b").refusal == "too many open files"


def test_memory_the_other_cannot_find(security: Security, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another network namespace: the place means nothing there."""

    def fail(place: bytes) -> int:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("manyhands.transport.shared_memory.fetch", fail)
    with joined(security, TOPICS) as (a, b):
        pass_on(a, b, 0, "large", LARGE)
        wait_until(lambda: sharing(a, "b").refusal)
        pass_on(a, b, 1, "large", LARGE)
        assert shared_bytes(a, "b") == 0
        assert sharing(b, "a").emptying is None


def test_another_host_gets_no_offer() -> None:
    class Elsewhere:
        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.1", 1

        def getpeername(self) -> tuple[str, int]:
            return "10.0.0.2", 2

    wire = Wire.__new__(Wire)
    wire.socket = Elsewhere()  # type: ignore[assignment]
    found = MemorySharing(wire, SharingSetting())
    assert found.offer() is None
    assert found.refusal == "another host"


def test_one_spelling_for_an_address() -> None:
    class Mapped:
        def getsockname(self) -> tuple[str, int, int, int]:
            return "::ffff:127.0.0.1", 1, 0, 0

        def getpeername(self) -> tuple[str, int, int, int]:
            return "::1", 2, 0, 0

    wire = Wire.__new__(Wire)
    wire.socket = Mapped()  # type: ignore[assignment]
    assert ends(wire) == (("127.0.0.1", 1), ("::1", 2))


@contextmanager
def relay(address: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """One connection passed on, byte for byte."""
    listening = socket.create_server(("127.0.0.1", 0))
    sockets: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(2**16):
            target.sendall(data)

    def serve() -> None:
        near, far = listening.accept()[0], socket.create_connection(address)
        sockets.extend((near, far))
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=_quietly, args=(carry, one, other), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        listening.close()
        for one in sockets:
            one.close()


def _quietly(what: Any, *arguments: object) -> None:
    with suppress(OSError):
        what(*arguments)


def test_a_relay_is_not_passed_by(security: Security) -> None:
    """It may be there to make the link slow."""
    a, b = TcpEndpoint("a", security, limit_seconds=20), TcpEndpoint("b", security, limit_seconds=20)
    try:
        with relay(b.address) as address:
            joining = threading.Thread(target=a.connect, args=({"b": address}, 10.0))
            joining.start()
            b.connect({"a": ("", 0)}, 10.0)
            joining.join()
            b.mailbox.open(0, {("a", "large"): LARGE})
            a.mailbox.open(0, {})
            pass_on(a, b, 0, "large", LARGE)
            wait_until(lambda: sharing(a, "b").refusal)
            assert sharing(b, "a").emptying is None
    finally:
        a.close()
        b.close()


def test_a_shaped_link_stays_on_tcp(security: Security) -> None:
    with joined(security, TOPICS) as (a, b):
        a.shape({"b": Link(1e9, 0.0)})
        pass_on(a, b, 0, "large", LARGE)
        assert sharing(a, "b")._offered is None
        agree_back = random_bytes(LARGE)
        b.send("a", 0, "large", [agree_back])
        a.mailbox.receive("b", 0, "large", [agree_back])
        wait_until(lambda: sharing(b, "a").refusal)  # nor does its other end use it towards it


def test_a_link_that_is_shaped_later_leaves_the_ring(security: Security) -> None:
    with joined(security, TOPICS) as (a, b):
        agree(a, b)
        before = shared_bytes(a, "b")
        a.shape({"b": Link(1e9, 0.0)})
        pass_on(a, b, 0, "large", LARGE)
        assert shared_bytes(a, "b") == before
        a.shape({})
        wait_until(lambda: not a._connections["b"].outbox.is_shaped)
        pass_on(a, b, 1, "large", LARGE)
        assert shared_bytes(a, "b") > before


# What a peer may say


class Sharer(Guest):
    """A guest that offers memory as an endpoint would, and then does what a test wants."""

    def offer(self, **changes: object) -> FillingRing:
        ring = FillingRing(CHUNK_BYTES)
        near, far = ends(self.wire)
        offer = Offer(ring.place, ring.size, ring.key, near, far)
        self.say(OFFER, msgspec.msgpack.encode(msgspec.structs.replace(offer, **changes)))
        return ring

    def say(self, topic: str, content: bytes) -> None:
        self.write(encode(control(topic, len(content))) + content)

    def hear(self) -> tuple[Header, bytes]:
        deadline = time.monotonic() + 10
        while True:
            prelude = read_exactly(self.wire, PRELUDE.size, deadline)
            header = decode(read_exactly(self.wire, size_of_header(prelude), deadline))
            content = read_exactly(self.wire, header.length, deadline)
            if header.topic != "beat":
                return header, content

    def shared_frame(self, place: int, length: int, **changes: object) -> None:
        header = Header(self.name, 0, 0, "x", length, 0, length, place)
        self.write(encode(msgspec.structs.replace(header, **changes)))


@contextmanager
def sharer(security: Security, size: int = 100) -> Iterator[tuple[Sharer, TcpEndpoint]]:
    b = TcpEndpoint("b", security, limit_seconds=5.0)
    try:
        b.mailbox.open(0, {("a", "x"): size})
        guest = Sharer(b, security)
        yield guest, b
        guest.wire.close()
    finally:
        b.close()


def test_by_hand(security: Security) -> None:
    with sharer(security) as (guest, b):
        ring = guest.offer()
        header, content = guest.hear()
        assert header.topic == ANSWER
        assert content == ring.nonce
        place = ring.put([memoryview(b"\7" * 100)], 100)
        guest.shared_frame(place, 100)
        into = torch.zeros(100, dtype=torch.uint8)
        b.mailbox.receive("a", 0, "x", [into])
        assert (into == 7).all()
        ring.close()


@pytest.mark.quick(every=16)
@pytest.mark.parametrize(
    "changes",
    [
        {"place": b"manyhands-elsewhere"},
        {"place": b""},
        {"size": CHUNK_BYTES - 1},
        {"size": 2**50},
        {"size": -1},
        {"key": bytes(32)},
        {"near": ("127.0.0.1", 1)},
        {"far": ("127.0.0.2", 1)},
    ],
    ids=str,
)
def test_an_offer_that_does_not_hold_is_answered_by_nothing(security: Security, changes: dict[str, object]) -> None:
    with sharer(security) as (guest, b):
        guest.offer(**changes).close()
        header, content = guest.hear()
        assert header.topic == ANSWER
        assert content == b""
        guest.frame(b"\7" * 100)
        b.mailbox.receive("a", 0, "x", [torch.zeros(100, dtype=torch.uint8)])


@pytest.mark.quick(every=8)
@pytest.mark.parametrize(
    ("place", "length"), [(0, CHUNK_BYTES + 1), (CHUNK_BYTES, 1), (2**62, 100), (CHUNK_BYTES, 0)], ids=str
)
def test_a_frame_outside_ends_the_connection(security: Security, place: int, length: int) -> None:
    with sharer(security, length) as (guest, b):
        ring = guest.offer()
        guest.hear()
        guest.shared_frame(place, length)
        with pytest.raises(WorkerLost, match=r"no frame: .* of shared memory"):
            b.mailbox.receive("a", 0, "x", [torch.zeros(length, dtype=torch.uint8)])
        ring.close()


@pytest.mark.parametrize("is_refused", [False, True], ids=["never offered", "refused"])
def test_a_frame_in_memory_that_nobody_agreed_on(security: Security, is_refused: bool) -> None:
    with sharer(security) as (guest, b):
        if is_refused:
            guest.offer(key=bytes(32)).close()
            guest.hear()
        guest.shared_frame(0, 100)
        with pytest.raises(WorkerLost, match="100 bytes at 0 of shared memory, of which there are 0"):
            b.mailbox.receive("a", 0, "x", [torch.zeros(100, dtype=torch.uint8)])


SAID = {
    "an offer that is none": (OFFER, b"\xc1", "an offer of memory that is none"),
    "an offer with a text that is none": (
        OFFER,
        msgspec.msgpack.encode([1, 1, 1, b"", ("xyz", 1), ("", 1)]).replace(b"xyz", b"\xff\xfe\xfd"),
        "an offer of memory that is none",
    ),
    "an answer to nothing": (ANSWER, bytes(32), "that was not made"),
    "too long": (OFFER, bytes(4097), "at most 4096"),
}


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("kind", SAID)
def test_nonsense_ends_the_connection(security: Security, kind: str) -> None:
    topic, content, reason = SAID[kind]
    with sharer(security) as (guest, b):
        guest.say(topic, content)
        with pytest.raises(WorkerLost, match=reason):
            b.mailbox.receive("a", 0, "x", [torch.zeros(100, dtype=torch.uint8)])


def test_a_second_offer_ends_the_connection(security: Security) -> None:
    with sharer(security) as (guest, b):
        rings = [guest.offer(), guest.offer()]
        with pytest.raises(WorkerLost, match="offered twice"):
            b.mailbox.receive("a", 0, "x", [torch.zeros(100, dtype=torch.uint8)])
        for ring in rings:
            ring.close()


def test_a_wrong_answer_is_no_proof(security: Security) -> None:
    with sharer(security) as (guest, b):
        b.send("a", 0, "y", [random_bytes(SMALLEST_SHARED_BYTES)])
        header, _ = guest.hear()
        assert header.topic == OFFER
        guest.say(ANSWER, bytes(32))
        wait_until(lambda: sharing(b, "a").refusal)
        assert sharing(b, "a").filling is None
        header, content = guest.hear()
        assert header.place == -1
        assert len(content) == SMALLEST_SHARED_BYTES


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_an_offer_that_does_not_hold_or_none(noise: bytes) -> None:
    here, there = socket.socketpair()
    found = MemorySharing(Wire(here), SharingSetting())
    try:
        assert found.answer(noise, is_welcome=True) == b""
    except BadFrame:
        pass
    finally:
        found.close()
        here.close()
        there.close()


numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 64))
hosts = st.tuples(st.one_of(st.just("127.0.0.1"), st.text(max_size=10)), numbers)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), numbers, st.binary(max_size=40), hosts, hosts, st.booleans())
def test_any_offer_but_a_true_one_is_answered_by_nothing(
    place: bytes, size: int, key: bytes, near: tuple[str, int], far: tuple[str, int], is_near: bool
) -> None:
    """Also one of a place where something is handed over and of a connection that exists."""
    given = FillingRing(CHUNK_BYTES)
    listening = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(listening.getsockname())
    there = listening.accept()[0]
    found = MemorySharing(Wire(here), SharingSetting())
    if is_near:
        place, near, far = given.place, ends(found._wire)[1], ends(found._wire)[0]
    try:
        assert found.answer(msgspec.msgpack.encode([place, size, key, near, far]), is_welcome=True) == b""
        assert found.emptying is None
    finally:
        found.close()
        given.close()
        for one in (here, there, listening):
            one.close()


def test_room_for_messages_that_are_larger_than_a_ring_usually_is(security: Security) -> None:
    """All of it leaves though nothing is taken: without the room, the rest would wait or go over the connection."""
    size = 4 * RING_BYTES
    with joined(security, {**TOPICS, "huge": size}) as (a, b):
        a.make_room("b", 2 * size)
        agree(a, b)
        before, content, into = shared_bytes(a, "b"), random_bytes(size), torch.zeros(size, dtype=torch.uint8)
        b.mailbox.post("a", 0, "huge", [into])
        with b.mailbox.writing:  # b takes nothing as long as this is held
            a.send("b", 0, "huge", [content])
            wait_until(lambda: shared_bytes(a, "b") - before == size)
        b.mailbox.receive("a", 0, "huge", [into])
        assert torch.equal(content, into)
