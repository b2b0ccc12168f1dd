"""The reason why no pipeline fits into the memory of a cluster, and what would help."""

from __future__ import annotations

from dataclasses import replace

import numpy

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import OutOfMemory
from manyhands.facts.network import Network
from manyhands.facts.profile import estimate_cluster
from manyhands.facts.units import format_bytes
from manyhands.planner.context import Batch, PlanningContext
from manyhands.planner.steps import Steps
from manyhands.schedule.shortage import LESS_STATE, MORE_MEMORY


def pipeline_shortage(network: Network, cluster: Cluster, like: Batch) -> OutOfMemory:
    """Return the error that says why nothing fits: the layer at which the devices' memory is used up, with one sample
    at a time; and what would help. Layers are not divided: if one is larger than every device, more devices are of no
    use."""
    context = PlanningContext(network, cluster, estimate_cluster(network, cluster), 1, like.optimizer_slots)
    steps = Steps(context, replace(like, samples=1, count=1))
    sizes = [cluster.device(name).memory_bytes for name in steps.names]
    first, device = 0, 0
    for last in range(1, steps.layers + 1):
        if _needed(steps, first, last)[1] <= sizes[device]:
            continue
        if last - first > 1:  # it begins the next device's stage
            first, device = last - 1, device + 1
        fixed, needed = _needed(steps, first, last)
        if device < len(sizes) and needed <= sizes[device]:
            continue
        layer = network.layers[first]
        is_full = device == len(sizes)
        have = 0 if is_full else sizes[device]
        where = "all devices are full by then" if is_full else f"{steps.names[device]} has {format_bytes(have)}"
        return OutOfMemory(
            f"No pipeline of {network.name} fits cluster {cluster.name}: layer {first} ({layer.name}) needs "
            f"{format_bytes(needed)} with one sample; {where}: {format_bytes(needed - have)} are missing.",
            hint=_way_out(needed, fixed, max(sizes)),
        )
    return OutOfMemory(
        f"No pipeline of {network.name} fits cluster {cluster.name} with micro-batches of this size.",
        hint="Use more micro-batches (--micro-batches), or a smaller batch (--batch-size).",
    )


def _way_out(needed: float, fixed: float, most: float) -> str:
    """Return what helps where a layer needs `needed` bytes, `fixed` of them without samples, and a device has at most
    `most`."""
    if needed <= most:
        return f"Use more devices, {MORE_MEMORY}, smaller inputs (--input), or {LESS_STATE}."
    if fixed <= most:
        return (
            f"More devices are of no use: a pipeline divides no layer. Use {MORE_MEMORY}, or smaller inputs (--input)."
        )
    return f"No batch size and no more devices help: a pipeline divides no layer. Use {MORE_MEMORY}."


def _needed(steps: Steps, first: int, last: int) -> tuple[float, float]:
    """Return the bytes of a stage of these layers: without samples, and with one."""
    fixed, each = steps.memory(numpy.array([first]), numpy.array([last]), 1)
    return float(fixed[0]), float(fixed[0] + each[0])
