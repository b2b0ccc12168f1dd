"""The engine between processes and machines: one TCP connection per pair of devices, one thread for all of them
(and whoever waits for a message helps it, see `wheel`).

    endpoint = TcpEndpoint("pi-1", security, host="192.168.1.11")
    endpoint.connect({"pi-2": ("192.168.1.12", 40123)}, limit_seconds=30)
    endpoint.mailbox.open(generation, expected)
    endpoint.send("pi-2", step, topic, [tensor])

It reads everything that comes, whether anybody waits for it or not, so devices that send to each other never
wait for each other. Between processes of one machine the payloads of larger messages go through memory in common,
where both can see it (`sharing`); everything else is the same.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from manyhands.engine.door import Door
from manyhands.engine.endpoint import Address, Peers
from manyhands.engine.frames import (
    ANSWER,
    CHUNK_BYTES,
    LONGEST_TOPIC,
    OFFER,
    SHARED_CHUNK_BYTES,
    BadFrame,
    Header,
    control,
)
from manyhands.engine.inbox import Inbox
from manyhands.engine.mailbox import WAIT_LIMIT_SECONDS, Mailbox, Memory, as_bytes
from manyhands.engine.meeting import Meeting
from manyhands.engine.outbox import Outbox, Outgoing, Precedence
from manyhands.engine.poller import READ, WRITE, Poller
from manyhands.engine.security import Security, is_loopback
from manyhands.engine.shaping import Port, Shaper
from manyhands.engine.sharing import Sharing, SharingSetting
from manyhands.engine.wheel import Wheel
from manyhands.engine.wire import Broken, Wire, unacknowledged_bytes
from manyhands.facts.errors import BadValue, TimedOut, WorkerLost
from manyhands.facts.link import HERE, Link

SILENCE_SECONDS = 6.0
"""A connection without a byte for this long is lost. A peer that computes keeps beating, unless it holds the
interpreter's lock: which lasts a second or two at most."""
_BEAT_SECONDS = 1.0
_AT_ONCE_BYTES = 4 * 2**20
"""How much one connection is read or written before others get their turn."""
_LITTLE_BYTES = 64 * 1024
"""Less than this in one look came over a slow link, or was all there is."""
_SHARED_AT_ONCE_BYTES = 2 * SHARED_CHUNK_BYTES
"""How much a sender's own thread puts into memory in common: to wake the engine's thread takes longer than that."""
_FLUSH_POLL_SECONDS = 0.001
_SEGMENTS_AT_ONCE = 16
"""How much leaves over shaped links before the sockets are looked at again."""


def is_far(wire: Wire) -> bool:
    """Whether bytes come over a network; of a connection that is gone again, whoever reads next finds out."""
    try:
        return not is_loopback(str(wire.socket.getpeername()[0]))
    except OSError:
        return False


class Connection:
    """To one peer."""

    def __init__(
        self,
        peer: str,
        wire: Wire,
        mailbox: Mailbox,
        setting: SharingSetting,
        on_answer: Callable[[Connection], None],
        precedence: Precedence,
    ) -> None:
        self.peer, self.wire, self._on_answer = peer, wire, on_answer
        self.outbox, self.inbox = Outbox(wire, precedence), Inbox(peer, wire, mailbox, self._hear)
        self.sharing = Sharing(wire, setting)
        self._is_far = is_far(wire)
        self.outbox.smallest_shared_bytes = setting.smallest_bytes
        self.heard_at = time.monotonic()
        self.frames_at_last_beat = 0
        self.events = READ
        self.is_registered = False

    @property
    def trickles(self) -> bool:
        """Whether a message comes in parts, over a network."""
        return self.inbox.is_inside and self._is_far

    def offer_sharing(self) -> None:
        """From any thread, before the first large message."""
        with self.outbox.writing:  # not while it is closed
            content = self.sharing.offer() if self.sharing.may_offer and not self.outbox.is_shaped else None
        if content is not None:
            self.outbox.put(Outgoing(control(OFFER, len(content)), [memoryview(content)]), urgent=True)

    def _hear(self, topic: str, content: bytes) -> None:
        """What the other engine says; called by whoever holds the wheel."""
        if topic == OFFER:
            answer = self.sharing.answer(content, is_welcome=not self.outbox.is_shaped)
            self.inbox.ring = self.sharing.emptying
            views = [memoryview(answer)] if answer else []
            self.outbox.put(Outgoing(control(ANSWER, len(answer)), views), urgent=True)
            self._on_answer(self)
        elif topic == ANSWER:
            self.sharing.conclude(content)
            self.outbox.ring = self.sharing.filling

    def close(self) -> None:
        with self.outbox.writing:
            self.wire.close()
            self.outbox.ring = self.inbox.ring = None
            self.sharing.close()


class TcpEndpoint:
    """One device's connections. See `endpoint.Endpoint`."""

    def __init__(
        self,
        name: str,
        security: Security,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limit_seconds: float = WAIT_LIMIT_SECONDS,
        silence_seconds: float | None = None,
        sharing: SharingSetting | None = None,
        door: Door | None = None,
    ) -> None:
        """`door`: where peers come in, in place of one of its own at `host` and `port`."""
        self.name = name
        self.mailbox = Mailbox(name, limit_seconds=limit_seconds)
        self.sent_bytes: Counter[str] = Counter()
        self.silence_seconds = silence_seconds = silence_seconds or SILENCE_SECONDS * security.patience
        self.sharing = sharing or SharingSetting.of_environment()
        self.beat_seconds = min(_BEAT_SECONDS, silence_seconds / 4)
        self._connections: dict[str, Connection] = {}
        self._lost: set[str] = set()
        self._met_at: dict[str, int] = {}
        """The port of each peer when it was last named."""
        self._wanted: set[str] = set()
        """Whom a `connect` under way is to reach."""
        self._lock = threading.Lock()
        self._is_closing = False
        self._asked: deque[Callable[[], None]] = deque()
        """What whoever holds the wheel is to do next: only he touches the selector and closes wires."""
        self._buffered: set[Connection] = set()
        self._writers: set[Connection] = set()
        self._links: dict[str, Link] = {}
        self._up_bytes_per_second = math.inf
        self._port = Port()
        self._precedence = Precedence(on_gone=lambda: self._ask(self._write_everywhere))
        self._held: dict[Connection, float] = {}
        """Shaped connections with something to send, and when it is due."""
        self._poller: Poller[Connection | None] = Poller()
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self._poller.register(self._alarm, READ, None)
        self._looked_at = time.monotonic()
        self._beaten_at = math.inf  # not before there is a meeting, which a beat tidies
        self._wheel = Wheel(f"engine {name}", self._turn, self._ring, self._has_work, self._end, self.beat_seconds / 2)
        self.mailbox.helper = self._wheel
        try:
            self._meeting = Meeting(name, security, host, port, self._install, self.is_connected, door)
        except BaseException:
            self._wheel.close()
            raise
        self._beaten_at = time.monotonic()
        self.address = self._meeting.address

    # What executors call

    def connect(self, peers: Peers, limit_seconds: float) -> None:
        """Have a connection to every one of these; to be called on all of them, in any order.

        Of two devices the one with the smaller name connects and the other waits for it, unless their addresses say
        who does. Live connections are kept.
        Refused where one will not have us, TimedOut names those that are missing.
        """
        wanted = {peer: peers[peer] for peer in peers if peer != self.name}
        for peer in wanted:
            self._forget_elsewhere(peer, Address.of(peers[peer]).port)
        self._wanted = set(wanted)
        try:
            self._meeting.gather(wanted, limit_seconds)
        finally:
            self._wanted = set()

    def _forget_elsewhere(self, peer: str, port: int) -> None:
        """Drop a connection to an earlier process of this name, which had another port: its end may not have been heard
        of, and whoever has its name now would wait for one."""
        before, self._met_at[peer] = self._met_at.get(peer, port), port
        connection = self._connections.get(peer)
        if connection is not None and before != port:
            self._lose(connection, "another process has its name now")

    def is_connected(self, peer: str) -> bool:
        return peer in self._connections

    def silent_peers(self) -> dict[str, float]:
        """See `transport.ConnectedEndpoint`."""
        now, noted = time.monotonic(), 2 * self.beat_seconds
        found = {peer: now - connection.heard_at for peer, connection in list(self._connections.items())}
        return {peer: seconds for peer, seconds in found.items() if seconds > noted}

    def missing_peers(self) -> set[str]:
        """See `transport.ConnectedEndpoint`."""
        return {peer for peer in self._wanted if peer not in self._connections}

    def send(self, to: str, step: int, topic: str, parts: Sequence[Memory], *, urgent: bool = False) -> None:
        """Hand a message over. The first chunk leaves in this thread if the link has room, the rest in the engine's."""
        connection = self._connections.get(to)
        if connection is None:
            if to in self._lost:
                return
            known = ", ".join(sorted(self._connections)) or "nobody"
            raise WorkerLost(
                f"{self.name} cannot send '{topic:.200}' to {to}: it was never connected to it, only to {known}.",
                hint="Call connect() with its address first.",
            )
        views = [view for view in map(as_bytes, parts) if len(view)]
        size = sum(map(len, views))
        if len(topic) > LONGEST_TOPIC:  # found here, before anything is queued
            raise BadValue(f"'{topic:.80}...' is a name of {len(topic)} letters; at most {LONGEST_TOPIC} travel.")
        with self._lock:
            self.sent_bytes[to] += size
        outbox = connection.outbox
        longest = CHUNK_BYTES if outbox.ring is None else SHARED_CHUNK_BYTES
        start = Header(self.name, self.mailbox.generation, step, topic, size, 0, min(size, longest))
        if size >= self.sharing.smallest_bytes and connection.sharing.may_offer and not outbox.is_shaped:
            connection.offer_sharing()
        try:
            most_bytes = CHUNK_BYTES if outbox.ring is None else _SHARED_AT_ONCE_BYTES
            if outbox.send_now(start, views):
                is_left = outbox.has_work and outbox.pump(most_bytes)  # somebody may have added to it meanwhile
            else:
                outbox.put(Outgoing(start, views), urgent=urgent)
                is_left = outbox.pump(most_bytes)
            if is_left:
                self._ask(partial(self._go_on_writing, connection))
        except Broken as error:
            self._lose(connection, str(error))

    def release(self) -> None:
        """What has not left is copied: the senders' memory may change from now on."""
        for connection in list(self._connections.values()):
            connection.outbox.release()  # asked without its lock, one with its last piece in hand seems to have no work
            if connection.outbox.has_work:
                self._ask(partial(self._go_on_writing, connection))  # whoever found it busy left the writing to us

    def flush(self, limit_seconds: float) -> None:
        """Wait until everything handed over has arrived in the memory of the peers' machines."""
        deadline = time.monotonic() + limit_seconds
        while True:
            busy = [
                connection.peer
                for connection in list(self._connections.values())
                if connection.outbox.is_busy or unacknowledged_bytes(connection.wire)
            ]
            if not busy:
                return
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"{self.name} still has messages for {', '.join(sorted(busy))} after {limit_seconds:g} s.",
                    hint="The link is slow or its other end does not read.",
                )
            time.sleep(_FLUSH_POLL_SECONDS)

    def shape(self, links: Mapping[str, Link], up_bytes_per_second: float = math.inf) -> None:
        """From now on, what leaves to these peers does so no faster than its link, and all of it together no faster
        than `up_bytes_per_second`; a message's first byte leaves when the link's delay has passed.

        Links to other peers are as they are; so are, from the next call on, those that it does not name. Connections
        made later to these names are shaped too. What counts are the bytes of frames, not what TLS and TCP add. The
        receiver's port (its `down` rate) is not modelled: senders do not know of each other.
        """
        if not up_bytes_per_second > 0:
            raise BadValue(f"{self.name}'s port has a rate of {up_bytes_per_second} B/s; it must be > 0.")
        is_limited = up_bytes_per_second < math.inf
        with self._lock:
            self._links = {peer: link for peer, link in links.items() if is_limited or link != HERE}
            self._up_bytes_per_second = up_bytes_per_second
            for connection in self._connections.values():
                if connection.peer in self._links:
                    connection.outbox.expect_shaping()
        self._ask(self._reshape)

    def lose(self, peer: str) -> None:
        """Drop the connection to one peer, here and there."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._lose(connection, f"{self.name} dropped it")

    def close(self) -> None:
        """End the thread and every connection. Waits for a peer fail; messages that have come can still be received."""
        if self._is_closing:
            return
        self._is_closing = True
        self._meeting.close()
        self._wheel.close()

    # Connections come and go

    def _install(self, peer: str, wire: Wire) -> None:
        connection = Connection(peer, wire, self.mailbox, self.sharing, self._write_soon, self._precedence)
        with self._lock:
            if self._is_closing or peer in self._connections:
                raise Broken("closed" if self._is_closing else f"{peer} is connected already")
            if peer in self._links:
                connection.outbox.expect_shaping()
            self._connections[peer] = connection
            self._lost.discard(peer)
        self.mailbox.join(peer)
        self._ask(partial(self._register, connection))

    def _lose(self, connection: Connection, reason: str) -> None:
        """From any thread: whoever waits for this peer fails now, the descriptor goes when the thread gets to it."""
        with self._lock:
            if self._connections.get(connection.peer) is not connection:
                return
            del self._connections[connection.peer]
            self._lost.add(connection.peer)
        self._meeting.forget(connection.peer)
        connection.wire.shut()
        self._precedence.end(connection.outbox)
        self.mailbox.lose(
            connection.peer,
            WorkerLost(
                f"{connection.peer} was lost: its connection to {self.name} broke ({reason}).",
                hint=f"See the log of {connection.peer}; start it again and it joins.",
            ),
        )
        self._ask(partial(self._discard, connection))

    # What whoever holds the wheel does

    def _ask(self, what: Callable[[], None]) -> None:
        self._asked.append(what)
        self._wheel.wake()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it will be heard anyway; closed: nobody listens
            self._bell.send(b"\0")

    def _has_work(self) -> bool:
        return bool(self._asked or self._writers or self._buffered or self._held)

    def _turn(self, limit_seconds: float) -> bool:
        """Look at the sockets once and serve those that are ready. Whether all that came were small parts of larger
        messages from other machines."""
        if self._buffered or self._asked:
            limit_seconds = 0.0
        if self._held:
            left = min(self._held.values()) - time.monotonic()
            ready = self._poller.poll_precisely(max(0.0, min(limit_seconds, left)))
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
        if now - self._beaten_at >= self.beat_seconds:
            self._beaten_at = now
            self._beat(now)
        return 0 < came < _LITTLE_BYTES and all(one is None or one.trickles for one, _ in ready)

    def _pardon(self, now: float) -> None:
        """This process itself did not run for a while (a suspended laptop): nobody else was silent."""
        for connection in self._connections.values():
            connection.heard_at = now

    def _serve(self, connection: Connection, mask: int, now: float) -> int:
        """How many bytes were read."""
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
            self._lose(connection, str(error))
        except BadFrame as error:
            self._lose(connection, f"what it sent is no frame: {error}")
        return came

    def _write_soon(self, connection: Connection) -> None:
        """Said inside a turn of the wheel, which ends with what was asked."""
        self._asked.append(partial(self._go_on_writing, connection))

    def _go_on_writing(self, connection: Connection) -> None:
        outbox = connection.outbox
        try:
            is_left = self._hold(connection) if outbox.is_shaped else outbox.pump(_AT_ONCE_BYTES)
        except Broken as error:
            self._held.pop(connection, None)
            self._lose(connection, str(error))
            return
        events = READ | (WRITE if is_left else 0)
        if connection.is_registered and events != connection.events:
            self._poller.modify(connection.wire.socket, events, connection)
            connection.events = events
            (self._writers.add if is_left else self._writers.discard)(connection)

    def _write_everywhere(self) -> None:
        """Bulk that stood back goes on."""
        for connection in list(self._connections.values()):
            if connection.outbox.has_work:
                self._go_on_writing(connection)

    def _hold(self, connection: Connection) -> bool:
        """Write what the shaper lets through, and note when to go on. Whether the link is full."""
        due = connection.outbox.pump_shaped(time.monotonic())
        if due < math.inf and self._connections.get(connection.peer) is connection:
            self._held[connection] = due
        else:
            self._held.pop(connection, None)
        return connection.outbox.is_blocked

    def _serve_held(self) -> None:
        """In the order in which they are due: so they share the port."""
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
        """All of them at once, for they share the port."""
        now = time.monotonic()
        with self._lock:
            connections = list(self._connections.values())
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
        if self._connections.get(connection.peer) is not connection:
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

    def _beat(self, now: float) -> None:
        """Say that we are alive where nothing else was said; see who has not."""
        for connection in list(self._connections.values()):
            silent_seconds = now - connection.heard_at
            if silent_seconds > self.silence_seconds:
                self._lose(connection, f"silent for {silent_seconds:.1f} s")
                continue
            outbox = connection.outbox
            is_busy = outbox.is_inside_a_frame if outbox.is_shaped else outbox.has_work
            if outbox.frames == connection.frames_at_last_beat and not is_busy:
                outbox.put_beat()
                self._go_on_writing(connection)
            connection.frames_at_last_beat = outbox.frames
        if not self._is_closing:
            self._meeting.tidy()

    def _end(self) -> None:
        for connection in list(self._connections.values()):
            self._lose(connection, f"{self.name} was closed")
        while self._asked:
            self._asked.popleft()()
        self._close_own_descriptors()

    def _close_own_descriptors(self) -> None:
        self._poller.close()
        self._alarm.close()
        self._bell.close()
