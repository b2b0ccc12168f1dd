"""The self-check before a run's first step: compares the captured graph with the module under plain autograd."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from manyhands.data.loader import example
from manyhands.facts.network import DTYPE_BYTES
from manyhands.facts.units import format_bytes
from manyhands.graph.graph import Graph
from manyhands.graph.verify import Verified, verify
from manyhands.job.evaluation import EXAMPLE_SAMPLES, floats_of
from manyhands.job.metrics import cast
from manyhands.job.workload import Workload
from manyhands.runtime.memory_kills import free_bytes
from manyhands.weights.mapped import is_mapped

_OUTPUTS_HELD = 4
"""Tensors of the size of the outputs that a loss works with: they, what it makes of them, and gradients of both."""


def verified(graph: Graph, workload: Workload, requested: bool | None, data: Dataset[Any]) -> Verified:
    """Compare loss and gradients of up to four samples of `data` with the module's own; a difference is a
    CaptureFailed.

    `requested` None means: unless both steps together would take more than half of this machine's free memory.
    """
    if requested is False:
        return Verified(0, 0.0, 0.0, "verify=False")
    samples = _samples(workload.batch_size)
    need, free = _bytes(graph, samples), free_bytes()
    if requested is None and need > free / 2:
        note = f"it would take {format_bytes(need)} of {format_bytes(free)} that are free here; verify=True insists"
        return Verified(0, 0.0, 0.0, note)
    inputs, targets = example(data, samples)
    floats = floats_of(workload.model)
    return verify(graph, workload.model, workload.loss, cast(inputs, floats), cast(targets, floats))


def _samples(batch_size: int) -> int:
    """Return the number of samples to compare. Module and graph each run them, so half a batch takes no longer than one
    step of the run; with fewer than two, batch norms of plain numbers have no variance."""
    return max(min(2, batch_size), min(EXAMPLE_SAMPLES, batch_size // 2))


def _bytes(graph: Graph, samples: int) -> int:
    """Return the bytes of two gradients of every weight that is trained, and of what one step at a time holds for its
    backward pass. Weights that are mapped from a file are read layer by layer."""
    network = graph.network
    held = sum(layer.saved_fixed_bytes + samples * layer.saved_bytes for layer in network.layers)
    read = max((layer.parameter_bytes for layer in network.layers), default=0)
    trained = sum(weight.bytes for weight in network.weights.values() if weight.trainable)
    entering = graph.loss.inputs if graph.loss is not None else ()
    held += _OUTPUTS_HELD * samples * sum(spec.elements * DTYPE_BYTES[spec.dtype] for spec in entering)
    return 2 * trained + read * any(map(is_mapped, graph.state.values())) + held
