"""Limits the connections that have not shown yet that they may be here, fairly per client address.

Opening a connection is free for an attacker, so every listener bounds the connections that have proven nothing, and the
bound must not lock out the next client. Two rules hold at every listener of manyhands, for peers and for HTTP:

- one client address holds at most `most_per_address` pending connections; a further one replaces its own oldest;
- where `most` are reached over all addresses, the oldest pending connection of the address that holds most of them
  makes room.

So a flood from one address replaces only itself, and a client that shares the attacker's address still has as long as
it takes the attacker to open `most_per_address` further connections. An address is an IPv4 address or an IPv6 /64,
since a client with one address of a /64 usually has all of them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Pending:
    """A connection at a listener."""

    connected: socket.socket
    host: str
    network: str
    """The client's address as it is counted: see `client_network`."""
    is_authorized: bool = False
    evicted: threading.Event = field(default_factory=threading.Event)
    """Set once the connection had to make room."""


class Admission:
    """The connections of one listener that have not proven yet that they may be here. Thread-safe."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._lock = threading.Lock()
        self._pending: dict[Pending, None] = {}
        """Pending connections in the order in which they came."""

    def enter(self, connected: socket.socket, host: str) -> Pending | None:
        """Register a new connection, for which another may be shut down; None where all present ones are authorized."""
        pending = Pending(connected, host, client_network(host))
        with self._lock:
            crowds = Counter(other.network for other in self._pending if not other.is_authorized)
            if crowds[pending.network] >= self._most_per_address:
                self._evict(pending.network)
            elif len(self._pending) >= self._most:
                if not crowds:
                    return None
                largest = max(crowds.values())
                self._evict(*(network for network, count in crowds.items() if count == largest))
            self._pending[pending] = None
        return pending

    def _evict(self, *networks: str) -> None:
        """Shut down the oldest pending connection of these networks. Called with the lock held."""
        oldest = next(pending for pending in self._pending if not pending.is_authorized and pending.network in networks)
        oldest.evicted.set()
        shut_down(oldest.connected)  # the thread that serves it wakes up and ends
        del self._pending[oldest]

    def replace(self, pending: Pending, connected: socket.socket) -> None:
        """Replace a connection's socket, as when encryption begins."""
        with self._lock:
            pending.connected = connected
            if pending.evicted.is_set():
                shut_down(connected)

    def authorize(self, pending: Pending) -> None:
        """Keep counting a connection, but no longer let it make room for others."""
        with self._lock:
            pending.is_authorized = True

    def leave(self, pending: Pending) -> None:
        """Stop counting a connection: it ended, or another object counts it."""
        with self._lock:
            self._pending.pop(pending, None)

    def shut_down_pending(self) -> None:
        """End all connections that have not been authorized."""
        with self._lock:
            for pending in self._pending:
                if not pending.is_authorized:
                    shut_down(pending.connected)


def client_network(host: str) -> str:
    """Return what counts as one client address: the IPv4 address, or the /64 of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def shut_down(connected: socket.socket) -> None:
    """End a connection from any thread: waiting threads wake up. TLS's own goodbye is left out: it would wait."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
