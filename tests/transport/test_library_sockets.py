"""Connections that are shut from outside: those at the given addresses, and no others."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from manyhands.transport.library_sockets import Place, listening, shut


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def place_of(made: socket.socket) -> Place:
    host, port = made.getsockname()[:2]
    return str(host), int(port)


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    dialled = socket.create_connection(place_of(listener), timeout=5)
    accepted, _ = listener.accept()
    accepted.settimeout(5)
    return dialled, accepted


def test_who_listens_is_found_and_who_does_not_is_not(listener: socket.socket) -> None:
    dialled, accepted = pair(listener)
    with dialled, accepted:
        places = listening()
        assert place_of(listener) in places
        assert place_of(dialled) not in places


@pytest.mark.parametrize("side", ["here", "there"])
def test_a_connection_is_shut_and_others_live_on(listener: socket.socket, side: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        (dialled, accepted), (far, near) = pair(listener), pair(other)
        with dialled, accepted, far, near:
            places = {place_of(listener)}
            count = shut(places, set()) if side == "here" else shut(set(), places)
            assert count == 1
            assert dialled.recv(1) == accepted.recv(1) == b""
            far.sendall(b"x")
            assert near.recv(1) == b"x"
            with socket.create_connection(place_of(listener), timeout=5):
                assert listener.accept()  # whoever listens goes on listening


def test_an_address_as_an_ipv6_socket_has_it_is_the_same() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            accepted, _ = listener.accept()
            with accepted:
                assert shut({("127.0.0.1", port)}, set()) == 1
                assert accepted.recv(1) == b""
