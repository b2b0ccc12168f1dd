"""The two ends of a split, made ready: processes of this machine, or an edge here and a cloud that is dialled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue
from manyhands.facts.hosts import host_and_port
from manyhands.facts.link import DirectedLink, Link
from manyhands.planner.rates import LEAST_PROBE_BYTES, MOST_PROBE_BYTES
from manyhands.planner.split import LinkRates
from manyhands.runtime.assembly import JOIN_SECONDS
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.heartbeats import heartbeat_interval
from manyhands.runtime.measuring import PAIR_SECONDS, probe_pair
from manyhands.runtime.processes import WorkerProcess
from manyhands.session.joining import parse_address
from manyhands.session.session import Say, Session
from manyhands.transport.keys import Role

LOCAL_SILENCE_SECONDS = 5.0
"""An end on this machine that sends nothing for so long is lost: both share its cores with all other processes."""

EDGE, SERVER = "edge", "server"
INVITE_SECONDS = 30.0
ENOUGH_SECONDS = 0.05
"""A transfer that takes so long is enough to measure the rate of its link."""


@dataclass(frozen=True)
class Cloud:
    """The address at which the server listens, and the token that it requires."""

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, address: str, token: str) -> Cloud:
        from manyhands.runtime.device_book import knows_any
        from manyhands.runtime.serving import LISTEN_PORT

        if not token and not knows_any(Role.WORKER):
            raise BadValue(
                f"The cloud at {address:.80} requires a token; `manyhands split serve` prints it there.",
                hint="Give it once: --token-file FILE, MANYHANDS_TOKEN, or --token TOKEN.",
            )

        return cls(*parse_address(address, LISTEN_PORT), token)


class Looked(NamedTuple):
    """The bytes that were sent one way to measure its rate, and how long that took; 0 bytes: none were sent."""

    byte_count: int
    seconds: float
    delay_seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.byte_count / self.seconds if self.seconds else 0.0


@dataclass
class Two:
    """A session whose members are an edge and a server."""

    session: Session
    edge: str = EDGE
    server: str = SERVER


@contextlib.contextmanager
def open_two(
    cloud: Cloud | None = None,
    *,
    edge_slowdown: float = 1.0,
    server_slowdown: float = 1.0,
    threads: int = 1,
    logs: Path | None = None,
    say: Say | None = None,
    limit_seconds: float = JOIN_SECONDS,
    silence_seconds: float = LOCAL_SILENCE_SECONDS,
) -> Iterator[Two]:
    """Yield an edge and a server.

    The edge is a process of this machine. So is the server, unless a cloud is named: that one is dialled, and again
    whenever it is lost. A slowdown makes an end take so many times as long, to stand for a device that is not at hand.
    """
    for name, factor in (("edge_slowdown", edge_slowdown), ("server_slowdown", server_slowdown)):
        if not 1 <= factor < float("inf"):
            raise BadValue(f"{name} is {factor}; it must be 1 or more.")
    with Coordinator(
        logs=logs,
        heartbeat_timeout_seconds=silence_seconds,
        heartbeat_seconds=heartbeat_interval(silence_seconds),
        on_event=None,
    ) as coordinator:
        workers = [WorkerProcess((EDGE,), slowdown=edge_slowdown)]
        if cloud is None:
            workers.append(WorkerProcess((SERVER,), slowdown=server_slowdown))
        coordinator.wanted = {name for worker in workers for name in worker.names}
        coordinator.start_workers(workers, threads, limit_seconds)
        server = SERVER
        if cloud is not None:
            if say is not None:
                say(f"dialling the cloud at {host_and_port(cloud.host, cloud.port)}")
            server = coordinator.invite(cloud.host, cloud.port, cloud.token, limit_seconds=INVITE_SECONDS)
            coordinator.keep_inviting(cloud.host, cloud.port, cloud.token)
        yield two(coordinator, EDGE, server, threads)


def two(coordinator: Coordinator, edge: str, server: str, threads: int = 0) -> Two:
    """Return a session of two members that have joined. Each is measured separately: they may differ in any way."""
    devices = {member.name: member.device for member in coordinator.alive()}
    for name in (edge, server):
        if name not in devices:
            raise BadValue(f"No worker called {name} has joined; there are {', '.join(devices) or 'none'}.")
    cluster = Cluster.local(1).with_devices("split", (devices[edge], devices[server]))
    return Two(Session(coordinator, cluster, False, threads, has_links=True, kind="split-"), edge, server)


def linked(cluster: Cluster, edge: str, server: str, rates: LinkRates) -> Cluster:
    """Return the cluster with the link between the two as it was measured."""
    delay = rates.delay_seconds
    up, down = (Link(max(rate, 1.0), delay) for rate in (rates.up_bytes_per_second, rates.down_bytes_per_second))
    devices = tuple(
        msgspec.structs.replace(device, up_bytes_per_second=float("inf"), down_bytes_per_second=float("inf"))
        for device in cluster.devices
    )
    links = (DirectedLink(edge, server, up), DirectedLink(server, edge, down))
    return Cluster(cluster.name, devices, cluster.link, links)


def look_at_link(
    coordinator: Coordinator, edge: str, server: str, up: int = LEAST_PROBE_BYTES, down: int = LEAST_PROBE_BYTES,
    limit_seconds: float = PAIR_SECONDS,
) -> tuple[Looked, Looked]:  # fmt: skip
    """Send so many bytes up and down, and more and more until they take long enough to measure; return what was found.

    Nothing else may run meanwhile. Raises `TimedOut` where they have not arrived after `limit_seconds`.
    """
    sizes = {edge: up, server: down}
    looks = {edge: Looked(0, 0.0, 0.0), server: Looked(0, 0.0, 0.0)}
    while any(sizes.values()):
        for name, link in probe_pair(coordinator, (edge, server), sizes, limit_seconds).items():
            size, seconds = sizes[name], sizes[name] / link.bytes_per_second
            looks[name] = Looked(size, seconds, link.delay_seconds)
            is_enough = seconds >= ENOUGH_SECONDS or size >= MOST_PROBE_BYTES
            sizes[name] = 0 if is_enough else min(4 * size, MOST_PROBE_BYTES)
    return looks[edge], looks[server]


def rates_of(up: Looked, down: Looked) -> LinkRates:
    """Return the rates that a measurement in both directions found, and the shorter of the two delays."""
    return LinkRates(up.rate, down.rate, min(up.delay_seconds, down.delay_seconds))
