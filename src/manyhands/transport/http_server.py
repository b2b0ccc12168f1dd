"""Connections of an HTTP server: how many there are, how long each may be silent, and how they end.

Each connection has a thread, so that a slow client delays no other. The TLS handshake happens in that thread too. Until
a client has sent a complete request that it may make, its connection is pending and can make room for another's
(`admission`); from then on it counts among the connections that are served.
"""

from __future__ import annotations

import contextlib
import errno
import io
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any

from manyhands.facts.errors import AddressTaken, BadValue
from manyhands.facts.hosts import host_and_port
from manyhands.transport.admission import Admission, Pending, shut_down
from manyhands.transport.rate_limiter import AddressRateLimiter, RateLimiter

HANDSHAKE_SECONDS = 5.0
_ACCEPTED_PER_SECOND, _ACCEPTED_AT_ONCE = 500, 500
"""Connections that are given a thread: a client that connects without end must not keep this process busy."""
_POLL_SECONDS = 0.1
_TURN_SECONDS = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of what the clients of a server may do, so that others are answered too."""

    connections: int = 64
    """The most connections of clients that have sent a request they may make."""
    pending: int = 64
    """The most connections of clients that have not, at a time; three quarters of them may come from one address."""
    idle_seconds: float = 15.0
    """The longest time in which nothing comes, or nothing is read; also from a request's first byte to the end of its
    headers."""
    drain_seconds: float = 30.0
    """The longest time that requests under way are waited for at the end."""


class DeadlineReader(io.RawIOBase):
    """Reads from a socket until a deadline that is set anew for every part of a request."""

    def __init__(self, connected: socket.socket, idle_seconds: float) -> None:
        self.connected, self.idle_seconds = connected, idle_seconds
        self.end = time.monotonic() + idle_seconds

    def allow(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds_left = self.end - time.monotonic()
        if seconds_left <= 0:
            raise TimeoutError("the request did not come in time")
        self.connected.settimeout(min(seconds_left, self.idle_seconds))
        try:
            return self.connected.recv_into(buffer)
        finally:
            self.connected.settimeout(self.idle_seconds)  # for what is written


class HttpServer(ThreadingHTTPServer):
    """Listens, counts its clients, and ends without leaving a request half answered."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: Callable[..., Any],
        limits: ConnectionLimits,
        context: ssl.SSLContext | None,
        rate_limiter: AddressRateLimiter | None = None,
    ) -> None:
        """Listen at `address`.

        `rate_limiter`: a connection passes it once its client has sent something, before the TLS handshake; a
        connection whose turn does not come is ended.
        """
        host, port = address
        self.limits, self.context, self.rate_limiter = limits, context, rate_limiter
        self.is_closing = False
        self._changed = threading.Condition()
        self._admission = Admission(limits.pending, max(1, limits.pending * 3 // 4))
        self._accepting = RateLimiter(_ACCEPTED_PER_SECOND, _ACCEPTED_AT_ONCE)
        self._connections: dict[socket.socket, Pending] = {}
        """All connections that have a thread."""
        self._served: set[socket.socket] = set()
        self._idle: set[socket.socket] = set()
        try:
            resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family = resolved[0]
            super().__init__((host, port), handler)
        except OverflowError as error:
            raise BadValue(f"The port is {port}; it must be 0 to 65535.") from error
        except OSError as error:
            is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            raise AddressTaken(
                f"{host_and_port(host, port)} cannot be listened on: {error.strerror or error}.",
                hint="Give another port; 0 takes one that is free."
                if is_taken
                else "Give an address of this machine: 127.0.0.1 for itself alone, 0.0.0.0 for all it has.",
            ) from error
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_SECONDS,), name="http", daemon=True)

    def server_bind(self) -> None:
        """Bind as the base class does, without asking a name server for this machine's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    # Connections

    def process_request(self, request: Any, client_address: Any) -> None:
        pending = None if self.is_closing else self._admission.enter(request, str(client_address[0]))
        if pending is None:
            self.shutdown_request(request)
            return
        with self._changed:
            self._connections[request] = pending
        self._accepting.passes(_TURN_SECONDS)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no more threads
            self._forget(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        with self._changed:
            pending = self._connections.pop(request)
            self._served.discard(pending.connected)
            self._idle.discard(pending.connected)
            self._changed.notify_all()
        self._admission.leave(pending)

    def finish_request(self, request: Any, client_address: Any) -> None:
        pending = self._connections[request]
        if self.rate_limiter is not None and not (
            _has_spoken(request, self.limits.idle_seconds)
            and self.rate_limiter.passes(pending.host, _TURN_SECONDS, pending.evicted.wait)
        ):
            return
        if self.context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(HANDSHAKE_SECONDS)
        with self.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as wrapped:
            self._admission.replace(pending, wrapped)
            wrapped.do_handshake()
            super().finish_request(wrapped, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that went away."""
        if not isinstance(sys.exception(), (OSError, ValueError)):
            super().handle_error(request, client_address)

    def waits(self, connected: socket.socket) -> bool:
        """Note that a connection waits for its next request; return False if it should not, because the server is about
        to end."""
        with self._changed:
            self._idle.add(connected)
            return not self.is_closing

    def begins(self, connected: socket.socket) -> None:
        """Note that a request has begun to arrive."""
        with self._changed:
            self._idle.discard(connected)

    def serves(self, connected: socket.socket) -> bool:
        """Count a connection among those that are served, now that its client has shown that it may make requests.
        Return False if there are too many of them; it stays pending then."""
        with self._changed:
            if connected in self._served:
                return True
            if len(self._served) >= self.limits.connections:
                return False
            self._served.add(connected)
            pending = next(other for other in self._connections.values() if other.connected is connected)
        self._admission.leave(pending)
        return True

    # The end

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop accepting; requests under way are answered, within their limit."""
        with self._changed:
            self.is_closing = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # on Linux this wakes the thread; elsewhere it looks soon
        self.shutdown()
        self.server_close()
        self._admission.shut_down_pending()
        with self._changed:
            for connected in self._idle:
                shut_down(connected)
            self._changed.wait_for(lambda: not self._connections, self.limits.drain_seconds)
            for pending in self._connections.values():
                shut_down(pending.connected)
            self._changed.wait_for(lambda: not self._connections, HANDSHAKE_SECONDS)
        self._thread.join(HANDSHAKE_SECONDS)


def _has_spoken(connected: socket.socket, limit_seconds: float) -> bool:
    """Wait until something can be read from a client, the end of the connection included; return whether it can."""
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(limit_seconds * 1000))
