"""Forward in a tiled stage: each operator over the box that this device computes of it."""

from __future__ import annotations

import torch

from manyhands.executor.boxes import in_common
from manyhands.executor.tile_base import TileOperator, are_alike
from manyhands.executor.tile_call import BoxTensor, ForwardCall, GatheredStatistics, Notes
from manyhands.executor.tile_micro_batch import TileMicroBatch
from manyhands.executor.tile_moves import Split
from manyhands.executor.tile_normalization import BatchNorm
from manyhands.executor.tile_pointwise import Activation
from manyhands.executor.tile_stage import TiledStage
from manyhands.executor.tile_ways import ForwardWay
from manyhands.facts.boxes import Box, without
from manyhands.graph.piece import Context, counters
from manyhands.schedule.actions import Forward


class TileForward:
    """Computes a tiled stage's operators forward on one device."""

    def __init__(self, stage: TiledStage) -> None:
        self.stage, self.operators, self.ways, self.memory = stage, stage.operators, stage.ways, stage.memory
        self.elements = 0
        """Elements of maps computed so far: this device's share of the work."""
        first = stage.geometry.first
        nodes = stage.graph.nodes[first : stage.geometry.last]
        self._counters = {first + place: name for place, name in counters(nodes, stage.graph.outputs).items()}
        """Operators that count batches -> their buffers: the last of them counts for all."""
        self._counts_at = max(self._counters, default=-1)

    def run(self, batch: TileMicroBatch, action: Forward, context: Context) -> None:
        """Run one action; values are released as soon as nothing reads them any more."""
        if action.part == "interior":
            self._compute_interior(batch, action.first, context)
            return
        for index in range(action.first, action.last):
            if action.part == "rim":
                self._compute_rim(batch, index, context)
            elif index in self.operators:
                self._compute(batch, index, context)
            else:
                self._compute_whole(batch, index, context)
            for name in self.ways.done_forward.get(index, ()):
                batch.values.pop(name, None)
                batch.beyond.pop(name, None)

    def _compute_whole(self, batch: TileMicroBatch, index: int, context: Context) -> None:
        """Compute an operator on tensors that every tile has whole, or update buffers."""
        piece = self.stage.pieces[index]
        if self.stage.graph.nodes[index].updates and not (context.training and context.moves_buffers):
            return
        if index in self._counters:
            if index == self._counts_at:
                tensors = self.stage.weights.tensors
                torch._foreach_add_([tensors[name] for name in self._counters.values()], 1)
            return
        made = piece({name: batch.values[name].tensor for name in piece.inputs}, context)
        for name, tensor in made.items():
            batch.values[name] = BoxTensor(Box.whole(tensor.shape), tensor)

    def _compute(self, batch: TileMicroBatch, index: int, context: Context) -> None:
        operator, way = self.operators[index], self.ways.forward(index)
        if isinstance(operator, Split):
            self._split(batch, index, operator)
            return
        name, out = way.name, way.out
        if out is None:
            return
        inputs, statistics = self.memory.inputs(batch, way.inputs), batch.statistics.get(index)
        if not way.is_map:
            call = ForwardCall(inputs, out, context, statistics=statistics)
            batch.values[name] = BoxTensor(out, operator.forward(call))
            return
        self.elements += way.elements
        notes = batch.notes.setdefault(index, {}) if way.notes and context.training else None
        if way.inputs[0] in batch.beyond:
            self._compute_pieces(batch, way, operator, inputs, context, notes, statistics)
        elif self.memory.buffers[name] == out:
            room = None if way.next is None else self._room_ahead(batch, operator, way)
            into = None if room is None else _inside(room, inputs[0], out)
            call = ForwardCall(inputs, out, context, into, notes, way.is_last_reader, statistics)
            batch.values[name] = BoxTensor(out, operator.forward(call))
        else:
            place = batch.values[name] = self._place(batch, name, out)
            operator.forward(ForwardCall(inputs, out, context, place.view(out), notes, False, statistics))

    def _split(self, batch: TileMicroBatch, index: int, operator: Split) -> None:
        """Take a map apart: each part over the box that is read of it."""
        (source,) = self.memory.inputs(batch, self.ways.forward(index).inputs)
        for number, name in enumerate(self.stage.network.ops[index].outputs):
            out = self.ways.computed_box(name)
            if out is not None:
                self.elements += out.volume
                place = batch.values[name] = self.memory.room(name, out)
                place.view(out).copy_(source.view(operator.part(number, out)))

    def _compute_pieces(
        self,
        batch: TileMicroBatch,
        way: ForwardWay,
        operator: TileOperator,
        inputs: list[BoxTensor],
        context: Context,
        notes: Notes | None,
        statistics: GatheredStatistics | None,
    ) -> None:
        """Compute an operator that reads a map in pieces: each piece by itself."""
        assert way.out is not None
        pieces = [*inputs, *batch.beyond[way.inputs[0]]]
        parts = [(piece, box) for piece in pieces if (box := in_common(piece.box, way.out)) is not None]
        if way.name in self.ways.in_pieces:
            room = self._room_ahead(batch, operator, way)
            made = []
            for piece, box in parts:
                call = ForwardCall([piece], box, context, _inside(room, piece, box), notes, False, statistics)
                made.append(BoxTensor(box, operator.forward(call)))
            batch.values[way.name], batch.beyond[way.name] = made[0], made[1:]
            return
        place = batch.values[way.name] = self._place(batch, way.name, way.out)
        for piece, box in parts:
            operator.forward(ForwardCall([piece], box, context, place.view(box), notes, False, statistics))

    def _place(self, batch: TileMicroBatch, tensor: str, inside: Box) -> BoxTensor:
        ahead = batch.rooms.pop(tensor, None)
        return self.memory.room(tensor, inside) if ahead is None else ahead

    def _room_ahead(self, batch: TileMicroBatch, operator: TileOperator, way: ForwardWay) -> BoxTensor | None:
        """Return memory for what an activation will make of what a batch norm makes now, where that is more than one
        piece: then the activation works in place."""
        if way.next is None or not isinstance(operator, BatchNorm):
            return None
        then = self.operators[way.next]
        name = then.output.name
        if not isinstance(then, Activation) or way.out is None or name in self.ways.in_pieces:
            return None
        if way.name not in self.ways.in_pieces and self.memory.buffers[name] == way.out:
            return None
        room = batch.rooms[name] = self.memory.room(name, way.out)
        return room

    def _compute_interior(self, batch: TileMicroBatch, index: int, context: Context) -> None:
        out, name = self.ways.out_box(index), self.stage.network.ops[index].outputs[0]
        if out is None:
            return
        batch.values[name] = self.memory.room(name, out)
        self._compute_into(batch, index, self.stage.geometry.interior(self.stage.device, index), context)

    def _compute_rim(self, batch: TileMicroBatch, index: int, context: Context) -> None:
        out = self.ways.out_box(index)
        interior = self.stage.geometry.interior(self.stage.device, index)
        for box in without([out], interior) if out is not None else ():
            self._compute_into(batch, index, box, context)

    def _compute_into(self, batch: TileMicroBatch, index: int, box: Box, context: Context) -> None:
        if not box.is_empty:
            way = self.ways.forward(index)
            self.elements += box.volume
            inputs, into = self.memory.inputs(batch, way.inputs), batch.values[way.name].view(box)
            self.operators[index].forward(ForwardCall(inputs, box, context, into))


def _inside(room: BoxTensor | None, source: BoxTensor, box: Box) -> torch.Tensor | None:
    """Return the place for `box` in a room, if it lies in memory as `source` does; else None."""
    into = None if room is None else room.view(box)
    return into if into is not None and are_alike(source.view(box), into) else None
