"""Connections of an HTTP server: how many there are, how long each may keep quiet, and how they end.

A thread for each connection, so that a slow client waits for nobody and nobody for it. Encryption is agreed upon in
that thread too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any

from manyhands.engine.turnstile import Turnstile
from manyhands.facts.errors import AddressTaken, BadValue

HANDSHAKE_SECONDS = 5.0
REFUSED_AT_ONCE = 16
"""Connections beyond the limit that are told so; those beyond these are closed without a word."""
_REFUSED_PAUSE_SECONDS = 0.005
"""After one is closed so: who knocks without end must not keep this process busy."""
_POLL_SECONDS = 0.1
_TURN_SECONDS = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """What the clients of a server may do, so that others are answered too."""

    connections: int = 64
    idle_seconds: float = 15.0
    """How long nothing may come, or nothing be taken; also from a request's first byte to the end of its headers."""
    drain_seconds: float = 30.0
    """How long requests under way are waited for in the end."""


class PatientReader(io.RawIOBase):
    """Reads from a socket until a point in time that is set anew for every part of a request."""

    def __init__(self, connected: socket.socket, idle_seconds: float) -> None:
        self.connected, self.idle_seconds = connected, idle_seconds
        self.end = time.monotonic() + idle_seconds

    def allow(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not come in time")
        self.connected.settimeout(min(left, self.idle_seconds))
        try:
            return self.connected.recv_into(buffer)
        finally:
            self.connected.settimeout(self.idle_seconds)  # for what is written


class Door(ThreadingHTTPServer):
    """Listens, counts who is there, and ends without leaving a request half answered."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: Callable[..., Any],
        limits: ConnectionLimits,
        context: ssl.SSLContext | None,
        turnstile: Turnstile | None = None,
    ) -> None:
        """`turnstile`: connections pass it before anything is agreed upon; those whose turn does not come are ended."""
        host, port = address
        self.limits, self.context, self.turnstile = limits, context, turnstile
        self.is_closing = False
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._idle: set[socket.socket] = set()
        self._coming = 0
        """Connections that have a thread."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family = found[0]
            super().__init__((host, port), handler)
        except OverflowError as error:
            raise BadValue(f"The port is {port}; it must be 0 to 65535.") from error
        except OSError as error:
            is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            raise AddressTaken(
                f"{host}:{port} cannot be listened on: {error.strerror or error}.",
                hint="Give another port; 0 takes one that is free."
                if is_taken
                else "Give an address of this machine: 127.0.0.1 for itself alone, 0.0.0.0 for all it has.",
            ) from error
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_SECONDS,), name="http", daemon=True)

    def server_bind(self) -> None:
        """As the base does, without asking a name server who this machine is."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    # Connections

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            is_too_many = self.is_closing or self._coming >= self.limits.connections + REFUSED_AT_ONCE
            self._coming += not is_too_many
        if is_too_many:
            self.shutdown_request(request)
            time.sleep(_REFUSED_PAUSE_SECONDS)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no more threads
            with self._changed:
                self._coming -= 1
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changed:
                self._coming -= 1
                self._changed.notify_all()

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.turnstile is not None and not self.turnstile.passes(_TURN_SECONDS):
            return
        if self.context is None:
            self._serve(request, client_address)
            return
        request.settimeout(HANDSHAKE_SECONDS)
        with self.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as wrapped:
            wrapped.do_handshake()
            self._serve(wrapped, client_address)

    def _serve(self, connected: socket.socket, client_address: Any) -> None:
        with self._changed:
            self._open.add(connected)
        try:
            super().finish_request(connected, client_address)
        finally:
            with self._changed:
                self._open.discard(connected)
                self._idle.discard(connected)
                self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is its own matter."""
        if not isinstance(sys.exception(), (OSError, ValueError)):
            super().handle_error(request, client_address)

    def waits(self, connected: socket.socket) -> bool:
        """A connection waits for its next request; False: it should not, all is about to end."""
        with self._changed:
            self._idle.add(connected)
            return not self.is_closing

    def begins(self, connected: socket.socket) -> bool:
        """A request has begun to come; False: there are too many connections."""
        with self._changed:
            self._idle.discard(connected)
            return len(self._open) <= self.limits.connections

    # The end

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Nobody may come any more; requests under way are answered, within their limit."""
        with self._changed:
            self.is_closing = True
        self.shutdown()
        self.server_close()
        with self._changed:
            for connected in self._idle:
                _end(connected)
            self._changed.wait_for(lambda: not self._coming, self.limits.drain_seconds)
            for connected in self._open:
                _end(connected)
            self._changed.wait_for(lambda: not self._coming, HANDSHAKE_SECONDS)
        self._thread.join(HANDSHAKE_SECONDS)


def _end(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
