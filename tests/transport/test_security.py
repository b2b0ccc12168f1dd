"""Who gets in: the token, the protocol, plain or encrypted, and nobody in the middle."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest
from endpoint_pairs import wait_until

from manyhands.facts.errors import BadValue, Refused
from manyhands.transport import proofs
from manyhands.transport import security as rules
from manyhands.transport.channel import Listener, connect
from manyhands.transport.dialling import dial
from manyhands.transport.security import (
    PREAMBLE,
    PROTOCOL,
    Purpose,
    Security,
    is_loopback,
    is_made,
    is_secret,
    new_secret,
    new_token,
)
from manyhands.transport.wire import EncryptedWire


@pytest.fixture
def listener(security: Security) -> Iterator[Listener]:
    found = Listener("127.0.0.1", 0, security)
    yield found
    found.close()


def works(listener: Listener, security: Security) -> bool:
    client = connect(*listener.address, security, 5)
    server = listener.accept(5)
    assert server is not None
    client.send(b"word")
    found = server.receive(5)
    client.close()
    server.close()
    return found == b"word"


def test_tokens() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token.replace("-", "")) * 5 >= 128 for token in tokens)
    token = tokens.pop()
    assert token not in repr(Security(token, True))
    with pytest.raises(BadValue, match="empty"):
        Security("", True)
    for weak in ("a", "1234567", "aaaaaaaaaaaa", "abababababab"):
        with pytest.raises(BadValue, match=r"characters, . of them different; it must have at least 8") as caught:
            Security(weak, True)
        assert weak not in str(caught.value) or len(weak) == 1, "errors are logged"
    Security("korb-7719", True)


def test_which_are_drawn_by_programs() -> None:
    """An HMAC is made with these alone: what people type goes through the PAKE, whatever it looks like."""
    assert is_secret(new_secret())
    assert Security(new_secret(), False).is_secret
    for other in (new_token(), "run-7719korb", "run-" + "a" * 51, new_secret() + "a", new_secret().upper()):
        assert not Security(other, False).is_secret if len(set(other)) >= 5 else not is_secret(other)
    assert is_made(new_token())
    assert not is_made("many-hands-make-light-work-and-so-on")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("::1", True), ("[::1]", True),
     ("0.0.0.0", False), ("::", False), ("192.168.1.1", False), ("example.org", False), ("", False)],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_another_token(listener: Listener, security: Security) -> None:
    other = Security(new_token(), security.encrypted)
    with pytest.raises(Refused, match=r"refused: the token is not the one it asks for\.\nCopy the token"):
        connect(*listener.address, other, 5)
    wait_until(lambda: listener.dropped == 1)
    assert "another token" in listener.reasons[0]
    assert listener.accept(0) is None
    assert works(listener, security)


def test_plain_meets_encrypted(listener: Listener, security: Security) -> None:
    kinds = {False: "plain", True: "encrypted"}
    other = Security(security.token, not security.encrypted)
    with pytest.raises(Refused, match=f"is {kinds[security.encrypted]}, this side {kinds[other.encrypted]}"):
        connect(*listener.address, other, 5)
    assert works(listener, security)


def test_another_protocol(listener: Listener, security: Security, monkeypatch: pytest.MonkeyPatch) -> None:
    original = rules.preamble
    monkeypatch.setattr(
        rules, "preamble", lambda *both: PREAMBLE.pack(*_with_protocol(original(*both), PROTOCOL + 1))
    )  # both sides now say 2 and expect 1: each refuses the other
    with pytest.raises(Refused, match=f"speaks protocol {PROTOCOL + 1}, this side {PROTOCOL}"):
        connect(*listener.address, security, 5)
    monkeypatch.undo()
    wait_until(lambda: listener.dropped == 1)
    assert "protocol" in listener.reasons[0]
    assert works(listener, security)


def _with_protocol(content: bytes, protocol: int) -> tuple[object, ...]:
    magic, _, *rest = PREAMBLE.unpack(content)
    return (magic, protocol, *rest)


def test_a_port_for_something_else(listener: Listener, security: Security) -> None:
    with pytest.raises(Refused, match="is for control, not for data"):
        dial(*listener.address, security, Purpose.DATA, time.monotonic() + 5)


def test_a_browser_is_dropped(listener: Listener, security: Security) -> None:
    with socket.create_connection(listener.address, timeout=5) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert browser.recv(100) == b""
    wait_until(lambda: listener.dropped == 1)
    assert "is no manyhands" in listener.reasons[0]
    assert works(listener, security)


def test_a_web_server_is_told_apart(security: Security) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            guest, _ = server.accept()
            guest.recv(100)
            guest.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            guest.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Refused, match=r"is no manyhands: it begins with b'HTTP/1\.1'"):
            connect(*server.getsockname(), security, 5)
        thread.join()


@pytest.mark.quick(every=2)
def test_the_silent_do_not_keep_others_waiting(
    listener: Listener, security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    def come() -> list[socket.socket]:
        silent = [socket.create_connection(listener.address) for _ in range(20)]
        silent[0].sendall(rules.preamble(security, Purpose.CONTROL))  # and no more
        return silent

    monkeypatch.setattr(rules, "HANDSHAKE_LIMIT_SECONDS", 600.0)
    patient = come()
    assert works(listener, security)  # within seconds
    assert listener.dropped == 0
    for one in patient:
        one.close()
    wait_until(lambda: len(listener.reasons) == 20)
    monkeypatch.setattr(rules, "HANDSHAKE_LIMIT_SECONDS", 0.2)
    silent = come()
    wait_until(lambda: len(listener.reasons) == 40)
    assert all("no handshake within 0.2 s" in reason for reason in list(listener.reasons)[20:])
    assert listener.dropped == 40
    for one in silent:
        one.close()


class Middle:
    """Sits between client and server with a certificate of its own, and passes everything on."""

    def __init__(self, target: tuple[str, int], security: Security) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = self.server.getsockname()
        self.target, self.security = target, security
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        guest, _ = self.server.accept()
        onward = socket.create_connection(self.target)
        onward.sendall(guest.recv(PREAMBLE.size))
        guest.sendall(onward.recv(PREAMBLE.size))
        deadline = time.monotonic() + 5
        rules._server_side.cache_clear()
        context, _ = rules._server_side(-1)  # another process has another certificate
        inner = EncryptedWire(guest, context, is_server=True)
        outer = EncryptedWire(onward, rules._client_side(), is_server=False)
        inner.shake_hands(deadline)
        outer.shake_hands(deadline)
        scratch = memoryview(bytearray(1000))
        try:
            while time.monotonic() < deadline:
                for source, sink in ((inner, outer), (outer, inner)):
                    count = source.read([scratch])
                    if count:
                        sink.write([scratch[:count]])
        except Exception:
            inner.close()
            outer.close()
        self.server.close()


def test_nobody_in_the_middle() -> None:
    security = Security(new_token(), True)
    listener = Listener("127.0.0.1", 0, security)
    middle = Middle(listener.address, security)
    with pytest.raises(Refused, match="token"):
        connect(*middle.address, security, 5)
    assert listener.accept(0.1) is None
    listener.close()
    middle.thread.join(10)


def test_a_server_that_does_not_know_the_token_is_refused(monkeypatch: pytest.MonkeyPatch, security: Security) -> None:
    """It says welcome to everybody, but cannot prove anything."""
    listener = Listener("127.0.0.1", 0, Security(new_token(), security.encrypted))
    original = proofs.hmac.compare_digest
    main = threading.current_thread()
    monkeypatch.setattr(
        proofs.hmac, "compare_digest", lambda *both: original(*both) if threading.current_thread() is main else True
    )
    with pytest.raises(Refused, match="does not know the token itself"):
        connect(*listener.address, security, 5)
    listener.close()


def test_only_data_after_the_handshake() -> None:
    """TLS 1.3 without session tickets."""
    context, certificate = rules._server_side(0)
    assert context.num_tickets == 0
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert ssl.DER_cert_to_PEM_cert(certificate)
