"""Pieces run one after another, forward and backward, with nothing shared but the tensors that cross the cuts.

This is the reference that every distributed run is compared with: each piece sees detached inputs, as if they had come
over a wire, and hands back gradients for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import backward_piece, bind_inputs
from manyhands.graph.trees import tree_map
from manyhands.graph.weights import Weights


@dataclass
class Tape:
    """What a forward pass leaves behind for backward: the detached inputs and the outputs of every piece."""

    entered: list[dict[str, torch.Tensor]] = field(default_factory=list)
    left: list[dict[str, torch.Tensor]] = field(default_factory=list)


def forward(
    pieces: Sequence[Piece], inputs: Mapping[str, torch.Tensor], context: Context | None = None
) -> tuple[dict[str, torch.Tensor], Tape]:
    """Run the pieces in order. Returns every tensor that left a piece, detached, and the tape."""
    values = dict(inputs)
    tape = Tape()
    context = replace(context or Context(), samples=_samples(pieces[0].graph, inputs))
    for piece in pieces:
        entered: dict[str, torch.Tensor] = {}
        for name in piece.inputs:
            tensor = values[name].detach()
            if name not in inputs and tensor.is_floating_point():
                tensor.requires_grad_()
            entered[name] = tensor
        left = piece(entered, context)
        tape.entered.append(entered)
        tape.left.append(left)
        values.update({name: tensor.detach() for name, tensor in left.items()})
    return values, tape


def _samples(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> int:
    spec = next(spec for spec in graph.inputs if spec.batch_axis is not None)
    assert spec.batch_axis is not None
    return inputs[spec.name].shape[spec.batch_axis]


def backward(tape: Tape, gradients: Mapping[str, torch.Tensor]) -> None:
    """Run the tape backwards from gradients of the outputs. Weights' gradients are summed into their `.grad`."""
    collected = dict(gradients)
    for entered, left in zip(reversed(tape.entered), reversed(tape.left)):
        backward_piece(entered, left, collected)


class CapturedLoss:
    """The captured loss: outputs and target to a number and to gradients of the outputs."""

    def __init__(self, graph: Graph) -> None:
        assert graph.loss is not None, "the graph was captured without a loss"
        self.graph = graph
        self.piece = Piece(graph.loss, Weights.copied(graph.loss))
        self.names = list(graph.outputs)

    def __call__(self, values: Mapping[str, torch.Tensor], target: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert self.graph.loss is not None
        leaves = {name: values[name].detach() for name in self.names}
        for tensor in leaves.values():
            if tensor.is_floating_point():
                tensor.requires_grad_()
        output = tree_map(leaves.__getitem__, self.graph.loss_tree)
        made = self.piece(bind_inputs(self.graph.loss, (output, target)))
        value = made[self.graph.loss.outputs[0]]
        torch.autograd.backward([value])
        return value.detach(), {name: t.grad for name, t in leaves.items() if t.grad is not None}
