"""A coordinator learns nothing of a worker's network by having it probe addresses: only whether a member answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from doctor_ports import closed_port, deaf_port
from manyhands.runtime import member_probes, peer_connections
from manyhands.runtime.control_messages import Failed, Prepare, ProbeLinks
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.joining import Joining
from manyhands.runtime.member_probes import MemberProbes
from manyhands.runtime.reachability import NO_MEMBER, OPEN
from manyhands.runtime.worker import Worker
from manyhands.transport.endpoint import Address
from manyhands.transport.security import Security, new_token
from manyhands.transport.tcp import TcpEndpoint
from manyhands.transport.transport import TcpTransport

LIMIT_SECONDS = 0.6
SECURITY = Security(new_token(), encrypted=False)
BANNER = b"SSH-2.0-OpenSSH_9.6 a service of somebody else\r\n"


@contextlib.contextmanager
def speaking_port(banner: bytes = BANNER) -> Iterator[tuple[int, list[bytes]]]:
    """A service that greets whoever connects, and what it was sent."""
    received: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = listener.accept()
                with connected, contextlib.suppress(OSError):
                    connected.settimeout(5)
                    connected.sendall(banner)
                    received.append(connected.recv(100))

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], received
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def endpoint(name: str, security: Security) -> Iterator[int]:
    found = TcpEndpoint(name, security)
    try:
        yield found.address[1]
    finally:
        found.close()


def at(port: int, host: str = "127.0.0.1") -> Address:
    return Address(host, port, is_dialled=True)


@pytest.mark.slow
def test_all_ports_that_no_member_has_look_alike() -> None:
    """Before: 'refused', 'silent' and 'open' told a port scan from inside of the worker's network."""
    probes = MemberProbes("pi-1", SECURITY, "127.0.0.1")
    with (
        deaf_port() as deaf, speaking_port() as (speaking, _), endpoint("pi-2", SECURITY) as member,
        endpoint("pi-3", Security(new_token(), encrypted=False)) as stranger,
        endpoint("pi-4", Security(SECURITY.token, encrypted=True)) as encrypted,
    ):  # fmt: skip
        ports = {"closed": closed_port(), "deaf": deaf, "speaking": speaking, "other": stranger, "kind": encrypted}
        for port in ports.values():
            start = time.monotonic()
            (answer,) = probes.run({"pi-9": at(port)}, LIMIT_SECONDS).values()
            assert LIMIT_SECONDS <= time.monotonic() - start < LIMIT_SECONDS + 0.4
            assert (answer.host, answer.port) == ("127.0.0.1", port)
            assert (answer.outcome, answer.seconds) == (NO_MEMBER, LIMIT_SECONDS)
            assert answer.text == f"nobody who knows the token within {LIMIT_SECONDS:g} s"
        found = probes.run({name: at(port) for name, port in {**ports, "pi-2": member}.items()}, LIMIT_SECONDS)
    assert {name for name, answer in found.items() if answer.outcome == OPEN} == {"pi-2"}
    assert found["pi-2"].seconds < LIMIT_SECONDS


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0", "::", "::1", "224.0.0.1", "", "127.1"])
def test_some_places_are_not_even_tried(host: str) -> None:
    """Names are never looked up; loopback is this machine's own, which a coordinator elsewhere has no member at."""
    probes = MemberProbes("pi-1", SECURITY, "192.0.2.7")
    with speaking_port() as (port, received):
        (answer,) = probes.run({"pi-9": at(port, host)}, 0.2).values()
        assert answer.outcome == NO_MEMBER
        time.sleep(0.1)
        assert not received
    assert not probes._targets


def test_so_many_targets_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_probes, "MOST_TARGETS", 3)
    probes = MemberProbes("pi-1", SECURITY, "127.0.0.1")
    for _ in range(2):
        probes.run({f"pi-{number}": at(closed_port()) for number in range(2, 5)}, 0.05)
    with endpoint("pi-2", SECURITY) as member:
        assert probes.run({"pi-2": at(member)}, LIMIT_SECONDS)["pi-2"].outcome == NO_MEMBER, "it is one too many"
    assert len(probes._targets) == 3


# Connections that a worker is told to make


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    """With one worker, in a thread of this process."""
    monkeypatch.setattr(peer_connections, "CONNECT_SECONDS", 1.0)
    with Coordinator(heartbeat_timeout_seconds=20.0) as found:
        joining = Joining(*found.address, found.token, "pi-1", encrypted=False)
        worker = Worker(joining, TcpTransport())
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        found.wait_for(["pi-1"], 20.0)
        yield found
    thread.join(10)


@pytest.mark.parametrize("kind", [pytest.param("probe", marks=pytest.mark.slow), "prepare"])
def test_what_connecting_met_stays_with_the_worker(
    coordinator: Coordinator, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """Before, the coordinator was told at once how a service began that is none of manyhands'."""
    told: set[str] = set()
    with deaf_port() as deaf, speaking_port(BANNER) as (speaking, _):
        for port in (closed_port(), deaf, speaking):
            generation = coordinator.new_generation()
            peers = {"pi-9": at(port)}
            message = Prepare(generation, None, peers)
            asked = ProbeLinks(generation, ("pi-1", "pi-9"), peers) if kind == "probe" else message
            start = time.monotonic()
            coordinator.send("pi-1", asked)
            failed = answer_to(coordinator, generation)
            assert 1.0 <= time.monotonic() - start < 2.5
            told.add(f"{failed.kind} {failed.message} {failed.hint}".replace(str(port), "PORT"))
    (only,) = told
    assert only.startswith("TimedOut pi-1 could not connect to pi-9 at 127.0.0.1:PORT within 1 s: no member answers")
    assert "SSH" not in only
    assert "refused" in capfd.readouterr().err, "it is in the worker's own log"


def answer_to(coordinator: Coordinator, generation: int) -> Failed:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        event = coordinator.next_event(0.1)
        if event is not None and isinstance(event[1], Failed) and event[1].generation == generation:
            return event[1]
    raise AssertionError("no answer")
