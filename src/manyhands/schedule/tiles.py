"""The boxes of a stage shared by tiles (TILE §4), forward (tile_forward.py) and backward.

There are two ways backward:

    adjoint      each device differentiates what it computed and sends to the owners what it adds to their tiles
    groups       complete gradients over grown boxes: exchanged at a group's start, computed redundantly inside it
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from manyhands.facts.boxes import Box, Layout, first_come, without
from manyhands.facts.moves import Move, moves
from manyhands.facts.network import Op
from manyhands.facts.plan_check import group_ops
from manyhands.schedule.geometry import BackwardRuns, Exchange, Group, StageGeometry
from manyhands.schedule.tile_forward import TileForwardGeometry

Boxes = dict[str, dict[str, Box]]
"""Tensor -> device -> box."""
LAST_BUCKET_PART = 16
"""Backward goes operator by operator, so the last bucket of gradients has at most one of so many parts of the others'
size: all devices wait for it when nothing is left to compute."""


@dataclass(frozen=True)
class BackwardGroup:
    """Operators [first, last) whose gradients are computed without communication.

    `deltas`: moves of gradients, and `values`: of forward values that its derivatives read, both before it starts.
    """

    first: int
    last: int
    deltas: dict[str, tuple[Move, ...]]
    values: dict[str, tuple[Move, ...]]


class TileGeometry(TileForwardGeometry):
    """The boxes of one tiled stage, for one micro-batch."""

    def entering(self, tensor: str) -> Layout:
        """Return what each device needs of a tensor made before this stage."""
        if tensor not in self.maps:
            return Layout.whole(self.shape(tensor), self.devices)
        box_of = self.buffer if tensor in self.network.inputs else self._forward_hull
        return Layout.of({d: [box_of(d, tensor)] for d in self.devices})

    def buffer(self, device: str, tensor: str) -> Box:
        """Return the box around everything that a device ever has of a tensor's values, forward and backward."""
        box = self._forward_hull(device, tensor)
        read_backward = self._wanted_values.get(tensor, {}).get(device) if self.plan.is_training else None
        return box.hull(read_backward) if read_backward is not None else box

    @cached_property
    def rim_first(self) -> frozenset[int]:
        """Normalisations that start a group and alone read what it fetches: the gradients that go back to others' tiles
        need no sums, so both travel at once."""
        if self.share.backward_groups is not None or not self.plan.is_training:
            return frozenset()
        return frozenset(group.first for group in self.groups if self._alone_fetches(group))

    def _alone_fetches(self, group: Group) -> bool:
        op = self.network.ops[group.first]
        if group.first == self.first or op.tiling != "norm" or not self.adds_up(op):
            return False
        read = op.inputs[0]
        is_alone = self.network.readers[read] == (group.first,) and read not in self.network.outputs
        return (
            is_alone
            and read in group.fetches
            and self.network.tensors[op.outputs[0]].differentiable
            and all(self.computed[d].get(read, self.own(d, read)) == self.own(d, read) for d in self.devices)
        )

    # Lowering

    def splits_backward(self, index: int) -> bool:
        """Return whether an operator works on maps, with weights that are trained and inputs that have gradients; not
        one whose weight is computed: the operators that did so are differentiated next."""
        op = self.network.ops[index]
        trains = any(self.network.weights[name].trainable for name in op.weights)
        computed = any(name not in self.maps and self.network.tensors[name].differentiable for name in op.inputs)
        if not op.macs or not trains or computed:
            return False
        return any(name in self.maps and self.network.tensors[name].differentiable for name in op.inputs)

    def last_bucket_bytes(self, gradient_bytes: int) -> int:
        bucket_bytes = self.plan.bucket_bytes
        return bucket_bytes // LAST_BUCKET_PART if gradient_bytes > bucket_bytes else 0

    def returned_gradients(self, tensor: str, arrived: tuple[Move, ...], producer: StageGeometry) -> tuple[Move, ...]:
        """Return how the gradient of a tensor goes back to the stage that made it.

        With backward groups each device has the complete gradient of its tile, and hands that back.
        """
        if self.backward_groups is None or tensor not in self.maps:
            return super().returned_gradients(tensor, arrived, producer)
        return moves(self.owned(tensor), producer.owned(tensor))

    @cached_property
    def backward_runs(self) -> BackwardRuns:
        groups = self.backward_groups
        if groups is None:
            return super().backward_runs
        exchanges = (Exchange(group.deltas, group.values) for group in groups)
        return BackwardRuns(tuple((group.first, group.last) for group in groups), (*exchanges, Exchange()))

    # Backward by groups

    @cached_property
    def _backward_bounds(self) -> tuple[tuple[int, int], ...]:
        """Operators of each backward group, the last group first."""
        assert self.share.backward_groups is not None
        starts = group_ops(self.share.backward_groups, self.network)
        return tuple(pairwise((*starts, self.last)))[::-1]

    @cached_property
    def regions(self) -> Boxes:
        """Tensor -> device -> the box of its gradient that the device has complete."""
        regions: Boxes = {}
        for first, last in self._backward_bounds:
            grown: Boxes = {}
            for op in self.network.ops[first:last]:
                for name in op.outputs:
                    grown[name] = {d: self._region(d, op, name, grown) for d in self.devices}
            regions |= grown
        return regions

    def _region(self, device: str, op: Op, name: str, grown: Boxes) -> Box:
        region = self.own(device, name)
        for read in op.reads if name in self.maps else ():
            if read.tensor in self.maps and self.network.tensors[read.tensor].differentiable:
                of_input = grown[read.tensor][device] if read.tensor in grown else self.own(device, read.tensor)
                region = region.hull(read.touched(of_input, self.shape(name)))
        return region

    def gradient_box(self, device: str, tensor: str) -> Box:
        """Return the box of a tensor's gradient that a device collects."""
        if tensor not in self.maps:
            return Box.whole(self.shape(tensor))
        if self.share.backward_groups is None:
            return self._forward_hull(device, tensor)
        return self.regions[tensor][device] if tensor in self.regions else self.own(device, tensor)

    @cached_property
    def _wanted_of_group(self) -> tuple[Boxes, ...]:
        """For each backward group the forward values that its derivatives read."""
        if self.share.backward_groups is None:
            return ()
        return tuple(self._wanted(first, last) for first, last in self._backward_bounds)

    @cached_property
    def _wanted_values(self) -> Boxes:
        values: Boxes = {}
        for of_group in self._wanted_of_group:
            for tensor, boxes in of_group.items():
                by_device = values.setdefault(tensor, {})
                for device, box in boxes.items():
                    by_device[device] = by_device[device].hull(box) if device in by_device else box
        return values

    def _wanted(self, first: int, last: int) -> Boxes:
        values: Boxes = {}

        def want(tensor: str, device: str, box: Box) -> None:
            by_device = values.setdefault(tensor, {})
            by_device[device] = by_device[device].hull(box) if device in by_device else box

        for op in self.network.ops[first:last]:
            if not op.outputs or op.outputs[0] not in self.maps:
                continue
            name = op.outputs[0]
            if not self.network.tensors[name].differentiable:
                continue
            trains = any(self.network.weights[weight].trainable for weight in op.weights)
            for device in self.devices:
                region, own_box = self.regions[name][device], self.own(device, name)
                if name in op.derives_from:
                    want(name, device, region)
                for read in op.reads:
                    if read.tensor not in self.maps:
                        continue
                    if read.tensor in op.derives_from:
                        want(read.tensor, device, read.demand(region, self.shape(read.tensor)))
                    if trains:
                        want(read.tensor, device, read.demand(own_box, self.shape(read.tensor)))
        return values

    @cached_property
    def backward_groups(self) -> tuple[BackwardGroup, ...] | None:
        """TILE's backward groups, last first; None where backward is the adjoint of forward."""
        if self.share.backward_groups is None or not self.plan.is_training:
            return None
        groups = []
        fetched: dict[tuple[str, str], list[Box]] = {}
        for (first, last), wanted_boxes in zip(self._backward_bounds, self._wanted_of_group):
            deltas: dict[str, tuple[Move, ...]] = {}
            for tensor in (name for op in self.network.ops[first:last] for name in op.outputs):
                leaves = any(not first <= reader < last for reader in self.network.readers.get(tensor, ()))
                leaves = leaves or tensor in self.network.outputs
                if leaves and tensor in self.maps and self.network.tensors[tensor].differentiable:
                    target = Layout.of({d: [self.regions[tensor][d]] for d in self.devices})
                    deltas[tensor] = tuple(m for m in moves(self.owned(tensor), target) if not m.is_local)
            values = {tensor: self._missing_values(tensor, boxes, fetched) for tensor, boxes in wanted_boxes.items()}
            groups.append(
                BackwardGroup(
                    first, last, {t: ms for t, ms in deltas.items() if ms}, {t: ms for t, ms in values.items() if ms}
                )
            )
        return tuple(groups)

    def _missing_values(
        self, tensor: str, boxes: dict[str, Box], fetched: dict[tuple[str, str], list[Box]]
    ) -> tuple[Move, ...]:
        """Return the moves, from devices that have them, of the forward values that each device needs and lacks.

        What no device has, none needed: its gradient is zero, and any value will do.
        """
        if tensor in self.network.inputs:  # fed with all of it
            return ()
        held = {d: first_come((d, box) for box in self.held(d, tensor)) for d in self.devices}
        missing = {}
        for device, box in boxes.items():
            at_hand = fetched.setdefault((device, tensor), list(self.held(device, tensor)))
            offered = first_come((device, box.intersect(piece)) for pieces in held.values() for _, piece in pieces)
            missing[device] = [part for _, piece in offered for part in without([piece], *at_hand)]
            at_hand.extend(missing[device])
        source = Layout.of({d: [piece for _, piece in pieces] for d, pieces in held.items()})
        return moves(source, Layout.of(missing))

    def backward_fractions(self, device: str) -> tuple[float, ...]:
        if self.share.backward_groups is None:
            return self.fractions(device)
        grown = self._fractions({t: boxes[device] for t, boxes in self.regions.items()})
        own_fractions = self._fractions({t: self.own(device, t) for t in self.regions})
        return tuple(
            (region + owned) / 2 if self.network.backward_passes(op) == 2 else region
            for op, region, owned in zip(self.ops, grown, own_fractions)
        )
