"""The rendezvous of workers and a coordinator: those that connect or are dialled prove who they are, and join or are
refused.

A pending peer is one that is connected and has not joined yet. Each connection has a thread, from the first message of
the peer to the last one of the member that it becomes: what one peer sends harms no other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError, Refused, WorkerLost
from manyhands.facts.version import __version__
from manyhands.files.json_memory import decoded_bytes
from manyhands.runtime.admission import is_back, other_version, pinned, pinned_name, welcomed
from manyhands.runtime.audit import AuditLog
from manyhands.runtime.clock_sync import ClockSync
from manyhands.runtime.control import LARGEST_HELLO_BYTES, PROTOCOL, decode_from_worker, encode, spoken
from manyhands.runtime.control_messages import Clock, Heartbeat, Hello, Leaving, Refusal, Welcome
from manyhands.runtime.failed_proofs import FailedProofs
from manyhands.runtime.inviting import Invitation
from manyhands.runtime.member import Member
from manyhands.runtime.membership import Membership
from manyhands.transport.channel import LARGEST_CONTROL_BYTES
from manyhands.transport.keys import Credentials, KeyBook, fingerprint
from manyhands.transport.proofs import KeyRefused, WrongProof
from manyhands.transport.transport import ControlChannel, ControlListener

HELLO_SECONDS = 10.0
WELCOME_SECONDS = 2.0
_LEAVE_SECONDS = 0.3
_MOST_CONNECTIONS = 1200
"""Most peers that may be connected at once: each has a thread."""


@dataclass
class JoinTerms:
    """The terms that a worker learns when it joins."""

    coordinator_timeout_seconds: float
    heartbeat_seconds: float
    secret: str
    """The key of data connections between those that have joined."""
    shaping: Cluster | None = None
    """Links that workers are to imitate among each other."""

    def welcome(self, name: str) -> Welcome:
        return welcomed(name, self.coordinator_timeout_seconds, self.heartbeat_seconds, self.shaping, self.secret)


class TurnedAway:
    """The reports of peers that failed to prove who they are, to people and in the audit log."""

    def __init__(self, on_event: Callable[[str], None], audit: AuditLog) -> None:
        self._on_event, self._audit = on_event, audit
        self._failed_proofs = FailedProofs(on_event, audit)

    def note(self, origin: str, error: ManyhandsError) -> None:
        """Report a peer that failed. Called in that peer's thread."""
        if isinstance(error, WrongProof):
            self._failed_proofs.note(origin)
        elif isinstance(error, KeyRefused):
            self._on_event(f"Warning: {error.message} It came from {origin}. {error.hint}".rstrip())
            self._audit.record("refused", origin=origin, key=fingerprint(error.public), reason=error.message)

    def report(self, *, is_last: bool = False) -> None:
        """Report, once a minute, what was only counted so far; `is_last`: now."""
        self._failed_proofs.report(is_last=is_last)


class Rendezvous:
    """The listener for workers, which takes in those that may join."""

    def __init__(
        self,
        listener: ControlListener,
        membership: Membership,
        clock_sync: ClockSync,
        terms: JoinTerms,
        credentials: Credentials | None,
        *,
        on_event: Callable[[str], None],
        closing: threading.Event,
    ) -> None:
        self._listener, self._membership, self._clock_sync = listener, membership, clock_sync
        self.terms = terms
        self._credentials, self._on_event, self._closing = credentials, on_event, closing
        self._connections: dict[ControlChannel, threading.Thread] = {}
        """All peers that are connected, pending or joined, and the thread that reads what each sends."""
        self._acceptor = threading.Thread(target=self._accept, name="coordinator listener", daemon=True)

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        """Close all connections and end all threads. The listener was closed before."""
        self._acceptor.join(2)  # no peer is accepted from now on
        membership = self._membership
        with membership.change:
            connections = dict(self._connections)
            informed = [
                connections[member.channel] for member in membership.members.values() if member.channel in connections
            ]
        end = time.monotonic() + _LEAVE_SECONDS
        for thread in informed:  # a member that is cut off while it sends never reads that it may leave
            thread.join(max(0.0, end - time.monotonic()))
        for channel in connections:
            channel.close()
        for thread in (*connections.values(), self._acceptor):
            if thread is not threading.current_thread():
                thread.join(2)

    def _accept(self) -> None:
        while not self._closing.is_set():
            channel = self._listener.accept(0.2)
            if channel is not None:
                self.receive(channel)

    def receive(
        self, channel: ControlChannel, invitation: Invitation | None = None, joined: Future[Member] | None = None
    ) -> None:
        """Start a thread that reads what a peer sends.

        `joined`: set to the member that the peer becomes, or to the reason why it does not.
        """
        thread = threading.Thread(
            target=self._greet, args=(channel, invitation, joined or Future()), name="coordinator peer", daemon=True
        )
        with self._membership.change:
            is_late = self._closing.is_set() or len(self._connections) >= _MOST_CONNECTIONS
            if not is_late:
                try:
                    thread.start()  # it waits for this lock before it removes its entry
                    self._connections[channel] = thread
                except RuntimeError:  # the system has no more threads
                    is_late = True
        if is_late:
            channel.close()
            if joined is not None:
                joined.set_exception(WorkerLost("The coordinator ends, or is full: nobody is taken in."))

    def _greet(self, channel: ControlChannel, invitation: Invitation | None, joined: Future[Member]) -> None:
        """Admit a peer, then read what it sends: one connection's thread."""
        try:
            member = self._admit(channel, invitation)
            if isinstance(member, Refusal):
                joined.set_exception(Refused(member.reason, hint=member.hint))
            else:
                joined.set_result(member)
                self._listen(member)
        except Exception as error:
            reason = error.message if isinstance(error, ManyhandsError) else repr(error)
            self._on_event(f"a peer from {channel.peer_host} was turned away: {reason:.300}")
            if not joined.done():
                joined.set_exception(error)
        finally:
            channel.close()
            with self._membership.change:
                self._connections.pop(channel, None)

    # Joining

    def _admit(self, channel: ControlChannel, invitation: Invitation | None) -> Member | Refusal:
        """Read a pending peer's hello, and take it in or tell it why not."""
        hello = self._hello(channel, invitation)
        if isinstance(hello, Refusal):
            return hello
        membership = self._membership
        namesake = membership.members.get(hello.name)
        if namesake is not None and is_back(hello, namesake):
            membership.lose(namesake, "it has come back over another connection")
            namesake.channel.close()
        book = self._book(invitation)
        with membership.change:  # of two peers with one name the second is refused
            member = membership.judge(hello, channel, invitation, book)
            if isinstance(member, Member):
                label = pinned_name(hello.name, invitation)
                is_new = book is not None and bool(channel.peer_key) and pinned(book, channel.peer_key, label)
                channel.send(encode(self.terms.welcome(hello.name)), WELCOME_SECONDS)
                channel.limit_received(LARGEST_CONTROL_BYTES)
                membership.add(member)
        if isinstance(member, Refusal):
            return self._refuse(channel, hello.name, member)
        how = "joined from" if invitation is None else "was invited at"
        self._on_event(f"{hello.name} {how} {channel.peer_host}")
        key = fingerprint(channel.peer_key) if channel.peer_key else "none"
        membership.audit.record("joined", name=hello.name, origin=channel.peer_host, key=key, is_new=int(is_new))
        return member

    def _hello(self, channel: ControlChannel, invitation: Invitation | None) -> Hello | Refusal:
        """Return a pending peer's first message, or the reason why it is refused before its name is known."""
        channel.limit_received(LARGEST_HELLO_BYTES)
        data = channel.receive(HELLO_SECONDS)
        if data is None:
            return Refusal(f"{channel.peer_host} has not said who it is within {HELLO_SECONDS:g} s.", "Start it anew.")
        try:
            hello = decode_from_worker(data)
        except ManyhandsError as error:
            theirs = spoken(data)
            refusal = Refusal(error.message, error.hint)
            if theirs is not None and theirs != (__version__, PROTOCOL):
                refusal = other_version("This worker", *theirs)
            return self._refuse(channel, "somebody", refusal)
        if isinstance(hello, Refusal) and invitation is not None:
            return hello
        if not isinstance(hello, Hello):
            return self._refuse(channel, "somebody", Refusal("A worker says first who it is.", "Start it anew."))
        return hello

    def _book(self, invitation: Invitation | None) -> KeyBook | None:
        """Return the devices whose keys are pinned, as the side that dialled knows them."""
        credentials = self._credentials if invitation is None else invitation.credentials
        return credentials.book if credentials is not None else None

    def _refuse(self, channel: ControlChannel, name: str, refusal: Refusal) -> Refusal:
        verdict = f"{name:.64} from {channel.peer_host} is called {refusal.name} here" if refusal.name else ""
        self._on_event(f"{verdict or f'refused {name:.64} from {channel.peer_host}'}: {refusal.reason}")
        if not verdict:
            self._membership.audit.record("refused", name=name[:64], origin=channel.peer_host, reason=refusal.reason)
        channel.send(encode(refusal), WELCOME_SECONDS)
        with contextlib.suppress(ManyhandsError):
            channel.receive(2.0)  # gives it time to read before the connection closes
        return refusal

    # Once a peer has joined

    def _listen(self, member: Member) -> None:
        """Put what one worker sends into the queue of events, until its connection ends."""
        reason, unfinished_bytes, has_left = "", 0, False
        try:
            while True:  # until the channel ends, on either side
                data = member.channel.receive(self.terms.heartbeat_seconds)
                if data is None and member.channel.unfinished_bytes == unfinished_bytes:
                    continue
                unfinished_bytes = member.channel.unfinished_bytes
                self._membership.received(member)
                if data is None:
                    continue  # it is in the middle of a message
                message = decode_from_worker(data)
                if isinstance(message, Clock):
                    self._clock_sync.answered(member.name, message)
                    continue
                if isinstance(message, Heartbeat):
                    member.stands(message.standing, time.monotonic())
                if not isinstance(message, Heartbeat) or message.arrivals:
                    member.is_leaving = member.is_leaving or isinstance(message, Leaving)
                    self._membership.events.put((member.name, message), decoded_bytes(data))
        except ManyhandsError as error:
            has_left = member.is_leaving
            reason = error.message.rstrip(".") if not has_left else "it left by itself"
        except Exception as error:
            reason = f"what it says cannot be understood: {error!r:.200}"
        self._membership.lose(member, reason, has_left=has_left)
