"""Measures a network that a device cannot hold whole on a band of its input's rows.

Computations over maps take time in proportion to their rows; those that follow (global pooling, a classifier) take a
fixed time. So the speed of a device with little memory can be measured without the memory of a large one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manyhands.facts.network import Network
from manyhands.graph.graph import Graph
from manyhands.profiler.steps import random_inputs
from manyhands.schedule.tileable import tileable_layers

LEAST_ROWS = 32
"""The fewest rows of a band: with fewer, a map's edges would be most of it."""
_ROOM = 1.3
"""The factor for the memory of allocators and kernels beside tensors."""


def needed_bytes(network: Network, samples: int) -> int:
    """Return about how much memory measuring a whole training step takes: every tensor that is made, or kept, and the
    weights."""
    tensors = sum(max(layer.activation_bytes, layer.saved_bytes) for layer in network.layers)
    return int(_ROOM * (samples * tensors + 3 * sum(layer.parameter_bytes for layer in network.layers)))


def possible_parts(network: Network) -> tuple[int, ...]:
    """Return the numbers of bands into which the input may be cut so that every map's rows are divided evenly;
    1 first."""
    last = tileable_layers(network)[0]
    if not last or any(len(network.extents(name)) < 2 for name in network.inputs):
        return (1,)
    rows = network.extents(network.inputs[0])[-2]
    maps = [
        network.extents(name)[-2]
        for op in network.ops[: network.layers[last - 1].last]
        for name in op.outputs
        if network.extents(name)
    ]
    counts = [1]
    while rows // (2 * counts[-1]) >= LEAST_ROWS and not any(
        size % (2 * counts[-1]) for size in (rows, *maps) if size > 1
    ):
        counts.append(2 * counts[-1])
    return tuple(counts)


def fitting_parts(network: Network, samples: int, free_bytes: int) -> int:
    """Return the fewest bands of which one fits; where none does, the most there may be."""
    parts = possible_parts(network)
    needed = needed_bytes(network, samples)
    return next((count for count in parts if needed <= count * free_bytes), parts[-1])


def is_measured_by_layers(network: Network, samples: int, free_bytes: int | None) -> bool:
    """Return whether a network is measured one layer at a time, since neither it nor a band of it fits."""
    return (
        free_bytes is not None
        and len(possible_parts(network)) == 1
        and needed_bytes(network, samples) > free_bytes
    )  # fmt: skip


def band_inputs(graph: Graph, samples: int, device: torch.device, parts: int) -> dict[str, torch.Tensor]:
    """Return the inputs of one band out of `parts`."""
    whole = random_inputs(graph, samples, device)
    if parts == 1:
        return whole
    axes = {name: graph.network.spatial[name][-2] for name in whole}
    return {n: tensor.narrow(axes[n], 0, tensor.shape[axes[n]] // parts).contiguous() for n, tensor in whole.items()}


def whole_seconds(network: Network, seconds: Sequence[float], parts: int) -> list[float]:
    """Return the seconds of all layers from those of one band."""
    if parts == 1:
        return list(seconds)
    last = tileable_layers(network)[0]
    return [layer_seconds * parts if place < last else layer_seconds for place, layer_seconds in enumerate(seconds)]
