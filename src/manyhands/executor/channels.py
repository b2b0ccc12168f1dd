"""A stage shared by channels on one device: the graph's own operators on the channels that are here (DECNN §3.2).

The stage's graph is rewritten once for this device: convolutions get the number of groups that they have here, shapes
become the local ones, and a slice is inserted wherever an operator reads less than what is held. The result is a graph
like any other, run piece by piece. It is for inference only: a tensor is freed as soon as nothing here will read or
send it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from manyhands.executor.boxes import cut_out, narrowed, place_of
from manyhands.executor.channel_messages import ChannelBundle, Recipe, as_tensor, bundles_of, joined_shape, recipe_for
from manyhands.executor.local_graph import LocalGraph
from manyhands.executor.runner import ForwardOnly
from manyhands.executor.segments import bounds_of
from manyhands.facts.boxes import Box
from manyhands.facts.network import Op
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Forward, Message
from manyhands.schedule.channels import CHANNELS, Boxes, ChannelGeometry

_MOST_BUNDLES = 10_000


@dataclass
class ChannelMicroBatch:
    """The tensors of one in-flight micro-batch on one device."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors, by the local graph's names."""
    arrived: dict[str, list[tuple[Boxes, torch.Tensor]]] = field(default_factory=dict)
    """The tensors fetched for the next group: boxes, and a tensor that holds them one after another."""
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
        self.in_flight: dict[int, ChannelMicroBatch] = {}
        self.elements = 0
        """Elements of tensors cut by channels that were computed here: this device's share of the work."""
        self.local = LocalGraph(graph, geometry, device)
        forwards = [action for action in actions if isinstance(action, Forward) and action.stage == geometry.index]
        self._reading = {
            first: reads
            for first, tensors in zip(geometry.group_starts, geometry.reading)
            if (reads := [(name, alias, boxes, joined_shape(boxes)) for name, boxes in tensors[device].items()
                          if (alias := self.local.name(name, boxes)) != name])
        }  # fmt: skip
        """First operator of a group -> what is put together for it: tensor, its local name, its boxes, their shape."""
        bounds = sorted(bounds_of(forwards, ()) | self._reading.keys())
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
        """Local name -> the recipe that puts it together: parts arrive in the same order every time."""
        self._bundles: dict[int, tuple[Message, tuple[ChannelBundle, ...]]] = {}
        """The bundles of messages, by the messages' identity: a fixed schedule has the same messages in every round."""

    def rest(self, samples: int) -> None:
        for piece in self.pieces.values():
            piece.rest(samples)

    def _last_uses(self) -> dict[int, list[str]]:
        """Return piece -> names that nothing on this device reads or sends after it."""
        last: dict[str, int] = {}
        for first, piece in self.pieces.items():
            last.update(dict.fromkeys((*piece.inputs, *piece.outputs), first))
        for group, boxes in zip(self.geometry.groups, self.geometry.reading):
            sent = [name for name, moves in group.fetches.items() if any(move.source == self.device for move in moves)]
            first = max(start for start in self.pieces if start <= group.first)
            for name in (*sent, *boxes[self.device]):
                last[name] = max(last.get(name, first), first)
        frees: dict[int, list[str]] = {}
        for name, first in last.items():
            leaves = name in self.network.outputs or any(
                reader >= self.geometry.last for reader in self.network.readers.get(name, ())
            )
            if not leaves:
                frees.setdefault(first, []).append(name)
        return frees

    def micro_batch(self, micro_batch: int) -> ChannelMicroBatch:
        batch = self.in_flight.get(micro_batch)
        if batch is None:
            batch = self.in_flight[micro_batch] = ChannelMicroBatch()
        return batch

    def drop(self, micro_batch: int) -> None:
        self.in_flight.pop(micro_batch, None)

    def features(self) -> list[torch.Tensor]:
        tensors = [tensor for batch in self.in_flight.values() for tensor in batch.values.values()]
        tensors += [part for batch in self.in_flight.values() for parts in batch.arrived.values() for _, part in parts]
        return tensors + [
            part for batch in self.in_flight.values() for partials in batch.sums.values() for part in partials.values()
        ]

    # Computing

    def forward(self, action: Forward, context: Context) -> None:
        batch = self.micro_batch(action.micro_batch)
        if action.part == "sum":
            self._add_up(batch, self.network.ops[action.first])
            return
        for start, piece in self.pieces.items():
            if not action.first <= start < action.last:
                continue
            if start in self._reading:
                self._assemble(batch, start)
            batch.values.update(piece({name: batch.values[name] for name in piece.inputs}, context))
            self.elements += self._made[start]
            for name in self._frees.get(start, ()):
                batch.values.pop(name, None)

    def _assemble(self, batch: ChannelMicroBatch, first: int) -> None:
        """Put together what a group reads of others' channels and of this device's own."""
        for name, alias, boxes, shape in self._reading[first]:
            if alias in batch.values:
                continue
            local = batch.values[name]
            arrived = batch.arrived.pop(name, ())
            recipe = self._recipes.get(alias)
            if recipe is None:
                recipe = self._recipes[alias] = recipe_for(
                    boxes, [(self._hull(name),), *(hulls for hulls, _ in arrived)]
                )
            parts = [local, *(data for _, data in arrived)]
            pieces = [narrowed(parts[number], steps) for number, steps in recipe]
            batch.values[alias] = torch.cat(pieces, CHANNELS, out=empty_like(local, shape))

    def _add_up(self, batch: ChannelMicroBatch, op: Op) -> None:
        """Add up all devices' partial sums, in the order of the devices, and the bias."""
        name = op.outputs[0]
        box = self.geometry.own(self.device, name)
        parts = batch.sums.pop(name, {})
        partial = batch.values[name]
        parts[self.device] = partial[place_of(box, Box.whole(self.geometry.shape(name)))]
        total = parts[self.geometry.devices[0]].clone()
        for device in self.geometry.devices[1:]:
            total += parts[device]
        bias = self.local.biases.get(op.name)
        if bias is not None:
            total += self.weights.tensors[bias].view(-1, *(1 for _ in total.shape[2:]))
        batch.values[name] = total

    # What crosses to other devices and other stages

    def _hull(self, tensor: str) -> Box:
        hull = self._hulls.get(tensor)
        if hull is None:
            made_here = self.geometry.is_made_here(tensor)
            layout = self.geometry.owned(tensor) if made_here else self.geometry.entering(tensor)
            hull = self._hulls[tensor] = layout.hull(self.device)
        return hull

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        return cut_out(self.micro_batch(micro_batch).values[tensor], self._hull(tensor), box)

    def partial(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """Return this device's partial sums of what another device owns."""
        return cut_out(self.micro_batch(micro_batch).values[tensor], Box.whole(self.geometry.shape(tensor)), box)

    def bundles(self, message: Message, *, is_sent: bool) -> tuple[ChannelBundle, ...]:
        entry = self._bundles.get(id(message))
        if entry is None or entry[0] is not message:
            if len(self._bundles) > _MOST_BUNDLES:  # an event-driven schedule makes its messages anew in every round
                self._bundles.clear()
            hulls = {part.tensor: self._hull(part.tensor) for part in message.parts} if is_sent else None
            entry = self._bundles[id(message)] = (message, bundles_of(message, self.network, hulls))
        return entry[1]

    def outgoing(self, message: Message) -> list[torch.Tensor]:
        """Return what other devices fetch, in the form in which it travels."""
        values = self.micro_batch(message.micro_batch).values
        return [
            bundle.joined([narrowed(values[bundle.tensor], steps) for steps in bundle.steps])
            for bundle in self.bundles(message, is_sent=True)
        ]

    def incoming(self, message: Message, memory: list[torch.Tensor]) -> None:
        """Take what was fetched from other devices, in the form in which it travelled."""
        arrived = self.micro_batch(message.micro_batch).arrived
        for bundle, data in zip(self.bundles(message, is_sent=False), memory):
            tensor = as_tensor(data.to(self.weights.device))
            arrived.setdefault(bundle.tensor, []).append((bundle.boxes, tensor))

    def put_value(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        batch = self.micro_batch(micro_batch)
        hull = self._hull(tensor)
        if box == hull:
            batch.values[tensor] = data
            return
        if tensor not in batch.values:
            batch.values[tensor] = data.new_empty(hull.shape)
        batch.values[tensor][place_of(box, hull)] = data

    def put_partial(self, micro_batch: int, source: str, tensor: str, data: torch.Tensor) -> None:
        self.micro_batch(micro_batch).sums.setdefault(tensor, {})[source] = data

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        """Return this device's part of what the network returns."""
        return [
            self.value(micro_batch, name, box)
            for name in self.graph.outputs
            for box in self.geometry.returning(name).boxes(self.device)
            if not box.is_empty
        ]

    def first_not_finite(self, micro_batch: int, context: Context) -> str | None:
        values = self.micro_batch(micro_batch).values
        return next((n for n, t in values.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())), None)


def empty_like(data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return uninitialised memory of another shape in the same memory format, so that what reads it next need not
    convert it."""
    is_last = data.dim() == 4 and data.is_contiguous(memory_format=torch.channels_last) and not data.is_contiguous()
    layout = torch.channels_last if is_last else torch.contiguous_format
    return torch.empty(shape, dtype=data.dtype, device=data.device, memory_format=layout)
