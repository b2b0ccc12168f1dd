"""The coordinator: one port where workers join, what they say as events in one queue, and an endpoint of its own.

with Coordinator.local_cluster(cluster) as coordinator:        # workers are started here
with Coordinator("0.0.0.0", 7077) as coordinator:      # workers join: manyhands worker --join HOST:7077 --token T
    coordinator.wait_for(3)
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from manyhands.engine.channel import SEND_LIMIT_SECONDS, Channel, Listener
from manyhands.engine.security import Security, is_loopback, new_token
from manyhands.engine.tcp import TcpEndpoint
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.cluster import Cluster, Device
from manyhands.facts.errors import BadValue, ManyhandsError, TimedOut, WorkerLost
from manyhands.facts.version import __version__
from manyhands.runtime.control import (
    PROTOCOL,
    AskClock,
    Beat,
    Clock,
    Facts,
    Hello,
    Leave,
    Refusal,
    Said,
    Shape,
    Welcome,
    decode,
    encode,
)
from manyhands.runtime.processes import LocalWorkers, WorkerProcess

DEFAULT_PORT = 7077
JOIN_SECONDS = 120.0
BEAT_SECONDS = 0.5
SILENCE_SECONDS = 15.0
_HELLO_SECONDS = 10.0
_WELCOME_SECONDS = 2.0
_CLOCK_TRIES = 5
_DATA_SILENCE_PART = 2 / 3
"""Data connections notice silence sooner: whoever waits for a message should not wait for long."""
_EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(eq=False)
class Member:
    """A worker that has joined."""

    name: str
    channel: Channel
    address: tuple[str, int]
    device: Device
    facts: Facts
    clock_offset_seconds: float = 0.0
    """Add to the worker's clock to get this process'."""
    heard: float = field(default_factory=time.monotonic)
    is_lost: bool = False
    reason: str = ""
    """Why it is lost."""

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.heard


@dataclass(frozen=True)
class Lost:
    """A worker is gone: its control connection broke, or it has been silent too long."""

    member: Member
    """Another of the same name may have joined since."""

    @property
    def reason(self) -> str:
        return self.member.reason


Event = tuple[str, Said | Lost]
"""Which worker, and what it said or what became of it."""


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
        patience: float = 1.0,
    ) -> None:
        silence_seconds *= patience
        if not silence_seconds >= 4 * BEAT_SECONDS:
            raise BadValue(f"silence_seconds is {silence_seconds:g}; it must be at least {4 * BEAT_SECONDS:g}.")
        self.silence_seconds = silence_seconds
        self.token = token or new_token()
        self.encrypted = not is_loopback(host)
        self.security = Security(self.token, encrypted=self.encrypted, patience=patience)
        self.on_event = on_event or (lambda text: None)
        self.members: dict[str, Member] = {}
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.local = LocalWorkers(logs=logs)
        self.wanted: set[str] | None = None
        """Names that may join; None: any."""
        self.shaping: Cluster | None = None
        """Links that workers are to imitate among each other."""
        self.generation = 0
        self._change = threading.Condition()
        self._closing = threading.Event()
        self._clocks: dict[tuple[str, int], float] = {}
        self._guests: dict[Channel, threading.Thread] = {}
        """Everybody who is connected, joined or not yet, and the thread that listens to him."""
        self.listener = Listener(host, port, self.security)
        try:
            self.endpoint = TcpEndpoint(
                COORDINATOR, self.security, host=host, silence_seconds=silence_seconds * _DATA_SILENCE_PART
            )
        except BaseException:
            self.listener.close()
            raise
        self.address: tuple[str, int] = self.listener.address
        self._threads = [
            threading.Thread(target=self._accept, name="coordinator door", daemon=True),
            threading.Thread(target=self._beat, name="coordinator beat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def local_cluster(
        cls,
        cluster: Cluster,
        *,
        threads: int = 1,
        logs: Path | None = None,
        limit_seconds: float = JOIN_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> Coordinator:
        """A coordinator with one process on this machine for each device of the cluster, all joined."""
        coordinator = cls(logs=logs, silence_seconds=silence_seconds)
        try:
            coordinator.wanted = set(cluster.names)
            coordinator.start_workers(
                [WorkerProcess((device.name,), device.compute) for device in cluster.devices], threads, limit_seconds
            )
        except BaseException:
            coordinator.close()
            raise
        return coordinator

    def start_workers(self, wanted: Sequence[WorkerProcess], threads: int, limit_seconds: float) -> None:
        """Start processes on this machine and wait until all their workers have joined."""
        self.local.start(wanted, self.address, self.security, threads=threads)
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
            for member in self._alive():
                with contextlib.suppress(ManyhandsError):
                    member.channel.send(encode(Leave()), 1.0)
        finally:
            try:
                self.local.stop()
            finally:
                self._disconnect()

    def _disconnect(self) -> None:
        """No thread and no descriptor is left."""
        self.listener.close()
        self.endpoint.close()
        self._threads[0].join(2)  # nobody is let in from now on
        with self._change:
            guests = dict(self._guests)
        for channel in guests:
            channel.close()
        for thread in (*guests.values(), *self._threads):
            if thread is not threading.current_thread():
                thread.join(2)

    def _alive(self) -> list[Member]:
        with self._change:
            return [member for member in self.members.values() if not member.is_lost]

    # Joining

    def wait_for(self, names: Iterable[str] | int, limit_seconds: float = JOIN_SECONDS) -> None:
        """Wait until these workers (or so many) have joined."""
        wanted = list(names) if not isinstance(names, int) else []
        count = names if isinstance(names, int) else len(wanted)
        end = time.monotonic() + limit_seconds
        with self._change:
            while True:
                alive = [member.name for member in self._alive()]
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

    def join_command(self) -> str:
        host, port = self.address
        shown = "HOST" if host in _EVERY_ADDRESS else host
        return f"manyhands worker --join {shown}:{port} --token {self.token}"

    def _accept(self) -> None:
        while not self._closing.is_set():
            channel = self.listener.accept(0.2)
            if channel is None:
                continue
            thread = threading.Thread(target=self._greet, args=(channel,), name="coordinator guest", daemon=True)
            with self._change:
                self._guests[channel] = thread
            thread.start()

    def _greet(self, channel: Channel) -> None:
        """One guest's thread: whatever he says or does harms nobody else."""
        try:
            member = self._admit(channel)
            if member is not None:
                self._listen(member)
        except Exception as error:
            said = error.message if isinstance(error, ManyhandsError) else repr(error)
            self.on_event(f"a guest from {channel.peer_host} was turned away: {said:.300}")
        finally:
            channel.close()
            with self._change:
                self._guests.pop(channel, None)

    def _admit(self, channel: Channel) -> Member | None:
        """A worker says who it is, and is taken in or told why not."""
        data = channel.receive(_HELLO_SECONDS)
        if data is None:
            return None
        try:
            hello = decode(data)
        except ManyhandsError as error:
            self._refuse(channel, "somebody", Refusal(error.message, error.hint))
            return None
        if not isinstance(hello, Hello):
            self._refuse(channel, "somebody", Refusal("A worker says first who it is.", "Start it anew."))
            return None
        with self._change:  # of two with one name the second is refused
            found = self._judge(hello, channel)
            if isinstance(found, Member):
                channel.send(encode(self._welcome(hello.name)), _WELCOME_SECONDS)
                self.members[hello.name] = found
                self._change.notify_all()
        if isinstance(found, Refusal):
            self._refuse(channel, hello.name, found)
            return None
        self.on_event(f"{hello.name} joined from {channel.peer_host}")
        return found

    def _welcome(self, name: str) -> Welcome:
        if self.shaping is None:
            return Welcome(name, self.silence_seconds)
        own = self.shaping.device(name)
        slots = sum(
            one.host_name == own.host_name for one in self.shaping.devices
        )  # each a process: a part of the port
        links = {}
        for other in self.shaping.devices:
            if other.host_name != own.host_name:
                link = self.shaping.link_between(name, other.name)
                rate = self.shaping.bytes_per_second_between(name, other.name) / slots
                links[other.name] = Shape(rate if math.isfinite(rate) else None, link.delay_seconds)
        up = own.up_bytes_per_second / slots
        return Welcome(name, self.silence_seconds, links, up if math.isfinite(up) else None)

    def _refuse(self, channel: Channel, name: str, refusal: Refusal) -> None:
        self.on_event(f"refused {name:.64} from {channel.peer_host}: {refusal.reason}")
        channel.send(encode(refusal), _WELCOME_SECONDS)
        with contextlib.suppress(ManyhandsError):
            channel.receive(2.0)  # let it read before the connection goes

    def _judge(self, hello: Hello, channel: Channel) -> Member | Refusal:
        if hello.protocol != PROTOCOL or hello.version != __version__:
            return Refusal(
                f"{hello.name:.64} runs manyhands {hello.version:.20}; the coordinator runs {__version__}.",
                f"On that device: pip install manyhands=={__version__}",
            )
        known = self.members.get(hello.name)
        if known is not None and not known.is_lost:
            return Refusal(
                f"A worker called {hello.name:.64} has joined already, from {known.channel.peer_host}.",
                "Give each its own: manyhands worker --name NAME ...",
            )
        if self.wanted is not None and hello.name not in self.wanted:
            names = ", ".join(sorted(self.wanted))
            return Refusal(
                f"This run has no device called {hello.name:.64}; it has {names:.400}.",
                "Join under one of these: manyhands worker --name NAME ...",
            )
        if hello.name == COORDINATOR:
            return Refusal(
                f"No worker may be called {COORDINATOR}.", "Give it another: manyhands worker --name NAME ..."
            )
        try:
            device = _device(hello)
        except BadValue as error:
            return Refusal(error.message, error.hint)
        return Member(hello.name, channel, (hello.host, hello.port), device, hello.facts)

    def _listen(self, member: Member) -> None:
        """What one worker says goes into the queue; silence and a broken connection too."""
        reason = ""
        try:
            while not self._closing.is_set():
                data = member.channel.receive(BEAT_SECONDS)
                if data is None:
                    if member.silent_seconds > self.silence_seconds:
                        reason = silence(member.silent_seconds)
                        break
                    continue
                member.heard = time.monotonic()
                message = decode(data)
                if isinstance(message, Clock):
                    self._clocks[(member.name, message.ticket)] = message.seconds
                elif not isinstance(message, Beat):
                    self.events.put((member.name, message))
        except ManyhandsError as error:
            reason = error.message.rstrip(".")
        except Exception as error:
            reason = f"what it says cannot be understood: {error!r:.200}"
        self.endpoint.lose(member.name)  # nobody goes on waiting for its data; before it may join again
        with self._change:
            member.is_lost, member.reason = True, reason
            self._change.notify_all()
        if not self._closing.is_set():
            self.events.put((member.name, Lost(member)))
            self.on_event(f"{member.name} lost: {reason}")

    def _beat(self) -> None:
        """Workers end when nobody has spoken to them for long."""
        while not self._closing.wait(BEAT_SECONDS * 2):
            for member in self._alive():
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
        if here and len(here) < len(found):
            away = next(name for name in found if name not in here)
            raise BadValue(
                f"{', '.join(here)} joined by a loopback address, which {away} on another machine cannot reach.",
                hint="Join by this machine's own address: manyhands worker --join ADDRESS:PORT ...",
            )
        return found

    def say(self, name: str, message: Said, limit_seconds: float = SEND_LIMIT_SECONDS) -> None:
        """A lost worker is not an error here: its loss is in the events."""
        with contextlib.suppress(WorkerLost, TimedOut):
            self.members[name].channel.send(encode(message), limit_seconds * self.security.patience)

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
        self.endpoint.connect({name: self.members[name].address for name in names}, limit_seconds)

    def addresses(self, names: Iterable[str], reader: str) -> dict[str, tuple[str, int]]:
        """Where the data endpoints of these workers and of the coordinator are, as `reader` can reach them."""
        found = {name: self.members[name].address for name in names}
        host, port = self.endpoint.address
        if host in _EVERY_ADDRESS:  # the one under which this worker has found us
            host = self.members[reader].channel.local_host
        return {**found, COORDINATOR: (host, port)}

    def set_clocks(self, names: Iterable[str]) -> None:
        """How far each worker's clock is from this one: the middle of the quickest of a few round trips."""
        for name in names:
            best = float("inf")
            for ticket in range(_CLOCK_TRIES):
                start = time.monotonic()
                self._clocks.pop((name, ticket), None)
                self.say(name, AskClock(ticket))
                while (name, ticket) not in self._clocks and time.monotonic() - start < 2.0:
                    if self.members[name].is_lost:
                        return  # it is in the events
                    time.sleep(0.0002)
                end = time.monotonic()
                if (name, ticket) not in self._clocks:
                    break
                if end - start < best:
                    best = end - start
                    self.members[name].clock_offset_seconds = (start + end) / 2 - self._clocks[(name, ticket)]

    def new_generation(self) -> int:
        self.generation += 1
        return self.generation

    def cluster(self, name: str = "joined") -> Cluster:
        """The joined workers as a cluster, with what they said of themselves; speeds are to be measured."""
        devices = tuple(member.device for member in self._alive())
        if not devices:
            raise BadValue("No worker has joined.", hint=f"On each device: {self.join_command()}")
        return Cluster.local(1).with_devices(name, devices)


def silence(seconds: float) -> str:
    return f"it has said nothing for {seconds:.1f} s: it hangs, was stopped, or its network is down"


def _device(hello: Hello) -> Device:
    """A worker as a device of a cluster; what cannot be one is refused."""
    facts = hello.facts
    return Device(
        name=hello.name, kind="local", gflops=10.0, memory_bytes=facts.memory_bytes, cores=facts.cores,
        compute=facts.compute, source="Said by the worker itself.",
    )  # fmt: skip
