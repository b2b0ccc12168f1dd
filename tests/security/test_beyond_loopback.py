"""Whatever listens beyond loopback is encrypted and asks for a token, without being told to; nothing else gets in.

Somebody in the middle, with a certificate of his own, is in tests/transport/test_security.py.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from manyhands.dashboard.server import Dashboard
from manyhands.facts.errors import ManyhandsError, Refused
from manyhands.runtime.control import encode
from manyhands.runtime.control_messages import Heartbeat
from manyhands.runtime.coordinator import Coordinator
from manyhands.transport.channel import connect
from manyhands.transport.dialling import dial
from manyhands.transport.security import PREAMBLE, Purpose, Security, new_token

TOKEN = new_token()
HERE = "127.0.0.1"


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator("0.0.0.0", 0, TOKEN, announce=False) as found:
        yield found


def places(coordinator: Coordinator) -> dict[Purpose, tuple[str, int]]:
    """Where workers join, where tensors come in, and where pairs of others are relayed."""
    return dict.fromkeys(Purpose, (HERE, coordinator.address[1]))


def enter(coordinator: Coordinator, purpose: Purpose, security: Security) -> None:
    dial(*places(coordinator)[purpose], security, purpose, time.monotonic() + 10, once=True).close()


@pytest.mark.parametrize("purpose", list(Purpose))
def test_who_knows_the_token_gets_in_encrypted(coordinator: Coordinator, purpose: Purpose) -> None:
    """Of tensors and relays it is the run's own secret, which the coordinator tells those who have joined."""
    assert coordinator.encrypted
    known = TOKEN if purpose is Purpose.CONTROL else coordinator.secret
    enter(coordinator, purpose, Security(known, encrypted=True))
    with pytest.raises(Refused, match="the token is not the one"):
        enter(coordinator, purpose, Security(coordinator.secret if known == TOKEN else TOKEN, encrypted=True))


@pytest.mark.parametrize("purpose", list(Purpose))
def test_plain_connections_are_refused(coordinator: Coordinator, purpose: Purpose) -> None:
    with pytest.raises(Refused, match="is encrypted, this side plain"):
        enter(coordinator, purpose, Security(TOKEN, encrypted=False))


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize(
    "change",
    [lambda own: new_token(), lambda own: own + "x", lambda own: own[:-1], str.upper, lambda own: "\0" + own[1:],
     lambda own: own * 100],
    ids=["another", "longer", "shorter", "capitals", "nothing", "a hundred times"],
)  # fmt: skip
def test_other_tokens_are_refused(
    coordinator: Coordinator, purpose: Purpose, change: Callable[[str], str]
) -> None:  # fmt: skip
    with pytest.raises(Refused, match="the token is not the one"):
        enter(coordinator, purpose, Security(change(TOKEN), encrypted=True))


def test_tokens_cannot_be_guessed() -> None:
    """160 bits from the system's random numbers: at a million tries a second it takes 10^34 years."""
    tokens = [new_token().replace("-", "") for _ in range(200)]
    assert {len(token) for token in tokens} == {32}
    letters = {letter for token in tokens for letter in token}
    assert letters == set("abcdefghijklmnopqrstuvwxyz234567")
    assert 32 * math.log2(len(letters)) == 160
    assert len(set(tokens)) == 200


class Recorder:
    """Passes bytes on both ways and keeps those of the client: what somebody on the network sees."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.heard = b""
        self._server = socket.create_server((HERE, 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self._target = target
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._server, self._server.accept()[0] as client, socket.create_connection(self._target) as server:
            back = threading.Thread(target=self._pass, args=(server, client, False), daemon=True)
            back.start()
            self._pass(client, server, True)
            back.join(5)

    def _pass(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self.heard += data if keep else b""
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("encrypted", [True, False], ids=["encrypted", "plain"])
def test_a_handshake_that_was_recorded_is_worth_nothing(coordinator: Coordinator, encrypted: bool) -> None:
    with contextlib.ExitStack() as stack:
        if not encrypted:  # on loopback: even there it must not be enough to have listened
            coordinator = stack.enter_context(Coordinator(HERE, 0, TOKEN))
        target = places(coordinator)[Purpose.CONTROL]
        recorder = Recorder(target)
        channel = connect(*recorder.address, Security(TOKEN, encrypted), 10)
        channel.send(encode(Heartbeat()))
        channel.receive(10)
        channel.close()
        recorder.end()
        assert len(recorder.heard) > PREAMBLE.size + 64
        assert TOKEN.encode() not in recorder.heard
        before = coordinator.listener.dropped
        with socket.create_connection(target, 10) as again:
            again.settimeout(10)
            with contextlib.suppress(OSError):
                again.sendall(recorder.heard)
                again.shutdown(socket.SHUT_WR)
                while again.recv(65_536):
                    pass
        end = time.monotonic() + 10
        while coordinator.listener.dropped == before:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not coordinator.members


def test_a_dashboard_is_encrypted_and_asks_for_its_token() -> None:
    with Dashboard(("0.0.0.0", 0)) as dashboard:
        assert len(dashboard.token.replace("-", "")) == 32
        with socket.create_connection((HERE, dashboard.port), 10) as plain, contextlib.suppress(ConnectionError):
            plain.sendall(b"GET /api/view HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        for path, status in (
            ("/", 401), ("/api/view", 401), ("/api/stream?token=", 401), (f"/?token={new_token()}", 401),
            (f"/?token={dashboard.token}", 200),
        ):  # fmt: skip
            client = http.client.HTTPSConnection(HERE, dashboard.port, timeout=10, context=context)
            with contextlib.closing(client):
                client.request("GET", path)
                assert client.getresponse().status == status, path
                assert client.sock is None or client.sock.version() == "TLSv1.3"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org", ""])
def test_what_is_not_loopback_is_never_plain(host: str) -> None:
    """Also where the address cannot be listened on here."""
    try:
        with Coordinator(host, 0, TOKEN, announce=False) as coordinator:
            assert coordinator.encrypted
    except ManyhandsError as error:
        assert "listen" in error.message  # noqa: PT017
