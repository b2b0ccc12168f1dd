"""A tiled stage on one device: every operator forward and backward over boxes, by the stage's geometry (TILE §4).

Nothing here is recorded by autograd: each operator says what its derivative reads (`Op.derives_from`), so a value is
kept for exactly as long as something will read it, and weight gradients are computed when nobody waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch

from manyhands.executor.boxes import cut_out, dtype_of, place_of
from manyhands.executor.tile_base import formatted_like
from manyhands.executor.tile_operators import Held, Notes, State, SumsOperator, TileOperator, tile_operator
from manyhands.facts.boxes import Box, without
from manyhands.facts.network import Op
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
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
    gathered: dict[str, torch.Tensor] = field(default_factory=dict)
    """Outputs of the network, whole, on the device that computes the loss."""
    returned: dict[str, torch.Tensor] = field(default_factory=dict)
    """Their gradients."""


Answer = TypeVar("Answer")


def memoised(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Keep a method's answers: what a runner asks of its geometry is the same in every step."""
    name = "_known_" + method.__name__

    @wraps(method)
    def ask(self: Any, *arguments: Hashable) -> Answer:
        known: dict[Any, Answer] = self.__dict__.setdefault(name, {})
        key = arguments[0].name if isinstance(arguments[0], Op) else arguments
        if key not in known:
            known[key] = method(self, *arguments)
        return known[key]

    return ask


class TileRunner:
    """Runs the actions of one device in a tiled stage."""

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
        self.flights: dict[int, TileFlight] = {}
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
        self.computed = geometry.computed[device]
        self._own: dict[str, Box] = {}
        self._collecting: dict[str, Box] = {}
        self._rests: dict[tuple[str, Box], list[tuple[slice, ...]]] = {}
        self._formats = self._channels_last(kernels)
        self._buffers = dict(self._buffer_boxes())
        if geometry.plan.is_training:
            self._kept, self._done_backward = self._needed_backward()
        else:
            self._kept, self._done_backward = set(), {}
        self._done_forward = self._needed_forward()

    def rest(self, samples: int) -> None:
        for index, operator in self.operators.items():
            if index not in self.geometry.interior_first:  # else it computes several boxes
                operator.rest()

    # What is kept, where, and for how long

    def _channels_last(self, kernels: Mapping[str, Kernel]) -> set[str]:
        """Maps that a convolution reads in channels_last."""
        found: set[str] = set()
        for index in self.operators:
            op = self.network.ops[index]
            kernel = kernels.get(op.name)
            if op.macs and kernel is not None and kernel.channels_last:
                found.update(name for name in op.inputs if name in self.geometry.maps)
        return found

    def _buffer_boxes(self) -> Iterator[tuple[str, Box]]:
        """Of every map the box around all that is ever here, with room for the zeros that convolutions pad with."""
        for name in self.geometry.maps:
            box = self.geometry.buffer(self.device, name)
            for index in self.network.readers.get(name, ()):
                out = self._out_box(index) if index in self.operators else None
                if out is not None:
                    for number, read in enumerate(self.operators[index].op.reads):
                        if read.tensor == name:
                            box = box.hull(self.operators[index].raw_demand(number, out))
            yield name, box

    @memoised
    def _out_box(self, index: int) -> Box | None:
        """What this device computes of an operator on maps; None: nothing."""
        op = self.network.ops[index]
        box = self.computed.get(op.outputs[0])
        return None if box is None or box.is_empty else box

    def _needed_forward(self) -> dict[int, list[str]]:
        """Operator -> values that nothing reads once it has run forward."""
        last: dict[str, int] = {}
        for index in range(self.geometry.first, self.geometry.last):
            for name in (*self.network.ops[index].inputs, *self.network.ops[index].outputs):
                last[name] = index
        for group in self.geometry.groups:
            for name, moves in group.fetches.items():
                if any(move.source == self.device for move in moves):
                    last[name] = max(last[name], group.first)
        found: dict[int, list[str]] = defaultdict(list)
        for name, index in last.items():
            leaves = name in self.network.outputs or any(
                reader >= self.geometry.last for reader in self.network.readers.get(name, ())
            )
            if name not in self._kept and not leaves:
                found[index].append(name)
        return found

    def _needed_backward(self) -> tuple[set[str], dict[int, list[str]]]:
        """Values that the way back reads, and the operator after whose backward nothing reads them any more."""
        last: dict[str, int] = {}
        for index in range(self.geometry.last - 1, self.geometry.first - 1, -1):
            op = self.network.ops[index]
            if not self._is_differentiable(op):
                continue
            names = set(op.derives_from) if index in self.operators else set(op.inputs)
            if self._trains(op):
                names.update(op.inputs)
            last.update(dict.fromkeys(names, index))
        for group in self.geometry.backward_groups or ():
            for name, moves in group.values.items():
                if any(move.source == self.device for move in moves):
                    last[name] = min(last.get(name, group.last - 1), group.last - 1)
        found: dict[int, list[str]] = defaultdict(list)
        for name, index in last.items():
            found[index].append(name)
        return set(last), found

    @memoised
    def _is_differentiable(self, op: Op) -> bool:
        return any(self.network.tensors[name].differentiable for name in op.outputs)

    @memoised
    def _trains(self, op: Op) -> bool:
        return any(self.network.weights[name].trainable for name in op.weights)

    def _dtype(self, tensor: str) -> torch.dtype:
        return dtype_of(self.network.tensors[tensor].dtype)

    def _buffer(self, tensor: str) -> Box:
        """The box around all that is ever here of a tensor; of a replicated one, all of it."""
        return self._buffers.get(tensor) or Box.whole(self.geometry.shape(tensor))

    def _room(self, tensor: str, inside: Box) -> Held:
        """Memory for all that is ever here of a tensor: zeros but for `inside`, which is about to be written."""
        box = self._buffer(tensor)
        layout = torch.channels_last if tensor in self._formats else torch.contiguous_format
        memory = torch.empty(box.shape, dtype=self._dtype(tensor), device=self.torch_device, memory_format=layout)
        rests = self._rests.get((tensor, inside))
        if rests is None:
            rests = self._rests[tensor, inside] = [place_of(rest, box) for rest in without([box], inside)]
        for place in rests:
            memory[place] = 0
        return Held(box, memory)

    def _value(self, flight: TileFlight, tensor: str) -> Held:
        found = flight.values.get(tensor)
        if found is None:  # nobody needed any of it: any value will do
            found = flight.values[tensor] = self._room(tensor, Box(tuple((0, 0) for _ in self.geometry.shape(tensor))))
        return found

    # Forward

    def flight(self, micro_batch: int) -> TileFlight:
        return self.flights.setdefault(micro_batch, TileFlight())

    def drop(self, micro_batch: int) -> None:
        self.flights.pop(micro_batch, None)

    def settle(self, micro_batch: int) -> None:
        """Boxes are let go one by one, as operators are passed."""

    def features(self) -> list[torch.Tensor]:
        held = [one for flight in self.flights.values() for one in flight.values.values()]
        held += [one for flight in self.flights.values() for note in flight.notes.values() for one in note.values()]
        return [one.tensor for one in held]

    def deltas(self) -> list[torch.Tensor]:
        return [held.tensor for flight in self.flights.values() for held in flight.gradients.values()]

    @torch.no_grad()
    def forward(self, action: Forward, context: Context) -> None:
        flight = self.flight(action.micro_batch)
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
            for name in self._done_forward.get(index, ()):
                flight.values.pop(name, None)

    def _compute_whole(self, flight: TileFlight, index: int, context: Context) -> None:
        piece = self.pieces[index]
        if self.graph.nodes[index].updates and not context.training:
            return
        made = piece({name: flight.values[name].tensor for name in piece.inputs}, context)
        for name, tensor in made.items():
            flight.values[name] = Held(Box.whole(tensor.shape), tensor)

    def _compute(self, flight: TileFlight, index: int, context: Context) -> None:
        operator, op = self.operators[index], self.network.ops[index]
        name, out = op.outputs[0], self._out_box(index)
        if out is None and name in self.geometry.maps:
            return
        inputs = self._inputs(flight, op)
        options = self._options(flight, index)
        if name not in self.geometry.maps:  # the sums of everybody are its result
            whole = Box.whole(self.geometry.shape(name))
            flight.values[name] = Held(whole, operator.forward(inputs, whole, context, **options))
            return
        assert out is not None
        self.elements += out.volume
        if context.training and self._is_differentiable(op):
            options["notes"] = flight.notes.setdefault(index, {})
        if self._buffers[name] == out:
            options["may_overwrite"] = self._is_last_reader(index)
            flight.values[name] = Held(out, operator.forward(inputs, out, context, **options))
            return
        held = flight.values[name] = self._room(name, out)
        operator.forward(inputs, out, context, into=held.view(out), **options)

    @memoised
    def _is_last_reader(self, index: int) -> bool:
        """Whether nothing reads an operator's only input once it has run: its memory may become the output's."""
        op = self.network.ops[index]
        name = op.inputs[0]
        sent = any(move.source == self.device for group in self.geometry.groups for move in group.fetches.get(name, ()))
        alone = len(op.inputs) == 1 and self.network.readers[name] == (index,) and name not in self.network.outputs
        return alone and self.geometry.is_made_here(name) and name not in self._kept and not sent

    def _compute_interior(self, flight: TileFlight, index: int, context: Context) -> None:
        out, name = self._out_box(index), self.network.ops[index].outputs[0]
        if out is None:
            return
        flight.values[name] = self._room(name, out)
        self._compute_into(flight, index, self.geometry.interior(self.device, index), context)

    def _compute_rim(self, flight: TileFlight, index: int, context: Context) -> None:
        out = self._out_box(index)
        for box in without([out], self.geometry.interior(self.device, index)) if out is not None else ():
            self._compute_into(flight, index, box, context)

    def _compute_into(self, flight: TileFlight, index: int, box: Box, context: Context) -> None:
        op = self.network.ops[index]
        if not box.is_empty:
            self.elements += box.volume
            into = flight.values[op.outputs[0]].view(box)
            self.operators[index].forward(self._inputs(flight, op), box, context, into=into)

    def _options(self, flight: TileFlight, index: int) -> dict[str, Any]:
        return {"state": flight.states[index]} if index in flight.states else {}

    def _inputs(self, flight: TileFlight, op: Op) -> list[Held]:
        return [self._value(flight, read.tensor) for read in op.reads]

    # Sums over the whole map

    @torch.no_grad()
    def own_row(self, reduce: Reduce, context: Context) -> torch.Tensor:
        """This tile's part of the sums at an operator."""
        flight, index = self.flight(reduce.micro_batch), reduce.first
        operator, op = self.operators[index], self.network.ops[index]
        assert isinstance(operator, SumsOperator)
        if not reduce.backward:
            return operator.own_row(self._inputs(flight, op), self._owned(op.inputs[0]))
        gradient = flight.gradients.get(op.outputs[0])
        if gradient is None:
            gradient = self._zeros(op.outputs[0])
        over = self._weight_box(index)
        return operator.own_backward_row(self._inputs(flight, op), gradient, over, flight.states[index])

    @torch.no_grad()
    def take_rows(self, reduce: Reduce, rows: list[torch.Tensor]) -> None:
        flight, index = self.flight(reduce.micro_batch), reduce.first
        operator = self.operators[index]
        assert isinstance(operator, SumsOperator)
        if reduce.backward:
            flight.totals[index] = torch.stack(rows).sum(0)
            return
        flight.states[index] = operator.merged(rows, self._shares(index))

    @memoised
    def _shares(self, index: int) -> list[int]:
        """How many places of the map each device owns."""
        boxes = [self.geometry.own(device, self.network.ops[index].inputs[0]) for device in self.geometry.devices]
        return [box.shape[2] * box.shape[3] for box in boxes]

    # Backward

    @property
    def _is_grouped(self) -> bool:
        return self.geometry.share.backward_groups is not None

    def _owned(self, tensor: str) -> Box:
        found = self._own.get(tensor)
        if found is None:
            found = self._own[tensor] = self.geometry.own(self.device, tensor)
        return found

    def _collected_box(self, tensor: str) -> Box:
        """The box of a tensor's gradient that this device collects."""
        found = self._collecting.get(tensor)
        if found is None:
            found = self._collecting[tensor] = self.geometry.gradient_box(self.device, tensor)
        return found

    @memoised
    def _weight_box(self, index: int) -> Box:
        """Where this tile's part of sums over the map lies: by groups what it owns, else what it computed."""
        name = self.network.ops[index].outputs[0]
        if name not in self.geometry.maps:
            return Box.whole(self.geometry.shape(name))
        if self._is_grouped:
            return self._owned(name)
        return self.computed.get(name) or Box(tuple((0, 0) for _ in self.geometry.shape(name)))

    @memoised
    def _gradient_box(self, index: int) -> Box:
        """What this tile differentiates of an operator's output."""
        name = self.network.ops[index].outputs[0]
        return self.geometry.regions[name][self.device] if self._is_grouped else self._weight_box(index)

    @torch.no_grad()
    def backward(self, action: Backward, context: Context) -> None:
        flight = self.flight(action.micro_batch)
        for index in range(action.last - 1, action.first - 1, -1):
            op = self.network.ops[index]
            if self._is_differentiable(op):
                if index in self.pieces:
                    self._differentiate_whole(flight, index, context)
                else:
                    self._differentiate(flight, index, action.part, context)
            if action.part != "inputs":
                for name in op.outputs:  # whoever reads these has been passed
                    flight.gradients.pop(name, None)
                    flight.fresh.discard(name)
                flight.states.pop(index, None)
                flight.totals.pop(index, None)
                flight.notes.pop(index, None)
                for name in self._done_backward.get(index, ()):
                    flight.values.pop(name, None)

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
        operator, op = self.operators[index], self.network.ops[index]
        name = op.outputs[0]
        gradient = flight.gradients.get(name)
        adds_up = index in flight.totals
        if gradient is None and not adds_up:
            return
        if gradient is None:
            gradient = self._zeros(name)
        options = self._options(flight, index)
        if part != "inputs" and self._trains(op):
            over = self._weight_box(index)
            if not over.is_empty:
                operator.weight_gradients(self._inputs(flight, op), gradient.view(over), over, context, **options)
        if part == "weights":
            return
        if adds_up:
            source = op.inputs[0]
            corrected = self._collected(index, source) if self._is_grouped else self._owned(source)
            options |= {"total": flight.totals[index], "corrected": corrected}
        maps = [self._flows(read.tensor) and read.tensor in self.geometry.maps for read in op.reads]
        others = [self._flows(read.tensor) and read.tensor not in self.geometry.maps for read in op.reads]
        if self._is_grouped and any(others):
            self._input_gradients(flight, index, gradient, maps, self._gradient_box(index), context, options)
            self._input_gradients(flight, index, gradient, others, self._weight_box(index), context, options)
        else:
            wanted = [one or other for one, other in zip(maps, others)]
            options["may_overwrite"] = not part and name in flight.fresh
            self._input_gradients(flight, index, gradient, wanted, self._gradient_box(index), context, options)

    @memoised
    def _flows(self, tensor: str) -> bool:
        return self.network.tensors[tensor].differentiable and tensor not in self.network.inputs

    def _input_gradients(
        self, flight: TileFlight, index: int, gradient: Held, wanted: list[bool], out: Box, context: Context,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        operator, op = self.operators[index], self.network.ops[index]
        if out.is_empty or not any(wanted):
            return
        inputs = [self._value(flight, r.tensor) if r.tensor in op.derives_from else None for r in op.reads]
        output = self._value(flight, op.outputs[0]) if op.outputs[0] in op.derives_from else None
        given = formatted_like(gradient.view(out), [one for one in (*inputs, output) if one is not None])
        options["notes"] = flight.notes.get(index)
        found = operator.input_gradients(inputs, output, given, out, wanted, context, **options)
        memory = [one.tensor.untyped_storage().data_ptr() for one in found if one is not None]
        if not options.get("may_overwrite"):
            memory.append(given.untyped_storage().data_ptr())
        for read, one in zip(op.reads, found):
            if one is not None:
                alone = memory.count(one.tensor.untyped_storage().data_ptr()) == 1
                fresh = alone and 0 not in one.tensor.stride()
                self._add(flight, read.tensor, one, self._collected(index, read.tensor), fresh=fresh)

    @memoised
    def _collected(self, index: int, tensor: str) -> Box:
        """The box of an input's gradient that an operator adds to: complete beyond what is owned only if both are in
        one backward group."""
        if self._is_grouped and tensor in self.geometry.maps and not self._same_group(index, tensor):
            return self._owned(tensor)
        return self._collected_box(tensor)

    def _same_group(self, index: int, tensor: str) -> bool:
        made = self.network.producer.get(tensor, -1)
        groups = self.geometry.backward_groups or ()
        return any(group.first <= made and index < group.last for group in groups if group.first <= index < group.last)

    def _zeros(self, tensor: str) -> Held:
        box = self._collected_box(tensor)
        return Held(box, torch.zeros(box.shape, dtype=self._dtype(tensor), device=self.torch_device))

    def _add(self, flight: TileFlight, tensor: str, part: Held, within: Box, *, fresh: bool) -> None:
        """Add to a tensor's gradient what lies inside `within`."""
        box, known = self._collected_box(tensor), flight.gradients.get(tensor)
        if box.is_empty:
            return
        if known is None and part.box.contains(box) and within == box:
            flight.gradients[tensor] = part
            flight.fresh |= {tensor} if fresh else set()
            return
        if known is None or tensor not in flight.fresh:
            own = self._zeros(tensor)
            if known is not None:
                own.tensor.copy_(known.view(box))
            flight.gradients[tensor] = known = own
            flight.fresh.add(tensor)
        common = part.box.intersect(within)
        if not common.is_empty:
            known.view(common).add_(part.view(common))

    # What crosses to other devices and other stages

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """A box of a tensor, to be sent."""
        held = self.flight(micro_batch).values[tensor]
        return cut_out(held.tensor, held.box, box)

    @torch.no_grad()
    def put_value(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        flight = self.flight(micro_batch)
        if tensor not in flight.values:
            if box == self._buffer(tensor):
                flight.values[tensor] = Held(box, data)
                return
            flight.values[tensor] = self._room(tensor, box)
        flight.values[tensor].view(box).copy_(data)

    def gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """A box of a tensor's gradient, to be sent; zeros where none flowed back."""
        found = self.flight(micro_batch).gradients.get(tensor)
        if found is None:
            return torch.zeros(box.shape, dtype=self._dtype(tensor))
        return cut_out(found.tensor, found.box, box)

    @torch.no_grad()
    def add_gradient(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        self._add(self.flight(micro_batch), tensor, Held(box, data), box, fresh=True)

    # The network's outputs

    def outputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """What the network returns, whole: on the device that has gathered it."""
        flight = self.flight(micro_batch)
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
        self._gathered(self.flight(micro_batch), tensor)[box.slices()] = data

    def take_gradients(self, micro_batch: int, found: Mapping[str, torch.Tensor]) -> None:
        """The loss' gradients of what the network returned."""
        flight = self.flight(micro_batch)
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
        returned = self.flight(micro_batch).returned.get(tensor)
        if returned is None:
            return torch.zeros(box.shape, dtype=self._dtype(tensor))
        return cut_out(returned, Box.whole(returned.shape), box)

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        """This device's part of what the network returns, for whoever started a stream."""
        flight = self.flight(micro_batch)
        return [
            cut_out(flight.values[name].tensor, flight.values[name].box, box)
            for name in self.graph.outputs
            for box in self.geometry.returning(name).boxes(self.device)
            if not box.is_empty
        ]

    def first_not_finite(self, micro_batch: int, context: Context) -> str | None:
        """The first tensor at hand with a number that is none."""
        values = self.flight(micro_batch).values
        for name in (*self.network.inputs, *self.network.producer):
            held = values.get(name)
            if held is not None and held.tensor.is_floating_point() and not bool(torch.isfinite(held.tensor).all()):
                return name
        return None
