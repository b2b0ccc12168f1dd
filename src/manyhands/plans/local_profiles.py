"""Times of this machine's workers before any is started, for plans of `local:N`.

In order of preference: the stored measurements of this network by a run of as many workers, those of `manyhands
profile`, an estimate from the speed of this machine's cores. A catalogue's numbers would be those of another machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadFile, ManyhandsError
from manyhands.facts.network import Network
from manyhands.facts.profile import DeviceProfile, Profile, estimate, estimate_cluster
from manyhands.files.documents import cache_folder, read_document, write_document
from manyhands.plans.local_cluster import measured_cluster, threads_each
from manyhands.profiler.store import load_profile, profile_path
from manyhands.profiler.this_machine import Machine, identify, machine_path, this_machine


@dataclass(frozen=True)
class LocalTimes:
    """Local workers with their times, and a sentence that says where the times come from."""

    cluster: Cluster
    profile: Profile
    note: str


def is_plain_local(cluster: Cluster) -> bool:
    """Return whether this is `local:N` itself, whose numbers are placeholders. Numbers from a file count."""
    return cluster == Cluster.local(len(cluster.devices))


def local_times(network: Network, cluster: Cluster, *, training: bool = True) -> LocalTimes:
    """Return the workers of this machine that `local:N` stands for, measured where possible, else estimated."""
    count = len(cluster.devices)
    threads = threads_each(count)
    machine = identify(threads)
    workers = f"{count} worker(s) of {threads} thread(s) on {machine.cores} core(s)"
    for measured, how in _usable(network, machine, count, training):
        by_name = {name: msgspec.structs.replace(measured, device=name) for name in cluster.names}
        note = f"Times: measured on this machine ({machine.text}), {how}; {workers}."
        return LocalTimes(_known_links(cluster, machine) or measured_cluster(cluster), Profile(by_name), note)
    machines = _with_links(measured_cluster(cluster), _known_links(cluster, machine))
    note = (
        f"Times: estimated from the measured speed of this machine ({machine.text}), {workers}. "
        f"To measure {network.name}: manyhands profile --model {network.name} --threads {threads}, or a run."
    )
    return LocalTimes(machines, estimate_cluster(network, machines), note)


def known_times(network: Network) -> tuple[DeviceProfile, str] | None:
    """Return the times of this machine alone, and a sentence that says where they come from; None if neither the
    network nor the machine was measured before. Nothing is measured here."""
    threads = threads_each(1)
    machine = identify(threads)
    for measured, how in _usable(network, machine, 1, True):
        return measured, f"Times: measured on this machine ({machine.text}), {how}."
    if not machine_path(machine).exists():
        return None
    try:
        device = this_machine(threads=threads)
    except BadFile:
        return None
    return estimate(network, device), f"Times: estimated from the measured speed of this machine ({machine.text})."


def _usable(network: Network, machine: Machine, count: int, training: bool) -> Iterator[tuple[DeviceProfile, str]]:
    """Yield the stored profiles that can be read and belong to the network, the best match first."""
    for path, how in _stored(network, machine, count, training):
        try:
            profile = load_profile(path, network, machine)
        except ManyhandsError:
            continue  # as a run does: what cannot be used is measured again
        yield profile, how


def _stored(network: Network, machine: Machine, count: int, training: bool) -> Iterator[tuple[Path, str]]:
    """Yield profiles of this network on this machine, the best match first, and how each was measured."""
    for with_training in (training, True) if not training else (True,):
        base = profile_path(network, machine, training=with_training)
        of = "" if with_training == training else ", its forward passes in training"
        runs = [
            path
            for path in base.parent.glob(f"{base.stem}_{count}workers_cpu_*.json")
            if not path.name.endswith(".rate.json")
        ]
        for path in sorted(runs, key=_written, reverse=True):
            yield path, f"by a run of as many workers{of}"
        if base.exists():
            yield base, f"by manyhands profile, alone{of}"


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# Links


def keep_links(cluster: Cluster, threads: int) -> None:
    """Store the links and memory that a run measured for its local workers, for plans made without starting any."""
    path = _links_path(identify(threads), len(cluster.devices))
    try:
        write_document(path, cluster.to_dict())
    except BadFile:
        return  # a cache that cannot be written only costs time


def _links_path(machine: Machine, count: int) -> Path:
    return cache_folder() / "machines" / f"{machine.slug}_{count}workers.json"


def stored_links(cluster: Cluster, threads: int) -> Cluster | None:
    """Return the workers with the links that the last run of as many, of so many threads each, measured."""
    return _known_links(cluster, identify(threads))


def _known_links(cluster: Cluster, machine: Machine) -> Cluster | None:
    """Return the workers with the links that the last run of as many measured; speeds are stored in profiles, not
    here."""
    try:
        stored = Cluster.from_dict(read_document(_links_path(machine, len(cluster.devices))))
    except ManyhandsError:
        return None
    return stored if stored.names == cluster.names else None


def _with_links(measured: Cluster, stored: Cluster | None) -> Cluster:
    """Return workers whose speed was measured, with the links of a run, if there was one."""
    if stored is None:
        return measured
    devices = tuple(
        msgspec.structs.replace(
            device, gflops=speed.gflops, operator_seconds=speed.operator_seconds,
            memory_bytes_per_second=speed.memory_bytes_per_second,
        )
        for device, speed in zip(stored.devices, measured.devices, strict=True)
    )  # fmt: skip
    return Cluster(stored.name, devices, stored.link, stored.links, stored.sites)
