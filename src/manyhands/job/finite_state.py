"""The check that a state has finite weights before it becomes a checkpoint."""

from __future__ import annotations

import torch

from manyhands.facts.errors import NotFinite
from manyhands.graph.graph import Graph
from manyhands.runtime.order import RunState
from manyhands.runtime.state import constant_weights


def check_finite(graph: Graph, state: RunState) -> None:
    """Refuse a state with weights that are not finite: no step could go on from such a checkpoint."""
    if not state.steps_done:
        return
    network = graph.network
    constants = constant_weights(network)
    for layer in network.layers:
        for name in network.weights_of(layer.first, layer.last):
            tensor = state.weights[name]
            if (
                name not in constants
                and tensor.is_floating_point()
                and not bool(torch.isfinite(tensor).all())
                and _was_finite(graph.state[name])
            ):
                raise NotFinite(
                    f"The weight {name} of layer {layer.name} is not finite after step {state.steps_done - 1}.",
                    hint="Lower the learning rate, or look at the data of the steps before.",
                )


def _was_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is finite: a constant such as a mask may hold infinities from the beginning."""
    return bool(torch.isfinite(tensor).all())
