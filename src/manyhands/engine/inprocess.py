"""An engine inside one process: frames are handed over as they would be on a wire, faults come exactly when told.

    board = Switchboard(["a", "b"])
    board.fail_after("a", 7)          # a dies when it sends its 7th message, half of it delivered

    transport = InProcessTransport()  # a whole cluster: Coordinator(transport=transport), Worker(joining, transport)
    transport.cut("a")                # killed
    transport.freeze("a")             # nothing from or to it arrives any more, and nobody is told

All ends live in one process, so that a test can look at all of them.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from manyhands.engine.channel import LARGEST_CONTROL_BYTES, SEND_LIMIT_SECONDS
from manyhands.engine.endpoint import Address, Peers
from manyhands.engine.frames import CHUNK_BYTES, PRELUDE, Header, decode, encode, header_bytes
from manyhands.engine.mailbox import WAIT_LIMIT_SECONDS, Mailbox, Memory, as_bytes, byte_count
from manyhands.engine.security import EVERY_ADDRESS, Purpose, Security, difference, preamble
from manyhands.engine.tcp import SILENCE_SECONDS
from manyhands.engine.transport import ControlListener
from manyhands.facts.errors import AddressTaken, BadValue, ManyhandsError, Refused, TimedOut, WorkerLost
from manyhands.facts.link import Link

_FIRST_PORT = 40001
_LOOK_SECONDS = 0.1


class Switchboard:
    """Mailboxes of all devices, and what is to go wrong."""

    def __init__(self, names: Iterable[str], *, limit_seconds: float = 60.0) -> None:
        self.endpoints = {name: InProcessEndpoint(self, name, limit_seconds) for name in names}
        self.lock = threading.Lock()
        self._fail_after: dict[str, int] = {}
        self.failed: set[str] = set()

    def fail_after(self, name: str, messages: int) -> None:
        """`name` dies in the middle of its message number `messages`, counted from 1."""
        self._fail_after[name] = messages

    def dies_now(self, name: str, count: int) -> bool:
        return self._fail_after.get(name) == count

    def lose(self, name: str) -> None:
        """Everybody learns at once that `name` is gone, and `name` itself stops."""
        self.failed.add(name)
        error = WorkerLost(f"{name} was lost: its connection broke.")
        for other, endpoint in self.endpoints.items():
            if other == name:
                endpoint.mailbox.interrupt(error)
            else:
                endpoint.mailbox.lose(name, error)


class InProcessEndpoint:
    """One device on a switchboard."""

    def __init__(self, board: Switchboard, name: str, limit_seconds: float) -> None:
        self.board, self.name = board, name
        self.mailbox = Mailbox(name, limit_seconds=limit_seconds)
        self.sent_bytes: Counter[str] = Counter()
        self._messages = 0

    def send(self, to: str, step: int, topic: str, parts: Sequence[Memory], *, urgent: bool = False) -> None:
        size = byte_count(parts)
        content = b"".join(as_bytes(part) for part in parts)
        with self.board.lock:
            self._messages += 1
            dies = self.board.dies_now(self.name, self._messages)
            self.sent_bytes[to] += size
        header = Header(self.name, self.mailbox.generation, step, topic, size, 0, 0)
        for head, payload in frames(header, content):
            part = payload[: len(payload) // 2] if dies else payload
            deliver(self.board.endpoints[to].mailbox, self.name, head, part)
            if dies:
                self.board.lose(self.name)
                return

    def release(self) -> None:
        """Everything was copied as it was sent."""

    def flush(self, limit_seconds: float) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to close."""


def deliver(mailbox: Mailbox, peer: str, head: bytes, payload: bytes) -> None:
    """One frame as bytes, through the same reading as from a socket. A payload cut short is never complete."""
    size = header_bytes(head[: PRELUDE.size])
    header = decode(head[PRELUDE.size : PRELUDE.size + size])
    views = mailbox.accept(peer, header)
    if views is None:
        return
    place = 0
    with mailbox.writing:
        for view in views if mailbox.wants(header) else []:
            part = payload[place : place + len(view)]
            view[: len(part)] = part
            place += len(view)
    if len(payload) == header.length:
        mailbox.wrote(header)


def frames(header: Header, content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """A message as it would be on a wire: head and payload of each frame."""
    for offset in range(0, header.bytes, CHUNK_BYTES) or (0,):
        length = min(CHUNK_BYTES, header.bytes - offset)
        head = Header(header.origin, header.generation, header.step, header.topic, header.bytes, offset, length)
        yield encode(head), content[offset : offset + length]


class InProcessTransport:
    """Control channels and data endpoints of a whole cluster in one process. See `transport.Transport`.

    One for all of them; the name that asks for something is the one whose fate it shares.
    """

    def __init__(self, *, limit_seconds: float = WAIT_LIMIT_SECONDS) -> None:
        self.limit_seconds = limit_seconds
        self.change = threading.Condition(threading.RLock())
        self.before_send: Callable[[str, str, int, str], None] | None = None
        """Told of every data message before it leaves (from, to, step, topic), in its sender's thread."""
        self.listeners: dict[int, InProcessListener] = {}
        self.endpoints: dict[int, MeetingEndpoint] = {}
        self.channels: set[InProcessChannel] = set()
        self._frozen: set[str] = set()
        self._parted: dict[frozenset[str], float] = {}
        """Pairs that cannot reach each other, and since when."""
        self._held: dict[tuple[str, str], deque[Callable[[], None]]] = {}
        """What waits for a thaw, by sender and receiver."""
        self._ports = itertools.count(_FIRST_PORT)

    # What coordinator and workers ask for

    def listen(self, name: str, host: str, port: int, security: Security) -> InProcessListener:
        with self.change:
            if port in self.listeners:
                raise AddressTaken(f"Cannot listen on {host}:{port}: address already in use.", hint="Choose another.")
            found = InProcessListener(self, name, (host, port or self.new_port()), security)
            self.listeners[found.address[1]] = found
            self.change.notify_all()
            return found

    def reach(
        self,
        name: str,
        host: str,
        port: int,
        security: Security,
        limit_seconds: float,
        *,
        once: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> InProcessChannel:
        deadline = time.monotonic() + limit_seconds
        with self.change:
            while (listener := self.listeners.get(port)) is None or self.is_frozen(name, listener.name):
                left = deadline - time.monotonic()
                if left <= 0 or once or is_cancelled():
                    raise TimedOut(
                        f"Nobody answered at {host}:{port} within {limit_seconds:g} s.",
                        hint="Is it running, is this its address, and does a firewall let it through?",
                    )
                self.change.wait(min(left, _LOOK_SECONDS))
            compare(f"{host}:{port}", listener.security, security, Purpose.CONTROL)
            shown = "127.0.0.1" if host in EVERY_ADDRESS else host
            near, far = InProcessChannel(self, name, shown), InProcessChannel(self, listener.name, shown)
            near.other, far.other = far, near
            self.channels |= {near, far}
            listener.ready.append(far)
            self.change.notify_all()
            return near

    def endpoint(
        self, name: str, security: Security, *, host: str, listener: ControlListener | None = None
    ) -> MeetingEndpoint:
        with self.change:
            address = listener.address if listener is not None else (host, self.new_port())
            found = MeetingEndpoint(self, name, address, security)
            self.endpoints[found.address[1]] = found
            self.change.notify_all()
            return found

    def new_port(self) -> int:
        return next(port for port in self._ports if port not in self.listeners and port not in self.endpoints)

    # What goes wrong

    def cut(self, name: str) -> None:
        """All connections of `name` break at once, as if it was killed: for it and for everybody else.

        What is made under this name later is not concerned: one killed may be started again. Ends a freeze.
        """
        reason = f"{name} was cut off"
        with self.change:
            self._frozen.discard(name)
            self._held = {pair: held for pair, held in self._held.items() if name not in pair}
            for channel in [one for one in self.channels if one.name == name]:
                channel.break_off(reason)
                self.pass_on(name, channel.other.name, partial(channel.other.end, reason))
            for endpoint in [one for one in self.endpoints.values() if one.name == name]:
                endpoint.die(reason)
            for listener in [one for one in self.listeners.values() if one.name == name]:
                listener.close()
            self.change.notify_all()

    def freeze(self, name: str) -> None:
        """From now on nothing from or to `name` arrives, and nobody is told: a cable pulled, a process stopped."""
        with self.change:
            self._frozen.add(name)

    def thaw(self, name: str) -> None:
        """What was held back arrives now, in order: also that somebody gave up meanwhile."""
        with self.change:
            self._frozen.discard(name)
            for pair in [pair for pair in self._held if name in pair and not self.is_frozen(*pair)]:
                for what in self._held.pop(pair):
                    what()
            self.change.notify_all()

    def part(self, one: str, other: str) -> None:
        """From now on these two cannot reach each other, and nobody is told: a partial partition."""
        with self.change:
            self._parted[frozenset((one, other))] = time.monotonic()

    def parted_seconds(self, one: str, other: str) -> float:
        """For how long two have not reached each other; 0: they do."""
        since = self._parted.get(frozenset((one, other)))
        return 0.0 if since is None else time.monotonic() - since

    def is_frozen(self, *names: str) -> bool:
        return not self._frozen.isdisjoint(names) or frozenset(names) in self._parted

    def pass_on(self, source: str, target: str, what: Callable[[], None]) -> None:
        """Have it arrive: now, or when both are thawed."""
        with self.change:
            if self.is_frozen(source, target):
                self._held.setdefault((source, target), deque()).append(what)
            else:
                what()
                self.change.notify_all()

    def is_held(self, source: str) -> bool:
        return any(pair[0] == source for pair in self._held)


class InProcessChannel:
    """One end. See `channel.Channel`."""

    other: InProcessChannel

    def __init__(self, transport: InProcessTransport, name: str, host: str) -> None:
        self.transport, self.name = transport, name
        self.local_host = self.peer_host = host
        self.peer_key = b""
        self._messages: deque[bytes] = deque()
        self._largest_received_bytes = LARGEST_CONTROL_BYTES
        self._ended = ""
        """Why nothing more will come than what has come already."""
        self._lost: WorkerLost | None = None

    def send(self, data: bytes, limit_seconds: float = SEND_LIMIT_SECONDS) -> None:
        if len(data) > LARGEST_CONTROL_BYTES:
            raise BadValue(f"A control message of {len(data)} bytes; at most {LARGEST_CONTROL_BYTES} are sent.")
        with self.transport.change:
            if self._lost is not None or self._ended:
                raise self._lost or self._broken(self._ended)
            self.transport.pass_on(self.name, self.other.name, partial(self.other._messages.append, bytes(data)))

    def limit_received(self, largest_bytes: int) -> None:
        self._largest_received_bytes = largest_bytes

    def receive(self, limit_seconds: float) -> bytes | None:
        deadline = time.monotonic() + limit_seconds
        with self.transport.change:
            while self._lost is None:
                size, largest = len(self._messages[0]) if self._messages else 0, self._largest_received_bytes
                if size > largest:
                    self.break_off(f"it announces a message of {size} bytes; at most {largest} are read")
                    break
                if self._messages:
                    return self._messages.popleft()
                if self._ended:
                    self.break_off(self._ended)
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self.transport.change.wait(left)
            assert self._lost is not None
            raise self._lost

    @property
    def unfinished_bytes(self) -> int:
        """Messages come as a whole."""
        return 0

    def _broken(self, reason: str) -> WorkerLost:
        return WorkerLost(f"The connection to {self.peer_host} broke: {reason}.")

    def break_off(self, reason: str) -> None:
        """At this end."""
        with self.transport.change:
            self._lost = self._lost or self._broken(reason)
            self.transport.channels.discard(self)
            self.transport.change.notify_all()

    def end(self, reason: str) -> None:
        """The other end is gone; what has come before can still be read."""
        self._ended = self._ended or reason

    def close(self) -> None:
        with self.transport.change:
            if self._lost is None:
                self.break_off("it was closed on this side")
                ending = partial(self.other.end, "it was closed on the other side")
                self.transport.pass_on(self.name, self.other.name, ending)


class InProcessListener:
    """Where workers join. See `channel.Listener`."""

    def __init__(self, transport: InProcessTransport, name: str, address: tuple[str, int], security: Security) -> None:
        self.transport, self.name, self.address, self.security = transport, name, address, security
        self.ready: deque[InProcessChannel] = deque()
        self.dropped = 0
        """Whoever does not fit is told before he comes."""
        self.reasons: list[str] = []

    def tell_of_failures(self, told: Callable[[str, ManyhandsError], None]) -> None:
        """Nobody fails here."""

    def accept(self, limit_seconds: float) -> InProcessChannel | None:
        with self.transport.change:
            self.transport.change.wait_for(lambda: self.ready, max(0.0, limit_seconds))
            return self.ready.popleft() if self.ready else None

    def close(self) -> None:
        with self.transport.change:
            self.transport.listeners.pop(self.address[1], None)
            while self.ready:
                self.ready.popleft().close()


class _Link:
    """Two endpoints that are connected; one of its kind is not another between the same two."""


class MeetingEndpoint:
    """One device's data connections, found by address. See `tcp.TcpEndpoint`."""

    def __init__(self, transport: InProcessTransport, name: str, address: tuple[str, int], security: Security) -> None:
        self.transport, self.name, self.address, self.security = transport, name, address, security
        self.mailbox = Mailbox(name, limit_seconds=transport.limit_seconds)
        self.sent_bytes: Counter[str] = Counter()
        self.silence_seconds = SILENCE_SECONDS * security.patience
        """Silence is not noticed here, breaks are."""
        self._peers: dict[str, tuple[_Link, MeetingEndpoint]] = {}
        self._named: set[str] = set()
        self._wanted: set[str] = set()
        self._lost: set[str] = set()
        self._gone: WorkerLost | None = None

    def connect(self, peers: Peers, limit_seconds: float) -> None:
        deadline = time.monotonic() + limit_seconds
        wanted = {peer: Address.of(peers[peer]) for peer in sorted(peers) if peer != self.name}
        with self.transport.change:
            self._named.update(wanted)
            self._wanted = set(wanted)
            self.transport.change.notify_all()
            while missing := [peer for peer in wanted if not self._meet(peer, wanted[peer])]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimedOut(
                        f"{self.name} waited {limit_seconds:g} s for {', '.join(missing)} to connect to it.",
                        hint=f"Are they running, and can they reach {self.address[0]}:{self.address[1]}?",
                    )
                self.transport.change.wait(left)
            self._wanted = set()

    def _meet(self, peer: str, address: Address) -> bool:
        """Whether there is a connection; one of the two makes it, once both want it."""
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

    def _install(self, peer: str, link: _Link, other: MeetingEndpoint) -> None:
        self._peers[peer] = link, other
        self._lost.discard(peer)
        self.mailbox.join(peer)

    def is_connected(self, peer: str) -> bool:
        return peer in self._peers

    def silent_peers(self) -> dict[str, float]:
        found = {peer: self.transport.parted_seconds(self.name, peer) for peer in list(self._peers)}
        return {peer: seconds for peer, seconds in found.items() if seconds}

    def missing_peers(self) -> set[str]:
        return {peer for peer in self._wanted if peer not in self._peers}

    def send(self, to: str, step: int, topic: str, parts: Sequence[Memory], *, urgent: bool = False) -> None:
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
            self.sent_bytes[to] += size
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
        """The connection to a peer is gone: whoever waits for it fails now."""
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
        """As if the process was killed: everything of it ends, its own waits too."""
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

    def release(self) -> None:
        """Everything was copied as it was sent."""

    def flush(self, limit_seconds: float) -> None:
        with self.transport.change:
            if not self.transport.change.wait_for(lambda: not self.transport.is_held(self.name), limit_seconds):
                raise TimedOut(f"{self.name} still has messages under way after {limit_seconds:g} s.")

    def shape(self, links: Mapping[str, Link], up_bytes_per_second: float = math.inf) -> None:
        """Inside one process links are as they are."""

    def close(self) -> None:
        self._leave(f"{self.name} was closed")


def compare(where: str, theirs: Security, own: Security, purpose: Purpose) -> None:
    """What a handshake would find out."""
    problem, hint = difference(preamble(theirs, purpose), own, purpose)
    if not problem and theirs.token != own.token:
        problem, hint = "refused: the token is not the one it asks for", "Copy the coordinator's token."
    if problem:
        raise Refused(f"{where} {problem}.", hint=hint)
