"""The sums of the gradients of tied weights: among all devices of all stages that hold them.

    stage 0    words ──▶ ...             pi-1, pi-2 (samples)      gradients of `words` ─┐
    stage 1                              pi-3                                            ├─ one sum, then every step
    stage 2              ... ──▶ words   pi-4                      gradients of `words` ─┘

Each device's gradient is that of its own samples in its own stages, so the sum over the devices is the gradient of the
weight, whatever the number of stages and of devices in each.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.facts.network import Network
from manyhands.facts.tied_weights import tied_weights
from manyhands.schedule.actions import Reduce
from manyhands.schedule.geometry import StageGeometry


def tied_names(geometries: Sequence[StageGeometry]) -> dict[str, tuple[int, ...]]:
    """Return each trained weight that several stages hold, with the numbers of these stages."""
    network = geometries[0].network
    return tied_weights(network, [network.weights_of(geometry.first, geometry.last) for geometry in geometries])


def tied_sums(geometries: Sequence[StageGeometry]) -> tuple[Reduce, ...]:
    """Return the sums of a round, in the order in which every device joins them.

    Weights of the same devices and type are added up together, in buckets as large as those of a stage. Where one
    device holds all copies, it has one, and nothing is added up.
    """
    network, bucket_bytes = geometries[0].network, geometries[0].plan.bucket_bytes
    alike: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for name, stages in tied_names(geometries).items():
        alike.setdefault((stages, network.weights[name].dtype), []).append(name)
    sums: list[Reduce] = []
    for (stages, _), names in alike.items():
        devices = tuple(dict.fromkeys(device for stage in stages for device in geometries[stage].devices))
        if len(devices) > 1:
            places = geometries[0].plan.places_of(devices)
            buckets = _buckets(network, names, bucket_bytes)
            sums += [_sum(network, stages[0], bucket, devices, places) for bucket in buckets]
    return tuple(sums)


def _buckets(network: Network, names: Sequence[str], bucket_bytes: int) -> list[tuple[str, ...]]:
    """Return the weights in runs: each ends with the weight that makes it large enough."""
    buckets: list[tuple[str, ...]] = []
    pending: list[str] = []
    for name in names:
        pending.append(name)
        if sum(network.weights[each].bytes for each in pending) >= bucket_bytes:
            buckets.append(tuple(pending))
            pending = []
    return [*buckets, tuple(pending)] if pending else buckets


def _sum(
    network: Network, stage: int, names: tuple[str, ...], devices: tuple[str, ...], places: tuple[str, ...]
) -> Reduce:
    readers = [op for op, each in enumerate(network.ops) if not set(names).isdisjoint(each.weights)]
    size = sum(network.weights[name].bytes for name in names)
    return Reduce(stage, "gradients", readers[0], readers[-1] + 1, devices, size, weights=names, places=places)
