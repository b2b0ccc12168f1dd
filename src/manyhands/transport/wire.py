"""A connected socket whose reads and writes never wait, plain or encrypted, and functions that wait for it.

Encryption goes through memory, not through `ssl.SSLSocket`: one SSL object must not be in use by two threads, and a
lock around work in memory is short, while a lock around a socket is not.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import ssl
import sys
import termios
import threading
import time
from collections.abc import Sequence
from typing import Any

UNACKNOWLEDGED_LIMIT_SECONDS = 10.0
"""The time that sent bytes may go unacknowledged before the kernel gives up, as when a cable is pulled."""
MOST_BUFFERS = 64
"""The most pieces of memory in one system call."""
_AT_ONCE_BYTES = 256 * 1024
_RECORD_BYTES = 16 * 1024


class Broken(Exception):
    """The connection is lost; the message gives the reason in a few words."""


def tune(connected: socket.socket, timeout_factor: float = 1.0) -> None:
    """Make small messages leave at once, and a peer that vanished without closing the connection be noticed."""
    connected.setblocking(False)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if connected.family in (socket.AF_INET, socket.AF_INET6):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            limit_milliseconds = int(UNACKNOWLEDGED_LIMIT_SECONDS * timeout_factor * 1000)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_milliseconds)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(5 * timeout_factor)))
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(2 * timeout_factor)))
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


class Wire:
    """A plain connection. One thread reads at a time, and one writes."""

    encrypted = False
    peer_key = b""
    """The other device's public key, which it has proven; empty where it has none."""

    def __init__(self, connected: socket.socket, timeout_factor: float = 1.0) -> None:
        tune(connected, timeout_factor)
        self.socket = connected

    @property
    def has_unsent(self) -> bool:
        """Whether bytes that were accepted have not left yet."""
        return False

    @property
    def has_unread(self) -> bool:
        """Whether bytes have come that the socket no longer reports."""
        return False

    def write(self, buffers: Sequence[memoryview]) -> int:
        """Return how many bytes of the buffers were accepted; fewer than all where the link is full."""
        try:
            return self.socket.sendmsg(buffers[:MOST_BUFFERS])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise Broken(_why(error)) from error

    def read(self, views: Sequence[memoryview]) -> int:
        """Return how many bytes were read into the views (none of them empty); 0 where there are none at present."""
        try:
            count = self.socket.recv_into(views[0]) if len(views) == 1 else self.socket.recvmsg_into(views)[0]
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise Broken(_why(error)) from error
        if count == 0:
            raise Broken("closed by the other side")
        return count

    def shut(self) -> None:
        """End the connection from any thread: waiting threads wake up. The descriptor stays until `close`."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; no other thread may be inside a call."""
        self.shut()
        self.socket.close()


class EncryptedWire(Wire):
    """A wire under TLS 1.3."""

    encrypted = True

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext, *, is_server: bool, timeout_factor: float = 1.0
    ) -> None:
        super().__init__(connected, timeout_factor)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: Any = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._using_tls = threading.Lock()
        self._unsent = memoryview(b"")
        self._scratch = memoryview(bytearray(_AT_ONCE_BYTES))
        self._more_is_likely = False

    @property
    def has_unsent(self) -> bool:
        return len(self._unsent) > 0

    @property
    def has_unread(self) -> bool:
        return bool(self._incoming.pending) or self._tls.pending() > 0

    @property
    def peer_certificate(self) -> bytes:
        return bytes(self._tls.getpeercert(binary_form=True) or b"")

    def shake_hands(self, deadline: float) -> None:
        """Complete the TLS handshake. Raises Broken or TimeoutError."""
        while True:
            try:
                self._tls.do_handshake()
                is_complete = True
            except ssl.SSLWantReadError:
                is_complete = False
            except ssl.SSLError as error:
                raise Broken(f"the TLS handshake failed ({error.reason})") from error
            self._unsent = memoryview(bytes(self._unsent) + self._outgoing.read())
            while not self._push():
                wait(self, select.POLLOUT, deadline)
            if is_complete:
                return
            while not self._pull():
                wait(self, select.POLLIN, deadline)

    def _push(self) -> bool:
        """Send encrypted bytes, and return whether all of them have left."""
        if len(self._unsent):
            self._unsent = self._unsent[super().write([self._unsent]) :]
        return not len(self._unsent)

    def _pull(self) -> bool:
        """Read encrypted bytes, and return whether any have come."""
        count = super().read([self._scratch])
        self._more_is_likely = count == len(self._scratch)
        with self._using_tls:
            self._incoming.write(self._scratch[:count])
        return count > 0

    def write(self, buffers: Sequence[memoryview]) -> int:
        if not self._push():
            return 0
        written = 0
        with self._using_tls:
            for piece in _records(buffers):
                written += self._tls.write(piece)
            self._unsent = memoryview(self._outgoing.read())
        self._push()
        return written

    def read(self, views: Sequence[memoryview]) -> int:
        total = 0
        for view in views:
            place = 0
            while place < len(view):
                try:
                    with self._using_tls:
                        count = self._tls.read(len(view) - place, view[place:])
                except ssl.SSLWantReadError:
                    if total and not self._more_is_likely:
                        return total
                    try:
                        if not self._pull():
                            return total
                    except Broken:
                        if not total:
                            raise
                        return total  # the next read raises it again
                    continue
                except ssl.SSLError as error:
                    raise Broken(f"the encrypted stream is damaged ({error.reason})") from error
                if count == 0:
                    raise Broken("closed by the other side")
                place += count
                total += count
        return total


def _records(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return pieces to encrypt at once: small ones are joined, so that header and payload share a record."""
    pieces: list[memoryview] = []
    small = bytearray()
    total = 0
    for buffer in buffers:
        part = buffer[: _AT_ONCE_BYTES - total]
        total += len(part)
        if small or len(part) < _RECORD_BYTES:
            fits = _RECORD_BYTES - len(small)
            small += part[:fits]
            part = part[fits:]
            if len(small) == _RECORD_BYTES:
                pieces.append(memoryview(small))
                small = bytearray()
        if len(part):
            pieces.append(part)
        if total == _AT_ONCE_BYTES:
            break
    if small:
        pieces.append(memoryview(small))
    return pieces


def wait(wire: Wire, events: int, deadline: float) -> None:
    """Wait until the socket may be read or written; TimeoutError at the deadline."""
    seconds_left = deadline - time.monotonic()
    poll = select.poll()
    try:
        poll.register(wire.socket, events)
    except ValueError as error:
        raise Broken("closed") from error
    if seconds_left <= 0 or not poll.poll(seconds_left * 1000):
        raise TimeoutError


def write_all(wire: Wire, data: bytes | memoryview, deadline: float) -> None:
    """Return when everything has left. Raises Broken or TimeoutError."""
    remaining = memoryview(data)
    while len(remaining) or wire.has_unsent:
        written = wire.write([remaining])
        remaining = remaining[written:]
        if wire.has_unsent or (not written and len(remaining)):
            wait(wire, select.POLLOUT, deadline)


def read_exactly(wire: Wire, count: int, deadline: float) -> bytes:
    """Return exactly `count` bytes. Raises Broken or TimeoutError."""
    data = bytearray(count)
    view = memoryview(data)
    while len(view):
        got = wire.read([view])
        view = view[got:]
        if not got:
            wait(wire, select.POLLIN, deadline)
    return bytes(data)


def unacknowledged_bytes(wire: Wire) -> int:
    """Return the bytes that the other machine has not acknowledged yet; 0 where this system does not report them."""
    if sys.platform != "linux":
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(wire.socket, termios.TIOCOUTQ, b"\0\0\0\0"), sys.byteorder)
    except (OSError, ValueError):
        return 0  # closed meanwhile
