"""Backward in a tiled stage: the gradients of each operator's inputs and weights, from that of its output.

A gradient is collected over the box that this device owns or computes; what belongs to other tiles, the rim, is sent
to them. Weight gradients are computed when nothing waits for them.
"""

from __future__ import annotations

import torch

from manyhands.executor.boxes import holds, in_common
from manyhands.executor.tile_base import formatted_like, memory_of
from manyhands.executor.tile_call import BoxTensor, InputGradientCall, WeightGradientCall
from manyhands.executor.tile_micro_batch import TileMicroBatch
from manyhands.executor.tile_moves import Split
from manyhands.executor.tile_normalization import Normalization
from manyhands.executor.tile_stage import TiledStage
from manyhands.executor.tile_ways import BackwardWay
from manyhands.facts.boxes import Box
from manyhands.graph.piece import Context
from manyhands.schedule.actions import Backward


class TileBackward:
    """Differentiates a tiled stage's operators on one device."""

    def __init__(self, stage: TiledStage) -> None:
        self.stage, self.operators, self.ways, self.memory = stage, stage.operators, stage.ways, stage.memory

    def run(self, batch: TileMicroBatch, action: Backward, context: Context) -> None:
        """Run one action, last operator first; memory falls on the way."""
        if action.part == "rim":
            self._differentiate_rims(batch, action.first, context)
            return
        for index in range(action.last - 1, action.first - 1, -1):
            if index in self.ways.differentiable:
                operator = self.operators.get(index)
                if operator is None:
                    self._differentiate_whole(batch, index, context)
                elif isinstance(operator, Split):
                    self._join(batch, index, operator)
                else:
                    self._differentiate(batch, index, action.part, context)
            if action.part != "inputs":
                self._let_go(batch, index)

    def _let_go(self, batch: TileMicroBatch, index: int) -> None:
        """Forget what nothing reads once an operator has been differentiated."""
        for name in self.stage.network.ops[index].outputs:  # everything that reads these has been passed
            batch.gradients.pop(name, None)
            batch.fresh.discard(name)
        batch.statistics.pop(index, None)
        batch.totals.pop(index, None)
        batch.notes.pop(index, None)
        if index in self.stage.geometry.rim_first:
            batch.rims.clear()  # they have left
        for name in self.ways.done_backward.get(index, ()):
            batch.values.pop(name, None)
            batch.beyond.pop(name, None)

    def rim(self, batch: TileMicroBatch, tensor: str, box: Box) -> torch.Tensor:
        """Return the gradient of a piece that others own; zeros where none flowed back."""
        collected = batch.gradients.get(tensor)
        parts: list[BoxTensor] = [*batch.rims.get(tensor, ()), *([] if collected is None else [collected])]
        for part in parts:
            if holds(part.box, box):
                return part.view(box)
        gradient = torch.zeros(box.shape, dtype=self.memory.dtype(tensor), device=self.memory.torch_device)
        whole = BoxTensor(box, gradient)
        for part in parts:
            if (common := in_common(part.box, box)) is not None:
                whole.view(common).copy_(part.view(common))
        return gradient

    def _differentiate_rims(self, batch: TileMicroBatch, index: int, context: Context) -> None:
        """Compute the gradients of those pieces of an operator's input that other tiles own; a normalization's without
        its correction."""
        operator, way, made = self.operators[index], self.ways.backward(index), self.ways.forward(index).out
        rims = batch.rims[way.inputs[0]] = []
        if made is None:
            return
        for piece in batch.beyond.get(self.ways.piecewise[index], ()):
            box = in_common(piece.box, made)
            if box is None:
                continue
            gradient = self.rim(batch, way.name, box)
            if isinstance(operator, Normalization):
                rims.append(BoxTensor(box, operator.rim_gradient(gradient, batch.statistics[index])))
                continue
            inputs = [None if name is None else batch.piece_of(name, box) for name in way.derived]
            output = batch.piece_of(way.name, box) if way.derives_output else None
            call = InputGradientCall(inputs, output, gradient, box, way.wanted, context)
            rims += [part for part in operator.input_gradients(call) if part is not None]

    def _differentiate_whole(self, batch: TileMicroBatch, index: int, context: Context) -> None:
        """Differentiate an operator that every tile computes whole: it is run again, recorded, and differentiated by
        autograd."""
        piece, network = self.stage.pieces[index], self.stage.network
        roots = [name for name in network.ops[index].outputs if name in batch.gradients]
        if not roots:
            return
        with torch.enable_grad():
            inputs = {name: batch.values[name].tensor.detach() for name in piece.inputs}
            for name, tensor in inputs.items():
                if network.tensors[name].differentiable and name not in network.inputs:
                    tensor.requires_grad_()
            made = piece(inputs, context)
            pairs = [(made[name], batch.gradients[name].tensor) for name in roots if made[name].requires_grad]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        for name, tensor in inputs.items():
            if tensor.grad is not None:
                whole = Box.whole(tensor.shape)
                self.add(batch, name, BoxTensor(whole, tensor.grad), whole, fresh=True)

    def _join(self, batch: TileMicroBatch, index: int, operator: Split) -> None:
        """Put the gradients of a map's parts together."""
        op = self.stage.network.ops[index]
        within = self.ways.collected(index, op.inputs[0])
        for number, name in enumerate(op.outputs if any(self.ways.backward(index).wanted) else ()):
            gradient, out = batch.gradients.get(name), self.ways.differentiated(name)
            if gradient is not None and not out.is_empty:
                part = BoxTensor(operator.part(number, out), gradient.view(out))
                self.add(batch, op.inputs[0], part, within, fresh=False)

    def _differentiate(self, batch: TileMicroBatch, index: int, part: str, context: Context) -> None:
        way, operator = self.ways.backward(index), self.operators[index]
        if index in self.ways.piecewise and index not in self.stage.geometry.rim_first:
            self._differentiate_rims(batch, index, context)  # there may be nothing else here
        gradient = batch.gradients.get(way.name)
        if gradient is None:
            if index not in batch.totals:
                return
            gradient = self.memory.zeros(way.name)
        if part == "inputs" and way.trains:
            batch.waiting[index] = self.memory.inputs(batch, way.inputs)
        elif way.trains:
            inputs = batch.waiting.pop(index, None) or self.memory.inputs(batch, way.inputs)
            has_sums = index in self.stage.geometry.rim_first  # over all pieces, when its row was sent
            output_gradient = gradient.tensor if has_sums else gradient.view(way.over)
            operator.weight_gradients(
                WeightGradientCall(inputs, output_gradient, way.over, context, batch.statistics.get(index))
            )
        if part == "weights":
            return
        if self.ways.is_grouped and any(way.others):
            self._input_gradients(batch, index, way, gradient, way.maps, way.out, context, False)
            self._input_gradients(batch, index, way, gradient, way.others, way.over, context, False)
        else:
            may_overwrite = not part and way.name in batch.fresh
            self._input_gradients(batch, index, way, gradient, way.wanted, way.out, context, may_overwrite)

    def _input_gradients(
        self,
        batch: TileMicroBatch,
        index: int,
        way: BackwardWay,
        gradient: BoxTensor,
        wanted: tuple[bool, ...],
        out: Box,
        context: Context,
        may_overwrite: bool,
    ) -> None:
        """Add an operator's gradients over `out` to those of the wanted inputs."""
        if not any(wanted) or out.is_empty:
            return
        value = self.memory.value
        inputs = [None if name is None else value(batch, name) for name in way.derived]
        output = value(batch, way.name) if way.derives_output else None
        output_gradient = formatted_like(gradient.view(out), [*inputs, output])
        total = batch.totals.get(index)
        parts = self.operators[index].input_gradients(
            InputGradientCall(
                inputs, output, output_gradient, out, wanted, context, batch.notes.get(index), may_overwrite,
                batch.statistics.get(index), total, None if total is None else way.corrected,
            )
        )  # fmt: skip
        memory = [memory_of(part.tensor) for part in parts if part is not None]
        if not may_overwrite:
            memory.append(memory_of(output_gradient))
        for name, part, box in zip(way.inputs, parts, way.collected):
            if part is not None:
                alone = len(memory) == 1 or memory.count(memory_of(part.tensor)) == 1
                self.add(batch, name, part, box, fresh=alone and 0 not in part.tensor.stride())

    def add(self, batch: TileMicroBatch, tensor: str, part: BoxTensor, within: Box, *, fresh: bool) -> None:
        """Add to a tensor's gradient what lies inside `within`; `fresh`: nothing else uses the part's memory."""
        box, collected = self.ways.collected_box(tensor), batch.gradients.get(tensor)
        if box.is_empty:
            return
        if collected is None and within == box and holds(part.box, box):
            batch.gradients[tensor] = part
            batch.fresh |= {tensor} if fresh else set()
            return
        if collected is None or tensor not in batch.fresh:
            copy = self.memory.zeros(tensor)
            if collected is not None:
                copy.tensor.copy_(collected.view(box))
            batch.gradients[tensor] = collected = copy
            batch.fresh.add(tensor)
        if (common := in_common(part.box, within)) is not None:
            collected.view(common).add_(part.view(common))
