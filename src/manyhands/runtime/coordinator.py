"""The coordinator: one port where workers join, what they say as events in one queue, and an endpoint of its own.

with Coordinator.local_cluster(cluster) as coordinator:        # workers are started here
with Coordinator("0.0.0.0", 7077) as coordinator:      # workers join: manyhands worker, or --join HOST:7077
    coordinator.wait_for(3)
    coordinator.invite("cloud.example.org", 7078, token)   # one that listens: see `inviting`
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from manyhands.data.silo import SiloContent
from manyhands.engine.channel import LARGEST_CONTROL_BYTES, SEND_LIMIT_SECONDS
from manyhands.engine.endpoint import Address
from manyhands.engine.keys import Credentials, Role, fingerprint
from manyhands.engine.proofs import KeyRefused, WrongProof
from manyhands.engine.security import EVERY_ADDRESS, DeviceSecurity, Security, is_loopback, is_secret, new_secret
from manyhands.engine.transport import (
    ConnectedEndpoint,
    ControlChannel,
    ControlListener,
    TcpTransport,
    Transport,
    reach_either,
)
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue, ManyhandsError, Refused, TimedOut, WorkerLost
from manyhands.facts.version import __version__
from manyhands.files.json_memory import decoded_bytes
from manyhands.runtime.audit import AuditLog
from manyhands.runtime.control import (
    LARGEST_HELLO_BYTES,
    PROTOCOL,
    AskClock,
    Beat,
    Clock,
    Evict,
    Hello,
    Leave,
    Leaving,
    Refusal,
    Said,
    decode_from_worker,
    encode,
    spoken,
)
from manyhands.runtime.device_book import own_credentials
from manyhands.runtime.discovery import Announcer, can_announce, interface_asked
from manyhands.runtime.event_queue import EventQueue
from manyhands.runtime.failed_proofs import FailedProofs
from manyhands.runtime.household import config_folder, household_token
from manyhands.runtime.inviting import INVITE_SECONDS, Invitation, Inviting, meeting_address
from manyhands.runtime.members import (
    Event,
    Joined,
    Lost,
    Member,
    is_back,
    judged,
    other_version,
    pinned,
    pinned_name,
    welcomed,
)
from manyhands.runtime.processes import LocalWorkers, WorkerProcess
from manyhands.runtime.quarantine import Quarantine
from manyhands.runtime.watch import SILENCE_SECONDS, Watch

DEFAULT_PORT = 7077
JOIN_SECONDS = 120.0
BEAT_SECONDS = 0.5
COORDINATOR_SILENCE_SECONDS = 15.0
"""Workers have more patience with the coordinator: who is lost is its judgement, and without it nothing goes on."""
_BEATS_IN_SILENCE = 4
_LOOKS_IN_SILENCE = 8
_HELLO_SECONDS = 10.0
_WELCOME_SECONDS = 2.0
_LEAVE_SECONDS = 0.3
_EVICT_SECONDS = 0.5
_CLOCK_TRIES = 5
_MOST_CLOCKS = 10_000
_MOST_GUESTS = 1200
"""Connected at once: each has a thread."""
_PROBE_TICKET = -1
"""Of an answer that nobody looks at: that it came is enough."""


class Coordinator:
    """Members by name, in the order they joined."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        *,
        on_event: Callable[[str], None] | None = None,
        logs: Path | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        patience: float = 1.0,
        max_devices: int | None = None,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
        announce: bool = True,
        title: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        """`token`: empty: the household's where other machines can join, else a new one. `announce`: where they can,
        tell the network, so that they find it without --join; `title` is what the run is called there. `max_devices`:
        so many may be here at a time, others are refused. How many a job waits for is `wait_for`'s; how few it goes on
        with, `mh.train`'s. `credentials`: this device's key and whom it knows; None: as they are kept
        (`device_book`), where other machines can join.
        """
        silence_seconds *= patience
        if not 0 < beat_seconds < math.inf:
            raise BadValue(f"beat_seconds is {beat_seconds:g}; it must be > 0 and finite.")
        if not silence_seconds >= _BEATS_IN_SILENCE * beat_seconds:
            raise BadValue(
                f"silence_seconds is {silence_seconds:g}; it must be at least {_BEATS_IN_SILENCE * beat_seconds:g}.",
                hint=f"Workers say that they are alive every {beat_seconds:g} s.",
            )
        if max_devices is not None and max_devices < 1:
            raise BadValue(f"max_devices is {max_devices}; it must be at least 1.")
        interface = interface_asked()
        self.silence_seconds, self.beat_seconds = silence_seconds, beat_seconds
        self.clock = clock
        """By which silence is judged."""
        self.transport = transport or TcpTransport()
        self.on_event = on_event or (lambda text: None)
        self.encrypted = not is_loopback(host)
        self.token = token or (household_token(self.on_event) if self.encrypted else new_secret())
        self._credentials = credentials
        if self._credentials is None and self.encrypted and not is_secret(self.token):
            self._credentials = own_credentials(Role.COORDINATOR, self.on_event)
        self.security = DeviceSecurity(
            self.token, encrypted=self.encrypted, patience=patience, credentials=self._credentials
        )
        self.secret = new_secret()
        """By which those who have joined make data connections among each other."""
        self.audit = AuditLog(config_folder() if self._credentials is not None else None)
        self._failed_proofs = FailedProofs(self.on_event, self.audit)
        self.members: dict[str, Member] = {}
        self.events = EventQueue()
        self.local = LocalWorkers(logs=logs)
        self.wanted: set[str] | None = None
        """Names that may join; None: any."""
        self.max_devices = max_devices
        """How many may be here at a time; None: any number."""
        self.shaping: Cluster | None = None
        """Links that workers are to imitate among each other."""
        self.silos: dict[str, SiloContent] = {}
        """Worker -> what it takes from its own data in the job under way; set by api/silos.py."""
        self.join_limit_seconds = JOIN_SECONDS
        """How long workers may take to join: as long as they were waited for last."""
        self._awaited: list[str] | int = 0
        """Who, or how many, a job that has not begun yet was promised."""
        self.generation = 0
        self.quarantine = Quarantine()
        self._change = threading.Condition()
        self._closing = threading.Event()
        self._clocks: dict[tuple[str, int], Clock] = {}
        self._tickets = itertools.count(_PROBE_TICKET - 1, -1)
        self._watch = Watch(silence_seconds)
        self._watching = threading.Lock()
        self._guests: dict[ControlChannel, threading.Thread] = {}
        """Everybody who is connected, joined or not yet, and the thread that listens to him."""
        self._inviting: list[Inviting] = []
        self.listener: ControlListener = self.transport.listen(COORDINATOR, host, port, self.security)
        self.listener.tell_of_failures(self._turned_away)
        try:
            own = Security(self.secret, encrypted=self.encrypted, patience=patience)
            self.endpoint: ConnectedEndpoint = self.transport.endpoint(COORDINATOR, own, host=host)
        except BaseException:
            self.listener.close()
            raise
        self.address: tuple[str, int] = self.listener.address
        self._threads = [
            threading.Thread(target=self._accept, name="coordinator door", daemon=True),
            threading.Thread(target=self._beat, name="coordinator beat", daemon=True),
            threading.Thread(target=self._look_around, name="coordinator watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._announcer: Announcer | None = None
        if announce and can_announce(host, interface):
            public = self._credentials.key.public if self._credentials is not None else b""
            self._announcer = Announcer(self.address, self.token, title, self.on_event, interface, public=public)

    @classmethod
    def local_cluster(
        cls,
        cluster: Cluster,
        *,
        threads: int = 1,
        logs: Path | None = None,
        limit_seconds: float = JOIN_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        slowdowns: Mapping[str, float] | None = None,
        patience: float = 1.0,
        apart: bool = False,
    ) -> Coordinator:
        """A coordinator with one process on this machine for each device of the cluster, all joined.

        `slowdowns`: device -> how many times longer than it must whatever it computes takes. `patience`: how many times
        longer than usual to wait for anybody, silence included. `apart`: each loads PyTorch by itself.
        """
        coordinator = cls(
            logs=logs, silence_seconds=silence_seconds, beat_seconds=beat_for(silence_seconds), patience=patience
        )
        try:
            coordinator.wanted = set(cluster.names)
            slow = dict.fromkeys(cluster.names, 1.0) | dict(slowdowns or {})
            for name in slow:
                cluster.device(name)  # which says where there is none
            coordinator.start_workers(
                [
                    WorkerProcess((device.name,), device.compute, slowdown=slow[device.name])
                    for device in cluster.devices
                ],
                threads,
                limit_seconds,
                apart=apart,
            )
        except BaseException:
            coordinator.close()
            raise
        return coordinator

    def start_workers(
        self, wanted: Sequence[WorkerProcess], threads: int, limit_seconds: float, *, apart: bool = False
    ) -> None:
        """Start processes on this machine and wait until all their workers have joined. `apart`: see `LocalWorkers`."""
        self.local.start(wanted, self.address, self.security, threads=threads, apart=apart)
        self.wait_for([name for one in wanted for name in one.names], limit_seconds)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Everybody leaves; processes started here have ended when this returns."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            for one in self._inviting:
                one.close()
            for member in self.alive():
                with contextlib.suppress(ManyhandsError):
                    member.channel.send(encode(Leave()), 1.0)
        finally:
            try:
                self.local.stop()
            finally:
                self._disconnect()
                if self._announcer is not None:
                    self._announcer.close()

    def _disconnect(self) -> None:
        """No thread and no descriptor is left."""
        self.listener.close()
        self._failed_proofs.report(is_last=True)
        self.endpoint.close()
        self._threads[0].join(2)  # nobody is let in from now on
        with self._change:
            guests = dict(self._guests)
            told = [guests[member.channel] for member in self.members.values() if member.channel in guests]
        end = time.monotonic() + _LEAVE_SECONDS
        for thread in told:  # one that is cut off while it speaks never reads that it may go
            thread.join(max(0.0, end - time.monotonic()))
        for channel in guests:
            channel.close()
        for thread in (*guests.values(), *self._threads):
            if thread is not threading.current_thread():
                thread.join(2)

    @property
    def is_closing(self) -> bool:
        """Everybody is sent away: whoever is lost from now on was not."""
        return self._closing.is_set()

    def alive(self) -> list[Member]:
        """Those who have joined and are not lost."""
        with self._change:
            return [member for member in self.members.values() if not member.is_lost]

    # Joining

    def wait_for(self, names: Iterable[str] | int, limit_seconds: float = JOIN_SECONDS) -> None:
        """Wait until these workers (or so many) have joined."""
        wanted = list(names) if not isinstance(names, int) else []
        count = names if isinstance(names, int) else len(wanted)
        self._awaited, self.join_limit_seconds = wanted or count, limit_seconds
        end = time.monotonic() + limit_seconds
        with self._change:
            while True:
                alive = [member.name for member in self.alive()]
                missing = [name for name in wanted if name not in alive]
                if not missing and len(alive) >= count:
                    return
                for name in missing or list(self.local.processes):
                    if name not in alive and (ending := self.local.ending(name)):
                        raise WorkerLost(
                            f"Worker {name} {ending} before it joined.", hint=self.local.last_words(name)[-800:]
                        )
                left = end - time.monotonic()
                if left <= 0:
                    what = f"waiting for {', '.join(missing)}" if missing else f"{len(alive)} of {count} have joined"
                    raise TimedOut(
                        f"Workers did not join within {limit_seconds:g} s: {what}.",
                        hint=f"On each device: {self.join_command()}",
                    )
                self._change.wait(min(left, 0.2))

    def wait_for_replacements(self) -> None:
        """Wait again, for as long, where some of those that `wait_for` waited for were lost before a job began.

        A device may be switched off, or its worker killed, while the job still reads its data. Others may join in its
        place until the same limit has passed; then the job begins with those that are here. TimedOut where nobody is.
        Called as a job begins; from then on it does without whoever is lost. Workers that were started here are not
        replaced by anybody.
        """
        awaited, self._awaited = self._awaited, 0
        alive = [member.name for member in self.alive()]
        count = awaited if isinstance(awaited, int) else len(awaited)
        missing = [name for name in awaited if name not in alive] if isinstance(awaited, list) else []
        if self.local.processes or (not missing and len(alive) >= count):
            return
        who = ", ".join(missing) if missing else f"{count - len(alive)} worker(s)"
        self.on_event(f"Waiting for {who} in place of those that were lost: {len(alive)} of {count} are here.")
        try:
            self.wait_for(awaited, self.join_limit_seconds)
        except TimedOut:
            if not self.alive():
                raise
            self.on_event(f"Beginning with {len(self.alive())} of {count} workers: no more have joined.")
        finally:
            self._awaited = 0

    @property
    def is_announced(self) -> bool:
        """Whether workers can find it by themselves, as far as that is known here."""
        return self._announcer is not None

    def join_command(self) -> str:
        """For hints, which are kept in logs: the token is not in it."""
        host, port = self.address
        shown = "HOST" if host in EVERY_ADDRESS else f"[{host}]" if ":" in host else host
        return f"manyhands worker --join {shown}:{port}"

    def _accept(self) -> None:
        while not self._closing.is_set():
            channel = self.listener.accept(0.2)
            if channel is not None:
                self._receive(channel)

    def invite(
        self,
        host: str,
        port: int,
        token: str,
        *,
        limit_seconds: float = INVITE_SECONDS,
        once: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> str:
        """Dial a worker that listens (`serving.listen`) and take it in as a member like any other; returns its name.

        TimedOut where nobody is there until the limit (`once`: at the first attempt), Refused where it will not come:
        another token or version, it works for another coordinator, its name is taken. WorkerLost: it came and went.
        """
        reached = reach_either(
            self.transport, COORDINATOR, (host, port), token, limit_seconds, patience=self.security.patience, once=once,
            is_cancelled=lambda: is_cancelled() or self._closing.is_set(), credentials=self._dialling_credentials,
        )  # fmt: skip
        found: Future[Member] = Future()
        data = Security(self.secret, encrypted=reached.security.encrypted, patience=reached.security.patience)
        self._receive(reached.channel, Invitation(host, port, data, reached.security.credentials), found)
        try:
            return found.result(_HELLO_SECONDS + 2 * _WELCOME_SECONDS).name
        except TimeoutError as error:  # its thread waits for something else than the worker
            reached.channel.close()
            raise TimedOut(f"{host}:{port} was let in, and did not join.") from error

    def _dialling_credentials(self) -> Credentials | None:
        """A coordinator that only this machine can reach may dial a worker of another."""
        return self._credentials or own_credentials(Role.COORDINATOR, self.on_event)

    def keep_inviting(self, host: str, port: int, token: str) -> Inviting:
        """From now on have this worker here, again and again whenever it is lost; until this coordinator ends."""
        found = Inviting(self, host, port, token)
        self._inviting.append(found)
        return found

    def _receive(
        self, channel: ControlChannel, invitation: Invitation | None = None, found: Future[Member] | None = None
    ) -> None:
        """Have a thread listen to somebody who is connected."""
        thread = threading.Thread(
            target=self._greet, args=(channel, invitation, found or Future()), name="coordinator guest", daemon=True
        )
        with self._change:
            is_late = self._closing.is_set() or len(self._guests) >= _MOST_GUESTS
            if not is_late:
                try:
                    thread.start()  # it waits for this lock before it forgets itself
                    self._guests[channel] = thread
                except RuntimeError:  # the system has no more threads
                    is_late = True
        if is_late:
            channel.close()
            if found is not None:
                found.set_exception(WorkerLost("The coordinator ends, or is full: nobody is taken in."))

    def _greet(self, channel: ControlChannel, invitation: Invitation | None, found: Future[Member]) -> None:
        """One guest's thread: whatever he says or does harms nobody else."""
        try:
            member = self._admit(channel, invitation)
            if isinstance(member, Refusal):
                found.set_exception(Refused(member.reason, hint=member.hint))
            else:
                found.set_result(member)
                self._listen(member)
        except Exception as error:
            said = error.message if isinstance(error, ManyhandsError) else repr(error)
            self.on_event(f"a guest from {channel.peer_host} was turned away: {said:.300}")
            if not found.done():
                found.set_exception(error)
        finally:
            channel.close()
            with self._change:
                self._guests.pop(channel, None)

    def _admit(self, channel: ControlChannel, invitation: Invitation | None) -> Member | Refusal:
        """A worker says who it is, and is taken in or told why not."""
        channel.limit_received(LARGEST_HELLO_BYTES)
        data = channel.receive(_HELLO_SECONDS)
        if data is None:
            return Refusal(f"{channel.peer_host} has not said who it is within {_HELLO_SECONDS:g} s.", "Start it anew.")
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
        known = self.members.get(hello.name)
        if known is not None and is_back(hello, known):
            self._lose(known, "it has come back over another connection")
            known.channel.close()
        credentials = self._credentials if invitation is None else invitation.credentials
        book = credentials.book if credentials is not None else None
        with self._change:  # of two with one name the second is refused
            kept_out = self.quarantine.refusal(hello.identity.process, hello.name, self.clock())
            found = kept_out or judged(hello, channel, invitation, self.members, self.wanted, self.max_devices, book)
            if isinstance(found, Member):
                label = pinned_name(hello.name, invitation)
                is_new = book is not None and bool(channel.peer_key) and pinned(book, channel.peer_key, label)
                patience = max(COORDINATOR_SILENCE_SECONDS * self.security.patience, self.silence_seconds)
                welcome = welcomed(hello.name, patience, self.beat_seconds, self.shaping, self.secret)
                channel.send(encode(welcome), _WELCOME_SECONDS)
                channel.limit_received(LARGEST_CONTROL_BYTES)
                self.members[hello.name] = found
                self.local.joined(hello.name, hello.facts.pid)
                with self._watching:
                    self._watch.begin(hello.name, self.clock())
                self.events.put((hello.name, Joined(found)))
                self._change.notify_all()
        if isinstance(found, Refusal):
            return self._refuse(channel, hello.name, found)
        how = "joined from" if invitation is None else "was invited at"
        self.on_event(f"{hello.name} {how} {channel.peer_host}")
        key = fingerprint(channel.peer_key) if channel.peer_key else "none"
        self.audit.record("joined", name=hello.name, origin=channel.peer_host, key=key, is_new=int(is_new))
        return found

    def _refuse(self, channel: ControlChannel, name: str, refusal: Refusal) -> Refusal:
        verdict = f"{name:.64} from {channel.peer_host} is called {refusal.name} here" if refusal.name else ""
        self.on_event(f"{verdict or f'refused {name:.64} from {channel.peer_host}'}: {refusal.reason}")
        if not verdict:
            self.audit.record("refused", name=name[:64], origin=channel.peer_host, reason=refusal.reason)
        channel.send(encode(refusal), _WELCOME_SECONDS)
        with contextlib.suppress(ManyhandsError):
            channel.receive(2.0)  # let it read before the connection goes
        return refusal

    def _listen(self, member: Member) -> None:
        """What one worker says goes into the queue; a broken connection too."""
        reason, unfinished_bytes, has_left = "", 0, False
        try:
            while True:  # until the channel ends, here or there
                data = member.channel.receive(self.beat_seconds)
                if data is None and member.channel.unfinished_bytes == unfinished_bytes:
                    continue
                unfinished_bytes = member.channel.unfinished_bytes
                self._heard(member)
                if data is None:
                    continue  # it is still speaking
                message = decode_from_worker(data)
                if isinstance(message, Clock):
                    if len(self._clocks) >= _MOST_CLOCKS:
                        self._clocks.clear()  # nobody asked for so many
                    self._clocks[(member.name, message.ticket)] = message
                    continue
                if isinstance(message, Beat):
                    member.stands(message.standing, time.monotonic())
                if not isinstance(message, Beat) or message.arrivals:
                    member.is_leaving = member.is_leaving or isinstance(message, Leaving)
                    self.events.put((member.name, message), decoded_bytes(data))
        except ManyhandsError as error:
            has_left = member.is_leaving
            reason = error.message.rstrip(".") if not has_left else "it left by itself"
        except Exception as error:
            reason = f"what it says cannot be understood: {error!r:.200}"
        self._lose(member, reason, has_left=has_left)

    def _heard(self, member: Member) -> None:
        with self._watching:
            if not member.is_lost:
                self._watch.heard(member.name, self.clock())

    def _lose(self, member: Member, reason: str, *, has_left: bool = False) -> None:
        """Once: it left, its connection broke, or it was silent for too long."""
        with self._change:
            if member.is_lost:
                return
            with self._watching:
                self._watch.forget(member.name)
                member.is_lost, member.reason, member.has_left = True, reason, has_left
            self.endpoint.lose(member.name)  # nobody goes on waiting for its data; before it may join again
            if not self._closing.is_set():
                self.events.put((member.name, Lost(member)))
            self._change.notify_all()
        if not self._closing.is_set():
            event = "left" if has_left else "evicted" if member.is_evicted else "lost"
            self.audit.record(event, name=member.name, reason=reason)
        if not self._closing.is_set() and not member.is_dismissed:  # whoever let it go has said so
            what = "left" if has_left else f"evicted: {reason}" if member.is_evicted else f"lost: {reason}"
            self.on_event(f"{member.name} {what}")

    def evict(self, name: str, reason: str) -> None:
        """Go on without a worker that is connected and of no use: it makes no progress, or others cannot reach it.

        Its process may join again only when its quarantine is over, each one twice as long as the one before: else it
        would be back at once and the run would stand still again.
        """
        member = self.members[name]
        if member.is_lost:
            return
        member.is_evicted = True
        with contextlib.suppress(ManyhandsError):
            member.channel.send(encode(Evict(reason)), _EVICT_SECONDS)
        self.quarantine.begin(member.identity.process, reason, self.clock())
        self._lose(member, reason)
        member.channel.close()
        self.local.end(name)

    # Those who were not let in

    def _turned_away(self, origin: str, error: ManyhandsError) -> None:
        """Somebody has failed at the door, in his thread."""
        if isinstance(error, WrongProof):
            self._failed_proofs.note(origin)
        elif isinstance(error, KeyRefused):
            self.on_event(f"Warning: {error.message} It came from {origin}. {error.hint}".rstrip())
            self.audit.record("refused", origin=origin, key=fingerprint(error.public), reason=error.message)

    def _part_with_revoked(self) -> None:
        """Those whose key was revoked while they are here."""
        book = self._credentials.book if self._credentials is not None else None
        for member in self.alive() if book is not None else ():
            known = book.find(member.channel.peer_key) if book is not None and member.channel.peer_key else None
            if known is not None and known.is_revoked:
                member.is_evicted = True
                self._lose(member, "its key was revoked")
                member.channel.close()

    # Watching

    def _look_around(self) -> None:
        while not self._closing.wait(self.silence_seconds / _LOOKS_IN_SILENCE):
            with contextlib.suppress(Exception):  # whatever those raise who are told of losses: the watch goes on
                self.look_around()
            with contextlib.suppress(Exception):
                self._failed_proofs.report()
                self._part_with_revoked()

    def look_around(self) -> None:
        """Ask those who are silent whether they are there, and give up those who do not answer."""
        now = self.clock()
        with self._watching:
            silent_seconds = {name: self._watch.silent_seconds(name, now) for name in list(self.members)}
            due = self._watch.due(now)
            lost = [self.members[name] for name in due.lost]
        for name in due.probe:
            self.ask(name, _PROBE_TICKET)
        for member in lost:
            try:
                self._lose(member, silence(silent_seconds[member.name]))
            finally:
                member.channel.close()

    def silent_seconds(self, name: str) -> float:
        """How long a worker has said nothing."""
        with self._watching:
            return self._watch.silent_seconds(name, self.clock())

    def ask(self, name: str, ticket: int | None = None) -> int:
        """Ask a worker whether it is there, without waiting for anything: see `has_answered`. Returns the ticket."""
        found = next(self._tickets) if ticket is None else ticket
        channel, data = self.members[name].channel, encode(AskClock(found))

        def send() -> None:
            with contextlib.suppress(ManyhandsError):
                channel.send(data, self.silence_seconds)  # which waits where it does not read

        threading.Thread(target=send, name="coordinator probe", daemon=True).start()
        return found

    def has_answered(self, name: str, ticket: int) -> bool:
        return (name, ticket) in self._clocks

    def _beat(self) -> None:
        """Workers end when nobody has spoken to them for long."""
        while not self._closing.wait(self.beat_seconds * 2):
            for member in self.alive():
                with contextlib.suppress(ManyhandsError):
                    member.channel.send(encode(Beat()), 2.0)

    # Talking to members

    def muster(self, names: Iterable[str]) -> dict[str, Member]:
        """The members a job is about to use. What was said before it began is forgotten."""
        while self.next_event(0.0) is not None:
            pass
        found: dict[str, Member] = {}
        for name in names:
            member = self.members.get(name)
            if member is None:
                raise WorkerLost(f"Worker {name} has not joined.", hint=f"{self.join_command()} --name {name}")
            if member.is_lost:
                how = self.local.ending(name, 1.0) or member.reason
                raise WorkerLost(f"Worker {name} was lost before this began: {how}.", hint="Start it again.")
            found[name] = member
        here = [name for name, member in found.items() if is_loopback(member.address[0])]
        away = [name for name, member in found.items() if name not in here and not member.is_invited]
        if here and away:
            raise BadValue(
                f"{', '.join(here)} joined by a loopback address, which {away[0]} on another machine cannot reach.",
                hint="Join by this machine's own address: manyhands worker --join ADDRESS:PORT ...",
            )
        return found

    def say(self, name: str, message: Said, limit_seconds: float = SEND_LIMIT_SECONDS) -> None:
        """A lost worker is not an error here: its loss is in the events."""
        with contextlib.suppress(WorkerLost, TimedOut):
            self.members[name].channel.send(encode(message), limit_seconds * self.security.patience)

    def dismiss(self, name: str) -> None:
        """Let a worker go that has said that it wants to."""
        self.members[name].is_dismissed = True
        self.say(name, Leave())

    def wake(self) -> None:
        """Whoever waits for an event looks around now."""
        self.events.put((COORDINATOR, Beat()))

    def next_event(self, limit_seconds: float) -> Event | None:
        try:
            return self.events.get(timeout=max(0.0, limit_seconds))
        except queue.Empty:
            return None

    def connect(self, names: Iterable[str], limit_seconds: float = 30.0) -> None:
        """Data connections to these workers."""
        self.endpoint.connect(self.addresses(names, COORDINATOR, with_coordinator=False), limit_seconds)

    def addresses(self, names: Iterable[str], reader: str, *, with_coordinator: bool = True) -> dict[str, Address]:
        """Where the data endpoints of these workers and of the coordinator are, as `reader` can reach them, and which
        of the two connects."""
        own = self.members.get(reader)
        asking = reader, own.invitation if own is not None else None
        found = {
            name: meeting_address(asking, (name, self.members[name].invitation), self.members[name].address)
            for name in names
        }
        if not with_coordinator:
            return found
        host, port = self.endpoint.address
        if own is not None and host in EVERY_ADDRESS:  # the one under which this worker has found us
            host = own.channel.local_host
        found[COORDINATOR] = meeting_address(asking, (COORDINATOR, None), (host, port))
        return found

    def set_clocks(self, names: Iterable[str]) -> dict[str, float]:
        """How far each worker's clocks are from this one's: the middle of the quickest of a few round trips.

        Returns its seconds, for each worker that answered.
        """
        found: dict[str, float] = {}
        for name in names:
            best = float("inf")
            for ticket in range(_CLOCK_TRIES):
                start = time.monotonic()
                self._clocks.pop((name, ticket), None)
                self.say(name, AskClock(ticket))
                while (name, ticket) not in self._clocks and time.monotonic() - start < 2.0:
                    if self.members[name].is_lost:
                        break  # it is in the events
                    time.sleep(0.0002)
                end = time.monotonic()
                if (name, ticket) not in self._clocks:
                    break
                if end - start < best:
                    best = found[name] = end - start
                    clock, member = self._clocks[(name, ticket)], self.members[name]
                    member.clock_offset_seconds = (start + end) / 2 - clock.seconds
                    if clock.wall_seconds:
                        member.wall_offset_seconds = time.time() - (end - start) / 2 - clock.wall_seconds
        return found

    def new_generation(self) -> int:
        self.generation += 1
        return self.generation

    def cluster(self, name: str = "joined") -> Cluster:
        """The joined workers as a cluster, with what they said of themselves; speeds are to be measured."""
        devices = tuple(member.device for member in self.alive())
        if not devices:
            raise BadValue("No worker has joined.", hint=f"On each device: {self.join_command()}")
        return Cluster.local(1).with_devices(name, devices)


def beat_for(silence_seconds: float) -> float:
    """How often workers say that they are alive, where so much silence means that they are not."""
    return min(BEAT_SECONDS, silence_seconds / _BEATS_IN_SILENCE)


def silence(seconds: float) -> str:
    return f"it has said nothing for {seconds:.1f} s: it hangs, was stopped, or its network is down"
