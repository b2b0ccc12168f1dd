"""A stage's operators as segments that can be run forward and backward by themselves.

actions     forward [0,7)  [7,12)        backward [8,12) [0,8)
segments    [0,7) [7,8) [8,12)           cut wherever an action begins or ends
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch

from manyhands.executor.flight import Flight
from manyhands.executor.statistics import SharedBatchNorm
from manyhands.graph.graph import Graph, Node, Value, records_of
from manyhands.graph.piece import Call, Context, Piece
from manyhands.graph.tape import backward_piece
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Backward, Forward


class Segments:
    """The segments of operators [first, last) of a graph, compiled."""

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        bounds: Iterable[int],
        *,
        kernels: Mapping[str, Call],
        shared_norms: Iterable[int],
    ) -> None:
        self.graph = graph
        self.inputs = frozenset(spec.name for spec in graph.inputs)
        self.pieces = {a: Piece(graph, weights, a, b, kernels=kernels) for a, b in pairwise(sorted(set(bounds)))}
        self.norms = {op: SharedBatchNorm(graph.nodes[op], weights) for op in shared_norms}

    def forward(self, flight: Flight, first: int, last: int, context: Context) -> None:
        """Run operators [first, last); what leaves each segment is kept for those that follow and for sending."""
        for start, piece in self.pieces.items():
            if first <= start < last:
                self._forward(flight, start, piece, context)

    def _forward(self, flight: Flight, start: int, piece: Piece, context: Context) -> None:
        entered: dict[str, torch.Tensor] = {}
        for name in piece.inputs:
            tensor = flight.values[name].detach()
            if context.training and name not in self.inputs and self.graph.network.tensors[name].differentiable:
                tensor.requires_grad_()
            entered[name] = tensor
        norm = self.norms.get(start) if context.training else None
        if norm is not None:
            left = {norm.output: norm.forward(entered[norm.input], flight.moments[start])}
        elif context.training:
            left = piece(entered, context)
        else:
            with torch.no_grad():
                left = piece(entered, context)
        if context.training:
            flight.entered[start], flight.left[start] = entered, left
        flight.values.update({name: tensor.detach() for name, tensor in left.items()})

    def backward(self, flight: Flight, first: int, last: int) -> None:
        """Gradients of operators [first, last), last to first; memory falls on the way."""
        for start in reversed([start for start in self.pieces if first <= start < last]):
            entered, left = flight.entered.pop(start), flight.left.pop(start)
            norm = self.norms.get(start)
            if norm is None:
                backward_piece(entered, left, flight.gradients)
            elif start in flight.scaled:
                data = entered[norm.input]
                scaled, own, rows = flight.scaled.pop(start)
                made = norm.backward(data.detach(), scaled, own, rows, flight.moments.pop(start))
                if data.requires_grad:
                    flight.add_gradient(norm.input, made)
            for name in left:  # whoever reads these has been passed
                flight.gradients.pop(name, None)

    def first_not_finite(self, flight: Flight, context: Context) -> str | None:
        """Run the flight again, operator by operator: the first tensor with a number that is none, by name."""
        values = {name: flight.values[name] for name in self.inputs if name in flight.values}
        for piece in self.pieces.values():
            weights = Weights({name: piece.weights.tensors[name].detach().clone() for name in piece.weight_names})
            for op in range(piece.first, piece.last):
                node = self.graph.nodes[op]
                if node.updates:
                    continue
                one = Piece(self.graph, weights, op, op + 1)
                for name in one.inputs:
                    if name not in values:
                        if name not in flight.values:
                            return None  # came from elsewhere and is gone
                        values[name] = flight.values[name]
                    if not _is_finite(values[name]):
                        return name
                with torch.no_grad():
                    if op in self.norms and op in flight.moments:
                        made = {
                            self.norms[op].output: self.norms[op].normalised(
                                values[node_input(node)], flight.moments[op]
                            )
                        }
                    else:
                        made = one(values, context)
                bad_weight = not all(_is_finite(weights.tensors[name]) for name in one.weight_names)
                for name, tensor in made.items():
                    if bad_weight or not _is_finite(tensor):
                        return name
                values.update(made)
        return None


def node_input(node: Node) -> str:
    """The first tensor an operator reads."""
    return next(record.name for record in records_of(node) if isinstance(record, Value))


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def bounds_of(actions: Iterable[Action], norms: Iterable[int]) -> set[int]:
    """Every operator at which an action begins or ends; a shared batch norm stands alone."""
    found = {end for a in actions if isinstance(a, (Forward, Backward)) for end in (a.first, a.last)}
    return found | {end for op in norms for end in (op, op + 1)}
