"""Data endpoints inside one process that find each other by their addresses."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from manyhands.facts.errors import Refused, TimedOut, WorkerLost
from manyhands.facts.link import Link
from manyhands.transport.endpoint import Address, Peers
from manyhands.transport.frames import Header
from manyhands.transport.mailbox import Mailbox
from manyhands.transport.memory import Memory, as_bytes, byte_count
from manyhands.transport.security import Purpose, Security, difference, preamble
from manyhands.transport.switchboard import deliver, frames
from manyhands.transport.tcp import HEARTBEAT_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from manyhands.transport.inprocess import InProcessTransport


class _Link:
    """A connection of two endpoints; a later one between the same two is another object."""


class RendezvousEndpoint:
    """One device's data connections, found by address. See `tcp.TcpEndpoint`."""

    def __init__(self, transport: InProcessTransport, name: str, address: tuple[str, int], security: Security) -> None:
        self.transport, self.name, self.address, self.security = transport, name, address, security
        self.mailbox = Mailbox(name, limit_seconds=transport.limit_seconds)
        self.sent_bytes: Counter[str] = Counter()
        self.unplanned_bytes: Counter[str] = Counter()
        self.silence_seconds = HEARTBEAT_TIMEOUT_SECONDS * security.timeout_factor
        """Silence is not detected here, only breaks are."""
        self._peers: dict[str, tuple[_Link, RendezvousEndpoint]] = {}
        self._named: set[str] = set()
        self._wanted: set[str] = set()
        self._lost: set[str] = set()
        self._gone: WorkerLost | None = None

    def connect(self, peers: Peers, limit_seconds: float) -> None:
        deadline = time.monotonic() + limit_seconds
        addresses = {peer: Address.of(peers[peer]) for peer in sorted(peers) if peer != self.name}
        with self.transport.change:
            self._named.update(addresses)
            self._wanted = set(addresses)
            self.transport.change.notify_all()
            while missing := [peer for peer in addresses if not self._meet(peer, addresses[peer])]:
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    raise TimedOut(
                        f"{self.name} waited {limit_seconds:g} s for {', '.join(missing)} to connect to it.",
                        hint=f"Are they running, and can they reach {self.address[0]}:{self.address[1]}?",
                    )
                self.transport.change.wait(seconds_left)
            self._wanted = set()

    def _meet(self, peer: str, address: Address) -> bool:
        """Return whether there is a connection; one of the two makes it, once both want it."""
        if self._gone is not None:
            raise self._gone
        if self.is_connected(peer) or not address.is_dialled_by(self.name, peer):
            return self.is_connected(peer)
        other = self.transport.endpoints.get(address.port)
        if other is None or self.transport.is_frozen(self.name, other.name):
            return False
        where = f"{address.host}:{address.port}"
        if other.name != peer:
            raise Refused(f"{where} is {other.name}, not {peer}.", hint="Its address has changed: let it join again.")
        if not other.security.is_known or not self.security.is_known:
            return False
        compare(where, other.security, address.security or self.security, Purpose.DATA)
        if self.name not in other._named or other.is_connected(self.name):
            return False
        link = _Link()
        self._install(peer, link, other)
        other._install(self.name, link, self)
        self.transport.change.notify_all()
        return True

    def _install(self, peer: str, link: _Link, other: RendezvousEndpoint) -> None:
        self._peers[peer] = link, other
        self._lost.discard(peer)
        self.mailbox.join(peer)

    def make_room(self, peer: str, size: int) -> None:
        """See `transport.ConnectedEndpoint`; there is room for everything."""

    def is_connected(self, peer: str) -> bool:
        return peer in self._peers

    def silent_peers(self) -> dict[str, float]:
        silences = {peer: self.transport.parted_seconds(self.name, peer) for peer in list(self._peers)}
        return {peer: seconds for peer, seconds in silences.items() if seconds}

    def missing_peers(self) -> set[str]:
        return {peer for peer in self._wanted if peer not in self._peers}

    def send(
        self, to: str, step: int, topic: str, parts: Sequence[Memory], *, urgent: bool = False, unplanned: bool = False
    ) -> None:
        if self.transport.before_send is not None:
            self.transport.before_send(self.name, to, step, topic)
        size = byte_count(parts)
        content = b"".join(as_bytes(part) for part in parts)
        with self.transport.change:
            if to not in self._peers:
                if to in self._lost:
                    return
                raise WorkerLost(
                    f"{self.name} cannot send '{topic:.200}' to {to}: it was never connected to it.",
                    hint="Call connect() with its address first.",
                )
            (self.unplanned_bytes if unplanned else self.sent_bytes)[to] += size
            link, other = self._peers[to]
            header = Header(self.name, self.mailbox.generation, step, topic, size, 0, 0)
            for head, payload in frames(header, content):
                self.transport.pass_on(self.name, to, partial(other._take, self.name, link, head, payload))

    def _take(self, peer: str, link: _Link, head: bytes, payload: bytes) -> None:
        if self._is_by(peer, link):
            deliver(self.mailbox, peer, head, payload)

    def _is_by(self, peer: str, link: _Link) -> bool:
        return peer in self._peers and self._peers[peer][0] is link

    def lose(self, peer: str) -> None:
        self._drop(peer, f"{self.name} dropped it")

    def _drop(self, peer: str, reason: str) -> None:
        with self.transport.change:
            if peer in self._peers:
                link, other = self._peers[peer]
                self._hear_end(peer, link, reason)
                self.transport.pass_on(self.name, peer, partial(other._hear_end, self.name, link, reason))

    def _hear_end(self, peer: str, link: _Link, reason: str) -> None:
        """End the connection to a peer: waits for it fail now."""
        if not self._is_by(peer, link):
            return
        del self._peers[peer]
        self._lost.add(peer)
        self._named.discard(peer)
        error = WorkerLost(
            f"{peer} was lost: its connection to {self.name} broke ({reason}).",
            hint=f"See the log of {peer}; start it again and it joins.",
        )
        self.mailbox.lose(peer, error)

    def die(self, reason: str) -> None:
        """End everything of this endpoint, its own waits too, as if the process was killed."""
        self._leave(reason)
        assert self._gone is not None
        self.mailbox.interrupt(self._gone)

    def _leave(self, reason: str) -> None:
        with self.transport.change:
            self._gone = self._gone or WorkerLost(f"{self.name} is no longer connected: {reason}.")
            self.transport.endpoints.pop(self.address[1], None)
            for peer in list(self._peers):
                self._drop(peer, reason)
            self.transport.change.notify_all()

    def board_to(self, peer: str) -> None:
        """Return None: every message passes the network that tests look at."""

    def board_from(self, peer: str) -> None:
        """Return None: see `board_to`."""

    def count_put(self, peer: str, size: int) -> None:
        raise AssertionError("there is no board")

    def wake(self, peer: str) -> None:
        raise AssertionError("there is no board")

    def release(self) -> None:
        """Do nothing: everything was copied as it was sent."""

    def flush(self, limit_seconds: float) -> None:
        with self.transport.change:
            if not self.transport.change.wait_for(lambda: not self.transport.is_held(self.name), limit_seconds):
                raise TimedOut(f"{self.name} still has messages under way after {limit_seconds:g} s.")

    def shape(self, links: Mapping[str, Link], up_bytes_per_second: float = math.inf) -> None:
        """Do nothing: links inside one process are not shaped."""

    def close(self) -> None:
        self._leave(f"{self.name} was closed")


def compare(where: str, theirs: Security, ours: Security, purpose: Purpose) -> None:
    """Raise Refused where a handshake between the two would fail."""
    problem, hint = difference(preamble(theirs, purpose), ours, purpose)
    if not problem and theirs.token != ours.token:
        problem, hint = "refused: the token is not the one it asks for", "Copy the coordinator's token."
    if problem:
        raise Refused(f"{where} {problem}.", hint=hint)
