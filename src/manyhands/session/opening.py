"""Opens a session: starts the workers of a cluster on this machine or in a lab, or waits for others to join."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.errors import BadValue
from manyhands.facts.ray_cluster import RayCluster
from manyhands.files.documents import load_cluster
from manyhands.plans.local_cluster import threads_each
from manyhands.runtime.addresses import DEFAULT_PORT
from manyhands.runtime.assembly import JOIN_SECONDS
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.failure_detector import HEARTBEAT_TIMEOUT_SECONDS
from manyhands.runtime.fork_server import NoForkServer, fork_server_for
from manyhands.runtime.heartbeats import heartbeat_interval
from manyhands.runtime.processes import TOKEN_VARIABLE
from manyhands.runtime.shared_token import shared_token
from manyhands.session.joining import LISTEN_VARIABLE, JoinPoint, join_text, parse_address, refuse_preset
from manyhands.session.session import Say, Session, usable_cores

MOST_DEFAULT_WORKERS = 4


CROWD = 2
"""Workers per core above which each is slow to reply, so that timeouts are longer."""


def expect_session(cluster: object) -> None:
    """Load what workers of this machine need while the caller does something else: a session will be opened."""
    if cluster is None:
        cluster = _usual()
    if isinstance(cluster, Cluster) and all(
        device.kind == "local" and device.compute == "cpu" for device in cluster.devices
    ):
        with contextlib.suppress(NoForkServer):
            fork_server_for(threads_each(len(cluster.devices)), len(cluster.devices))


def _usual() -> Cluster:
    return Cluster.local(min(MOST_DEFAULT_WORKERS, usable_cores()))


@contextlib.contextmanager
def open_session(
    cluster: Cluster | LabCluster | RayCluster | str | Path | Coordinator | None,
    *,
    logs: Path | None = None,
    say: Say | None = None,
    limit_seconds: float = JOIN_SECONDS,
    threads: int = 0,
    pin: Sequence[int] = (),
    silence_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
    slowdowns: Mapping[str, float] | None = None,
    apart: bool = False,
    rendezvous: JoinPoint = JoinPoint(),
) -> Iterator[Session]:
    """Yield a session with the workers of a cluster: processes of this machine for local devices or in a lab, else
    workers that join by name.

    `threads`: of each local worker; 0: the machine's cores are divided among them. `pin`: the core that each local
    worker is pinned to, in the cluster's order, repeated if there are more workers. `silence_seconds`: a worker that
    sends nothing for so long is lost. `slowdowns`: local device -> how many times slower than possible it computes.
    `apart`: each local worker loads PyTorch by itself. `rendezvous`: where devices of other machines join.
    """
    if isinstance(cluster, Coordinator):
        cluster.wait_for_replacements()
        yield Session(cluster, cluster.cluster(), False, 0)
        return
    if isinstance(cluster, LabCluster):
        from manyhands.session.lab_session import lab_session

        with lab_session(cluster, logs=logs, say=say or (lambda text: None), limit_seconds=limit_seconds) as session:
            yield session
        return
    if isinstance(cluster, RayCluster):
        from manyhands.session.ray_session import ray_session

        with ray_session(
            cluster, say=say or (lambda text: None), limit_seconds=limit_seconds,
            heartbeat_timeout_seconds=silence_seconds,
        ) as session:  # fmt: skip
            yield session
        return
    if cluster is not None and not isinstance(cluster, (Cluster, str, Path)):
        raise BadValue(
            f"cluster is a {type(cluster).__name__}; it must be a Cluster, a file, or a Coordinator.",
            hint="Write cluster=mh.Cluster.local(4).",
        )
    if cluster is None:
        cluster = _usual()
    elif not isinstance(cluster, Cluster):
        cluster = load_cluster(cluster)
    if all(device.kind == "local" for device in cluster.devices):
        threads = threads or threads_each(len(cluster.devices))
        with Coordinator.local_cluster(
            cluster, threads=threads, logs=logs, limit_seconds=limit_seconds, heartbeat_timeout_seconds=silence_seconds,
            slowdowns=slowdowns, timeout_factor=max(1.0, len(cluster.devices) / (CROWD * usable_cores())), apart=apart,
        ) as coordinator:  # fmt: skip
            if pin:
                coordinator.local.pin(dict(zip(cluster.names, itertools.cycle(pin), strict=False)))
            yield Session(coordinator, _shared_memory(cluster, coordinator), True, threads)
        return
    refuse_preset(cluster, rendezvous.listen)
    listen = rendezvous.listen or os.environ.get(LISTEN_VARIABLE, f"0.0.0.0:{DEFAULT_PORT}")
    host, port = parse_address(listen, DEFAULT_PORT)
    report = say or (lambda text: None)
    token = rendezvous.token or os.environ.get(TOKEN_VARIABLE, "") or shared_token(report)
    with Coordinator(
        host, port, token, heartbeat_timeout_seconds=silence_seconds,
        heartbeat_seconds=heartbeat_interval(silence_seconds), title=cluster.name,
        on_event=report,
    ) as coordinator:  # fmt: skip
        coordinator.wanted = set(cluster.names)
        report(f"Waiting for {', '.join(cluster.names)}. On each:\n{join_text(coordinator, ' --name NAME')}")
        coordinator.wait_for(cluster.names, limit_seconds)
        yield Session(coordinator, cluster, False, 0, has_links=True)


def _shared_memory(cluster: Cluster, coordinator: Coordinator) -> Cluster:
    """Return the cluster with the memory of the machine, and of each GPU, divided among the workers that share it."""
    counts = Counter(device.compute for device in cluster.devices)
    devices = []
    for device in cluster.devices:
        memory_bytes = coordinator.members[device.name].facts.memory_bytes
        devices.append(msgspec.structs.replace(device, memory_bytes=memory_bytes // counts[device.compute]))
    return Cluster(cluster.name, tuple(devices), cluster.link, cluster.links, cluster.sites)
