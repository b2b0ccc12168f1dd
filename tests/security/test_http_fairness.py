"""Silent connections to the dashboard and to `infer --serve` shut nobody out, wherever they come from."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.dashboard import server
from manyhands.dashboard.server import Dashboard
from manyhands.data.wanted import SampleForm
from manyhands.inference.lines import Labels
from manyhands.inference.server import Answering
from manyhands.transport.admission import Admission, client_network
from manyhands.transport.http_server import ConnectionLimits, HttpServer
from manyhands.transport.rate_limiter import AddressRateLimiter

SILENT = 300
MOST_SECONDS = 1.0
"""Within which an honest client is answered, however many are silent."""


class _NoNetwork:
    """`/health` is answered without asking the network anything."""

    def submit(self, sample: torch.Tensor, limit_seconds: float = 5.0) -> Future[Any]:
        raise AssertionError("nobody sends a sample")


@contextlib.contextmanager
def dashboard(folder: Path, host: str) -> Iterator[tuple[int, str, bytes, HttpServer]]:
    with Dashboard((host, 0), folder) as found:
        yield found.port, f"/api/view?token={found.token}", b"", found._server


@contextlib.contextmanager
def inference_server(folder: Path, host: str) -> Iterator[tuple[int, str, bytes, HttpServer]]:
    with Answering(_NoNetwork(), SampleForm((1, 2, 2)), Labels(("a", "b")), host=host) as found:
        yield found.port, "/health", f"Authorization: Bearer {found.bearer}\r\n".encode(), found._server


Serving = Callable[[Path, str], contextlib.AbstractContextManager[tuple[int, str, bytes, HttpServer]]]


@contextlib.contextmanager
def silent(port: int, origin: str, count: int = SILENT) -> Iterator[list[socket.socket]]:
    """So many connections that never say anything."""
    with contextlib.ExitStack() as stack:
        connected = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20, (origin, 0))) for _ in range(count)
        ]
        yield connected


def ask(port: int, path: str, headers: bytes, *, encrypted: bool, origin: str = "127.0.0.1") -> tuple[int, float]:
    """The status of one request on a connection of its own, and the seconds from connecting to the answer."""
    start = time.monotonic()
    connected = socket.create_connection(("127.0.0.1", port), 20, (origin, 0))
    if encrypted:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connected = context.wrap_socket(connected)
    with connected:
        connected.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (path.encode(), headers))
        found = connected.recv(4096)
    return int(found.split()[1]) if found else 0, time.monotonic() - start


@pytest.mark.quick("0.0.0.0-127.0.0.2-dashboard")
@pytest.mark.parametrize("serving", [dashboard, inference_server])
@pytest.mark.parametrize("origin", ["127.0.0.2", "127.0.0.1"])
@pytest.mark.parametrize("host", [pytest.param("127.0.0.1", marks=pytest.mark.slow), "0.0.0.0"])
def test_silent_connections_shut_nobody_out(serving: Serving, origin: str, host: str, tmp_path: Path) -> None:
    """Before, 300 of them kept everybody else from being answered until they were given up."""
    with serving(tmp_path, host) as (port, path, headers, door), silent(port, origin):
        answers = [ask(port, path, headers, encrypted=host != "127.0.0.1") for _ in range(3)]
        assert [status for status, _ in answers] == [200] * 3
        assert min(seconds for _, seconds in answers) < MOST_SECONDS, "one of them, where machines of tests are busy"
        assert max(seconds for _, seconds in answers) < 3 * MOST_SECONDS
        assert len(door._connections) <= 2 * door.limits.pending, "a thread each"
        begun = time.monotonic()
        door.close()
        assert time.monotonic() - begun < 1.5, "silent connections are not waited for"


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("serving", [dashboard, inference_server])
def test_clients_without_the_token_shut_nobody_out(serving: Serving, tmp_path: Path) -> None:
    """They send whole requests and keep their connections."""
    with serving(tmp_path, "127.0.0.1") as (port, path, headers, _), silent(port, "127.0.0.2", 100) as connected:
        for one in connected:
            with contextlib.suppress(OSError):  # it has made room already
                one.sendall(b"GET /api/view HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n")
        status, seconds = ask(port, path, headers, encrypted=False)
        assert (status, seconds < MOST_SECONDS) == (200, True)


def status(connection: HTTPConnection) -> int:
    connection.request("GET", "/api/view")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_who_is_served_makes_no_room(tmp_path: Path) -> None:
    limits = ConnectionLimits(connections=2, pending=4, idle_seconds=20.0, drain_seconds=0.5)
    with Dashboard(("127.0.0.1", 0), tmp_path, limits=limits) as found:
        watching = [HTTPConnection("127.0.0.1", found.port, timeout=10) for _ in range(2)]
        assert [status(one) for one in watching] == [200, 200]
        with silent(found.port, "127.0.0.1", 20):
            assert ask(found.port, "/api/view", b"", encrypted=False)[0] == 503, "two are served, and no more"
            assert [status(one) for one in watching] == [200, 200], "over the same connections"
        for one in watching:
            one.close()


def test_headers_that_drip_have_a_deadline(tmp_path: Path) -> None:
    limits = ConnectionLimits(idle_seconds=0.5, drain_seconds=0.5)
    with (
        Dashboard(("127.0.0.1", 0), tmp_path, limits=limits) as found,
        socket.create_connection(("127.0.0.1", found.port), 10) as slow,
    ):
        slow.sendall(b"GET /api/view HTTP/1.1\r\nX-Slow: ")
        start = time.monotonic()
        slow.settimeout(0.1)
        while time.monotonic() - start < 5:
            with contextlib.suppress(TimeoutError):
                slow.sendall(b"x")
                if not slow.recv(1000):
                    break
        assert time.monotonic() - start < 2


def test_a_flood_of_requests_slows_down_only_its_own_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the rate limiter of the dashboard was one for everybody."""
    monkeypatch.setattr(server, "PER_SECOND", 10)
    monkeypatch.setattr(server, "AT_ONCE", 10)
    with Dashboard(("127.0.0.1", 0), tmp_path) as found:
        is_over = threading.Event()

        def flood() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    ask(found.port, "/api/view", b"", encrypted=False, origin="127.0.0.2")

        threads = [threading.Thread(target=flood, daemon=True) for _ in range(10)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        try:
            assert ask(found.port, "/api/view", b"", encrypted=False)[0] == 200
        finally:
            is_over.set()
            for thread in threads:
                thread.join(20)


# One rule for all listeners


def come(admission: Admission, *hosts: str) -> list[tuple[socket.socket, socket.socket]]:
    pairs = [socket.socketpair() for _ in hosts]
    for (connected, _), host in zip(pairs, hosts, strict=True):
        admission.enter(connected, host)
    return pairs


def is_open(pair: tuple[socket.socket, socket.socket]) -> bool:
    pair[1].setblocking(False)
    try:
        return bool(pair[1].recv(1))
    except BlockingIOError:
        return True


def test_the_oldest_of_the_address_with_most_makes_room() -> None:
    hosts = ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3", "10.0.0.4"]
    pairs = come(Admission(4, 4), *hosts)
    assert [is_open(pair) for pair in pairs] == [True, False, True, True, True]


def test_an_address_replaces_its_own_beyond_its_limit() -> None:
    pairs = come(Admission(10, 2), "10.0.0.1", *["10.0.0.2"] * 4)
    assert [is_open(pair) for pair in pairs] == [True, False, False, True, True]


def test_who_is_authorized_makes_no_room() -> None:
    admission = Admission(2, 2)
    connected = [socket.socketpair() for _ in range(3)]
    for one, _ in connected[:2]:
        pending = admission.enter(one, "10.0.0.1")
        assert pending is not None
        admission.authorize(pending)
    assert admission.enter(connected[2][0], "10.0.0.2") is None
    admission.leave(pending)
    assert admission.enter(connected[2][0], "10.0.0.2") is not None


def test_a_network_of_version_6_is_one_address() -> None:
    assert client_network("2001:db8:1:2::3") == client_network("2001:db8:1:2:ffff::9")
    assert client_network("2001:db8:1:2::3") != client_network("2001:db8:1:3::3")
    assert client_network("fe80::1%eth0") == client_network("fe80::2%eth0")
    assert client_network("::ffff:10.0.0.7") == client_network("10.0.0.7") == "10.0.0.7"
    assert client_network("10.0.0.7") != client_network("10.0.0.8")
    many = [str(ipaddress.ip_address("2001:db8::") + number) for number in range(3)]
    pairs = come(Admission(3, 3), "10.0.0.1", *many)
    assert [is_open(pair) for pair in pairs] == [True, False, True, True]


def test_rates_of_few_addresses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.transport.rate_limiter._MOST_ADDRESSES", 5)
    limiter = AddressRateLimiter(per_second=0.1, burst=1)
    assert limiter.passes("10.0.0.0", 0.0)
    assert not limiter.passes("10.0.0.0", 0.0)
    assert [limiter.passes(f"10.0.1.{number}", 0.0) for number in range(6)] == [True] * 3 + [False] * 3, "four of all"
    assert len(limiter._own) == 5


def test_json_of_a_refusal_is_whole(tmp_path: Path) -> None:
    """Whoever is refused for want of room is told so, with a hint."""
    limits = ConnectionLimits(connections=0, drain_seconds=0.5)
    with Dashboard(("127.0.0.1", 0), tmp_path, limits=limits) as found:
        with socket.create_connection(("127.0.0.1", found.port), 10) as connected:
            connected.sendall(b"GET /api/view HTTP/1.0\r\nHost: localhost\r\n\r\n")
            answer = b"".join(iter(lambda: connected.recv(4096), b""))
        assert b" 503 " in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["hint"]
