"""Two devices that only a relay connects: everything that passes it is what passes a connection, and sealed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from endpoint_pairs import wait_until

from manyhands.facts.errors import ManyhandsError, TimedOut, WorkerLost
from manyhands.transport import relay as relaying
from manyhands.transport.dialling import dial
from manyhands.transport.endpoint import Address, RelayAddress
from manyhands.transport.security import Purpose, Security, new_token
from manyhands.transport.tcp import TcpEndpoint
from manyhands.transport.tunnel import tunnel
from manyhands.transport.wire_hello import write_hello

SIZES = {"small": 10, "large": 3_000_000}


def through(relay: TcpEndpoint, name: str, peer: str) -> Address:
    return Address("", 0, name < peer, None, RelayAddress(relay.name, *relay.address))


def meet(relay: TcpEndpoint, pair: Sequence[TcpEndpoint], limit_seconds: float = 10.0) -> list[BaseException]:
    """connect() on both at once, through the relay."""
    errors: list[BaseException] = []

    def connect(one: TcpEndpoint, other: TcpEndpoint) -> None:
        try:
            one.connect({other.name: through(relay, one.name, other.name)}, limit_seconds)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=connect, args=ends) for ends in (pair, pair[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@contextmanager
def endpoints(security: Security, *names: str, silence_seconds: float | None = None) -> Iterator[list[TcpEndpoint]]:
    made = [TcpEndpoint(name, security, limit_seconds=10.0, silence_seconds=silence_seconds) for name in names]
    try:
        yield made
    finally:
        for endpoint in made:
            endpoint.close()


@contextmanager
def met(security: Security, silence_seconds: float | None = None) -> Iterator[list[TcpEndpoint]]:
    with endpoints(security, "a", "b", "r", silence_seconds=silence_seconds) as three:
        a, b, relay = three
        for endpoint, other in ((a, "b"), (b, "a")):
            endpoint.mailbox.open(0, {(other, topic): size for topic, size in SIZES.items()})
        assert not meet(relay, (a, b))
        yield three


def exchange(one: TcpEndpoint, other: TcpEndpoint, step: int) -> None:
    """Both ways at once; every byte arrives."""
    for endpoint in (one, other):
        endpoint.mailbox.begin_step(step)
    sent = {topic: torch.randint(0, 256, (size,), dtype=torch.uint8) for topic, size in SIZES.items()}
    for topic, content in sent.items():
        one.send(other.name, step, topic, [content])
        other.send(one.name, step, topic, [content.flip(0)])
    for topic, content in sent.items():
        into = torch.empty_like(content)
        other.mailbox.receive(one.name, step, topic, [into])
        assert torch.equal(into, content)
        one.mailbox.receive(other.name, step, topic, [into])
        assert torch.equal(into, content.flip(0))


def test_what_is_sent_arrives_and_passes_the_relay(security: Security) -> None:
    with met(security) as (a, b, relay):
        exchange(a, b, 0)
        exchange(b, a, 1)
        assert relay._rendezvous.relay.forwarded_bytes > 4 * SIZES["large"], "shared memory would bypass the relay"
        assert not relay.is_connected("a")
        assert not relay.is_connected("b")


def test_a_relay_cannot_read_what_it_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a message appears in the bytes that pass; what passes is a handshake and TLS between the two."""
    passed = bytearray()
    send = relaying.Relay._pass_on

    def look(self: relaying.Relay, source: relaying._End, target: relaying._End) -> None:
        passed.extend(source.pending)
        send(self, source, target)

    monkeypatch.setattr(relaying.Relay, "_pass_on", look)
    word = b"nobody in between reads this" * 4
    with endpoints(Security(new_token(), encrypted=True), "a", "b", "r") as (a, b, relay):
        b.mailbox.open(0, {("a", "x"): len(word)})
        a.mailbox.open(0, {})
        assert not meet(relay, (a, b))
        into = bytearray(len(word))
        a.send("b", 0, "x", [memoryview(word)])
        b.mailbox.receive("a", 0, "x", [memoryview(into)])
        assert bytes(into) == word
    assert b"manyhand" in passed
    assert word[:12] not in passed
    assert b'"from"' not in passed


def test_a_relay_that_ends_is_noticed_at_once(security: Security) -> None:
    with met(security) as (a, b, relay):
        exchange(a, b, 0)
        start = time.monotonic()
        relay.close()
        with pytest.raises(WorkerLost, match="b was lost"):
            a.mailbox.receive("b", 1, "small", [torch.empty(10, dtype=torch.uint8)])
        wait_until(lambda: not b.is_connected("a"))
        assert time.monotonic() - start < 3


def test_another_relay_takes_over(security: Security) -> None:
    with met(security) as (a, b, relay), endpoints(security, "other") as (other,):
        relay.close()
        wait_until(lambda: not a.is_connected("b") and not b.is_connected("a"))
        for endpoint, peer in ((a, "b"), (b, "a")):
            endpoint.mailbox.open(1, {(peer, topic): size for topic, size in SIZES.items()})
        assert not meet(other, (a, b))
        exchange(a, b, 0)
        assert other._rendezvous.relay.forwarded_bytes > 2 * SIZES["large"]


def test_a_relay_that_is_frozen_is_silence(security: Security) -> None:
    """Its process is there and forwards nothing: the heartbeats through it stop, and both ends notice."""
    with met(security, silence_seconds=0.8) as (a, b, relay):
        exchange(a, b, 0)
        tunnels = relay._rendezvous.relay
        tunnels._serve = lambda *_: time.sleep(0.05)  # type: ignore[method-assign]
        with pytest.raises(WorkerLost, match="silent for"):
            a.mailbox.receive("b", 1, "small", [torch.empty(10, dtype=torch.uint8)])


def test_the_other_one_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "WAITING_SECONDS", 0.1)
    with endpoints(Security(new_token(), encrypted=False), "a", "r") as (a, relay):
        with pytest.raises(TimedOut, match=r"could not reach b through the relay r at 127\.0\.0\.1:.*has not come"):
            a.connect({"b": through(relay, "a", "b")}, 3.0)
        wait_until(lambda: not relay._rendezvous.relay._waiting)


def test_no_relay_is_there() -> None:
    with endpoints(Security(new_token(), encrypted=False), "a", "r") as (a, relay):
        relay.close()
        with pytest.raises(TimedOut, match="through the relay r"):
            a.connect({"b": through(relay, "a", "b")}, 0.5)


def test_without_the_secret_nothing_is_relayed() -> None:
    with endpoints(Security(new_token(), encrypted=True), "r") as (relay,):
        with pytest.raises(ManyhandsError):
            tunnel(RelayAddress("r", *relay.address), Security(new_token(), encrypted=True), "a", "b", _soon())
        wait_until(lambda: not relay._rendezvous.relay._waiting)


def test_a_hello_that_makes_no_sense_is_turned_away(security: Security) -> None:
    with endpoints(security, "r") as (relay,):
        for hello in ({}, {"from": "a"}, {"from": "a", "to": "a"}, {"from": "r", "to": "a"}):
            wire = dial(*relay.address, security, Purpose.RELAY, _soon())
            write_hello(wire, hello, _soon())
            assert _last_byte(wire.socket) == relaying.BAD
        wait_until(lambda: not relay._rendezvous.relay._waiting)


def test_tunnels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    security = Security(new_token(), encrypted=False)
    monkeypatch.setattr(relaying, "MOST_WAITING", 2)
    with endpoints(security, "r") as (relay,):
        wires = []
        for name in ("a", "b", "c"):
            wires.append(dial(*relay.address, security, Purpose.RELAY, _soon()))
            write_hello(wires[-1], {"from": name, "to": "z"}, _soon())
            wait_until(lambda: len(relay._rendezvous.relay._waiting) == min(len(wires), 2))
        assert _last_byte(wires[-1].socket) == relaying.FULL
        for wire in wires:
            wire.close()


def test_a_relay_holds_no_more_than_its_buffer() -> None:
    """One end does not read: the other one is slowed down, and the relay's memory does not grow."""
    security = Security(new_token(), encrypted=False)
    with endpoints(security, "r") as (relay,):
        ends: dict[str, socket.socket] = {}
        address = RelayAddress("r", *relay.address)
        threads = [
            threading.Thread(target=lambda pair=pair: ends.update({pair[0]: tunnel(address, security, *pair, _soon())}))
            for pair in (("a", "b"), ("b", "a"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sent, quiet = 0, 0
        while quiet < 20:
            try:
                sent += ends["a"].send(bytes(65536))
                quiet = 0
            except BlockingIOError:
                quiet += 1
                time.sleep(0.01)
        tunnels = relay._rendezvous.relay
        (one,) = tunnels._tunnels
        assert sum(len(end.pending) for end in one.ends) <= 2 * relaying.BUFFER_BYTES
        received = 0
        while received < sent:  # and it goes on when the other end reads
            try:
                received += len(ends["b"].recv(1 << 20))
            except BlockingIOError:
                time.sleep(0.001)
        ends["a"].shutdown(socket.SHUT_WR)
        ends["b"].settimeout(5)
        assert ends["b"].recv(1) == b"", "its end is passed on"
        ends["b"].close()
        wait_until(lambda: not tunnels._tunnels)
        ends["a"].close()


def _soon() -> float:
    return time.monotonic() + 5.0


def _last_byte(connected: socket.socket) -> bytes:
    connected.settimeout(5)
    return connected.recv(1)
