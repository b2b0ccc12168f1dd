"""Relays the connections of pairs of devices that cannot reach each other: the relay's end.

    a ──────────▶ relay ◀────────── b       both connect to the relay, prove that they are members (TLS where the run
      hello: a, b       hello: b, a         is encrypted), and say whom they look for
      ◀── OPEN              OPEN ──▶        one plain byte: what follows goes straight through
      ◀═════════ bytes ═════════▶           preamble, TLS 1.3 and proofs between a and b themselves

What the relay forwards is the ordinary handshake and the TLS stream between the two devices, so it can count and delay
bytes and can end the connection, and no more. It never holds more than `BUFFER_BYTES` for each direction: it reads no
further from a device while the other does not take what it has sent, and TCP slows the sender down.

One thread serves all tunnels of a device. A tunnel ends when either device closes it, or after `IDLE_SECONDS` without a
byte: devices send each other a heartbeat every second.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field

from manyhands.facts.errors import Refused
from manyhands.transport.poller import READ, WRITE, Poller
from manyhands.transport.security import Security
from manyhands.transport.wire import Wire
from manyhands.transport.wire_hello import read_hello

BUFFER_BYTES = 256 * 1024
"""The bytes that are held for one direction of a tunnel."""
MOST_TUNNELS = 256
MOST_WAITING = 128
WAITING_SECONDS = 8.0
"""The time that a device waits at the relay for the other one."""
IDLE_SECONDS = 60.0
OPEN, ABSENT, FULL, BAD = b"\1", b"\2", b"\3", b"\4"
"""The relay's answer: the tunnel is open; the other device has not come; too many tunnels; a hello that is none."""
_LOOK_SECONDS = 0.25


@dataclass(eq=False)
class _End:
    """One device's end of a tunnel, and what has come from it and is not at the other end yet."""

    socket: socket.socket
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(BUFFER_BYTES)))
    first: int = 0
    last: int = 0
    has_ended: bool = False
    """Whether the device sends nothing more."""
    events: int = 0
    is_watched: bool = False

    @property
    def pending(self) -> memoryview:
        return self.buffer[self.first : self.last]


@dataclass(eq=False)
class _Tunnel:
    ends: tuple[_End, _End]
    used_at: float

    def other(self, end: _End) -> _End:
        return self.ends[end is self.ends[0]]


class Relay:
    """A device's tunnels for pairs of others. It costs a thread once the first pair has asked."""

    def __init__(self, name: str, security: Security) -> None:
        self.name, self._security = name, security
        self.forwarded_bytes = 0
        self._waiting: dict[tuple[str, str], tuple[Wire, float]] = {}
        """(Device, the one that it looks for) -> its connection, and until when it waits."""
        self._opened: list[_Tunnel] = []
        """Tunnels that the thread has not taken over yet."""
        self._tunnels: set[_Tunnel] = set()
        self._lock = threading.Lock()
        self._poller: Poller[tuple[_Tunnel, _End] | None] = Poller()
        self._alarm, self._bell = socket.socketpair()
        for end in (self._alarm, self._bell):
            end.setblocking(False)
        self._poller.register(self._alarm, READ, None)
        self._thread: threading.Thread | None = None
        self._is_closing = False

    @property
    def tunnel_count(self) -> int:
        return len(self._tunnels) + len(self._opened)

    # In the threads of devices that connect

    def receive(self, wire: Wire) -> None:
        """Take a device that has proven that it is a member: pair it with the other one, or let it wait."""
        deadline = time.monotonic() + self._security.handshake_seconds
        hello = read_hello(wire, deadline)
        name, peer = hello.get("from", ""), hello.get("to", "")
        if not name or not peer or name == peer or self.name in (name, peer) or wire.has_unread:
            _answer(wire, BAD)
            raise Refused(f"'{name:.64}' asks for a tunnel to '{peer:.64}', which makes no sense at {self.name}.")
        partner = older = None
        with self._lock:
            is_full = self._is_closing or self.tunnel_count >= MOST_TUNNELS
            if not is_full:
                partner = self._waiting.pop((peer, name), None)
            if not is_full and partner is None:
                older = self._waiting.pop((name, peer), None)
                is_full = len(self._waiting) >= MOST_WAITING
            if not is_full and partner is None:
                until = time.monotonic() + WAITING_SECONDS * self._security.timeout_factor
                self._waiting[name, peer] = wire, until
            self._start()
        if older is not None:
            older[0].close()
        if is_full:
            _answer(wire, FULL)
            raise Refused(f"{self.name} relays as many connections as it may.")
        if partner is not None:
            self._open(partner[0], wire)

    def _open(self, first: Wire, second: Wire) -> None:
        tunnel = _Tunnel((_End(first.socket), _End(second.socket)), time.monotonic())
        if not all(_send(end.socket, OPEN) for end in tunnel.ends):  # one has gone while it waited
            for end in tunnel.ends:
                end.socket.close()
            return
        with self._lock:
            if not self._is_closing:
                self._opened.append(tunnel)
                self._ring()
                return
        for end in tunnel.ends:
            end.socket.close()

    def _start(self) -> None:
        if self._thread is None and not self._is_closing:
            self._thread = threading.Thread(target=self._run, name=f"relay {self.name}", daemon=True)
            self._thread.start()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")

    # In the relay's own thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for entry, mask in self._poller.poll(_LOOK_SECONDS):
                    if entry is None:
                        self._alarm.recv(4096)
                    elif entry[0] in self._tunnels:
                        self._serve(*entry, mask)
                self._take_over()
                self._tidy(time.monotonic())
        finally:
            for tunnel in list(self._tunnels):
                self._end(tunnel)
            self._poller.close()
            self._alarm.close()

    def _take_over(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, []
            self._tunnels.update(opened)
        for tunnel in opened:
            for end in tunnel.ends:
                end.events, end.is_watched = READ, True
                self._poller.register(end.socket, READ, (tunnel, end))

    def _serve(self, tunnel: _Tunnel, end: _End, mask: int) -> None:
        tunnel.used_at = time.monotonic()
        if not end.events:  # a hang-up, of which the poller would tell again and again
            self._unwatch(end)
        try:
            if mask & WRITE:
                self._pass_on(tunnel.other(end), end)
            if mask & READ and not end.has_ended and end.first == end.last:
                count = end.socket.recv_into(end.buffer)
                end.has_ended = count == 0
                end.first, end.last = 0, count
                self._pass_on(end, tunnel.other(end))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._end(tunnel)
            return
        if all(side.has_ended and side.first == side.last for side in tunnel.ends):
            self._end(tunnel)
            return
        for side in tunnel.ends:
            wants = READ if not side.has_ended and side.first == side.last else 0
            wants |= WRITE if len(tunnel.other(side).pending) else 0
            if wants != side.events and side.is_watched:
                side.events = wants
                self._poller.modify(side.socket, wants, (tunnel, side))

    def _pass_on(self, source: _End, target: _End) -> None:
        """Send what has come from `source`; where it has ended and all has left, end the other way too."""
        if len(source.pending):
            try:
                count = target.socket.send(source.pending)
            except (BlockingIOError, InterruptedError):
                return
            source.first += count
            self.forwarded_bytes += count
        if source.has_ended and source.first == source.last:
            target.socket.shutdown(socket.SHUT_WR)

    def _tidy(self, now: float) -> None:
        """Send away the devices that have waited too long, and end tunnels that nobody uses."""
        with self._lock:
            overdue = [pair for pair, (_, until) in self._waiting.items() if now > until]
            wires = [self._waiting.pop(pair)[0] for pair in overdue]
        for wire in wires:
            _answer(wire, ABSENT)
        for tunnel in [idle for idle in self._tunnels if now - idle.used_at > IDLE_SECONDS]:
            self._end(tunnel)

    def _end(self, tunnel: _Tunnel) -> None:
        self._tunnels.discard(tunnel)
        for end in tunnel.ends:
            self._unwatch(end)
            with contextlib.suppress(OSError):
                end.socket.shutdown(socket.SHUT_RDWR)
            end.socket.close()

    def _unwatch(self, end: _End) -> None:
        if end.is_watched:
            end.is_watched = False
            self._poller.unregister(end.socket)

    def close(self) -> None:
        """End every tunnel and the thread: the devices at their ends notice at once."""
        with self._lock:
            self._is_closing = True
            wires = [wire for wire, _ in self._waiting.values()]
            opened, self._opened = self._opened, []
            self._waiting.clear()
        for wire in wires:
            wire.close()
        for tunnel in opened:
            for end in tunnel.ends:
                end.socket.close()
        self._ring()
        if self._thread is not None:
            self._thread.join(2.0)
        else:
            self._poller.close()
            self._alarm.close()
        self._bell.close()


def _send(connected: socket.socket, content: bytes) -> bool:
    """Send a byte, for which there is always room, and return whether the connection still stood."""
    try:
        return connected.send(content) == len(content)
    except OSError:
        return False


def _answer(wire: Wire, verdict: bytes) -> None:
    """Send a device away."""
    _send(wire.socket, verdict)
    wire.close()
