"""Clusters of local workers with measured numbers in place of the usual guesses."""

from __future__ import annotations

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue


def measured_cluster(cluster: Cluster) -> Cluster:
    """The same local workers, each one thread of this machine, with its measured speed and loopback link.

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

    device, link, count = this_machine(threads=1), measure_loopback(), len(cluster.devices)
    part = min(1.0, device.cores / count)
    devices = tuple(
        msgspec.structs.replace(
            device, name=own.name, gflops=device.gflops * part, memory_bytes=device.memory_bytes // count, cores=1
        )
        for own in cluster.devices
    )
    return Cluster(cluster.name, devices, link)
