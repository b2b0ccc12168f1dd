"""The coordinator: one port where workers join, one queue of events from them, and an endpoint of its own.

with Coordinator.local_cluster(cluster) as coordinator:        # workers are started here
with Coordinator("0.0.0.0", 7077) as coordinator:      # workers join: manyhands worker, or --join HOST:7077
    coordinator.wait_for(3)
    coordinator.invite("cloud.example.org", 7078, token)   # a worker that listens: see `inviting`

It consists of a few parts:

    Rendezvous        listens, and admits the workers that may join            rendezvous.py, dialler.py
    Membership        keeps the members and the events of all of them          membership.py
    HeartbeatMonitor  removes workers whose heartbeats stopped                 heartbeats.py, failure_detector.py
    Assembly          waits for the workers that a job needs                   assembly.py
    ClockSync         measures how far the workers' clocks are from this one's clock_sync.py
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Unpack

from manyhands.data.silo import SiloContent
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue, ManyhandsError
from manyhands.facts.hosts import host_and_port
from manyhands.facts.keywords import settings_from, takes_settings
from manyhands.runtime.assembly import JOIN_SECONDS, Assembly
from manyhands.runtime.audit import AuditLog
from manyhands.runtime.clock_sync import ClockSync
from manyhands.runtime.control import Message, encode
from manyhands.runtime.control_messages import Leave
from manyhands.runtime.coordinator_settings import CoordinatorOptions, CoordinatorSettings
from manyhands.runtime.device_book import own_credentials
from manyhands.runtime.dialler import Dialler
from manyhands.runtime.discovery import Announcer, can_announce, interface_asked
from manyhands.runtime.event_queue import EventQueue
from manyhands.runtime.failure_detector import HEARTBEAT_TIMEOUT_SECONDS, FailureDetector
from manyhands.runtime.gpu_settings import gpu_math
from manyhands.runtime.heartbeats import HeartbeatMonitor, HeartbeatTimes, heartbeat_interval
from manyhands.runtime.inviting import INVITE_SECONDS, Inviting, peer_address
from manyhands.runtime.member import Event, Member
from manyhands.runtime.membership import Membership
from manyhands.runtime.processes import LocalWorkers, WorkerProcess
from manyhands.runtime.rendezvous import JoinTerms, Rendezvous, TurnedAway
from manyhands.runtime.routes import Routes
from manyhands.runtime.shared_token import config_folder, shared_token
from manyhands.transport.channel import SEND_LIMIT_SECONDS
from manyhands.transport.endpoint import Address, RelayAddress
from manyhands.transport.keys import Role
from manyhands.transport.security import EVERY_ADDRESS, DeviceSecurity, Security, is_loopback, is_secret, new_secret
from manyhands.transport.transport import ConnectedEndpoint, ControlListener, TcpTransport


class Coordinator:
    """The workers that join it, and all that is needed to communicate with them."""

    @takes_settings(CoordinatorSettings)
    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        *,
        on_event: Callable[[str], None] | None = None,
        logs: Path | None = None,
        **options: Unpack[CoordinatorOptions],
    ) -> None:
        """Listen at `host` and `port`. `token`: what workers must know; empty: this machine's shared token where other
        machines can join, else a new one. `options`: the fields of `CoordinatorSettings`.
        """
        settings = settings_from(CoordinatorSettings, "Coordinator", options)
        timeout_factor, max_devices = settings.timeout_factor, settings.max_devices
        self.times = times = HeartbeatTimes(
            settings.heartbeat_seconds, settings.heartbeat_timeout_seconds * timeout_factor
        )
        interface = interface_asked()
        self.transport = settings.transport or TcpTransport()
        self.on_event = on_event or (lambda text: None)
        self.encrypted = not is_loopback(host)
        self.token = token or (shared_token(self.on_event) if self.encrypted else new_secret())
        self._credentials = settings.credentials
        if self._credentials is None and self.encrypted and not is_secret(self.token):
            self._credentials = own_credentials(Role.COORDINATOR, self.on_event)
        self.security = DeviceSecurity(
            self.token, encrypted=self.encrypted, timeout_factor=timeout_factor, credentials=self._credentials
        )
        self.secret = new_secret()
        self.gpu_math = gpu_math()
        """The settings of kernels on GPUs."""
        """The key of data connections between the coordinator and its members."""
        self.audit = AuditLog(config_folder() if self._credentials is not None else None)
        self.local = LocalWorkers(logs=logs)
        self.silos: dict[str, SiloContent] = {}
        """Worker -> the part of its own data that the job under way uses; set by split/silos.py."""
        self.generation = 0
        self._closing = threading.Event()
        self._inviting: list[Inviting] = []
        self._turned_away = TurnedAway(self.on_event, self.audit)
        self.listener: ControlListener = self.transport.listen(COORDINATOR, host, port, self.security)
        self.listener.tell_of_failures(self._turned_away.note)
        try:
            security = Security(self.secret, encrypted=self.encrypted, timeout_factor=timeout_factor)
            self.endpoint: ConnectedEndpoint = self.transport.endpoint(
                COORDINATOR, security, host=host, listener=self.listener
            )
        except BaseException:
            self.listener.close()
            raise
        self.address: tuple[str, int] = self.listener.address
        self.membership = Membership(
            self.endpoint, self.local, FailureDetector(times.timeout_seconds), self.audit, on_event=self.on_event,
            clock=settings.clock, closing=self._closing, max_devices=max_devices, timeout_factor=timeout_factor,
        )  # fmt: skip
        self.routes = Routes(self.membership.members, is_active=self.encrypted)
        self._assembly = Assembly(self.membership, self.join_command, self.on_event)
        self.clock_sync = ClockSync(self.membership, times.timeout_seconds)
        terms = JoinTerms(times.coordinator_timeout_seconds(timeout_factor), times.interval_seconds, self.secret)
        self._rendezvous = Rendezvous(
            self.listener, self.membership, self.clock_sync, terms, self._credentials, on_event=self.on_event,
            closing=self._closing,
        )  # fmt: skip
        self._dialler = Dialler(self.transport, self._rendezvous, self.security, self._credentials, self.on_event)
        self.heartbeats = HeartbeatMonitor(self.membership, self.clock_sync, times, self._closing, self._review)
        self._rendezvous.start()
        self.heartbeats.start()
        self._announcer: Announcer | None = None
        if settings.announce and can_announce(host, interface):
            public = self._credentials.key.public if self._credentials is not None else b""
            self._announcer = Announcer(
                self.address, self.token, settings.title, self.on_event, interface, public=public
            )

    @classmethod
    def local_cluster(
        cls,
        cluster: Cluster,
        *,
        threads: int = 1,
        logs: Path | None = None,
        limit_seconds: float = JOIN_SECONDS,
        heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
        slowdowns: Mapping[str, float] | None = None,
        timeout_factor: float = 1.0,
        apart: bool = False,
    ) -> Coordinator:
        """Return a coordinator with one process on this machine for each device of the cluster, all joined.

        `slowdowns`: device -> the factor by which its computations are slowed down. `timeout_factor`: the factor by
        which every timeout is longer than usual, the heartbeat timeout included. `apart`: each process loads PyTorch by
        itself.
        """
        coordinator = cls(
            logs=logs,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            heartbeat_seconds=heartbeat_interval(heartbeat_timeout_seconds),
            timeout_factor=timeout_factor,
        )
        try:
            coordinator.wanted = set(cluster.names)
            slow = dict.fromkeys(cluster.names, 1.0) | dict(slowdowns or {})
            for name in slow:
                cluster.device(name)  # raises an error where there is none
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
        self, processes: Sequence[WorkerProcess], threads: int, limit_seconds: float, *, apart: bool = False
    ) -> None:
        """Start processes on this machine and wait until all their workers have joined. `apart`: see `LocalWorkers`."""
        self.local.start(processes, self.address, self.security, threads=threads, apart=apart)
        self.wait_for([name for process in processes for name in process.names], limit_seconds)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Dismiss all members, and end the processes that were started here before returning."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            for inviting in self._inviting:
                inviting.close()
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
        """Close every descriptor and end every thread."""
        self.listener.close()
        self._turned_away.report(is_last=True)
        self.endpoint.close()
        self._rendezvous.close()
        self.heartbeats.join(2)

    def _review(self) -> None:
        """Report failed proofs, and evict workers whose key was revoked. Called periodically."""
        self._turned_away.report()
        if self._credentials is not None:
            self.membership.evict_revoked(self._credentials.book)

    @property
    def is_closing(self) -> bool:
        """Whether all members are being dismissed: a worker that disconnects from now on is not lost."""
        return self._closing.is_set()

    # Members

    @property
    def members(self) -> dict[str, Member]:
        """Members by name, in the order they joined, including lost ones."""
        return self.membership.members

    @property
    def events(self) -> EventQueue:
        """The queue of the workers' messages and of their losses."""
        return self.membership.events

    @property
    def wanted(self) -> set[str] | None:
        """The names that may join; None: any."""
        return self.membership.wanted

    @wanted.setter
    def wanted(self, names: set[str] | None) -> None:
        self.membership.wanted = names

    @property
    def shaping(self) -> Cluster | None:
        """The cluster whose links the workers are to imitate among each other."""
        return self._rendezvous.terms.shaping

    @shaping.setter
    def shaping(self, cluster: Cluster | None) -> None:
        self._rendezvous.terms.shaping = cluster

    def alive(self) -> list[Member]:
        """Return the members that are not lost."""
        return self.membership.alive()

    def members_for(self, names: Iterable[str]) -> dict[str, Member]:
        """Return the members that a job is about to use, by name. Events from before it began are dropped."""
        return self._assembly.members_for(names)

    def evict(self, name: str, reason: str) -> None:
        """Remove a worker that is connected but useless: it makes no progress, or others cannot reach it.

        Its process may join again only when its quarantine is over, each one twice as long as the one before: otherwise
        it would be back at once and the run would stall again.
        """
        self.membership.evict(name, reason)

    def cluster(self, name: str = "joined") -> Cluster:
        """Return the joined workers as a cluster, with the facts they report; speeds are yet to be measured."""
        devices = tuple(member.device for member in self.alive())
        if not devices:
            raise BadValue("No worker has joined.", hint=f"On each device: {self.join_command()}")
        return Cluster.local(1).with_devices(name, devices)

    # Joining

    def wait_for(self, names: Iterable[str] | int, limit_seconds: float = JOIN_SECONDS) -> None:
        """Wait until these workers, or this many, have joined."""
        self._assembly.wait_for(names, limit_seconds)

    def wait_for_replacements(self) -> None:
        """Wait again, for as long, where some of those that `wait_for` waited for were lost before a job began."""
        self._assembly.wait_for_replacements()

    @property
    def join_limit_seconds(self) -> float:
        """The time in which workers must join: the limit of the last wait."""
        return self._assembly.limit_seconds

    @property
    def is_announced(self) -> bool:
        """Whether it is announced on the network, so that workers can find it by themselves."""
        return self._announcer is not None

    def join_command(self) -> str:
        """Return the command by which a worker joins, for hints. Hints end up in logs, so the token is left out."""
        host, port = self.address
        return f"manyhands worker --join {host_and_port('HOST' if host in EVERY_ADDRESS else host, port)}"

    def invite(
        self, host: str, port: int, token: str, *, limit_seconds: float = INVITE_SECONDS, once: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> str:  # fmt: skip
        """Dial a worker that listens (`serving.listen`), admit it as a member like any other, and return its name.

        TimedOut where no worker answers within the limit (`once`: at the first attempt). Refused where it does not
        join: its token or version differs, it works for another coordinator, or its name is taken. WorkerLost where it
        was lost while it joined.
        """
        return self._dialler.dial(
            host, port, token, limit_seconds=limit_seconds, once=once,
            is_cancelled=lambda: is_cancelled() or self._closing.is_set(),
        )  # fmt: skip

    def keep_inviting(self, host: str, port: int, token: str) -> Inviting:
        """Keep this worker as a member: invite it again whenever it is lost, until this coordinator ends."""
        inviting = Inviting(self, host, port, token)
        self._inviting.append(inviting)
        return inviting

    # Talking to members

    def send(self, name: str, message: Message, limit_seconds: float = SEND_LIMIT_SECONDS) -> None:
        """Send a message to a worker. A lost worker is not an error here: its loss is among the events."""
        self.membership.send(name, message, limit_seconds)

    def dismiss(self, name: str) -> None:
        """Dismiss a worker that has asked to leave."""
        self.membership.dismiss(name)

    def wake(self) -> None:
        """Wake the thread that waits for an event."""
        self.membership.wake()

    def next_event(self, limit_seconds: float) -> Event | None:
        """Return the next event; None where none comes within the limit."""
        return self.membership.next_event(limit_seconds)

    def connect(self, names: Iterable[str], limit_seconds: float = 30.0) -> None:
        """Make data connections to these workers."""
        self.endpoint.connect(self.addresses(names, COORDINATOR, with_coordinator=False), limit_seconds)

    def addresses(self, names: Iterable[str], reader: str, *, with_coordinator: bool = True) -> dict[str, Address]:
        """Return the addresses of the data endpoints of these workers and of the coordinator, as `reader` reaches them.

        Each says which of the two connects, or the relay to which both do. An empty host: the address at which the
        reader has reached the coordinator, which only the reader knows.
        """
        member = self.members.get(reader)
        reader_invitation = reader, member.invitation if member is not None else None
        addresses = {
            name: self._by_route(reader, name, peer_address(
                reader_invitation, (name, self.members[name].invitation), self.members[name].address
            ))
            for name in names
        }  # fmt: skip
        if not with_coordinator:
            return addresses
        addresses[COORDINATOR] = peer_address(reader_invitation, (COORDINATOR, None), ("", 0))
        return addresses

    def _by_route(self, reader: str, name: str, address: Address) -> Address:
        """Return the address with the way that is known between these two: see `routes`."""
        route = self.routes.between(reader, name)
        if route is None or not route.relay:
            return address if route is None else address._replace(is_dialled=route.dialler == reader)
        relay = self.members.get(route.relay)
        host, port = relay.address if relay is not None else ("", 0)
        return Address("", 0, route.dialler == reader, None, RelayAddress(route.relay, host, port))

    def new_generation(self) -> int:
        """Return the number of the next generation; messages of earlier ones are refused from then on."""
        self.generation += 1
        return self.generation
