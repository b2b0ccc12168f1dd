"""The boxes of one device at each operator of a tiled stage, and how long values are kept.

They are the same in every step, so they are taken from the geometry once, and a step looks them up.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import prod
from typing import Any

import msgspec

from manyhands.facts.boxes import Box
from manyhands.facts.network import Op
from manyhands.schedule.tiles import TileGeometry

_NOTHING = Box(((0, 0),))


class ForwardWay(msgspec.Struct, frozen=True):
    """An operator on maps, forward."""

    name: str
    """The tensor that it makes."""
    inputs: tuple[str, ...]
    is_map: bool
    """Whether it makes a map; else the sums of all tiles are its result."""
    out: Box | None
    """The box that is computed here; of a result that is no map, all of it; None: nothing."""
    elements: int
    notes: bool
    """Whether a backward pass will read what it notes."""
    is_last_reader: bool
    """Whether nothing reads its only input afterwards: then its memory may become the output's."""
    next: int | None
    """The operator that alone reads what this one makes, all of it and no more, place by place."""


class BackwardWay(msgspec.Struct, frozen=True):
    """An operator on maps, backward."""

    name: str
    """The tensor that it made."""
    inputs: tuple[str, ...]
    derived: tuple[str | None, ...]
    """The inputs whose values the derivative reads; None in place of the others."""
    derives_output: bool
    trains: bool
    """Whether this tile has a part of its weights' gradients."""
    over: Box
    """The box of this tile's part of sums over the map: by groups what it owns, else what it computed."""
    out: Box
    """The box of the output that this tile differentiates; of an operator in pieces, what it owns."""
    corrected: Box | None
    """The box of its input's gradient to which sums of all tiles are added; None: it reads no map."""
    maps: tuple[bool, ...]
    """Inputs whose gradients are wanted, and are of maps; `others`: of tensors that every tile has whole."""
    others: tuple[bool, ...]
    wanted: tuple[bool, ...]
    collected: tuple[Box, ...]
    """For each input, the box of its gradient that this operator adds to."""


class TileWays:
    """The ways of one device through a tiled stage, forward and backward."""

    def __init__(self, geometry: TileGeometry, device: str, on_maps: frozenset[int]) -> None:
        self.geometry, self.device, self.network = geometry, device, geometry.network
        self._computed, self._maps = geometry.computed[device], geometry.maps
        self._on_maps = on_maps
        """Operators that read maps."""
        self.is_grouped = geometry.share.backward_groups is not None
        """Whether backward has groups of its own; else it is the adjoint of forward."""
        self.forward, self.backward = cache(self._forward), cache(self._backward)
        self.owned, self.collected_box, self.shares = (
            cache(self._owned),
            cache(self._collected_box),
            cache(self._shares),
        )
        ops = range(geometry.first, geometry.last)
        self.differentiable = frozenset(index for index in ops if self._is_differentiable(index))
        self.fetched_in_pieces = frozenset(self.network.ops[index].inputs[0] for index in geometry.rim_first)
        """Maps whose places on other tiles arrive beside sums: a normalisation alone reads them."""
        self.piecewise = {
            index: self.network.ops[first].inputs[0] for first in geometry.rim_first for index in self._chain(first)
        }
        """These normalisations, and what is computed place by place after them up to an operator that reads beyond ->
        the map that was fetched. They go piece by piece, each in memory of its own, where a part of a larger one would
        have gaps."""
        self.in_pieces = frozenset(self.network.ops[index].inputs[0] for index in self.piecewise)
        self.kept: set[str] = set()
        """Values that the backward pass reads."""
        self.done_backward: dict[int, list[str]] = {}
        """Operator -> values that nothing reads once it has been differentiated."""
        if geometry.plan.is_training:
            self.kept, self.done_backward = self._needed_backward()
        self.done_forward = self._needed_forward()
        """Operator -> values that nothing reads once it has run forward."""

    def _forward(self, index: int) -> ForwardWay:
        op = self.network.ops[index]
        name = op.outputs[0]
        is_map = name in self.geometry.maps
        out = self.out_box(index) if is_map else Box.whole(self.geometry.shape(name))
        return ForwardWay(
            name, tuple(read.tensor for read in op.reads), is_map, out, out.volume if is_map and out else 0,
            is_map and index in self.differentiable, self._is_last_reader(index), self._next(index),
        )  # fmt: skip

    def _backward(self, index: int) -> BackwardWay:
        op, maps = self.network.ops[index], self.geometry.maps
        inputs = tuple(read.tensor for read in op.reads)
        flows = [self._flows(name) for name in inputs]
        corrected = None
        if op.inputs[0] in maps:
            corrected = self.collected(index, op.inputs[0]) if self.is_grouped else self.owned(op.inputs[0])
        over = self._weight_box(index)
        return BackwardWay(
            name=op.outputs[0],
            inputs=inputs,
            derived=tuple(name if name in op.derives_from else None for name in inputs),
            derives_output=op.outputs[0] in op.derives_from,
            trains=self._trains(op) and not over.is_empty,
            over=over,
            out=self._own_part(index) if index in self.piecewise else self._gradient_box(index),
            corrected=corrected,
            maps=tuple(flow and name in maps for flow, name in zip(flows, inputs)),
            others=tuple(flow and name not in maps for flow, name in zip(flows, inputs)),
            wanted=tuple(flows),
            collected=tuple(self.collected(index, n) if flow else _NOTHING for flow, n in zip(flows, inputs)),
        )

    # Boxes

    def _chain(self, first: int) -> list[int]:
        chain = [first]
        while True:
            name = self.network.ops[chain[-1]].outputs[0]
            readers = self.network.readers.get(name, ())
            op = self.network.ops[readers[0]] if len(readers) == 1 and name not in self.network.outputs else None
            if (
                op is None
                or readers[0] >= self.geometry.last
                or op.inputs != (name,)
                or op.outputs[0] not in self._maps
            ):
                return chain
            if op.weights or op.tiling != "local" or self.geometry.reads_beyond(op) or self._is_sent(name):
                return chain
            if len(op.outputs) > 1:
                return chain
            if self._computed.get(op.outputs[0]) != self._computed[self.network.ops[first].outputs[0]]:
                return chain  # less is read of it here than was normalised
            chain.append(readers[0])

    def _is_sent(self, tensor: str) -> bool:
        return any(tensor in group.fetches for group in self.geometry.groups)

    def out_box(self, index: int) -> Box | None:
        """Return the box that this device computes of an operator on maps; None: nothing."""
        return self.computed_box(self.network.ops[index].outputs[0])

    def computed_box(self, tensor: str) -> Box | None:
        """Return the box that this device computes of a map; None: nothing."""
        box = self._computed.get(tensor)
        return None if box is None or box.is_empty else box

    def differentiated(self, tensor: str) -> Box:
        """Return the box of a map's gradient that flows back through the operator that made it."""
        return self.geometry.regions[tensor][self.device] if self.is_grouped else self._computed_or_nothing(tensor)

    def _owned(self, tensor: str) -> Box:
        return self.geometry.own(self.device, tensor)

    def _shares(self, index: int) -> list[int]:
        """Return how many places of the map that an operator reads each device owns."""
        name = self.network.ops[index].inputs[0]
        shapes = [self.geometry.own(device, name).shape for device in self.geometry.devices]
        return [prod(shape[axis] for axis in self.network.spatial[name]) for shape in shapes]

    def _collected_box(self, tensor: str) -> Box:
        """Return the box of a tensor's gradient that this device collects."""
        if tensor in self.in_pieces:
            return self.owned(tensor)  # what belongs to others has left
        return self.geometry.gradient_box(self.device, tensor)

    def _weight_box(self, index: int) -> Box:
        name = self.network.ops[index].outputs[0]
        if name not in self.geometry.maps:
            return Box.whole(self.geometry.shape(name))
        return self.owned(name) if self.is_grouped else self._computed_or_nothing(name)

    def _computed_or_nothing(self, tensor: str) -> Box:
        return self._computed.get(tensor) or Box(tuple((0, 0) for _ in self.geometry.shape(tensor)))

    def _own_part(self, index: int) -> Box:
        return self._gradient_box(index).intersect(self.owned(self.network.ops[index].outputs[0]))

    def _gradient_box(self, index: int) -> Box:
        name = self.network.ops[index].outputs[0]
        return self.geometry.regions[name][self.device] if self.is_grouped else self._weight_box(index)

    def collected(self, index: int, tensor: str) -> Box:
        """Return the box of an input's gradient that an operator adds to: complete beyond what is owned only if both
        are in one backward group."""
        if self.is_grouped and tensor in self.geometry.maps and not self._same_group(index, tensor):
            return self.owned(tensor)
        return self.collected_box(tensor)

    def _same_group(self, index: int, tensor: str) -> bool:
        made = self.network.producer.get(tensor, -1)
        groups = self.geometry.backward_groups or ()
        return any(group.first <= made and index < group.last for group in groups if group.first <= index < group.last)

    # What is read, and until when

    def _is_differentiable(self, index: int) -> bool:
        return any(self.network.tensors[name].differentiable for name in self.network.ops[index].outputs)

    def _trains(self, op: Op) -> bool:
        return any(self.network.weights[name].trainable for name in op.weights)

    def _flows(self, tensor: str) -> bool:
        return self.network.tensors[tensor].differentiable and tensor not in self.network.inputs

    def _is_last_reader(self, index: int) -> bool:
        op = self.network.ops[index]
        name = op.inputs[0]
        sent = any(self._sends(group.fetches, name) for group in self.geometry.groups)
        alone = len(op.inputs) == 1 and self.network.readers[name] == (index,) and name not in self.network.outputs
        return alone and self.geometry.is_made_here(name) and name not in self.kept and not sent

    def _next(self, index: int) -> int | None:
        name = self.network.ops[index].outputs[0]
        readers = self.network.readers.get(name, ())
        if len(readers) != 1 or readers[0] not in self._on_maps or not self._is_last_reader(readers[0]):
            return None
        op = self.network.ops[readers[0]]
        is_alike = op.tiling == "local" and not op.weights and not self.geometry.reads_beyond(op)
        return readers[0] if is_alike and self.out_box(readers[0]) == self.out_box(index) else None

    def _sends(self, moves: Any, tensor: str) -> bool:
        return any(move.source == self.device for move in moves.get(tensor, ()))

    def _needed_forward(self) -> dict[int, list[str]]:
        last: dict[str, int] = {}
        for index in range(self.geometry.first, self.geometry.last):
            for name in (*self.network.ops[index].inputs, *self.network.ops[index].outputs):
                last[name] = index
        for group in self.geometry.groups:
            for name in group.fetches:
                if self._sends(group.fetches, name):
                    last[name] = max(last[name], group.first)
        unused_after: dict[int, list[str]] = defaultdict(list)
        for name, index in last.items():
            leaves = name in self.network.outputs or any(
                reader >= self.geometry.last for reader in self.network.readers.get(name, ())
            )
            if name not in self.kept and not leaves:
                unused_after[index].append(name)
        return dict(unused_after)

    def _needed_backward(self) -> tuple[set[str], dict[int, list[str]]]:
        last: dict[str, int] = {}
        for index in range(self.geometry.last - 1, self.geometry.first - 1, -1):
            op = self.network.ops[index]
            if index not in self.differentiable:
                continue
            names = set(op.derives_from) if index in self._on_maps else set(op.inputs)
            if self._trains(op):
                names.update(op.inputs)
            last.update(dict.fromkeys(names, index))
        for group in self.geometry.backward_groups or ():
            for name in group.values:
                if self._sends(group.values, name):
                    last[name] = min(last.get(name, group.last - 1), group.last - 1)
        unused_after: dict[int, list[str]] = defaultdict(list)
        for name, index in last.items():
            unused_after[index].append(name)
        return set(last), dict(unused_after)
