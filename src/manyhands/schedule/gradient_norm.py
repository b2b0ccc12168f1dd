"""The norm of all gradients of an update: which device gives which part, and the exchange by which all learn the total.

    stage 0    pi-1, pi-2 (samples)     a weight each, in turn: both hold the same sums of gradients ─┐
    stage 1    pi-3                     all of its weights                                            ├─ [Σ g², …]
    stage 2    pi-4 (gateway), pi-5     pi-4 alone: it has the sums and makes the step                ─┘

Every trained weight is given by one device, tied ones included. Each device sends its part to all others, and all add
up the parts in the same order: they clip by the same number, and replicas stay alike to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from manyhands.schedule.actions import Reduce
from manyhands.schedule.geometry import StageGeometry

NUMBERS = 2
"""The numbers that a device gives: the sum of its gradients' squares, and how many of its gradients' numbers are not
finite."""
NUMBER_BYTES = 8


class GradientNorm(NamedTuple):
    """The exchange of a round, and each device's part of it."""

    reduce: Reduce
    parts: dict[str, tuple[str, ...]]
    """Device -> the weights whose gradients it gives; the devices that step trained weights."""


def gradient_norm(geometries: Sequence[StageGeometry], steppers: Mapping[int, tuple[str, ...]]) -> GradientNorm | None:
    """Return the exchange among all devices that step trained weights; None: nothing is trained. `steppers`: the
    devices of each stage that hold the sums of its gradients and step its weights."""
    network = geometries[0].network
    parts: dict[str, list[str]] = {}
    load: dict[str, int] = {}
    given: set[str] = set()
    for geometry in geometries:
        names = [n for n in network.weights_of(geometry.first, geometry.last) if network.weights[n].trainable]
        if not names:
            continue
        for device in steppers[geometry.index]:
            parts.setdefault(device, [])
            load.setdefault(device, 0)
        for name in names:
            if name not in given and steppers[geometry.index]:
                giver = min(steppers[geometry.index], key=load.__getitem__)
                parts[giver].append(name)
                load[giver] += network.weights[name].bytes
                given.add(name)
    if not parts:
        return None
    for device in geometries[-1].loss_devices:  # the loss may be scaled by a number that follows from the exchange
        parts.setdefault(device, [])
    devices, size = tuple(parts), NUMBERS * NUMBER_BYTES
    reduce = Reduce(0, "norm", 0, len(network.ops), devices, size, places=geometries[0].plan.places_of(devices))
    return GradientNorm(reduce, {device: tuple(names) for device, names in parts.items()})
