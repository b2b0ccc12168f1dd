"""Namespaces made for real: what they carry, what happens when a cable is pulled, and that nothing is left."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.errors import LabError
from manyhands.facts.link import DirectedLink, Link
from manyhands.lab import spaces
from manyhands.lab.spaces import Spaces, entered

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(bool(spaces.missing()), reason=spaces.missing()),
]

MBIT = 125_000.0
GOODPUT = 1448 / 1514
LAB = f"t{os.getpid()}"


def device(name: str, up: float = math.inf, down: float = math.inf) -> Device:
    return Device(name=name, gflops=1, memory_bytes=10**9, up_bytes_per_second=up, down_bytes_per_second=down)


@contextlib.contextmanager
def made(*devices: Device, links: tuple[DirectedLink, ...] = (), lab: str = LAB) -> Iterator[Spaces]:
    found = Spaces(lab, Cluster("x", devices, Link(math.inf, 0.0), links))
    found.up()
    try:
        yield found
    finally:
        Spaces.down(lab)


class Stream:
    """Bytes without end from one member to another, counted where they arrive."""

    def __init__(self, found: Spaces, sender: str, receiver: str, port: int = 5000) -> None:
        with entered(found.namespace(receiver)):
            listener = socket.create_server((found.address(receiver), port))
        with entered(found.namespace(sender)):
            self.out = socket.create_connection((found.address(receiver), port), timeout=10)
        self.into, _ = listener.accept()
        listener.close()
        self.received = 0
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]
        for thread in self.threads:
            thread.start()

    def _send(self) -> None:
        self.out.settimeout(60)
        with contextlib.suppress(OSError):
            while True:
                self.out.sendall(bytes(65_536))

    def _receive(self) -> None:
        buffer = bytearray(1 << 20)
        with contextlib.suppress(OSError):
            while count := self.into.recv_into(buffer):
                self.received += count

    def rate(self, seconds: float) -> float:
        start, before = time.perf_counter(), self.received
        time.sleep(seconds)
        return (self.received - before) / (time.perf_counter() - start)

    def close(self) -> None:
        for end in (self.into, self.out):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self.threads:
            thread.join(5)


@contextlib.contextmanager
def streaming(found: Spaces, sender: str, receiver: str, port: int = 5000) -> Iterator[Stream]:
    stream = Stream(found, sender, receiver, port)
    try:
        yield stream
    finally:
        stream.close()


def test_six_devices_are_quickly_up_and_leave_nothing() -> None:
    before = subprocess.run(["ip", "-oneline", "address"], capture_output=True, text=True, check=True).stdout
    start = time.perf_counter()
    with made(*(device(f"pi3-{number}", 100 * MBIT, 100 * MBIT) for number in range(6))) as found:
        assert Spaces.names_of(LAB) == sorted([found.hub, *(found.namespace(member) for member in found.members)])
        with entered(found.namespace("pi3-0")):
            assert "10.77.0.2" in spaces.run(["ip", "-oneline", "address"])
            assert "inet6" not in spaces.run(["ip", "-oneline", "address"])
    assert time.perf_counter() - start < 2
    assert not Spaces.exists(LAB)
    assert before == subprocess.run(["ip", "-oneline", "address"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("mbit", [0.5, 5, 100, 480])
def test_tcp_gets_the_rate_up_and_down(mbit: float) -> None:
    rate = mbit * MBIT
    with made(device("up", up=rate), device("down", down=rate)) as found:
        for port, (sender, receiver) in enumerate((("up", "desk"), ("desk", "down")), start=5000):
            with streaming(found, sender, receiver, port) as stream:
                time.sleep(0.4)
                assert stream.rate(2.0) == pytest.approx(rate * GOODPUT, rel=0.05)


def test_a_slow_pair_is_slow_and_others_are_not() -> None:
    links = (DirectedLink("x", "y", Link(5 * MBIT, 0.0)),)
    ports = [device(name, 50 * MBIT, 50 * MBIT) for name in ("x", "y", "z")]
    with made(*ports, links=links) as found:
        with streaming(found, "x", "y") as slow:
            time.sleep(0.3)
            assert slow.rate(1.0) == pytest.approx(5 * MBIT * GOODPUT, rel=0.12)
            with streaming(found, "z", "y", 5001) as fast:  # both share y's port
                time.sleep(0.3)
                assert fast.rate(1.0) + slow.rate(1.0) == pytest.approx(50 * MBIT * GOODPUT, rel=0.15)
                assert slow.rate(1.0) == pytest.approx(5 * MBIT * GOODPUT, rel=0.15)
        with streaming(found, "y", "x", 5002) as back:
            time.sleep(0.3)
            assert back.rate(1.0) == pytest.approx(50 * MBIT * GOODPUT, rel=0.12)
        found.set_rates("y", 50 * MBIT, 2 * MBIT)
        with streaming(found, "x", "y", 5003) as slower:
            time.sleep(0.3)
            assert slower.rate(1.0) == pytest.approx(2 * MBIT * GOODPUT, rel=0.12)


def test_rates_change_under_a_connection() -> None:
    """Down by steps that need a smaller burst, and up again: a piece too long for it must not block the queue."""
    with made(device("x", 1000 * MBIT, 1000 * MBIT)) as found:
        for sender, receiver, port in (("x", "desk", 5000), ("desk", "x", 5001)):
            with streaming(found, sender, receiver, port) as stream:
                for mbit in (1000, 100, 10, 2, 400):
                    found.set_rates("x", mbit * MBIT, mbit * MBIT)
                    time.sleep(1.0)
                    rates = []  # TCP may still be finding its way; it must get there
                    while len(rates) < 4 and rates[-1:] != [pytest.approx(mbit * MBIT * GOODPUT, rel=0.12)]:
                        rates.append(stream.rate(1.0))
                    assert rates[-1] == pytest.approx(mbit * MBIT * GOODPUT, rel=0.12), (sender, mbit, rates)
                found.set_rates("x", math.inf, math.inf)
                time.sleep(0.5)
                assert stream.rate(0.5) > 600 * MBIT
            found.set_rates("x", 1000 * MBIT, 1000 * MBIT)


def test_a_cable_is_pulled_and_put_back() -> None:
    with (
        made(device("x", 20 * MBIT, 20 * MBIT), device("y", 20 * MBIT, 20 * MBIT)) as found,
        streaming(found, "x", "y") as stream,
        streaming(found, "desk", "y", 5001) as other,
    ):
        assert not found.is_cut("x")
        found.cut("x")
        assert found.is_cut("x")
        assert not found.is_cut("y")
        time.sleep(0.3)
        at, passed = stream.received, other.received
        time.sleep(0.5)
        assert stream.received == at
        assert other.received > passed
        assert all(thread.is_alive() for thread in stream.threads)  # nobody was told
        found.heal("x")
        assert not found.is_cut("x")
        end = time.monotonic() + 10
        while stream.received == at and time.monotonic() < end:
            time.sleep(0.05)
        assert stream.received > at


def test_labs_do_not_touch_each_other() -> None:
    with made(device("x"), lab=f"{LAB}a") as one, made(device("x"), lab=f"{LAB}b"):
        with pytest.raises(LabError, match="is up already"):
            one.up()
        assert Spaces.exists(f"{LAB}a")
        Spaces.down(f"{LAB}b")
        Spaces.down(f"{LAB}b")
        with streaming(one, "x", "desk") as stream:
            assert stream.rate(0.2) > 0


def test_what_is_half_there_is_taken_away() -> None:
    for name in (f"mh-{LAB}-x", f"mh-{LAB}"):
        spaces.run(["ip", "netns", "add", name])
    Spaces.down(LAB)
    assert not Spaces.exists(LAB)


def test_a_failure_on_the_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "forwarding_lines", lambda count: ["fdb replace nonsense dev p0 master static"])
    with pytest.raises(LabError, match="fdb replace nonsense"), made(device("x")):
        pytest.fail("it is up")
    assert not Spaces.exists(LAB)


@pytest.mark.skipif(not spaces.has_netem(), reason="this kernel has no netem")
def test_netem_delays_a_pair() -> None:
    links = tuple(DirectedLink(*ends, Link(math.inf, 0.02)) for ends in (("x", "y"), ("y", "x")))
    with made(device("x", 50 * MBIT, 50 * MBIT), device("y", 50 * MBIT, 50 * MBIT), links=links) as found:
        assert not found.uses_switch
        with entered(found.namespace("y")):
            listener = socket.create_server((found.address("y"), 5000))
        start = time.perf_counter()
        with entered(found.namespace("x")):
            socket.create_connection((found.address("y"), 5000), timeout=5).close()
        assert time.perf_counter() - start == pytest.approx(0.04, rel=0.1)
        listener.close()


def test_only_this_thread_enters() -> None:
    with made(device("x")) as found:
        here = os.readlink("/proc/thread-self/ns/net")
        seen: list[str] = []
        with entered(found.namespace("x")):
            assert os.readlink("/proc/thread-self/ns/net") != here
            with entered(found.hub):  # and from there another
                assert "p1" in spaces.run(["ip", "link"])
            assert "p1" not in spaces.run(["ip", "link"])
        thread = threading.Thread(target=lambda: seen.append(os.readlink("/proc/thread-self/ns/net")))
        thread.start()
        thread.join()
        assert seen == [here] == [os.readlink("/proc/thread-self/ns/net")]


def test_rates_are_told_as_they_are_now() -> None:
    links = (DirectedLink("x", "y", Link(5 * MBIT, 0.0)),)
    with made(device("x", 50 * MBIT, 40 * MBIT), device("y", 50 * MBIT, 30 * MBIT), device("z"), links=links) as found:
        assert found.rates("x") == (50 * MBIT, 40 * MBIT)
        assert found.rates("y") == (50 * MBIT, 30 * MBIT)
        assert found.rates("z") == (math.inf, math.inf)
        found.set_rates("y", 8 * MBIT, 3 * MBIT)
        assert found.rates("y") == (8 * MBIT, 3 * MBIT)
        found.set_rates("y", math.inf, math.inf)
        assert found.rates("y") == (math.inf, math.inf)
