"""How coordinator and workers reach each other: control channels and data endpoints of one kind.

    transport = TcpTransport()                                          # between processes and machines
    transport = InProcessTransport()                                    # inside one process, see `inprocess`
    listener = transport.listen("coordinator", "0.0.0.0", 7077, security)
    channel = transport.reach("pi-1", "192.168.1.10", 7077, security, limit_seconds=30.0)
    endpoint = transport.endpoint("pi-1", security, host=channel.local_host)

The first word is always who asks: TCP has no use for it, a transport that plays faults has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from manyhands.engine.channel import SEND_LIMIT_SECONDS, Channel, Listener, connect
from manyhands.engine.endpoint import Endpoint
from manyhands.engine.security import Security
from manyhands.engine.tcp import TcpEndpoint
from manyhands.facts.cluster import Link


class ControlChannel(Protocol):
    """Whole messages both ways, every wait with a limit. See `channel.Channel`."""

    local_host: str
    peer_host: str

    def send(self, data: bytes, limit_seconds: float = SEND_LIMIT_SECONDS) -> None:
        """The message has left. WorkerLost where the connection broke."""

    def receive(self, limit_seconds: float) -> bytes | None:
        """The next message; None where the limit passed. WorkerLost where the connection broke."""

    @property
    def unfinished_bytes(self) -> int:
        """How much has come of a message that is not whole yet: one who is still speaking is not silent."""

    def close(self) -> None:
        """From any thread; whoever waits gets WorkerLost."""


class ControlListener(Protocol):
    """Where workers join."""

    address: tuple[str, int]

    def accept(self, limit_seconds: float) -> ControlChannel | None: ...

    def close(self) -> None: ...


class ConnectedEndpoint(Endpoint, Protocol):
    """An endpoint that finds its peers by their addresses."""

    address: tuple[str, int]
    silence_seconds: float
    """A peer of which no byte has come for so long is lost."""

    def connect(self, peers: Mapping[str, tuple[str, int]], limit_seconds: float) -> None:
        """Have a connection to every one of these; to be called on all of them, in any order."""

    def is_connected(self, peer: str) -> bool: ...

    def lose(self, peer: str) -> None:
        """Drop the connection to one peer, here and there."""

    def shape(self, links: Mapping[str, Link], up_bytes_per_second: float = math.inf) -> None:
        """Have links imitated, where the transport can."""


class Transport(Protocol):
    """Makes all of these."""

    def listen(self, name: str, host: str, port: int, security: Security) -> ControlListener:
        """A place to join; port 0 takes any that is free. AddressTaken where it cannot be."""

    def reach(self, name: str, host: str, port: int, security: Security, limit_seconds: float) -> ControlChannel:
        """Join a listener, which may not be there yet: tried until the limit. Refused where it will not have us."""

    def endpoint(self, name: str, security: Security, *, host: str) -> ConnectedEndpoint:
        """A device's place in the exchange of data."""


class TcpTransport:
    """Sockets: between processes and machines."""

    def listen(self, name: str, host: str, port: int, security: Security) -> Listener:
        return Listener(host, port, security)

    def reach(self, name: str, host: str, port: int, security: Security, limit_seconds: float) -> Channel:
        return connect(host, port, security, limit_seconds)

    def endpoint(self, name: str, security: Security, *, host: str) -> TcpEndpoint:
        return TcpEndpoint(name, security, host=host)
