"""Who connects to whom where addresses say so, by which token, and at which port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from manyhands.facts.errors import Refused, TimedOut
from manyhands.transport import dialling
from manyhands.transport.dialling import dial
from manyhands.transport.endpoint import Address
from manyhands.transport.inprocess import InProcessTransport
from manyhands.transport.security import PREAMBLE, Purpose, Security, admit, new_token, preamble
from manyhands.transport.transport import ConnectedEndpoint, TcpTransport, Transport, reach_either

HERE = "127.0.0.1"
OWN = Security(new_token(), encrypted=False)
OTHER = Security(new_token(), encrypted=True)


@pytest.fixture(params=[TcpTransport, InProcessTransport], ids=["tcp", "in process"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param()  # type: ignore[no-any-return]


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def endpoints(transport: Transport, closing: ExitStack, **security: Security) -> list[ConnectedEndpoint]:
    found = [transport.endpoint(name, one, host=HERE) for name, one in security.items()]
    for one in found:
        closing.callback(one.close)
    return found


def meet(one: ConnectedEndpoint, to_other: Address, other: ConnectedEndpoint, to_one: Address) -> None:
    waiting = threading.Thread(target=other.connect, args=({one.name: to_one}, 5.0))
    waiting.start()
    try:
        one.connect({other.name: to_other}, 5.0)
    finally:
        waiting.join(10)
    assert one.is_connected(other.name)
    assert other.is_connected(one.name)


@pytest.mark.parametrize("is_first", [True, False], ids=["the smaller name dials", "the larger name dials"])
def test_the_address_says_who_dials(transport: Transport, closing: ExitStack, is_first: bool) -> None:
    """One that is not to dial has no address to dial."""
    a, b = endpoints(transport, closing, a=OWN, b=OWN)
    nowhere = Address("", 0, is_dialled=False)
    to_a = nowhere if is_first else Address(*a.address, is_dialled=True)
    to_b = Address(*b.address, is_dialled=True) if is_first else nowhere
    meet(a, to_b, b, to_a)


def test_by_the_token_of_the_one_that_is_dialled(transport: Transport, closing: ExitStack) -> None:
    a, b = endpoints(transport, closing, a=OTHER, b=OWN)
    with pytest.raises(Refused, match="is encrypted, this side plain"):
        b.connect({"a": Address(*a.address, is_dialled=True)}, 2.0)
    wrong = Security(OWN.token, encrypted=True)
    with pytest.raises(Refused, match="the token is not the one it asks for"):
        b.connect({"a": Address(*a.address, is_dialled=True, security=wrong)}, 2.0)
    meet(b, Address(*a.address, is_dialled=True, security=OTHER), a, Address("", 0, is_dialled=False))


def test_control_and_data_at_one_port(transport: Transport, closing: ExitStack) -> None:
    listener = transport.listen("a", HERE, 0, OTHER)
    closing.callback(listener.close)
    (b,) = endpoints(transport, closing, b=OWN)
    for _ in range(2):  # endpoints come and go at it
        a = transport.endpoint("a", OTHER, host=HERE, listener=listener)
        assert a.address == listener.address
        meet(b, Address(*listener.address, is_dialled=True, security=OTHER), a, Address("", 0, is_dialled=False))
        near = transport.reach("b", *listener.address, OTHER, 5.0)
        far = listener.accept(5.0)
        assert far is not None
        near.send(b"word")
        assert far.receive(5.0) == b"word"
        near.close()
        far.close()
        a.close()
        end = time.monotonic() + 5
        while b.is_connected("a"):
            assert time.monotonic() < end
            time.sleep(0.002)


def test_no_data_where_no_endpoint_is(closing: ExitStack) -> None:
    transport = TcpTransport()
    listener = transport.listen("a", HERE, 0, OTHER)
    closing.callback(listener.close)
    transport.endpoint("a", OTHER, host=HERE, listener=listener).close()
    with pytest.raises(Refused, match="is for control, not for data"):
        dial(*listener.address, OTHER, Purpose.DATA, time.monotonic() + 5)
    transport.reach("b", *listener.address, OTHER, 5.0).close()


def test_either_kind_and_which_refusal(transport: Transport, closing: ExitStack) -> None:
    for security in (OWN, OTHER):
        listener = transport.listen("a", HERE, 0, security)
        closing.callback(listener.close)
        reached = reach_either(transport, "b", listener.address, security.token, 5.0)
        closing.callback(reached.channel.close)
        assert reached.security.encrypted == security.encrypted
        with pytest.raises(Refused, match="the token is not the one it asks for"):
            reach_either(transport, "b", listener.address, "another token", 5.0)
        with pytest.raises(Refused, match="Both must be encrypted"):
            reach_either(transport, "b", listener.address, security.token, 5.0, encrypted=not security.encrypted)


def test_once_is_once(transport: Transport) -> None:
    start = time.monotonic()
    with socket.socket() as taken:
        taken.bind((HERE, 0))  # and nobody listens
        with pytest.raises(TimedOut, match="Nobody answered"):
            transport.reach("a", HERE, taken.getsockname()[1], OWN, 30.0, once=True)
    assert time.monotonic() - start < 5


def test_a_port_that_swallows_everything_is_given_up_when_told() -> None:
    with socket.socket() as full:
        full.bind((HERE, 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        begun = time.monotonic()
        with pytest.raises(TimedOut, match="no answer"):
            dial(
                *full.getsockname(), OWN, Purpose.DATA, begun + 30, lambda: time.monotonic() > begun + 0.2
            )  # fmt: skip
        assert 0.2 <= time.monotonic() - begun < 3
        for one in waiting:
            one.close()


# Handshakes that are cut off


class Busy:
    """A listener of the right kind that has no time: it answers with its preamble, and no more."""

    def __init__(self, security: Security, *, is_silent: bool = False) -> None:
        self.came, self._security, self._is_silent = 0, security, is_silent
        self._socket = socket.create_server((HERE, 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                return
            self.came += 1
            self._held.append(connected)
            with suppress(OSError):  # the other end has closed
                connected.recv(PREAMBLE.size, socket.MSG_WAITALL)
                connected.sendall(preamble(self._security, Purpose.CONTROL))
                if not self._is_silent:
                    connected.shutdown(socket.SHUT_WR)  # not closed: a reset could overtake the preamble

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        for one in (self._socket, *self._held):
            one.close()


@pytest.mark.parametrize("security", [OWN, OTHER], ids=["plain", "encrypted"])
def test_a_handshake_that_is_cut_off_is_tried_again(
    security: Security, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is no refusal: restart policies start the worker again."""
    monkeypatch.setattr(dialling, "_CUT_OFF_SECONDS", (0.01, 0.02))
    busy = Busy(security)
    closing.callback(busy.close)
    with pytest.raises(TimedOut, match=r"answered, but it ended the handshake: .*\nIt may be busy") as caught:
        reach_either(TcpTransport(), "a", busy.address, security.token, 1.0, encrypted=security.encrypted)
    assert busy.came > 1
    assert (caught.value.exit_code, caught.value.is_lasting) == (15, False)


def test_so_is_one_that_falls_silent(closing: ExitStack) -> None:
    busy = Busy(OTHER, is_silent=True)
    closing.callback(busy.close)
    with pytest.raises(TimedOut, match="answered, but it did not go on with the handshake"):
        TcpTransport().reach("a", *busy.address, OTHER, 0.3, once=True)
    assert busy.came == 1


def test_it_is_let_in_once_there_is_time(closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two connections are closed by the listener before it takes the third."""
    monkeypatch.setattr(dialling, "_CUT_OFF_SECONDS", (0.01, 0.02))
    listener = TcpTransport().listen("a", HERE, 0, OTHER)
    closing.callback(listener.close)
    closed: list[bytes] = []

    def busy(connected: socket.socket, *others: Any) -> Any:
        if len(closed) < 2:
            closed.append(connected.recv(PREAMBLE.size, socket.MSG_WAITALL))
            connected.sendall(preamble(OTHER, Purpose.CONTROL))
            raise TimeoutError
        return admit(connected, *others)

    monkeypatch.setattr("manyhands.transport.listener.admit", busy)
    TcpTransport().reach("b", *listener.address, OTHER, 20.0).close()
    assert len(closed) == 2
