"""The data that each device must get of a micro-batch before it starts: its part of the inputs, and of the targets.

Inputs at home everywhere are sent straight to the devices that read them; an input with a home is sent to that device
whole, and travels on from there as the schedule says. Targets go to the last stage, which computes the loss.
"""

from __future__ import annotations

from manyhands.facts.boxes import Box
from manyhands.facts.plan import EVERYWHERE
from manyhands.schedule.actions import Part
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.lowering import Lowering, entering_input

WAYS = ("step", "start")
"""The times at which samples travel: those of a step before it, or all before the first step; then only numbers do."""
AT_HOME = -1
"""A value in place of a stage: the input is one that a device has for all of them."""


def fed_inputs(lowering: Lowering) -> dict[str, tuple[tuple[int, Part], ...]]:
    """Return for each device the boxes of graph inputs that it gets and the stage that reads them, for one micro-batch.

    Devices that need none are absent.
    """
    network, plan = lowering.network, lowering.plan
    fed: dict[str, list[tuple[int, Part]]] = {}
    for tensor in network.inputs:
        home = plan.homes.get(tensor, EVERYWHERE)
        if home != EVERYWHERE:
            whole = Box.whole(network.tensors[tensor].shape_for(plan.micro_batch_size))
            fed.setdefault(home, []).append((AT_HOME, Part(tensor, whole)))
            continue
        for geometry in lowering.geometries:
            layout = entering_input(geometry, tensor)
            for device, box in layout.pieces() if layout is not None else ():
                fed.setdefault(device, []).append((geometry.index, Part(tensor, box)))
    return {device: tuple(parts) for device, parts in fed.items()}


def samples_of(geometry: StageGeometry, device: str) -> tuple[int, int]:
    """Return which samples of a micro-batch a device has: [first, last).

    Where they do not lie side by side (`geometry.sample_intervals`), it is as if they did: `last - first` of them.
    """
    first = geometry.sample_intervals(device)[0][0]
    return (first, first + geometry.sample_count(device))


def feed_topic(micro_batch: int) -> str:
    return f"feed m{micro_batch}"


def result_topic(micro_batch: int) -> str:
    return f"result m{micro_batch}"
