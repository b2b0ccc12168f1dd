"""The transport between processes and machines: one TCP connection per pair of devices, one thread for all of them.

    endpoint = TcpEndpoint("pi-1", security, host="192.168.1.11")
    endpoint.connect({"pi-2": ("192.168.1.12", 40123)}, limit_seconds=30)
    endpoint.mailbox.open(generation, expected)
    endpoint.send("pi-2", step, topic, [tensor])

`connection_loop` moves the bytes. Between processes of one machine the payloads of larger messages go through shared
memory where both can see it (`sharing`); everything else is the same.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from manyhands.facts.errors import BadValue, TimedOut, WorkerLost
from manyhands.facts.link import HERE, Link
from manyhands.transport.connection_loop import ConnectionLoop
from manyhands.transport.endpoint import Address, Peers
from manyhands.transport.frames import BELL, CHUNK_BYTES, LONGEST_TOPIC, SHARED_CHUNK_BYTES, Header
from manyhands.transport.listener import PeerListener
from manyhands.transport.mailbox import WAIT_LIMIT_SECONDS, Mailbox
from manyhands.transport.memory import Memory, as_bytes
from manyhands.transport.outbox import Outgoing
from manyhands.transport.rendezvous import PeerRendezvous
from manyhands.transport.security import Security
from manyhands.transport.sharing import SharingSetting
from manyhands.transport.wire import Broken, unacknowledged_bytes

HEARTBEAT_TIMEOUT_SECONDS = 6.0
"""A connection without a byte for this long is lost. A peer that computes keeps sending heartbeats, unless it holds the
interpreter's lock, which lasts a second or two at most."""
_SHARED_AT_ONCE_BYTES = 2 * SHARED_CHUNK_BYTES
"""The bytes that a sender's own thread puts into shared memory: waking the transport's thread takes longer than
that."""
_FLUSH_POLL_SECONDS = 0.001


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
        peer_listener: PeerListener | None = None,
    ) -> None:
        """Listen for peers. `peer_listener`: the listener at which they connect, in place of a new one at `host` and
        `port`."""
        self.name = name
        self.mailbox = Mailbox(name, limit_seconds=limit_seconds)
        self.sent_bytes: Counter[str] = Counter()
        self.unplanned_bytes: Counter[str] = Counter()
        self.silence_seconds = silence_seconds or HEARTBEAT_TIMEOUT_SECONDS * security.timeout_factor
        self.sharing = sharing or SharingSetting.of_environment()
        self._rooms: dict[str, int] = {}
        """Peer -> the bytes that it will be sent at once."""
        self._met_at: dict[str, int] = {}
        """The port of each peer when it was last named."""
        self._wanted: set[str] = set()
        """The peers that a `connect` under way is to reach."""
        self._is_closing = False
        self._loop = loop = ConnectionLoop(
            name, self.mailbox, self.sharing, self.silence_seconds, self._forget, self._tidy
        )
        self.heartbeat_seconds = loop.heartbeat_seconds
        self._connections, self._lost, self._lock = loop.connections, loop.lost, loop.lock
        try:
            self._rendezvous = PeerRendezvous(
                name, security, host, port, loop.install, self.is_connected, peer_listener
            )
        except BaseException:
            loop.close()
            raise
        loop.start_heartbeats()
        self.address = self._rendezvous.address

    def _forget(self, peer: str) -> None:
        self._rendezvous.forget(peer)

    def _tidy(self) -> None:
        self._rendezvous.tidy()

    def connect(self, peers: Peers, limit_seconds: float) -> None:
        """Connect to every one of these peers; to be called on all of them, in any order.

        Of two devices the one with the smaller name connects and the other waits for it, unless their addresses say
        which one does. Live connections are kept. Refused where a peer does not admit this device; TimedOut names those
        that are missing.
        """
        others = {peer: peers[peer] for peer in peers if peer != self.name}
        for peer in others:
            self._forget_elsewhere(peer, Address.of(peers[peer]).port)
        self._wanted = set(others)
        try:
            self._rendezvous.gather(others, limit_seconds)
        finally:
            self._wanted = set()

    def _forget_elsewhere(self, peer: str, port: int) -> None:
        """Drop a connection to an earlier process of this name, which had another port: its end may not have been
        noticed, and the process that has the name now would wait for a connection."""
        before, self._met_at[peer] = self._met_at.get(peer, port), port
        connection = self._connections.get(peer)
        if connection is not None and before != port:
            self._loop.lose(connection, "another process has its name now")

    def make_room(self, peer: str, size: int) -> None:
        """See `transport.ConnectedEndpoint`."""
        self._rooms[peer] = size

    def is_connected(self, peer: str) -> bool:
        return peer in self._connections

    def silent_peers(self) -> dict[str, float]:
        """See `transport.ConnectedEndpoint`."""
        now, noted = time.monotonic(), 2 * self.heartbeat_seconds
        silences = {peer: now - connection.heard_at for peer, connection in list(self._connections.items())}
        return {peer: seconds for peer, seconds in silences.items() if seconds > noted}

    def missing_peers(self) -> set[str]:
        """See `transport.ConnectedEndpoint`."""
        return {peer for peer in self._wanted if peer not in self._connections}

    def send(
        self, to: str, step: int, topic: str, parts: Sequence[Memory], *, urgent: bool = False, unplanned: bool = False
    ) -> None:
        """Hand a message over. The first chunk leaves in this thread if the link has room, the rest in the loop's
        thread."""
        connection = self._connections.get(to)
        if connection is None:
            if to in self._lost:
                return
            raise self._never_connected(to, topic)
        views = [view for view in map(as_bytes, parts) if len(view)]
        size = sum(map(len, views))
        if len(topic) > LONGEST_TOPIC:  # found here, before anything is queued
            raise BadValue(f"'{topic:.80}...' is a name of {len(topic)} letters; at most {LONGEST_TOPIC} travel.")
        with self._lock:
            (self.unplanned_bytes if unplanned else self.sent_bytes)[to] += size
        outbox = connection.outbox
        longest = CHUNK_BYTES if outbox.ring is None else SHARED_CHUNK_BYTES
        start = Header(self.name, self.mailbox.generation, step, topic, size, 0, min(size, longest))
        if size >= self.sharing.smallest_bytes and connection.sharing.may_offer and not outbox.is_shaped:
            connection.sharing.make_room(self._rooms.get(to, 0))
            connection.offer_sharing()
        try:
            most_bytes = CHUNK_BYTES if outbox.ring is None else _SHARED_AT_ONCE_BYTES
            if outbox.send_now(start, views):
                is_left = outbox.has_work and outbox.pump(most_bytes)  # another thread may have added to it meanwhile
            else:
                outbox.put(Outgoing(start, views), urgent=urgent)
                is_left = outbox.pump(most_bytes)
            if is_left:
                self._loop.ask_to_write(connection)
        except Broken as error:
            self._loop.lose(connection, str(error))

    def board_to(self, peer: str) -> memoryview | None:
        """See `endpoint.Endpoint`."""
        connection = self._connections.get(peer)
        if connection is None or connection.outbox.is_shaped:
            return None
        if connection.sharing.may_offer:
            connection.sharing.make_room(self._rooms.get(peer, 0))
            connection.offer_sharing()
            self._loop.ask_to_write(connection)
        return connection.board_to

    def board_from(self, peer: str) -> memoryview | None:
        """See `endpoint.Endpoint`."""
        connection = self._connections.get(peer)
        return connection.board_from if connection is not None else None

    def count_put(self, peer: str, size: int) -> None:
        """See `endpoint.Endpoint`."""
        with self._lock:
            self.sent_bytes[peer] += size

    def wake(self, peer: str) -> None:
        """See `endpoint.Endpoint`."""
        connection = self._connections.get(peer)
        if connection is None:
            return
        try:
            connection.outbox.put(Outgoing(BELL, []), urgent=True)
            if connection.outbox.pump(CHUNK_BYTES):
                self._loop.ask_to_write(connection)
        except Broken as error:
            self._loop.lose(connection, str(error))

    def _never_connected(self, to: str, topic: str) -> WorkerLost:
        peers = ", ".join(sorted(self._connections)) or "nobody"
        return WorkerLost(
            f"{self.name} cannot send '{topic:.200}' to {to}: it was never connected to it, only to {peers}.",
            hint="Call connect() with its address first.",
        )

    def release(self) -> None:
        """Copy what has not left: the senders' memory may change from now on."""
        for connection in list(self._connections.values()):
            connection.outbox.release()  # without its lock, an outbox just writing its last piece seems to have no work
            if connection.outbox.has_work:
                self._loop.ask_to_write(connection)  # a thread that found it busy has left the writing to this one

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
        """Limit what leaves to these peers to the rate of each one's link, and all of it together to
        `up_bytes_per_second`; a message's first byte leaves when the link's delay has passed.

        Links to other peers are not shaped; nor are, from the next call on, those that it does not name. Connections
        made later to these names are shaped too. The bytes of frames count, not those that TLS and TCP add. The
        receiver's port (its `down` rate) is not modelled: senders do not know of each other.
        """
        if not up_bytes_per_second > 0:
            raise BadValue(f"{self.name}'s port has a rate of {up_bytes_per_second} B/s; it must be > 0.")
        is_limited = up_bytes_per_second < math.inf
        shaped = {peer: link for peer, link in links.items() if is_limited or link != HERE}
        self._loop.shape(shaped, up_bytes_per_second)

    def lose(self, peer: str) -> None:
        """Drop the connection to one peer, at both ends."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._loop.lose(connection, f"{self.name} dropped it")

    def close(self) -> None:
        """End the thread and every connection. Waits for a peer fail; messages that have come can still be received."""
        if self._is_closing:
            return
        self._is_closing = True
        self._loop.stop_accepting()
        self._rendezvous.close()
        self._loop.close()
