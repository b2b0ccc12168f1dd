"""Clusters of local workers with measured numbers instead of defaults."""

from __future__ import annotations

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue


def threads_each(count: int) -> int:
    """Return the threads of each of `count` workers: this machine's cores are divided among them."""
    from manyhands.profiler.this_machine import identify

    return max(1, identify().cores // count)


def measured_cluster(cluster: Cluster) -> Cluster:
    """Return the same local workers with their threads of this machine, their measured speed, and the loopback link.

    Workers share the machine: each gets its part of the memory, and with more workers than cores its part of a core.
    """
    strangers = [device.name for device in cluster.devices if device.kind != "local"]
    if strangers:
        raise BadValue(
            f"Only this machine can be measured here, not {', '.join(strangers[:5])}.",
            hint="Use local:N, or run manyhands on that device.",
        )
    from manyhands.profiler.links import measure_loopback
    from manyhands.profiler.this_machine import this_machine

    count = len(cluster.devices)
    threads = threads_each(count)
    device, link = this_machine(threads=threads), measure_loopback()
    part = min(1.0, device.cores / count)
    devices = tuple(
        msgspec.structs.replace(
            device, name=worker.name, gflops=device.gflops * part, memory_bytes=device.memory_bytes // count,
            cores=threads,
        )
        for worker in cluster.devices
    )  # fmt: skip
    return Cluster(cluster.name, devices, link)
