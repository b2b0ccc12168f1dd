"""The bookkeeping of one coordinator's members: those that are in, left or were evicted, and what they reported.

Two locks, always taken in this order: `change` guards the set of members, and wakes threads that wait for members to
join; the other one guards the failure detector.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import ManyhandsError, TimedOut, WorkerLost
from manyhands.runtime.admission import judged
from manyhands.runtime.audit import AuditLog
from manyhands.runtime.control import Message, encode
from manyhands.runtime.control_messages import Evict, Heartbeat, Hello, Leave, Refusal
from manyhands.runtime.event_queue import EventQueue
from manyhands.runtime.failure_detector import FailureDetector
from manyhands.runtime.inviting import Invitation
from manyhands.runtime.member import Event, Lost, Member, MemberJoined
from manyhands.runtime.processes import LocalWorkers
from manyhands.runtime.quarantine import Quarantine
from manyhands.transport.channel import SEND_LIMIT_SECONDS
from manyhands.transport.keys import KeyBook
from manyhands.transport.transport import ConnectedEndpoint, ControlChannel

_EVICT_SECONDS = 0.5


class Membership:
    """Members by name, in the order they joined; a lost one stays until another of its name joins."""

    def __init__(
        self,
        endpoint: ConnectedEndpoint,
        local: LocalWorkers,
        detector: FailureDetector,
        audit: AuditLog,
        *,
        on_event: Callable[[str], None],
        clock: Callable[[], float],
        closing: threading.Event,
        max_devices: int | None,
        timeout_factor: float,
    ) -> None:
        """`closing`: set once the coordinator ends; a member that is lost from then on is not reported."""
        self.endpoint, self.local, self.audit = endpoint, local, audit
        self.members: dict[str, Member] = {}
        self.events = EventQueue()
        self.quarantine = Quarantine()
        self.wanted: set[str] | None = None
        """Names that may join; None: any."""
        self.max_devices = max_devices
        """Most members at a time; None: any number."""
        self.change = threading.Condition()
        self._on_event, self._clock, self._closing = on_event, clock, closing
        self._timeout_factor = timeout_factor
        self._detector = detector
        self._detecting = threading.Lock()

    def alive(self) -> list[Member]:
        """Return the members that are not lost."""
        with self.change:
            return [member for member in self.members.values() if not member.is_lost]

    # Joining and leaving

    def judge(
        self, hello: Hello, channel: ControlChannel, invitation: Invitation | None, book: KeyBook | None
    ) -> Member | Refusal:
        """Return the member that a worker may join as, or the refusal.

        To be called with `change` held until the member is added: of two workers with one name the second is refused.
        """
        kept_out = self.quarantine.refusal(hello.identity.process, hello.name, self._clock())
        return kept_out or judged(hello, channel, invitation, self.members, self.wanted, self.max_devices, book)

    def add(self, member: Member) -> None:
        """Add a worker that may join. To be called with `change` held."""
        self.members[member.name] = member
        self.local.joined(member.name, member.facts.pid)
        with self._detecting:
            self._detector.begin(member.name, self._clock())
        self.events.put((member.name, MemberJoined(member)))
        self.change.notify_all()

    def lose(self, member: Member, reason: str, *, has_left: bool = False) -> None:
        """Take a member out, once: it left, was evicted, its connection broke, or its heartbeats stopped."""
        with self.change:
            if member.is_lost:
                return
            with self._detecting:
                self._detector.forget(member.name)
                member.is_lost, member.reason, member.has_left = True, reason, has_left
            self.endpoint.lose(member.name)  # ends all waits for its data, before it may join again
            if not self._closing.is_set():
                self.events.put((member.name, Lost(member)))
            self.change.notify_all()
        if not self._closing.is_set():
            event = "left" if has_left else "evicted" if member.is_evicted else "lost"
            self.audit.record(event, name=member.name, reason=reason)
        if not self._closing.is_set() and not member.is_dismissed:  # the one that dismissed it has reported it
            outcome = "left" if has_left else f"evicted: {reason}" if member.is_evicted else f"lost: {reason}"
            self._on_event(f"{member.name} {outcome}")

    def evict(self, name: str, reason: str) -> None:
        """Evict a worker: go on without it, and keep its process out for a while; see `Coordinator.evict`."""
        member = self.members[name]
        if member.is_lost:
            return
        member.is_evicted = True
        with contextlib.suppress(ManyhandsError):
            member.channel.send(encode(Evict(reason)), _EVICT_SECONDS)
        self.quarantine.begin(member.identity.process, reason, self._clock())
        self.lose(member, reason)
        member.channel.close()
        self.local.end(name)

    def evict_revoked(self, book: KeyBook) -> None:
        """Take out the members whose key was revoked since they joined."""
        for member in self.alive():
            device = book.find(member.channel.peer_key) if member.channel.peer_key else None
            if device is not None and device.is_revoked:
                member.is_evicted = True
                self.lose(member, "its key was revoked")
                member.channel.close()

    # Failure detection

    def received(self, member: Member) -> None:
        """Record that a member has sent something, whatever it was: it is alive."""
        with self._detecting:
            if not member.is_lost:
                self._detector.received(member.name, self._clock())

    def silent_seconds(self, name: str) -> float:
        """Return for how long a worker has sent nothing."""
        with self._detecting:
            return self._detector.silent_seconds(name, self._clock())

    def due(self) -> tuple[tuple[str, ...], list[tuple[Member, float]]]:
        """Return the members to probe, and those to give up, each with the seconds for which it has sent nothing."""
        now = self._clock()
        with self._detecting:
            silent_seconds = {name: self._detector.silent_seconds(name, now) for name in list(self.members)}
            due = self._detector.due(now)
            return due.probe, [(self.members[name], silent_seconds[name]) for name in due.lost]

    @property
    def suspects(self) -> tuple[str, ...]:
        """The members that were probed because they are silent, and have not answered yet."""
        return self._detector.suspects

    # Messages and events

    def send(self, name: str, message: Message, limit_seconds: float = SEND_LIMIT_SECONDS) -> None:
        """Send a worker a message. A lost worker is not an error here: its loss is among the events."""
        with contextlib.suppress(WorkerLost, TimedOut):
            self.members[name].channel.send(encode(message), limit_seconds * self._timeout_factor)

    def dismiss(self, name: str) -> None:
        """Allow a worker that has asked to leave to do so."""
        self.members[name].is_dismissed = True
        self.send(name, Leave())

    def wake(self) -> None:
        """Make the thread that waits for an event look around now."""
        self.events.put((COORDINATOR, Heartbeat()))

    def next_event(self, limit_seconds: float) -> Event | None:
        """Return the next event; None where none comes within the limit."""
        try:
            return self.events.get(timeout=max(0.0, limit_seconds))
        except queue.Empty:
            return None
