"""Works out the memory that a loss takes while it is computed and differentiated, without running it.

With a large vocabulary it is most of what the last device holds beside its weights: cross entropy has at once the
scores, their log-softmax, its gradient, and the gradient of the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from manyhands.facts.network import DTYPE_BYTES
from manyhands.graph.peak_bytes import PeakBytes
from manyhands.graph.piece import Context, Piece
from manyhands.graph.trees import tree_leaves
from manyhands.graph.weights import Weights

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph

COPIES = 4
"""How often a loss that cannot be followed is taken to hold what it reads."""


def loss_bytes(graph: Graph) -> int:
    """Return the most bytes for each sample that a graph's loss holds, forward and back, with what it reads of the
    network's outputs; 0 without a loss."""
    if graph.loss is None:
        return 0
    try:
        two, three = _peaks(graph.loss, (2, 3))
    except (RuntimeError, TypeError, ValueError, IndexError):  # what it makes depends on the numbers in a target
        return COPIES * sum(spec.elements * DTYPE_BYTES[spec.dtype] for spec in graph.loss.inputs)
    return max(0, three - two)


def _peaks(loss: Graph, counts: Sequence[int]) -> list[int]:
    """Return the most bytes held, for each number of samples. No memory is used: tensors are on the meta device."""
    outputs = set(tree_leaves(loss.input_tree[0][0]))
    device = torch.device("meta")
    with device, torch.enable_grad():
        weights = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in loss.weights}
        piece = Piece(loss, Weights(weights, device))
        piece.steps(training=True)
        return [_peak(loss, piece, outputs, samples) for samples in counts]


def _peak(loss: Graph, piece: Piece, outputs: set[str], samples: int) -> int:
    inputs = {spec.name: torch.empty(spec.shape_for(samples), dtype=getattr(torch, spec.dtype)) for spec in loss.inputs}
    for name, tensor in inputs.items():
        if name in outputs and tensor.is_floating_point():
            tensor.requires_grad_()
    peak = PeakBytes(inputs.values())
    with peak:
        value = piece(inputs, Context(samples=samples))[loss.outputs[0]]
        if value.requires_grad:
            torch.autograd.backward([value])
    return peak.most_bytes
