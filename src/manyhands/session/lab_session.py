"""Clusters emulated on this machine: a lab brought up for a session, with workers on its devices, then taken down.

Where a lab is impossible (no root, no Linux), the workers are plain processes whose links are shaped inside them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.errors import BadValue, LabError, WorkerLost
from manyhands.facts.lab import Played, play, scale_text, scaled, with_slots
from manyhands.facts.units import format_bytes
from manyhands.files.documents import load_cluster
from manyhands.files.traces import read_link_trace
from manyhands.lab.lab import Lab
from manyhands.lab.removal import missing
from manyhands.lab.spaces import COORDINATOR_SPACE, entered
from manyhands.profiler.this_machine import this_machine
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.processes import WorkerProcess
from manyhands.session.session import Say, Session
from manyhands.transport.security import new_secret

THREADS = 1
"""Threads of a worker in the lab: a device's share of the processor is a share of time, not of cores."""
TENSORS_PART = 0.8
"""The part of a device's free memory that tensors may fill: with a U-Net whose tensors were planned to take 0.95 GB, a
process grew by 1.22 GB."""
HEARTBEAT_TIMEOUT_SECONDS = 5.0
"""Generous, because a device with a tenth of a core is slow to send its heartbeats."""


def lab_cluster(source: str, *, scale: float | None = None, slots: int = 1, traces: tuple[str, ...] = ()) -> LabCluster:
    """Return the lab cluster that was typed: a preset or file, and traces as FILE, DEVICE=FILE or
    DEVICE=UP_FILE,DOWN_FILE."""
    cluster = load_cluster(source)
    if all(device.kind == "local" for device in cluster.devices):
        raise BadValue(
            f"{source} is this machine itself, as fast as it is: nothing to play.",
            hint="Name a preset (manyhands devices lists them) or a cluster.yaml.",
        )
    limited = [device.name for device in cluster.devices if device.up_bytes_per_second < float("inf")]
    trace_files: dict[str, str] = {}
    for text in traces:
        device, _, file = text.rpartition("=")
        device = device or ("edge" if "edge" in cluster.names else limited[0] if limited else cluster.names[0])
        files = [file] if "," not in file or Path(file).is_file() else file.split(",")
        for path in files:
            if not Path(path).is_file():
                raise BadValue(
                    f"--trace {text}: there is no file {path}.", hint="Write FILE, DEVICE=FILE or DEVICE=UP,DOWN."
                )
        trace_files[device] = ",".join(str(Path(path).absolute()) for path in files)
        read_link_trace(trace_files[device])
    return Cluster.lab(cluster, scale=scale, slots=slots, traces=trace_files)


def play_here(setup: LabCluster) -> Played:
    """Return how the cluster is emulated on this machine's cores, whose speed is measured once and stored."""
    return play(setup, core_gflops=this_machine(threads=1).gflops, cores=sorted(os.sched_getaffinity(0)))


def bring_up(setup: LabCluster, *, name: str = "", source: str = "") -> Lab:
    """Bring up a lab that stays until it is taken down, and return it."""
    check_possible()
    return Lab.up(play_here(setup), name or setup.cluster.name, source=source)


def check_possible() -> None:
    """Raise LabError where this machine cannot play a lab."""
    if why := missing():
        raise LabError(f"There can be no lab here: {why}")


def _timeout_factor(played: Played) -> float:
    """Return how many times longer than usual to wait for a device. What a whole core does in two seconds without
    reading messages takes a device with a tenth of a core twenty."""
    slowest_share = played.slowest_share / played.slots
    return max(1.0, played.scale, 2.0 / (slowest_share * HEARTBEAT_TIMEOUT_SECONDS))


@contextlib.contextmanager
def lab_session(setup: LabCluster, *, logs: Path | None, say: Say, limit_seconds: float) -> Iterator[Session]:
    """Yield a session with workers on the devices of a lab that exists only for them; else with plain processes behind
    shaped links."""
    if why := missing():
        say(
            f"There can be no lab here: {why}\nPlain processes stand in for the devices: their links are shaped, but "
            f"their speed and memory are this machine's{', and no trace is followed' if setup.traces else ''}."
        )
        with _shaped(setup, logs, limit_seconds) as session:
            yield session
        return
    played = play_here(setup)
    say(f"Lab {setup.cluster.name}, {scale_text(played.scale)}.")
    with (
        Lab.up(played, setup.cluster.name, owned=True, at_full_speed=True) as lab,
        entered(lab.spaces.namespace(COORDINATOR_SPACE)),
        Coordinator(
            lab.address(COORDINATOR_SPACE),
            0,
            new_secret(),
            logs=logs,
            timeout_factor=_timeout_factor(played),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
            announce=False,
        ) as coordinator,
    ):
        coordinator.wanted = set(played.workers.names)
        workers = [
            WorkerProcess(played.workers_of(device), before=lab.words(device), device=device)
            for device in played.network.names
        ]
        try:
            coordinator.start_workers(workers, THREADS, limit_seconds)
            lab.settle()  # importing torch took the whole core
            yield Session(
                coordinator, _budgeted(played, lab), False, THREADS, has_links=True, scale=played.scale,
                kind=f"lab-{_digest(played)}-",
            )  # fmt: skip
        except WorkerLost as error:
            raise _explained(error, lab) from error


def _digest(played: Played) -> str:
    """Return a digest that separates labs that must not share profiles: the same name at another speed."""
    return hashlib.sha256(repr((played.scale, played.slots, played.seats)).encode()).hexdigest()[:12]


def _budgeted(played: Played, lab: Lab) -> Cluster:
    """Return the cluster with the memory that each worker may plan with: its device's memory without what Python and
    torch already use, and without what allocator, kernels and messages take beside tensors."""
    devices = []
    for device in played.network.devices:
        used_bytes = lab.groups.statistics(lab.name, device.name).memory_bytes
        free_bytes = device.memory_bytes - used_bytes
        if free_bytes <= 0:
            raise LabError(
                f"{device.name} has {format_bytes(device.memory_bytes)}, all of which {played.slots} worker(s) take "
                "before they have anything to do.",
                hint="Give it fewer --slots.",
            )
        devices.append(msgspec.structs.replace(device, memory_bytes=int(TENSORS_PART * free_bytes)))
    network = played.network
    name = network.name if played.scale == 1 else f"{network.name} (time scale {played.scale:g})"
    return with_slots(Cluster(name, tuple(devices), network.link, network.links), played.slots)


def _explained(error: WorkerLost, lab: Lab) -> WorkerLost:
    """Return the error with what the lab knows of its devices: which one ran out of memory, was cut off or frozen."""
    for device in lab.status():
        why = ""
        if device.group.oom_kills:
            why = f"ran out of its {format_bytes(lab.played.seat(device.name).memory_bytes)} of memory"
        elif device.is_cut:
            why = "is cut off from the lab's network"
        elif device.group.is_frozen:
            why = "is frozen in the lab"
        if why:
            return WorkerLost(f"{error.message} {device.name} {why}.", hint=error.hint)
    return error


@contextlib.contextmanager
def _shaped(setup: LabCluster, logs: Path | None, limit_seconds: float) -> Iterator[Session]:
    scale = setup.scale or 1.0
    cluster = with_slots(scaled(setup.cluster, scale), setup.slots)
    with Coordinator(logs=logs, timeout_factor=max(1.0, scale)) as coordinator:
        coordinator.wanted, coordinator.shaping = set(cluster.names), cluster
        coordinator.start_workers([WorkerProcess((name,)) for name in cluster.names], THREADS, limit_seconds)
        yield Session(
            coordinator, cluster, False, THREADS, has_links=True, scale=scale, stands_in=True,
            kind=f"shaped-{len(cluster.names)}workers-",
        )  # fmt: skip
