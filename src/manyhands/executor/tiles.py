"""A tiled stage on one device: every operator forward and backward over boxes, by the stage's geometry (TILE §4).

Nothing here is recorded by autograd: each operator says what its derivative reads (`Op.derives_from`), so a value is
kept for exactly as long as something will read it, and weight gradients are computed when nobody waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from manyhands.executor.boxes import cut_out, dtype_of, holds, in_common, place_of
from manyhands.executor.tile_base import are_alike, formatted_like, memory_of
from manyhands.executor.tile_operators import (
    BatchNorm,
    Held,
    Normalisation,
    Notes,
    State,
    SumsOperator,
    TileOperator,
    tile_operator,
)
from manyhands.executor.tile_pointwise import Activation
from manyhands.executor.tile_ways import BackwardWay, ForwardWay, TileWays
from manyhands.facts.boxes import Box, without
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece, counters
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Backward, Forward, Reduce
from manyhands.schedule.tiles import TileGeometry


@dataclass
class TileFlight:
    """One micro-batch under way on one tile."""

    values: dict[str, Held] = field(default_factory=dict)
    gradients: dict[str, Held] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    """Gradients whose memory is nobody else's: they may be added to in place."""
    states: dict[int, State] = field(default_factory=dict)
    """Operator that adds up over the map -> the sums of everybody, forward."""
    totals: dict[int, torch.Tensor] = field(default_factory=dict)
    notes: dict[int, Notes] = field(default_factory=dict)
    """Operator -> what its forward pass noted for its backward pass."""
    waiting: dict[int, list[Held]] = field(default_factory=dict)
    """Operator whose weights' gradients are computed later -> what it reads: others may be done with it by then."""
    beyond: dict[str, list[Held]] = field(default_factory=dict)
    """Of maps that are held in pieces, those that others own."""
    rims: dict[str, list[Held]] = field(default_factory=dict)
    """Their gradients, which are computed before those of this tile."""
    rooms: dict[str, Held] = field(default_factory=dict)
    """Memory of results to come, where what they are made of lies already."""
    gathered: dict[str, torch.Tensor] = field(default_factory=dict)
    """Outputs of the network, whole, on the device that computes the loss."""
    returned: dict[str, torch.Tensor] = field(default_factory=dict)
    """Their gradients."""


class _Room(NamedTuple):
    """Memory for all that is ever here of a tensor."""

    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format
    rests: list[tuple[slice, ...]]
    """Places beside what is about to be written."""


class TileRunner:
    """Runs the actions of one device in a tiled stage, in rounds that autograd does not record."""

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        geometry: TileGeometry,
        device: str,
        kernels: Mapping[str, Kernel],
        torch_device: torch.device,
    ) -> None:
        self.graph, self.network, self.geometry, self.device = graph, graph.network, geometry, device
        self.weights, self.torch_device = weights, torch_device
        self.flights: defaultdict[int, TileFlight] = defaultdict(TileFlight)
        self.elements = 0
        """Elements of maps computed forward so far: the share this device has of the work."""
        self.operators: dict[int, TileOperator] = {}
        self.pieces: dict[int, Piece] = {}
        """Operators on tensors that every tile has whole, and updates of buffers."""
        for index in range(geometry.first, geometry.last):
            op = self.network.ops[index]
            if op.outputs and any(name in geometry.maps for name in op.inputs):
                self.operators[index] = tile_operator(graph, index, weights, kernels.get(op.name))
            else:
                self.pieces[index] = Piece(graph, weights, index, index + 1)
        nodes = graph.nodes[geometry.first : geometry.last]
        self._counters = {geometry.first + place: name for place, name in counters(nodes, graph.outputs).items()}
        """Operators that count batches -> their buffers: the last of them counts for all."""
        self._counts_at = max(self._counters, default=-1)
        self.ways = TileWays(geometry, device, frozenset(self.operators))
        self._rooms: dict[tuple[str, Box], _Room] = {}
        self._formats = self._channels_last(kernels)
        self._buffers = dict(self._buffer_boxes())

    def rest(self, samples: int) -> None:
        for index, operator in self.operators.items():
            if index not in self.geometry.interior_first:  # else it computes several boxes
                operator.rest()

    # What is kept, where, and for how long

    def _channels_last(self, kernels: Mapping[str, Kernel]) -> set[str]:
        """Maps that a convolution reads in channels_last, or makes so, and what is made of them without one."""
        found: set[str] = set()
        for index in self.operators:
            op = self.network.ops[index]
            kernel = kernels.get(op.name)
            if op.macs and kernel is not None and kernel.channels_last:
                found.update(name for name in (*op.inputs, *op.outputs) if name in self.geometry.maps)
            elif not op.macs and any(name in found for name in op.inputs):
                found.update(name for name in op.outputs if name in self.geometry.maps)
        return {name for name in found if len(self.network.tensors[name].shape) == 4}

    def _buffer_boxes(self) -> Iterator[tuple[str, Box]]:
        """Of every map the box around all that is ever here, with room for the zeros that convolutions pad with; of one
        in pieces what is owned, for the others have memory of their own."""
        for name in self.geometry.maps:
            if name in self.ways.in_pieces:
                yield name, self.ways.owned(name)
                continue
            box = self.geometry.buffer(self.device, name)
            for index in self.network.readers.get(name, ()):
                out = self.ways.out_box(index) if index in self.operators else None
                if out is not None:
                    for number, read in enumerate(self.operators[index].op.reads):
                        if read.tensor == name:
                            box = box.hull(self.operators[index].raw_demand(number, out))
            yield name, box

    def _dtype(self, tensor: str) -> torch.dtype:
        return dtype_of(self.network.tensors[tensor].dtype)

    def _buffer(self, tensor: str) -> Box:
        """The box around all that is ever here of a tensor; of a replicated one, all of it."""
        return self._buffers.get(tensor) or Box.whole(self.geometry.shape(tensor))

    def _room(self, tensor: str, inside: Box) -> Held:
        """Memory for all that is ever here of a tensor: zeros but for `inside`, which is about to be written."""
        found = self._rooms.get((tensor, inside))
        if found is None:
            found = self._rooms[tensor, inside] = self._room_for(tensor, inside)
        memory = torch.empty(found.shape, dtype=found.dtype, device=self.torch_device, memory_format=found.layout)
        for place in found.rests:
            memory[place] = 0
        return Held(found.box, memory)

    def _room_for(self, tensor: str, inside: Box) -> _Room:
        box = self._buffer(tensor)
        layout = torch.channels_last if tensor in self._formats else torch.contiguous_format
        rests = [place_of(rest, box) for rest in without([box], inside)]
        return _Room(box, box.shape, self._dtype(tensor), layout, rests)

    def _value(self, flight: TileFlight, tensor: str) -> Held:
        found = flight.values.get(tensor)
        if found is None:  # nobody needed any of it: any value will do
            found = flight.values[tensor] = self._room(tensor, Box(tuple((0, 0) for _ in self.geometry.shape(tensor))))
        return found

    # Forward

    def drop(self, micro_batch: int) -> None:
        self.flights.pop(micro_batch, None)

    def settle(self, micro_batch: int) -> None:
        """Boxes are let go one by one, as operators are passed."""

    def features(self) -> list[torch.Tensor]:
        held = [one for flight in self.flights.values() for one in flight.values.values()]
        held += [one for flight in self.flights.values() for pieces in flight.beyond.values() for one in pieces]
        held += [one for flight in self.flights.values() for kept in flight.waiting.values() for one in kept]
        held += [one for flight in self.flights.values() for one in flight.rooms.values()]
        held += [one for flight in self.flights.values() for note in flight.notes.values() for one in note.values()]
        return [one.tensor for one in held]

    def deltas(self) -> list[torch.Tensor]:
        held = [one for flight in self.flights.values() for one in flight.gradients.values()]
        held += [one for flight in self.flights.values() for rims in flight.rims.values() for one in rims]
        return [one.tensor for one in held]

    def forward(self, action: Forward, context: Context) -> None:
        flight = self.flights[action.micro_batch]
        if action.part == "interior":
            self._compute_interior(flight, action.first, context)
            return
        for index in range(action.first, action.last):
            if action.part == "rim":
                self._compute_rim(flight, index, context)
            elif index in self.operators:
                self._compute(flight, index, context)
            else:
                self._compute_whole(flight, index, context)
            for name in self.ways.done_forward.get(index, ()):
                flight.values.pop(name, None)
                flight.beyond.pop(name, None)

    def _compute_whole(self, flight: TileFlight, index: int, context: Context) -> None:
        piece = self.pieces[index]
        if self.graph.nodes[index].updates and not (context.training and context.moves_buffers):
            return
        if index in self._counters:
            if index == self._counts_at:
                torch._foreach_add_([self.weights.tensors[name] for name in self._counters.values()], 1)
            return
        made = piece({name: flight.values[name].tensor for name in piece.inputs}, context)
        for name, tensor in made.items():
            flight.values[name] = Held(Box.whole(tensor.shape), tensor)

    def _compute(self, flight: TileFlight, index: int, context: Context) -> None:
        operator, way = self.operators[index], self.ways.forward(index)
        name, out = way.name, way.out
        if out is None:
            return
        inputs = self._inputs(flight, way.inputs)
        options: dict[str, Any] = {"state": flight.states[index]} if index in flight.states else {}
        if not way.is_map:
            flight.values[name] = Held(out, operator.forward(inputs, out, context, **options))
            return
        self.elements += way.elements
        if way.notes and context.training:
            options["notes"] = flight.notes.setdefault(index, {})
        pieces = flight.beyond.get(way.inputs[0])
        if pieces is not None:
            parts = [(one, box) for one in (*inputs, *pieces) if (box := in_common(one.box, out)) is not None]
            if name in self.ways.in_pieces:
                room = self._room_ahead(flight, operator, way)
                made = [
                    Held(box, operator.forward([one], box, context, _inside(room, one, box), **options))
                    for one, box in parts
                ]
                flight.values[name], flight.beyond[name] = made[0], made[1:]
                return
            held = flight.values[name] = self._place(flight, name, out)
            for one, box in parts:
                operator.forward([one], box, context, into=held.view(box), **options)
            return
        if self._buffers[name] == out:
            options["may_overwrite"] = way.is_last_reader
            room = None if way.next is None else self._room_ahead(flight, operator, way)
            into = None if room is None else _inside(room, inputs[0], out)
            flight.values[name] = Held(out, operator.forward(inputs, out, context, into, **options))
            return
        held = flight.values[name] = self._place(flight, name, out)
        operator.forward(inputs, out, context, into=held.view(out), **options)

    def _place(self, flight: TileFlight, tensor: str, inside: Box) -> Held:
        ahead = flight.rooms.pop(tensor, None)
        return self._room(tensor, inside) if ahead is None else ahead

    def _room_ahead(self, flight: TileFlight, operator: TileOperator, way: ForwardWay) -> Held | None:
        """Memory for what an activation will make of what a batch norm makes now, where that is more than one piece:
        then the activation works in place."""
        if way.next is None or not isinstance(operator, BatchNorm):
            return None
        then = self.operators[way.next]
        name = then.output.name
        if not isinstance(then, Activation) or way.out is None or name in self.ways.in_pieces:
            return None
        if way.name not in self.ways.in_pieces and self._buffers[name] == way.out:
            return None
        room = flight.rooms[name] = self._room(name, way.out)
        return room

    def _compute_interior(self, flight: TileFlight, index: int, context: Context) -> None:
        out, name = self.ways.out_box(index), self.network.ops[index].outputs[0]
        if out is None:
            return
        flight.values[name] = self._room(name, out)
        self._compute_into(flight, index, self.geometry.interior(self.device, index), context)

    def _compute_rim(self, flight: TileFlight, index: int, context: Context) -> None:
        out = self.ways.out_box(index)
        for box in without([out], self.geometry.interior(self.device, index)) if out is not None else ():
            self._compute_into(flight, index, box, context)

    def _compute_into(self, flight: TileFlight, index: int, box: Box, context: Context) -> None:
        if not box.is_empty:
            way = self.ways.forward(index)
            self.elements += box.volume
            into = flight.values[way.name].view(box)
            self.operators[index].forward(self._inputs(flight, way.inputs), box, context, into=into)

    def _inputs(self, flight: TileFlight, names: tuple[str, ...]) -> list[Held]:
        try:
            return [*map(flight.values.__getitem__, names)]
        except KeyError:
            return [self._value(flight, name) for name in names]

    # Sums over the whole map

    def own_row(self, reduce: Reduce, context: Context) -> torch.Tensor:
        """This tile's part of the sums at an operator."""
        flight, index = self.flights[reduce.micro_batch], reduce.first
        operator = self.operators[index]
        assert isinstance(operator, SumsOperator)
        if not reduce.backward:
            names = self.ways.forward(index).inputs
            return operator.own_row(self._inputs(flight, names), self.ways.owned(names[0]))
        way = self.ways.backward(index)
        gradient = flight.gradients.get(way.name) or self._zeros(way.name)
        inputs, beyond = self._inputs(flight, way.inputs), flight.beyond.get(way.inputs[0], ())
        pairs = [(piece, self._rim(flight, way.name, piece.box)) for piece in beyond]
        return operator.own_backward_row(inputs, gradient, way.over, flight.states[index], pairs)

    def take_rows(self, reduce: Reduce, rows: list[torch.Tensor]) -> None:
        flight, index = self.flights[reduce.micro_batch], reduce.first
        operator = self.operators[index]
        assert isinstance(operator, SumsOperator)
        if reduce.backward:
            flight.totals[index] = rows[0] + rows[1] if len(rows) == 2 else torch.stack(rows).sum(0)
            return
        flight.states[index] = operator.merged(rows, self.ways.shares(index))

    # Backward

    def backward(self, action: Backward, context: Context) -> None:
        flight = self.flights[action.micro_batch]
        if action.part == "rim":
            self._differentiate_rims(flight, action.first, context)
            return
        for index in range(action.last - 1, action.first - 1, -1):
            if index in self.ways.differentiable:
                if index in self.pieces:
                    self._differentiate_whole(flight, index, context)
                else:
                    self._differentiate(flight, index, action.part, context)
            if action.part != "inputs":
                for name in self.network.ops[index].outputs:  # whoever reads these has been passed
                    flight.gradients.pop(name, None)
                    flight.fresh.discard(name)
                flight.states.pop(index, None)
                flight.totals.pop(index, None)
                flight.notes.pop(index, None)
                if index in self.geometry.rim_first:
                    flight.rims.clear()  # they have left
                for name in self.ways.done_backward.get(index, ()):
                    flight.values.pop(name, None)
                    flight.beyond.pop(name, None)

    def _rim(self, flight: TileFlight, tensor: str, box: Box) -> torch.Tensor:
        """The gradient of a piece that others own; zeros where none flowed back."""
        known = flight.gradients.get(tensor)
        several: list[Held] = [*flight.rims.get(tensor, ()), *([] if known is None else [known])]
        for held in several:
            if holds(held.box, box):
                return held.view(box)
        found = Held(box, torch.zeros(box.shape, dtype=self._dtype(tensor), device=self.torch_device))
        for held in several:
            if (common := in_common(held.box, box)) is not None:
                found.view(common).copy_(held.view(common))
        return found.tensor

    def _differentiate_rims(self, flight: TileFlight, index: int, context: Context) -> None:
        """Of what an operator in pieces reads, what belongs to others. Of a normalisation: no sums are in it."""
        operator, way, made = self.operators[index], self.ways.backward(index), self.ways.forward(index).out
        found = flight.rims[way.inputs[0]] = []
        if made is None:
            return
        for piece in flight.beyond.get(self.ways.piecewise[index], ()):
            box = in_common(piece.box, made)
            if box is None:
                continue
            gradient = self._rim(flight, way.name, box)
            if isinstance(operator, Normalisation):
                found.append(Held(box, operator.rim_gradient(gradient, flight.states[index])))
                continue
            inputs = [None if name is None else self._piece_of(flight, name, box) for name in way.derived]
            output = self._piece_of(flight, way.name, box) if way.derives_output else None
            slopes = operator.input_gradients(inputs, output, gradient, box, way.wanted, context)
            found += [one for one in slopes if one is not None]

    def _piece_of(self, flight: TileFlight, tensor: str, box: Box) -> Held:
        """Whatever holds a piece of a map."""
        held: list[Held] = [*flight.beyond.get(tensor, ()), flight.values[tensor]]
        return next(one for one in held if holds(one.box, box))

    def _differentiate_whole(self, flight: TileFlight, index: int, context: Context) -> None:
        """An operator that every tile computes whole: run again, recorded, and differentiated by autograd."""
        piece, op = self.pieces[index], self.network.ops[index]
        roots = [name for name in op.outputs if name in flight.gradients]
        if not roots:
            return
        with torch.enable_grad():
            given = {name: flight.values[name].tensor.detach() for name in piece.inputs}
            for name, tensor in given.items():
                if self.network.tensors[name].differentiable and name not in self.network.inputs:
                    tensor.requires_grad_()
            made = piece(given, context)
            pairs = [(made[name], flight.gradients[name].tensor) for name in roots if made[name].requires_grad]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        for name, tensor in given.items():
            if tensor.grad is not None:
                self._add(flight, name, Held(Box.whole(tensor.shape), tensor.grad), Box.whole(tensor.shape), fresh=True)

    def _differentiate(self, flight: TileFlight, index: int, part: str, context: Context) -> None:
        way = self.ways.backward(index)
        if index in self.ways.piecewise and index not in self.geometry.rim_first:
            self._differentiate_rims(flight, index, context)  # there may be nothing else here
        gradient = flight.gradients.get(way.name)
        adds_up = index in flight.totals
        if gradient is None:
            if not adds_up:
                return
            gradient = self._zeros(way.name)
        options: dict[str, Any] = {"state": flight.states[index]} if index in flight.states else {}
        if part == "inputs" and way.trains:
            flight.waiting[index] = self._inputs(flight, way.inputs)
        elif way.trains:
            inputs = flight.waiting.pop(index, None) or self._inputs(flight, way.inputs)
            has_sums = index in self.geometry.rim_first  # over all pieces, when its row was sent
            slopes = gradient.tensor if has_sums else gradient.view(way.over)
            self.operators[index].weight_gradients(inputs, slopes, way.over, context, **options)
        if part == "weights":
            return
        if adds_up:
            options |= {"total": flight.totals[index], "corrected": way.corrected}
        if self.ways.is_grouped and any(way.others):
            self._input_gradients(flight, index, way, gradient, way.maps, way.out, context, options)
            self._input_gradients(flight, index, way, gradient, way.others, way.over, context, options)
        else:
            options["may_overwrite"] = not part and way.name in flight.fresh
            self._input_gradients(flight, index, way, gradient, way.wanted, way.out, context, options)

    def _input_gradients(
        self, flight: TileFlight, index: int, way: BackwardWay, gradient: Held, wanted: tuple[bool, ...], out: Box,
        context: Context, options: dict[str, Any],
    ) -> None:  # fmt: skip
        if not any(wanted) or out.is_empty:
            return
        inputs = [None if name is None else self._value(flight, name) for name in way.derived]
        output = self._value(flight, way.name) if way.derives_output else None
        given = formatted_like(gradient.view(out), [*inputs, output])
        options["notes"] = flight.notes.get(index)
        found = self.operators[index].input_gradients(inputs, output, given, out, wanted, context, **options)
        memory = [memory_of(one.tensor) for one in found if one is not None]
        if not options.get("may_overwrite"):
            memory.append(memory_of(given))
        for name, one, box in zip(way.inputs, found, way.collected):
            if one is not None:
                alone = len(memory) == 1 or memory.count(memory_of(one.tensor)) == 1
                self._add(flight, name, one, box, fresh=alone and 0 not in one.tensor.stride())

    def _zeros(self, tensor: str) -> Held:
        box = self.ways.collected_box(tensor)
        return Held(box, torch.zeros(box.shape, dtype=self._dtype(tensor), device=self.torch_device))

    def _add(self, flight: TileFlight, tensor: str, part: Held, within: Box, *, fresh: bool) -> None:
        """Add to a tensor's gradient what lies inside `within`."""
        box, known = self.ways.collected_box(tensor), flight.gradients.get(tensor)
        if box.is_empty:
            return
        if known is None and within == box and holds(part.box, box):
            flight.gradients[tensor] = part
            flight.fresh |= {tensor} if fresh else set()
            return
        if known is None or tensor not in flight.fresh:
            own = self._zeros(tensor)
            if known is not None:
                own.tensor.copy_(known.view(box))
            flight.gradients[tensor] = known = own
            flight.fresh.add(tensor)
        if (common := in_common(part.box, within)) is not None:
            known.view(common).add_(part.view(common))

    # What crosses to other devices and other stages

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """A box of a tensor, to be sent."""
        held = self.flights[micro_batch].values[tensor]
        return cut_out(held.tensor, held.box, box)

    def put_value(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        flight = self.flights[micro_batch]
        if tensor in self.ways.fetched_in_pieces:
            flight.beyond.setdefault(tensor, []).append(Held(box, data))
            return
        if tensor not in flight.values:
            if box == self._buffer(tensor):
                flight.values[tensor] = Held(box, data)
                return
            flight.values[tensor] = self._room(tensor, box)
        flight.values[tensor].view(box).copy_(data)

    def gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """A box of a tensor's gradient, to be sent; zeros where none flowed back."""
        flight = self.flights[micro_batch]
        for rim in flight.rims.get(tensor, ()):
            if holds(rim.box, box):
                return cut_out(rim.tensor, rim.box, box)
        found = flight.gradients.get(tensor)
        if found is None:
            return torch.zeros(box.shape, dtype=self._dtype(tensor))
        return cut_out(found.tensor, found.box, box)

    def add_gradient(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        self._add(self.flights[micro_batch], tensor, Held(box, data), box, fresh=True)

    # The network's outputs

    def outputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """What the network returns, whole: on the device that has gathered it."""
        flight = self.flights[micro_batch]
        found = {}
        for name in self.graph.outputs:
            if name not in self.geometry.maps:
                found[name] = flight.values[name].tensor
                continue
            whole = self._gathered(flight, name)
            own = self.geometry.own(self.device, name)
            if not own.is_empty:
                whole[own.slices()] = flight.values[name].view(own)
            found[name] = whole
        return found

    def _gathered(self, flight: TileFlight, name: str) -> torch.Tensor:
        shape = self.geometry.shape(name)
        if name not in flight.gathered:
            flight.gathered[name] = torch.empty(shape, dtype=self._dtype(name), device=self.torch_device)
        return flight.gathered[name]

    def put_output(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        self._gathered(self.flights[micro_batch], tensor)[box.slices()] = data

    def take_gradients(self, micro_batch: int, found: Mapping[str, torch.Tensor]) -> None:
        """The loss' gradients of what the network returned."""
        flight = self.flights[micro_batch]
        for name, tensor in found.items():
            if name in self.network.inputs or not self.network.tensors[name].differentiable:
                continue
            if name not in self.geometry.maps:
                self._add(flight, name, Held(Box.whole(tensor.shape), tensor), Box.whole(tensor.shape), fresh=True)
                continue
            flight.returned[name] = tensor
            own = self.geometry.own(self.device, name)
            if not own.is_empty:
                self._add(flight, name, Held(own, tensor[own.slices()]), own, fresh=False)
        flight.gathered.clear()

    def output_gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        returned = self.flights[micro_batch].returned.get(tensor)
        if returned is None:
            return torch.zeros(box.shape, dtype=self._dtype(tensor))
        return cut_out(returned, Box.whole(returned.shape), box)

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        """This device's part of what the network returns, for whoever started a stream."""
        flight = self.flights[micro_batch]
        return [
            cut_out(flight.values[name].tensor, flight.values[name].box, box)
            for name in self.graph.outputs
            for box in self.geometry.returning(name).boxes(self.device)
            if not box.is_empty
        ]

    def first_not_finite(self, micro_batch: int, context: Context) -> str | None:
        """The first tensor at hand with a number that is none."""
        values = self.flights[micro_batch].values
        for name in (*self.network.inputs, *self.network.producer):
            held = values.get(name)
            if held is not None and held.tensor.is_floating_point() and not bool(torch.isfinite(held.tensor).all()):
                return name
        return None


def _inside(room: Held | None, given: Held, box: Box) -> torch.Tensor | None:
    """The place for `box` in a room, where it lies in memory as what is given does."""
    into = None if room is None else room.view(box)
    return into if into is not None and are_alike(given.view(box), into) else None
