"""Transports, by which coordinator and workers reach each other: control channels and data endpoints of one kind.

    transport = TcpTransport()                                          # between processes and machines
    transport = InProcessTransport()                                    # inside one process, see `inprocess`
    listener = transport.listen("coordinator", "0.0.0.0", 7077, security)
    channel = transport.reach("pi-1", "192.168.1.10", 7077, security, limit_seconds=30.0)
    endpoint = transport.endpoint("pi-1", security, host=channel.local_host)

The first argument is always the caller's name: TCP does not use it, but a transport that injects faults does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from manyhands.facts.errors import ManyhandsError, Refused
from manyhands.facts.link import Link
from manyhands.transport.channel import SEND_LIMIT_SECONDS, Channel, Listener, connect
from manyhands.transport.endpoint import Endpoint, Peers
from manyhands.transport.keys import Credentials
from manyhands.transport.security import OTHER_KIND, DeviceSecurity, Security, is_loopback, is_secret
from manyhands.transport.tcp import TcpEndpoint


class ControlChannel(Protocol):
    """A connection for whole messages both ways; every wait has a limit. See `channel.Channel`."""

    local_host: str
    peer_host: str
    peer_key: bytes
    """The public key that the other device has proven; empty where it has none."""

    def send(self, data: bytes, limit_seconds: float = SEND_LIMIT_SECONDS) -> None:
        """Send a message and return when it has left. WorkerLost where the connection broke."""

    def limit_received(self, largest_bytes: int) -> None:
        """Break the connection where a longer message arrives from now on."""

    def receive(self, limit_seconds: float) -> bytes | None:
        """Return the next message; None where the limit passed. WorkerLost where the connection broke."""

    @property
    def unfinished_bytes(self) -> int:
        """Bytes received of a message that is not complete yet: a peer that is still sending is not silent."""

    def close(self) -> None:
        """Close the channel from any thread; waiting threads get WorkerLost."""


class ControlListener(Protocol):
    """A listener at which workers join, or at which a worker waits to be invited."""

    address: tuple[str, int]

    def tell_of_failures(self, on_failure: Callable[[str, ManyhandsError], None]) -> None:
        """Call `on_failure` with the address and the reason of every handshake that fails from now on."""

    @property
    def dropped(self) -> int:
        """The number of peers that were turned away."""

    @property
    def reasons(self) -> list[str]:
        """The reasons why the last of them were turned away."""

    def accept(self, limit_seconds: float) -> ControlChannel | None: ...

    def close(self) -> None: ...


class ConnectedEndpoint(Endpoint, Protocol):
    """An endpoint that finds its peers by their addresses."""

    address: tuple[str, int]
    silence_seconds: float
    """A peer from which no byte has come for this long is considered lost."""

    def connect(self, peers: Peers, limit_seconds: float) -> None:
        """Connect to every one of these peers; to be called on all of them, in any order."""

    def make_room(self, peer: str, size: int) -> None:
        """Expect that a peer on this machine is sent so many bytes at once: memory that is shared with it will hold
        them, if it is not made yet. Without this what does not fit goes over the connection, which is slower."""

    def is_connected(self, peer: str) -> bool: ...

    def silent_peers(self) -> dict[str, float]:
        """Return connected peer -> seconds without a byte from it, for those that have missed more than one
        heartbeat."""

    def missing_peers(self) -> set[str]:
        """Return the peers to which a `connect` under way has no connection yet."""

    def lose(self, peer: str) -> None:
        """Drop the connection to one peer, at both ends."""

    def shape(self, links: Mapping[str, Link], up_bytes_per_second: float = math.inf) -> None:
        """Imitate slower links, where the transport can."""


class Transport(Protocol):
    """A maker of listeners, channels and endpoints."""

    def listen(self, name: str, host: str, port: int, security: Security) -> ControlListener:
        """Return a listener at which peers join; port 0 takes any that is free. AddressTaken where the address cannot
        be used."""

    def reach(
        self,
        name: str,
        host: str,
        port: int,
        security: Security,
        limit_seconds: float,
        *,
        once: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> ControlChannel:
        """Join a listener, which may not exist yet: tried until the limit, unless `once`. Refused where it rejects this
        peer."""

    def endpoint(
        self, name: str, security: Security, *, host: str, port: int = 0, listener: ControlListener | None = None
    ) -> ConnectedEndpoint:
        """Return a device's endpoint for exchanging data, at `host` and `port` (0: any that is free), or at the
        listener's own address."""


class TcpTransport:
    """The transport over sockets: between processes and machines."""

    def listen(self, name: str, host: str, port: int, security: Security) -> Listener:
        return Listener(host, port, security)

    def reach(
        self,
        name: str,
        host: str,
        port: int,
        security: Security,
        limit_seconds: float,
        *,
        once: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Channel:
        return connect(host, port, security, limit_seconds, once=once, is_cancelled=is_cancelled)

    def endpoint(
        self, name: str, security: Security, *, host: str, port: int = 0, listener: ControlListener | None = None
    ) -> TcpEndpoint:
        peer_listener = listener.peer_listener if isinstance(listener, Listener) else None
        return TcpEndpoint(name, security, host=host, port=port, peer_listener=peer_listener)


@dataclass(frozen=True)
class ControlConnection:
    """A connection between coordinator and worker, whichever of the two established it."""

    channel: ControlChannel
    security: Security
    listener: ControlListener | None = None
    """The listener at which the coordinator connected and data connections arrive; None: the worker connected."""


def reach_either(
    transport: Transport,
    name: str,
    address: tuple[str, int],
    token: str,
    limit_seconds: float,
    *,
    encrypted: bool | None = None,
    timeout_factor: float = 1.0,
    once: bool = False,
    is_cancelled: Callable[[], bool] = lambda: False,
    credentials: Callable[[], Credentials | None] = lambda: None,
) -> ControlConnection:
    """Connect to a listener over an encrypted connection, or, on this very machine, over whichever kind it has.

    `credentials` is called where a connection is encrypted and the token is not a secret of one run.
    """
    host, port = address
    kinds = [encrypted] if encrypted is not None else [False, True] if is_loopback(host) and token else [True]
    for kind in kinds:
        key_ring = credentials() if kind and not is_secret(token) else None
        security = DeviceSecurity(token, encrypted=kind, timeout_factor=timeout_factor, credentials=key_ring)
        try:
            channel = transport.reach(name, host, port, security, limit_seconds, once=once, is_cancelled=is_cancelled)
            return ControlConnection(channel, security)
        except Refused as error:
            if error.hint != OTHER_KIND or kind is kinds[-1]:
                raise
    raise AssertionError("one of the kinds was the last")
