"""A stage shared by channels on one device: the graph's own operators on the channels that are here (DECNN §3.2).

The stage's graph is rewritten once for this device: convolutions with the number of groups they have here, shapes as
they are here, and a slice wherever an operator reads less than what is held. What remains is a graph like any other,
run piece by piece. Inference only: a tensor is let go as soon as nothing here will read or send it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import torch

from manyhands.executor.boxes import cut_out, narrowed, place_of
from manyhands.executor.channel_mail import Bundle, Recipe, as_tensor, bundles_of, joined_shape, recipe_for
from manyhands.executor.runner import ForwardOnly
from manyhands.executor.segments import bounds_of
from manyhands.facts.boxes import Box
from manyhands.facts.network import Op, TensorSpec
from manyhands.facts.profile import Kernel
from manyhands.facts.reads import Blocks
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls
from manyhands.graph.nodes import Node, SampleCount, Value
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Forward, Message
from manyhands.schedule.channels import CHANNELS, Boxes, ChannelGeometry

_MOST_BUNDLES = 10_000
_GROUPS = 6
"""Where a convolution is told its groups."""


@dataclass
class ChannelFlight:
    """One micro-batch under way on one device."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the local graph's names."""
    arrived: dict[str, list[tuple[Boxes, torch.Tensor]]] = field(default_factory=dict)
    """What was fetched for the next group: boxes, and a tensor that has them one after another."""
    sums: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Tensor -> device -> its partial sums of what is owned here."""


class ChannelRunner(ForwardOnly):
    """Runs the actions of one device in a stage shared by channels."""

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        geometry: ChannelGeometry,
        device: str,
        actions: Sequence[Action],
        kernels: Mapping[str, Kernel],
    ) -> None:
        self.graph, self.network, self.geometry, self.device = graph, graph.network, geometry, device
        self.weights = weights
        self.flights: dict[int, ChannelFlight] = {}
        self.elements = 0
        """Elements of tensors cut by channels that were computed here: its share of the work."""
        self.local = LocalGraph(graph, geometry, device)
        own = [one for one in actions if isinstance(one, Forward) and one.stage == geometry.index]
        self._reading = {
            first: found
            for first, tensors in zip(geometry.group_starts, geometry.reading)
            if (found := [(name, alias, boxes, joined_shape(boxes)) for name, boxes in tensors[device].items()
                          if (alias := self.local.name(name, boxes)) != name])
        }  # fmt: skip
        """First operator of a group -> what is put together for it: tensor, its local name, its boxes, their shape."""
        bounds = sorted(bounds_of(own, ()) | self._reading.keys())
        calls = kernel_calls(self.local.graph, kernels)
        self.pieces = {a: Piece(self.local.graph, weights, *self.local.range(a, b), kernels=calls)
                       for a, b in pairwise(bounds)}  # fmt: skip
        self._made = {
            a: sum(
                geometry.own(device, n).volume
                for op in self.network.ops[a:b]
                for n in op.outputs
                if n in geometry.split
            )
            for a, b in pairwise(bounds)
        }
        self._frees = self._last_uses()
        self._hulls: dict[str, Box] = {}
        self._recipes: dict[str, Recipe] = {}
        """Local name -> how it is put together: what comes, comes in the same order every time."""
        self._bundles: dict[int, tuple[Message, tuple[Bundle, ...]]] = {}
        """What messages are made of, by their identity: a fixed schedule has the same ones in every round."""

    def rest(self, samples: int) -> None:
        for piece in self.pieces.values():
            piece.rest(samples)

    def _last_uses(self) -> dict[int, list[str]]:
        """Piece -> names that nothing here reads or sends after it."""
        last: dict[str, int] = {}
        for first, piece in self.pieces.items():
            last.update(dict.fromkeys((*piece.inputs, *piece.outputs), first))
        for group, boxes in zip(self.geometry.groups, self.geometry.reading):
            sent = [name for name, found in group.fetches.items() if any(one.source == self.device for one in found)]
            first = max(start for start in self.pieces if start <= group.first)
            for name in (*sent, *boxes[self.device]):
                last[name] = max(last.get(name, first), first)
        found: dict[int, list[str]] = {}
        for name, first in last.items():
            leaves = name in self.network.outputs or any(
                reader >= self.geometry.last for reader in self.network.readers.get(name, ())
            )
            if not leaves:
                found.setdefault(first, []).append(name)
        return found

    def flight(self, micro_batch: int) -> ChannelFlight:
        found = self.flights.get(micro_batch)
        if found is None:
            found = self.flights[micro_batch] = ChannelFlight()
        return found

    def drop(self, micro_batch: int) -> None:
        self.flights.pop(micro_batch, None)

    def features(self) -> list[torch.Tensor]:
        found = [tensor for flight in self.flights.values() for tensor in flight.values.values()]
        found += [part for flight in self.flights.values() for parts in flight.arrived.values() for _, part in parts]
        return found + [
            part for flight in self.flights.values() for one in flight.sums.values() for part in one.values()
        ]

    # Computing

    def forward(self, action: Forward, context: Context) -> None:
        flight = self.flight(action.micro_batch)
        if action.part == "sum":
            self._add_up(flight, self.network.ops[action.first])
            return
        for start, piece in self.pieces.items():
            if not action.first <= start < action.last:
                continue
            if start in self._reading:
                self._assemble(flight, start)
            flight.values.update(piece({name: flight.values[name] for name in piece.inputs}, context))
            self.elements += self._made[start]
            for name in self._frees.get(start, ()):
                flight.values.pop(name, None)

    def _assemble(self, flight: ChannelFlight, first: int) -> None:
        """What a group reads of others' channels, put together with its own."""
        for name, alias, boxes, shape in self._reading[first]:
            if alias in flight.values:
                continue
            own = flight.values[name]
            arrived = flight.arrived.pop(name, ())
            recipe = self._recipes.get(alias)
            if recipe is None:
                recipe = self._recipes[alias] = recipe_for(boxes, [(self._held(name),), *(held for held, _ in arrived)])
            parts = [own, *(data for _, data in arrived)]
            pieces = [narrowed(parts[number], steps) for number, steps in recipe]
            flight.values[alias] = torch.cat(pieces, CHANNELS, out=empty_like(own, shape))

    def _add_up(self, flight: ChannelFlight, op: Op) -> None:
        """Everybody's partial sums, in the order of the devices, and the bias."""
        name = op.outputs[0]
        own = self.geometry.own(self.device, name)
        parts = flight.sums.pop(name, {})
        partial = flight.values[name]
        parts[self.device] = partial[place_of(own, Box.whole(self.geometry.shape(name)))]
        total = parts[self.geometry.devices[0]].clone()
        for device in self.geometry.devices[1:]:
            total += parts[device]
        bias = self.local.biases.get(op.name)
        if bias is not None:
            total += self.weights.tensors[bias].view(-1, *(1 for _ in total.shape[2:]))
        flight.values[name] = total

    # What crosses to other devices and other stages

    def _held(self, tensor: str) -> Box:
        found = self._hulls.get(tensor)
        if found is None:
            made_here = self.geometry.is_made_here(tensor)
            layout = self.geometry.owned(tensor) if made_here else self.geometry.entering(tensor)
            found = self._hulls[tensor] = layout.hull(self.device)
        return found

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        return cut_out(self.flight(micro_batch).values[tensor], self._held(tensor), box)

    def partial(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """This device's partial sums of what another owns."""
        return cut_out(self.flight(micro_batch).values[tensor], Box.whole(self.geometry.shape(tensor)), box)

    def bundles(self, message: Message, *, is_sent: bool) -> tuple[Bundle, ...]:
        known = self._bundles.get(id(message))
        if known is None or known[0] is not message:
            if len(self._bundles) > _MOST_BUNDLES:  # an event-driven schedule makes its messages anew in every round
                self._bundles.clear()
            hulls = {part.tensor: self._held(part.tensor) for part in message.parts} if is_sent else None
            known = self._bundles[id(message)] = (message, bundles_of(message, self.network, hulls))
        return known[1]

    def outgoing(self, message: Message) -> list[torch.Tensor]:
        """What others fetch, as it travels."""
        values = self.flight(message.micro_batch).values
        return [
            bundle.joined([narrowed(values[bundle.tensor], steps) for steps in bundle.steps])
            for bundle in self.bundles(message, is_sent=True)
        ]

    def incoming(self, message: Message, memory: list[torch.Tensor]) -> None:
        """What was fetched of others, as it came."""
        arrived = self.flight(message.micro_batch).arrived
        for bundle, data in zip(self.bundles(message, is_sent=False), memory):
            here = as_tensor(data.to(self.weights.device))
            arrived.setdefault(bundle.tensor, []).append((bundle.boxes, here))

    def put_value(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        flight = self.flight(micro_batch)
        hull = self._held(tensor)
        if box == hull:
            flight.values[tensor] = data
            return
        if tensor not in flight.values:
            flight.values[tensor] = data.new_empty(hull.shape)
        flight.values[tensor][place_of(box, hull)] = data

    def put_partial(self, micro_batch: int, source: str, tensor: str, data: torch.Tensor) -> None:
        self.flight(micro_batch).sums.setdefault(tensor, {})[source] = data

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        """This device's part of what the network returns."""
        return [
            self.value(micro_batch, name, box)
            for name in self.graph.outputs
            for box in self.geometry.returning(name).boxes(self.device)
            if not box.is_empty
        ]

    def first_not_finite(self, micro_batch: int, context: Context) -> str | None:
        values = self.flight(micro_batch).values
        return next((n for n, t in values.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())), None)


class LocalGraph:
    """A stage's operators as one device runs them."""

    def __init__(self, graph: Graph, geometry: ChannelGeometry, device: str) -> None:
        self.geometry, self.device, self.network = geometry, device, graph.network
        self.biases: dict[str, str] = {}
        """Operator that makes partial sums -> the bias that is added to their sum."""
        self._nodes: list[Node] = []
        self._starts: dict[int, int] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._reading: dict[str, Boxes] = {}
        """Of what the group under way reads from before it: the boxes of it that are here."""
        starts = {first: number for number, first in enumerate(geometry.group_starts)}
        for index in range(geometry.first, geometry.last):
            self._starts[index] = len(self._nodes)
            if index in starts:
                self._reading = geometry.reading[starts[index]][device]
            if not graph.nodes[index].updates:
                self._add(index, graph.nodes[index])
        self._starts[geometry.last] = len(self._nodes)
        made = {spec.name for node in self._nodes for spec in node.outputs}
        kept = [name for name in self._kept() if name in made]
        outside = tuple(spec for name, spec in self._specs.items() if name not in made)
        self.graph = Graph(
            name=graph.name, inputs=outside, input_tree=[[], {}], output_tree=kept, nodes=tuple(self._nodes),
            weights=graph.weights, aliases={}, state={}, granularity=graph.granularity,
        )  # fmt: skip
        facts = msgspec.structs.replace(self.network, tensors={**self.network.tensors, **self._specs})
        self.graph.__dict__["network"] = facts  # what kernels ask for; nothing is planned by it

    def range(self, first: int, last: int) -> tuple[int, int]:
        """The nodes of operators [first, last)."""
        return self._starts[first], self._starts[last]

    def name(self, tensor: str, boxes: Boxes) -> str:
        """What boxes of a tensor are called: a device's own part by the tensor's name."""
        is_own = self.geometry.is_made_here(tensor) and boxes == (self.geometry.own(self.device, tensor),)
        return tensor if is_own else tensor + "".join(map(str, boxes))

    def _kept(self) -> list[str]:
        """Tensors that are read, sent or returned beside what nodes read."""
        found = list(self.network.outputs)
        for group, tensors in zip(self.geometry.groups, self.geometry.reading):
            found += [*group.fetches, *group.sums]
            found += [name for name, boxes in tensors[self.device].items() if self.name(name, boxes) != name]
        later = self.network.ops[self.geometry.last :]
        return list(dict.fromkeys([*found, *(name for op in later for name in op.inputs)]))

    def _add(self, index: int, node: Node) -> None:
        op = self.network.ops[index]
        changed: dict[str, str] = {}
        for name, box in self.geometry.needs(self.device, index).items():
            changed[name] = self._input(op, name, box)
        node = _renamed(node, changed)
        if index in self.geometry.input_based:
            bias = node.arguments[2] if len(node.arguments) > 2 else None
            if bias is not None:
                self.biases[op.name] = bias.name
            node = msgspec.structs.replace(node, arguments=(*node.arguments[:2], None, *node.arguments[3:]))
        elif any(name in self.geometry.split for name in op.outputs):
            node = self._cut(op, node)
        self._nodes.append(node)
        self._specs.update({spec.name: spec for spec in node.outputs})

    def _input(self, op: Op, name: str, box: Box) -> str:
        """The name under which an operator finds a box of a tensor; a slice is made where more of it is here."""
        boxes = self._reading.get(name, ())
        if self.geometry.shuffles(self.network.op_index[op.name]):  # of every group what is needed, and no more
            known = self.name(name, boxes)
            self._specs.setdefault(known, self._spec(known, name, Box.whole(joined_shape(boxes))))
            return known
        if not self.geometry.is_made_here(name):
            held, known = self.geometry.entering(name).hull(self.device), name
        else:
            held = boxes[0] if boxes else self.geometry.own(self.device, name)
            known = self.name(name, (held,))
        self._specs.setdefault(known, self._spec(known, name, held))
        wanted, here = box.intervals[CHANNELS], held.intervals[CHANNELS]
        if wanted != here:  # along other axes all is here, and a window's stride passes over what it does not read
            cut = f"{known}>{op.name}"
            spec = self._spec(cut, name, held.replace(CHANNELS, wanted))
            place = (CHANNELS, wanted[0] - here[0], wanted[1] - here[0], 1)
            node = Node(cut, "aten.slice.Tensor", (Value(known), *place), {}, (spec,), module=op.module)
            self._nodes.append(node)
            self._specs[cut] = spec
            known = cut
        return known

    def _spec(self, known: str, name: str, box: Box) -> TensorSpec:
        """The facts of a box of a tensor, for one sample."""
        spec = self.network.tensors[name]
        shape = tuple(spec.shape[axis] if axis == spec.batch_axis else extent for axis, extent in enumerate(box.shape))
        return msgspec.structs.replace(spec, name=known, shape=shape)

    def _cut(self, op: Op, node: Node) -> Node:
        """An operator that makes this device's channels only."""
        name = op.outputs[0]
        own = self.geometry.own(self.device, name)
        spec = self._spec(name, name, own)
        arguments: tuple[Any, ...] = node.arguments
        target = node.target
        if op.channels == "grouped":
            rule = op.reads[0].rules[CHANNELS]
            assert isinstance(rule, Blocks)
            first, last = own.intervals[CHANNELS]
            arguments = (*arguments[:_GROUPS], max(1, (last - first) // rule.outputs), *arguments[_GROUPS + 1 :])
        elif op.channels == "shaped":
            sizes = [SampleCount(spec.shape[0]), *spec.shape[1:]]
            target, arguments = "aten.reshape.default", (arguments[0], sizes)
        options = {} if op.channels == "shaped" else node.options
        return msgspec.structs.replace(node, target=target, arguments=arguments, options=options, outputs=(spec,))


def empty_like(data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Room of another shape in the same memory format: what reads it next is not to convert it."""
    is_last = data.dim() == 4 and data.is_contiguous(memory_format=torch.channels_last) and not data.is_contiguous()
    wanted = torch.channels_last if is_last else torch.contiguous_format
    return torch.empty(shape, dtype=data.dtype, device=data.device, memory_format=wanted)


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    """The same with other names for what it reads."""
    if all(old == new for old, new in names.items()):
        return node

    def change(argument: Any) -> Any:
        if isinstance(argument, Value):
            return Value(names.get(argument.name, argument.name))
        if isinstance(argument, (list, tuple)):
            return type(argument)(change(item) for item in argument)
        return argument

    options = {key: change(value) for key, value in node.options.items()}
    return msgspec.structs.replace(node, arguments=change(node.arguments), options=options)
