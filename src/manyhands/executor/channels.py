"""A stage shared by channels on one device: the graph's own operators on the channels that are here (DECNN §3.2).

The stage's graph is rewritten once for this device: convolutions with the number of groups they have here, shapes as
they are here, and a slice wherever an operator reads less than what is held. What remains is a graph like any other,
run piece by piece. Inference only: a tensor is let go as soon as nothing here will read or send it.
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
        self.in_flight: dict[int, ChannelMicroBatch] = {}
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
        self._bundles: dict[int, tuple[Message, tuple[ChannelBundle, ...]]] = {}
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

    def micro_batch(self, micro_batch: int) -> ChannelMicroBatch:
        found = self.in_flight.get(micro_batch)
        if found is None:
            found = self.in_flight[micro_batch] = ChannelMicroBatch()
        return found

    def drop(self, micro_batch: int) -> None:
        self.in_flight.pop(micro_batch, None)

    def features(self) -> list[torch.Tensor]:
        found = [tensor for batch in self.in_flight.values() for tensor in batch.values.values()]
        found += [part for batch in self.in_flight.values() for parts in batch.arrived.values() for _, part in parts]
        return found + [
            part for batch in self.in_flight.values() for one in batch.sums.values() for part in one.values()
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
        """What a group reads of others' channels, put together with its own."""
        for name, alias, boxes, shape in self._reading[first]:
            if alias in batch.values:
                continue
            own = batch.values[name]
            arrived = batch.arrived.pop(name, ())
            recipe = self._recipes.get(alias)
            if recipe is None:
                recipe = self._recipes[alias] = recipe_for(
                    boxes, [(self._hull(name),), *(hulls for hulls, _ in arrived)]
                )
            parts = [own, *(data for _, data in arrived)]
            pieces = [narrowed(parts[number], steps) for number, steps in recipe]
            batch.values[alias] = torch.cat(pieces, CHANNELS, out=empty_like(own, shape))

    def _add_up(self, batch: ChannelMicroBatch, op: Op) -> None:
        """Everybody's partial sums, in the order of the devices, and the bias."""
        name = op.outputs[0]
        own = self.geometry.own(self.device, name)
        parts = batch.sums.pop(name, {})
        partial = batch.values[name]
        parts[self.device] = partial[place_of(own, Box.whole(self.geometry.shape(name)))]
        total = parts[self.geometry.devices[0]].clone()
        for device in self.geometry.devices[1:]:
            total += parts[device]
        bias = self.local.biases.get(op.name)
        if bias is not None:
            total += self.weights.tensors[bias].view(-1, *(1 for _ in total.shape[2:]))
        batch.values[name] = total

    # What crosses to other devices and other stages

    def _hull(self, tensor: str) -> Box:
        found = self._hulls.get(tensor)
        if found is None:
            made_here = self.geometry.is_made_here(tensor)
            layout = self.geometry.owned(tensor) if made_here else self.geometry.entering(tensor)
            found = self._hulls[tensor] = layout.hull(self.device)
        return found

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        return cut_out(self.micro_batch(micro_batch).values[tensor], self._hull(tensor), box)

    def partial(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """This device's partial sums of what another owns."""
        return cut_out(self.micro_batch(micro_batch).values[tensor], Box.whole(self.geometry.shape(tensor)), box)

    def bundles(self, message: Message, *, is_sent: bool) -> tuple[ChannelBundle, ...]:
        known = self._bundles.get(id(message))
        if known is None or known[0] is not message:
            if len(self._bundles) > _MOST_BUNDLES:  # an event-driven schedule makes its messages anew in every round
                self._bundles.clear()
            hulls = {part.tensor: self._hull(part.tensor) for part in message.parts} if is_sent else None
            known = self._bundles[id(message)] = (message, bundles_of(message, self.network, hulls))
        return known[1]

    def outgoing(self, message: Message) -> list[torch.Tensor]:
        """What others fetch, as it travels."""
        values = self.micro_batch(message.micro_batch).values
        return [
            bundle.joined([narrowed(values[bundle.tensor], steps) for steps in bundle.steps])
            for bundle in self.bundles(message, is_sent=True)
        ]

    def incoming(self, message: Message, memory: list[torch.Tensor]) -> None:
        """What was fetched of others, as it came."""
        arrived = self.micro_batch(message.micro_batch).arrived
        for bundle, data in zip(self.bundles(message, is_sent=False), memory):
            here = as_tensor(data.to(self.weights.device))
            arrived.setdefault(bundle.tensor, []).append((bundle.boxes, here))

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
        """This device's part of what the network returns."""
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
    """Room of another shape in the same memory format: what reads it next is not to convert it."""
    is_last = data.dim() == 4 and data.is_contiguous(memory_format=torch.channels_last) and not data.is_contiguous()
    wanted = torch.channels_last if is_last else torch.contiguous_format
    return torch.empty(shape, dtype=data.dtype, device=data.device, memory_format=wanted)
