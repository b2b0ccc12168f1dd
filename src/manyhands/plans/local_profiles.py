"""Times of this machine's workers before any is started, for plans of `local:N`.

In order of preference: the stored measurements of this network by a run of as many workers, those of `manyhands
profile`, an estimate from the speed of this machine's cores. A catalogue's numbers would be those of another machine.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.decode import decode
from manyhands.facts.errors import BadFile, BadValue, ManyhandsError
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
        linked = _known_links(cluster, machine) or measured_cluster(cluster)
        return LocalTimes(_with_known_costs(linked, threads), Profile(by_name), note)
    machines = _with_links(measured_cluster(cluster), _known_links(cluster, machine))
    machines = _with_known_costs(machines, threads)
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


# What a step costs beside its layers


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The costs of a step beside its layers to one of this machine's workers: see `session.step_costs`."""

    message_seconds: float
    round_seconds: float

    def __post_init__(self) -> None:
        for seconds in (self.message_seconds, self.round_seconds):
            if not 0 <= seconds < math.inf:
                raise BadValue(f"Beside its layers a step costs {seconds} s; it must be finite and >= 0.")


def with_costs(cluster: Cluster, costs: StepCosts) -> Cluster:
    """Return the workers with what steps cost them."""
    devices = tuple(
        msgspec.structs.replace(device, message_seconds=costs.message_seconds, round_seconds=costs.round_seconds)
        for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)


def _with_known_costs(cluster: Cluster, threads: int) -> Cluster:
    costs = stored_step_costs(cluster, threads)
    return cluster if costs is None else with_costs(cluster, costs)


def _costs_path(cluster: Cluster, threads: int) -> Path:
    machine = identify(threads)
    return cache_folder() / "machines" / f"{machine.slug}_{len(cluster.devices)}workers.costs.json"


def keep_step_costs(costs: StepCosts, cluster: Cluster, threads: int) -> None:
    """Store what a step costs, for later runs of as many workers, and for plans made without starting any."""
    with contextlib.suppress(BadFile):  # a cache that cannot be written only costs time
        write_document(_costs_path(cluster, threads), msgspec.to_builtins(costs))


def stored_step_costs(cluster: Cluster, threads: int) -> StepCosts | None:
    """Return what a step costs so many workers of so many threads each; None if it has not been measured here."""
    path = _costs_path(cluster, threads)
    try:
        return decode(read_document(path), StepCosts, str(path)) if path.exists() else None
    except ManyhandsError:
        return None
