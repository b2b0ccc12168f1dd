"""A stage's operators as segments that can be run forward and backward by themselves.

actions     forward [0,7)  [7,12)        backward [8,12) [0,8)
segments    [0,7) [7,8) [8,12)           cut wherever an action begins or ends
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from manyhands.executor.segment_micro_batch import SegmentMicroBatch, SegmentTape
from manyhands.executor.statistics import SharedBatchNorm
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Node, Value, records_of, values_of
from manyhands.graph.piece import Call, Context, Piece
from manyhands.graph.weights import Weights, plain
from manyhands.schedule.actions import Action, Backward, Forward
from manyhands.schedule.recomputation import Span, entering


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
        recomputed: Sequence[Span] = (),
    ) -> None:
        self.graph = graph
        self.inputs = frozenset(spec.name for spec in graph.inputs)
        self.pieces = {a: Piece(graph, weights, a, b, kernels=kernels) for a, b in pairwise(sorted(set(bounds)))}
        self.norms = {op: SharedBatchNorm(graph.nodes[op], weights) for op in shared_norms}
        pieces = list(self.pieces.values())
        self._first = min(self.pieces, default=0)
        end = max((piece.last for piece in pieces), default=0)
        later = {name for node in graph.nodes[end:] for name in values_of(node)} | set(graph.outputs)
        self._recorded = frozenset(start for start, piece in self.pieces.items() if self._is_recorded(piece))
        self.made = frozenset(name for piece in pieces for name in piece.outputs) - self.inputs
        last_reader = {name: piece.first for piece in pieces for name in piece.inputs if name in self.made}
        spans = {span[0]: names for span, names in entering(graph.network, self._first, recomputed).items()}
        self._kept = {name: first for first, names in spans.items() for name in names}
        """Tensors made here that layers read when they are run again -> the first operator of the first such layers."""
        self._read_up = {piece.first: [n for n, at in last_reader.items() if at == piece.first and n not in later]
                         for piece in pieces}  # fmt: skip
        """First operator of a segment -> the tensors made here that nothing reads after it."""

    def forward(self, batch: SegmentMicroBatch, first: int, last: int, context: Context) -> None:
        """Run operators [first, last); what leaves each segment is kept for those that follow and for sending."""
        for start, piece in self.pieces.items():
            if first <= start < last:
                self._forward(batch, start, piece, context)

    def _forward(self, batch: SegmentMicroBatch, start: int, piece: Piece, context: Context) -> None:
        norm = self.norms.get(start) if context.training else None
        is_recorded = context.training and context.records and start in self._recorded
        if norm is not None and context.records:
            data = batch.values[norm.input].detach()
            outputs = {norm.output: norm.forward(data, batch.moments[start])}
            if is_recorded:
                batch.tapes[start] = SegmentTape(data)
        elif not is_recorded:
            with torch.no_grad():
                outputs = piece({name: batch.values[name].detach() for name in piece.inputs}, context)
        else:
            tape = batch.tapes[start] = SegmentTape()
            with torch.enable_grad():
                outputs = piece({name: self._entering(batch, tape, name) for name in piece.inputs}, context)
                tape.leaving(outputs)
        batch.values.update({name: tensor.detach() for name, tensor in outputs.items()})
        for name in self._read_up[start]:
            if name not in self._kept:
                del batch.values[name]

    def _entering(self, batch: SegmentMicroBatch, tape: SegmentTape, name: str) -> torch.Tensor:
        tensor = batch.values[name].detach()
        return tape.entering(name, tensor) if self._has_gradient(name) else tensor

    def _has_gradient(self, name: str) -> bool:
        return name not in self.inputs and self.graph.network.tensors[name].differentiable

    def _is_recorded(self, piece: Piece) -> bool:
        """Return whether anything that a segment makes has a gradient."""
        ops, tensors = self.graph.network.ops[piece.first : piece.last], self.graph.network.tensors
        return any(tensors[name].differentiable for op in ops for name in op.outputs)

    def settle(self, batch: SegmentMicroBatch) -> None:
        """Forget the values that were made here: everything that needs them has read them."""
        for name in self.made & batch.values.keys():
            if name not in self._kept:
                del batch.values[name]

    def forget_again(self, batch: SegmentMicroBatch, first: int, last: int) -> None:
        """Forget the values that operators [first, last) have made once more: tapes have what is needed of them."""
        for start, piece in self.pieces.items():
            for name in piece.outputs if first <= start < last else ():
                batch.values.pop(name, None)

    def backward(self, batch: SegmentMicroBatch, first: int, last: int) -> None:
        """Compute the gradients of operators [first, last), last to first; memory falls on the way."""
        for start in reversed([start for start in self.pieces if first <= start < last]):
            if start in self._recorded:
                self._backward(batch, start)
            for name in [name for name, read in self._kept.items() if read == start]:
                batch.values.pop(name, None)
            for name in self.pieces[start].outputs:  # everything that reads these has been passed
                batch.gradients.pop(name, None)

    def _backward(self, batch: SegmentMicroBatch, start: int) -> None:
        tape, norm = batch.tapes.pop(start), self.norms.get(start)
        if norm is None:
            batch.add_gradients(tape.backward(batch.gradients))
        elif start in batch.scaled:
            assert tape.data is not None
            scaled, sums, rows = batch.scaled.pop(start)
            made = norm.backward(tape.data, scaled, sums, rows, batch.moments.pop(start))
            if self._has_gradient(norm.input):
                batch.add_gradient(norm.input, made)

    def first_not_finite(self, batch: SegmentMicroBatch, context: Context) -> str | None:
        """Run the micro-batch again, operator by operator, and return the name of the first tensor with a number that
        is not finite."""
        values = {name: batch.values[name] for name in self.inputs if name in batch.values}
        for piece in self.pieces.values():
            weights = Weights(
                {name: plain(piece.weights.tensors[name]).detach().clone() for name in piece.weight_names}
            )
            for op in range(piece.first, piece.last):
                node = self.graph.nodes[op]
                if node.updates:
                    continue
                single = Piece(self.graph, weights, op, op + 1)
                for name in single.inputs:
                    if name not in values:
                        if name not in batch.values:
                            return None  # came from elsewhere and is gone
                        values[name] = batch.values[name]
                    if not _is_finite(values[name]):
                        return name
                with torch.no_grad():
                    if op in self.norms and op in batch.moments:
                        made = {
                            self.norms[op].output: self.norms[op].normalised(
                                values[node_input(node)], batch.moments[op]
                            )
                        }
                    else:
                        made = single(values, context)
                bad_weight = not all(_is_finite(weights.tensors[name]) for name in single.weight_names)
                for name, tensor in made.items():
                    if bad_weight or not _is_finite(tensor):
                        return name
                values.update(made)
        return None


def node_input(node: Node) -> str:
    """Return the first tensor an operator reads."""
    return next(record.name for record in records_of(node) if isinstance(record, Value))


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def bounds_of(actions: Iterable[Action], norms: Iterable[int]) -> set[int]:
    """Return every operator at which an action begins or ends; a shared batch norm stands alone."""
    bounds = {end for a in actions if isinstance(a, (Forward, Backward)) for end in (a.first, a.last)}
    return bounds | {end for op in norms for end in (op, op + 1)}
