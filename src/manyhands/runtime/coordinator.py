"""The coordinator: one port where workers join, what they say as events in one queue, and an endpoint of its own.

with Coordinator.local(cluster) as coordinator:        # workers are started here
with Coordinator("0.0.0.0", 7077) as coordinator:      # workers join: manyhands worker --join HOST:7077 --token T
    coordinator.wait_for(3)
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from manyhands.engine.channel import Channel, Listener
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
    Welcome,
    decode,
    encode,
)
from manyhands.runtime.processes import LocalWorkers

DEFAULT_PORT = 7077
JOIN_SECONDS = 120.0
BEAT_SECONDS = 0.5
SILENCE_SECONDS = 15.0
_HELLO_SECONDS = 10.0
_CLOCK_TRIES = 5


@dataclass(frozen=True)
class Lost:
    """A worker is gone: its control connection broke, or it has been silent too long."""

    reason: str


Event = tuple[str, Said | Lost]
"""Which worker, and what it said or what became of it."""


@dataclass
class Member:
    """A worker that has joined."""

    name: str
    channel: Channel
    address: tuple[str, int]
    facts: Facts
    clock_offset_seconds: float = 0.0
    """Add to the worker's clock to get this process'."""
    heard: float = field(default_factory=time.monotonic)
    is_lost: bool = False


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
    ) -> None:
        self.token = token or new_token()
        self.encrypted = not is_loopback(host)
        self.security = Security(self.token, encrypted=self.encrypted)
        self.on_event = on_event or (lambda text: None)
        self.members: dict[str, Member] = {}
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.local = LocalWorkers(logs=logs)
        self.wanted: set[str] | None = None
        """Names that may join; None: any."""
        self.generation = 0
        self._change = threading.Condition()
        self._closing = threading.Event()
        self._clocks: dict[tuple[str, int], float] = {}
        self.listener = Listener(host, port, self.security)
        try:
            self.endpoint = TcpEndpoint(COORDINATOR, self.security, host=host)
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
        cls, cluster: Cluster, *, threads: int, logs: Path | None = None, limit_seconds: float = JOIN_SECONDS
    ) -> Coordinator:
        """A coordinator with one process on this machine for each device of the cluster, all joined."""
        coordinator = cls(logs=logs)
        try:
            coordinator.wanted = set(cluster.names)
            names = {device.name: device.compute for device in cluster.devices}
            coordinator.local.start(
                names, coordinator.address, coordinator.token, encrypted=coordinator.encrypted, threads=threads
            )
            coordinator.wait_for(cluster.names, limit_seconds)
        except BaseException:
            coordinator.close()
            raise
        return coordinator

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
        for member in self.members.values():
            with contextlib.suppress(ManyhandsError):
                member.channel.send(encode(Leave()), 1.0)
        self.local.stop()
        self.listener.close()
        for member in self.members.values():
            member.channel.close()
        self.endpoint.close()
        for thread in self._threads:
            thread.join(2)

    # Joining

    def wait_for(self, names: Iterable[str] | int, limit_seconds: float = JOIN_SECONDS) -> None:
        """Wait until these workers (or so many) have joined."""
        wanted = list(names) if not isinstance(names, int) else []
        count = names if isinstance(names, int) else len(wanted)
        end = time.monotonic() + limit_seconds
        with self._change:
            while True:
                alive = [member.name for member in self.members.values() if not member.is_lost]
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
        shown = "HOST" if host in ("0.0.0.0", "::") else host
        return f"manyhands worker --join {shown}:{port} --token {self.token}"

    def _accept(self) -> None:
        while not self._closing.is_set():
            channel = self.listener.accept(0.2)
            if channel is not None:
                threading.Thread(target=self._greet, args=(channel,), daemon=True).start()

    def _greet(self, channel: Channel) -> None:
        try:
            data = channel.receive(_HELLO_SECONDS)
            hello = decode_hello(data) if data is not None else None
            if hello is None:
                channel.close()
                return
            refusal = self._refusal(hello)
            if refusal is not None:
                self.on_event(f"refused {hello.name:.64} from {channel.peer_host}: {refusal.reason}")
                channel.send(encode(refusal))
                channel.receive(2.0)  # let it read before the connection goes
                channel.close()
                return
            member = Member(hello.name, channel, (hello.host, hello.port), hello.facts)
            channel.send(encode(Welcome(hello.name)))
            with self._change:
                self.members[hello.name] = member
                self._change.notify_all()
            self.on_event(f"{hello.name} joined from {channel.peer_host}")
            self._listen(member)
        except ManyhandsError:
            channel.close()

    def _refusal(self, hello: Hello) -> Refusal | None:
        if hello.protocol != PROTOCOL or hello.version != __version__:
            return Refusal(
                f"{hello.name:.64} runs manyhands {hello.version:.20}; the coordinator runs {__version__}.",
                f"On that device: pip install manyhands=={__version__}",
            )
        with self._change:
            known = self.members.get(hello.name)
            if known is not None and not known.is_lost:
                return Refusal(
                    f"A worker called {hello.name:.64} has joined already, from {known.channel.peer_host}.",
                    "Give each its own: manyhands worker --name NAME ...",
                )
        if hello.name == COORDINATOR or (self.wanted is not None and hello.name not in self.wanted):
            names = ", ".join(sorted(self.wanted or ()))
            return Refusal(
                f"This run has no device called {hello.name:.64}; it has {names:.400}.",
                "Join under one of these: manyhands worker --name NAME ...",
            )
        return None

    def _listen(self, member: Member) -> None:
        """What one worker says goes into the queue; silence and a broken connection too."""
        reason = ""
        try:
            while not self._closing.is_set():
                data = member.channel.receive(BEAT_SECONDS)
                if data is None:
                    if time.monotonic() - member.heard > SILENCE_SECONDS:
                        reason = f"it has said nothing for {SILENCE_SECONDS:g} s"
                        break
                    continue
                member.heard = time.monotonic()
                message = decode(data)
                if isinstance(message, Clock):
                    self._clocks[(member.name, message.ticket)] = message.seconds
                elif not isinstance(message, Beat):
                    self.events.put((member.name, message))
        except ManyhandsError as error:
            reason = error.message
        with self._change:
            member.is_lost = True
            self._change.notify_all()
        if not self._closing.is_set():
            self.on_event(f"{member.name} lost: {reason}")
            self.events.put((member.name, Lost(reason)))

    def _beat(self) -> None:
        """Workers end when nobody has spoken to them for long."""
        while not self._closing.wait(BEAT_SECONDS * 4):
            for member in list(self.members.values()):
                if not member.is_lost:
                    with contextlib.suppress(ManyhandsError):
                        member.channel.send(encode(Beat()), 2.0)

    # Talking to members

    def say(self, name: str, message: Said) -> None:
        """A lost worker is not an error here: its loss is in the events."""
        with contextlib.suppress(WorkerLost, TimedOut):
            self.members[name].channel.send(encode(message))

    def next_event(self, limit_seconds: float) -> Event | None:
        try:
            return self.events.get(timeout=max(0.0, limit_seconds))
        except queue.Empty:
            return None

    def connect(self, names: Iterable[str], limit_seconds: float = 30.0) -> None:
        """Data connections to these workers."""
        self.endpoint.connect({name: self.members[name].address for name in names}, limit_seconds)

    def addresses(self, names: Iterable[str]) -> dict[str, tuple[str, int]]:
        """Where the data endpoints of these workers and of the coordinator are."""
        found = {name: self.members[name].address for name in names}
        return {**found, COORDINATOR: self.endpoint.address}

    def set_clocks(self, names: Iterable[str]) -> None:
        """How far each worker's clock is from this one: the middle of the quickest of a few round trips."""
        for name in names:
            best = float("inf")
            for ticket in range(_CLOCK_TRIES):
                start = time.monotonic()
                self._clocks.pop((name, ticket), None)
                self.say(name, AskClock(ticket))
                while (name, ticket) not in self._clocks and time.monotonic() - start < 2.0:
                    time.sleep(0.0002)
                end = time.monotonic()
                if (name, ticket) in self._clocks and end - start < best:
                    best = end - start
                    self.members[name].clock_offset_seconds = (start + end) / 2 - self._clocks[(name, ticket)]

    def new_generation(self) -> int:
        self.generation += 1
        return self.generation

    def cluster(self, name: str = "joined") -> Cluster:
        """The joined workers as a cluster, with what they said of themselves; speeds are to be measured."""
        if not self.members:
            raise BadValue("No worker has joined.", hint=f"On each device: {self.join_command()}")
        devices = tuple(
            Device(
                name=member.name, kind="local", gflops=10.0, memory_bytes=member.facts.memory_bytes,
                cores=member.facts.cores, compute=member.facts.compute, source="Said by the worker itself.",
            )
            for member in self.members.values()
            if not member.is_lost
        )  # fmt: skip
        return Cluster.local(1).with_devices(name, devices)


def decode_hello(data: bytes) -> Hello | None:
    message = decode(data)
    return message if isinstance(message, Hello) else None
