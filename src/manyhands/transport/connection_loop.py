"""Moves the bytes of all of a device's TCP connections, in one thread at a time.

Whichever thread runs the event loop at the moment (`event_loop`) is the only one that touches the poller and closes
wires. Other threads leave work for it with `ask`. It reads everything that comes, whether any thread waits for it or
not, so devices that send to each other never block each other.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from manyhands.facts.errors import WorkerLost
from manyhands.facts.link import Link
from manyhands.transport.connection import Connection
from manyhands.transport.event_loop import EventLoop
from manyhands.transport.frames import BadFrame
from manyhands.transport.mailbox import Mailbox
from manyhands.transport.outbox import Precedence
from manyhands.transport.poller import READ, WRITE, Poller
from manyhands.transport.shaping import Port, Shaper
from manyhands.transport.sharing import SharingSetting
from manyhands.transport.wire import Broken, Wire

_HEARTBEAT_SECONDS = 1.0
_AT_ONCE_BYTES = 4 * 2**20
"""The bytes that are read from or written to one connection before others get their turn."""
_LITTLE_BYTES = 64 * 1024
"""Less than this in one look came over a slow link, or was all there is."""
_SEGMENTS_AT_ONCE = 16
"""The segments that leave over shaped links before the sockets are looked at again."""


class ConnectionLoop:
    """The connections of one device and the event loop that serves them."""

    def __init__(
        self,
        name: str,
        mailbox: Mailbox,
        sharing: SharingSetting,
        silence_seconds: float,
        on_lost: Callable[[str], None],
        on_heartbeat: Callable[[], None],
    ) -> None:
        """Start the event loop. `on_lost` is called in any thread with each peer whose connection ended;
        `on_heartbeat` at every heartbeat."""
        self.name, self.silence_seconds = name, silence_seconds
        self._mailbox, self._sharing, self._on_lost, self._on_heartbeat = mailbox, sharing, on_lost, on_heartbeat
        self.heartbeat_seconds = min(_HEARTBEAT_SECONDS, silence_seconds / 4)
        self.connections: dict[str, Connection] = {}
        self.lost: set[str] = set()
        """Peers whose connection ended and was not made again."""
        self.lock = threading.Lock()
        self._is_closing = False
        self._asked: deque[Callable[[], None]] = deque()
        """Work for the thread that runs the event loop, in order."""
        self._buffered: set[Connection] = set()
        self._writers: set[Connection] = set()
        self._links: Mapping[str, Link] = {}
        self._up_bytes_per_second = math.inf
        self._port = Port()
        self._precedence = Precedence(on_gone=lambda: self.ask(self._write_everywhere))
        self._held: dict[Connection, float] = {}
        """Shaped connections with something to send, and when it is due."""
        self._poller: Poller[Connection | None] = Poller()
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self._poller.register(self._alarm, READ, None)
        self._looked_at = time.monotonic()
        self._last_heartbeat_at = math.inf
        self._event_loop = EventLoop(
            f"engine {name}", self._turn, self._ring, self._has_work, self._end, self.heartbeat_seconds / 2
        )
        mailbox.let_help(self._event_loop)

    def start_heartbeats(self) -> None:
        """Send heartbeats from now on, and call `on_heartbeat`."""
        self._last_heartbeat_at = time.monotonic()

    def stop_accepting(self) -> None:
        """Refuse connections from now on."""
        self._is_closing = True

    def close(self) -> None:
        """End the thread and every connection."""
        self._is_closing = True
        self._event_loop.close()

    # From any thread

    def ask(self, work: Callable[[], None]) -> None:
        """Make the thread that runs the event loop do this work soon."""
        self._asked.append(work)
        self._event_loop.wake()

    def ask_to_write(self, connection: Connection) -> None:
        """Make the event loop write what is left in a connection's outbox soon."""
        self.ask(partial(self._go_on_writing, connection))

    def install(self, peer: str, wire: Wire) -> None:
        """Add a connection; Broken where there is one to this peer already."""
        connection = Connection(peer, wire, self._mailbox, self._sharing, self._write_soon, self._precedence)
        with self.lock:
            if self._is_closing or peer in self.connections:
                raise Broken("closed" if self._is_closing else f"{peer} is connected already")
            if peer in self._links:
                connection.outbox.expect_shaping()
            self.connections[peer] = connection
            self.lost.discard(peer)
        self._mailbox.join(peer)
        self.ask(partial(self._register, connection))

    def lose(self, connection: Connection, reason: str) -> None:
        """End a connection: waits for its peer fail now, the descriptor is closed when the event loop gets to it."""
        with self.lock:
            if self.connections.get(connection.peer) is not connection:
                return
            del self.connections[connection.peer]
            self.lost.add(connection.peer)
        self._on_lost(connection.peer)
        connection.wire.shut()
        self._precedence.end(connection.outbox)
        self._mailbox.lose(
            connection.peer,
            WorkerLost(
                f"{connection.peer} was lost: its connection to {self.name} broke ({reason}).",
                hint=f"See the log of {connection.peer}; start it again and it joins.",
            ),
        )
        self.ask(partial(self._discard, connection))

    def shape(self, links: Mapping[str, Link], up_bytes_per_second: float) -> None:
        """Shape what leaves to these peers, and no others, from now on."""
        with self.lock:
            self._links = links
            self._up_bytes_per_second = up_bytes_per_second
            for connection in self.connections.values():
                if connection.peer in self._links:
                    connection.outbox.expect_shaping()
        self.ask(self._reshape)

    # In the thread that runs the event loop

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes the loop anyway; closed: nothing is left to wake
            self._bell.send(b"\0")

    def _has_work(self) -> bool:
        return bool(self._asked or self._writers or self._buffered or self._held)

    def _turn(self, limit_seconds: float) -> bool:
        """Look at the sockets once, serve those that are ready, and return whether all that came were small parts of
        larger messages from other machines."""
        if self._buffered or self._asked:
            limit_seconds = 0.0
        if self._held:
            seconds_left = min(self._held.values()) - time.monotonic()
            ready = self._poller.poll_precisely(max(0.0, min(limit_seconds, seconds_left)))
        else:
            ready = self._poller.poll(limit_seconds)
        now = time.monotonic()
        if now - self._looked_at > self.silence_seconds / 2:
            self._pardon(now)
        self._looked_at = now
        came = 0
        for connection, mask in ready:
            if connection is None:
                self._alarm.recv(4096)
            else:
                came += self._serve(connection, mask, now)
        for connection in list(self._buffered) if self._buffered else ():
            came += self._serve(connection, READ, now)
        while self._asked:
            self._asked.popleft()()
        if self._held:
            self._serve_held()
        if now - self._last_heartbeat_at >= self.heartbeat_seconds:
            self._last_heartbeat_at = now
            self._send_heartbeats(now)
        return 0 < came < _LITTLE_BYTES and all(entry is None or entry.trickles for entry, _ in ready)

    def _pardon(self, now: float) -> None:
        """Reset every peer's silence: this process itself did not run for a while (a suspended laptop)."""
        for connection in self.connections.values():
            connection.heard_at = now

    def _serve(self, connection: Connection, mask: int, now: float) -> int:
        """Read and write what a connection is ready for; return how many bytes were read."""
        came = 0
        try:
            if mask & READ:
                came = connection.inbox.read(_AT_ONCE_BYTES)
                if came:
                    connection.heard_at = now
                if connection.wire.has_unread:
                    self._buffered.add(connection)
                else:
                    self._buffered.discard(connection)
            if mask & WRITE:
                connection.outbox.is_blocked = False
                self._go_on_writing(connection)
        except Broken as error:
            self.lose(connection, str(error))
        except BadFrame as error:
            self.lose(connection, f"what it sent is no frame: {error}")
        return came

    def _write_soon(self, connection: Connection) -> None:
        """Write at the end of this turn: called inside one, which ends with the work that was left for it."""
        self._asked.append(partial(self._go_on_writing, connection))

    def _go_on_writing(self, connection: Connection) -> None:
        outbox = connection.outbox
        try:
            is_left = self._hold(connection) if outbox.is_shaped else outbox.pump(_AT_ONCE_BYTES)
        except Broken as error:
            self._held.pop(connection, None)
            self.lose(connection, str(error))
            return
        events = READ | (WRITE if is_left else 0)
        if connection.is_registered and events != connection.events:
            self._poller.modify(connection.wire.socket, events, connection)
            connection.events = events
            (self._writers.add if is_left else self._writers.discard)(connection)

    def _write_everywhere(self) -> None:
        """Resume bulk messages that waited for urgent ones."""
        for connection in list(self.connections.values()):
            if connection.outbox.has_work:
                self._go_on_writing(connection)

    def _hold(self, connection: Connection) -> bool:
        """Write what the shaper lets through, and note when to go on; return whether the link is full."""
        due = connection.outbox.pump_shaped(time.monotonic())
        if due < math.inf and self.connections.get(connection.peer) is connection:
            self._held[connection] = due
        else:
            self._held.pop(connection, None)
        return connection.outbox.is_blocked

    def _serve_held(self) -> None:
        """Write to shaped connections in the order in which they are due, so that they share the port."""
        now = time.monotonic()
        for _ in range(_SEGMENTS_AT_ONCE):
            connection = min(self._held, key=self._held.__getitem__, default=None)
            if connection is None or self._held[connection] > now:
                return
            self._go_on_writing(connection)

    def _reshape(self) -> None:
        for connection in self._fit_shapers():
            self._go_on_writing(connection)

    def _fit_shapers(self) -> list[Connection]:
        """Give every connection the shaper of its link, all at once, because they share the port."""
        now = time.monotonic()
        with self.lock:
            connections = list(self.connections.values())
            for connection in connections:
                if connection.outbox.shaper is not None:
                    connection.outbox.shaper.cancel(now)
            self._port.bytes_per_second = self._up_bytes_per_second
            for connection in connections:
                link, shaper = self._links.get(connection.peer), connection.outbox.shaper
                if link is None:
                    shaper = None
                    self._held.pop(connection, None)
                elif shaper is None:
                    shaper = Shaper(link, self._port, now)
                else:
                    shaper.link = link
                connection.outbox.shape(shaper)
        return connections

    def _register(self, connection: Connection) -> None:
        if self.connections.get(connection.peer) is not connection:
            return
        self._poller.register(connection.wire.socket, connection.events, connection)
        connection.is_registered = True
        self._fit_shapers()
        self._serve(connection, READ, time.monotonic())  # what came with the handshake
        self._go_on_writing(connection)

    def _discard(self, connection: Connection) -> None:
        if connection.is_registered:
            connection.is_registered = False
            self._poller.unregister(connection.wire.socket)
        self._buffered.discard(connection)
        self._writers.discard(connection)
        self._held.pop(connection, None)
        connection.close()

    def _send_heartbeats(self, now: float) -> None:
        """Send a heartbeat where nothing else was sent, and lose the peers whose heartbeats have stopped."""
        for connection in list(self.connections.values()):
            silent_seconds = now - connection.heard_at
            if silent_seconds > self.silence_seconds:
                self.lose(connection, f"silent for {silent_seconds:.1f} s")
                continue
            outbox = connection.outbox
            is_busy = outbox.is_inside_a_frame if outbox.is_shaped else outbox.has_work
            if outbox.frames == connection.frames_at_last_heartbeat and not is_busy:
                outbox.put_heartbeat()
                self._go_on_writing(connection)
            connection.frames_at_last_heartbeat = outbox.frames
        if not self._is_closing:
            self._on_heartbeat()

    def _end(self) -> None:
        for connection in list(self.connections.values()):
            self.lose(connection, f"{self.name} was closed")
        while self._asked:
            self._asked.popleft()()
        self._poller.close()
        self._alarm.close()
        self._bell.close()
