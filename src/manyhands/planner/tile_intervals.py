"""The rows and columns, and depths, of every map that each tile of a grid computes, reads and holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy

from manyhands.facts.boxes import Interval, cut_points
from manyhands.facts.network import Network, Op
from manyhands.facts.plan import Plan
from manyhands.facts.reads import Read, Rule
from manyhands.planner.shares import Numbers
from manyhands.schedule.tiles import TileGeometry


def hull(first: Interval, second: Interval) -> Interval:
    if first[0] >= first[1]:
        return second
    if second[0] >= second[1]:
        return first
    return (min(first[0], second[0]), max(first[1], second[1]))


def overlap(first: Interval, second: Interval) -> Interval:
    return (max(first[0], second[0]), min(first[1], second[1]))


def length(interval: Interval) -> int:
    return max(0, interval[1] - interval[0])


@dataclass
class _Needs:
    """For each tensor, the interval that each place of the grid computes, or reads from outside, on one axis."""

    made: dict[str, list[Interval]] = field(default_factory=dict)
    read: dict[str, list[Interval]] = field(default_factory=dict)


class TileIntervals:
    """The intervals of one tiled stage. Each direction is handled by itself: a grid of R x C tiles has R + C intervals
    on each map, not R * C boxes. A direction is a place in a map's spatial axes: 0 and 1 are rows and columns; where
    maps have a depth, 0 is that, and 1 and 2 are rows and columns."""

    def __init__(self, plan: Plan, stage: int, network: Network) -> None:
        self.network = network
        self.geometry = TileGeometry(plan, stage, network)
        self.weights = self.geometry.cuts
        self.axes = range(len(self.weights))
        """The directions in which maps are cut."""
        self.devices = self.geometry.devices
        self._owned: dict[tuple[int, str], list[Interval]] = {}
        self._extents: dict[str, tuple[int, ...]] = {}
        places = numpy.arange(len(self.devices))
        self._line = dict(zip(self.axes, numpy.unravel_index(places, tuple(len(sizes) for sizes in self.weights))))
        """Direction -> the row, column or depth of the grid that each device is in."""

    def _extent(self, tensor: str) -> tuple[int, ...]:
        """Return the extents of a map: rows and columns, or depth, rows and columns."""
        if tensor not in self._extents:
            self._extents[tensor] = self.network.extents(tensor)
        return self._extents[tensor]

    def _rule(self, read: Read, axis: int) -> Rule:
        """Return the rule of a map that is read, in one direction."""
        return read.rules[self.network.spatial[read.tensor][axis]]

    def owned(self, axis: int, tensor: str) -> list[Interval]:
        key = (axis, tensor)
        if key not in self._owned:
            self._owned[key] = list(pairwise(cut_points(self._extent(tensor)[axis], self.weights[axis])))
        return self._owned[key]

    def _areas(self, intervals: dict[int, list[Interval]]) -> Numbers:
        """Return each device's positions of a map of which the grid's lines have these intervals."""
        areas: Numbers = numpy.ones(len(self.devices))
        for axis in self.axes:
            areas = areas * numpy.array([length(each) for each in intervals[axis]], float)[self._line[axis]]
        return areas

    def _parts(self, tensor: str) -> Numbers:
        """Return the fraction of a map that each device owns."""
        owned = {axis: self.owned(axis, tensor) for axis in self.axes}
        parts: Numbers = self._areas(owned) / prod(self._extent(tensor))
        return parts

    def _ops(self, first: int, last: int) -> Iterator[tuple[int, Op]]:
        """Yield the operators of a range that make maps."""
        for index in range(first, last):
            op = self.network.ops[index]
            if op.outputs and op.outputs[0] in self.geometry.maps:
                yield index, op

    def _made(self, first: int, last: int) -> Iterator[tuple[str, Op]]:
        """Yield the maps that a range makes, with the operators that make them: some make several."""
        for _, op in self._ops(first, last):
            for name in op.outputs:
                yield name, op

    def _forward_needs(self, axis: int, first: int, last: int) -> _Needs:
        """Return what a forward group computes and reads on one axis, walking from its last operator."""
        maps, count = self.geometry.maps, len(self.weights[axis])
        need: dict[str, list[Interval]] = {}
        made = set()
        for name, op in reversed(list(self._made(first, last))):
            made.add(name)
            readers = self.network.readers.get(name, ())
            if any(reader >= last for reader in readers) or name in self.network.outputs or self.geometry.adds_up(op):
                owned = self.owned(axis, name)
                need[name] = [hull(a, b) for a, b in zip(need[name], owned)] if name in need else list(owned)
            for read in op.reads if name in need else ():
                if read.tensor not in maps:
                    continue
                extent, rule = self._extent(read.tensor)[axis], self._rule(read, axis)
                demanded = [rule.demand(interval, extent) for interval in need[name]]
                needed = need.get(read.tensor, [(0, 0)] * count)
                need[read.tensor] = [hull(a, b) for a, b in zip(needed, demanded)]
        return _Needs(
            {name: intervals for name, intervals in need.items() if name in made},
            {name: intervals for name, intervals in need.items() if name not in made},
        )

    def _backward_regions(self, axis: int, first: int, last: int) -> dict[str, list[Interval]]:
        """Return what a backward group computes on one axis, walking from its first operator."""
        grown: dict[str, list[Interval]] = {}
        for name, op in self._made(first, last):
            region = list(self.owned(axis, name))
            for read in op.reads:
                if read.tensor in self.geometry.maps and self.network.tensors[read.tensor].differentiable:
                    of_input = grown.get(read.tensor) or self.owned(axis, read.tensor)
                    extent, rule = self._extent(name)[axis], self._rule(read, axis)
                    region = [hull(a, rule.touched(b, extent)) for a, b in zip(region, of_input)]
            grown[name] = region
        return grown

    @cached_property
    def _held(self) -> dict[int, dict[str, list[Interval]]]:
        """The intervals that forward leaves on each place of the grid if it exchanges before every operator that reads
        beyond its tile."""
        held: dict[int, dict[str, list[Interval]]] = {}
        for axis in self.axes:
            by_tensor: dict[str, list[Interval]] = {t: list(self.owned(axis, t)) for t in self.geometry.maps}
            for _, op in self._ops(self.geometry.first, self.geometry.last):
                for read in op.reads:
                    if read.tensor in by_tensor:
                        extent, rule = self._extent(read.tensor)[axis], self._rule(read, axis)
                        demanded = [rule.demand(i, extent) for i in self.owned(axis, op.outputs[0])]
                        by_tensor[read.tensor] = [hull(a, b) for a, b in zip(by_tensor[read.tensor], demanded)]
            held[axis] = by_tensor
        return held

    def _wanted(
        self, axis: int, first: int, last: int, regions: dict[str, list[Interval]]
    ) -> dict[str, list[Interval]]:
        """Return the forward values that a backward group's derivatives read."""
        values: dict[str, list[Interval]] = {}

        def want(tensor: str, intervals: list[Interval]) -> None:
            present = values.get(tensor)
            values[tensor] = intervals if present is None else [hull(a, b) for a, b in zip(present, intervals)]

        for _, op in self._ops(first, last):
            name = op.outputs[0]
            if not self.network.tensors[name].differentiable:
                continue
            trains = any(self.network.weights[weight].trainable for weight in op.weights)
            if name in op.derives_from:
                want(name, regions[name])
            for read in op.reads:
                if read.tensor not in self.geometry.maps:
                    continue
                extent, rule = self._extent(read.tensor)[axis], self._rule(read, axis)
                if read.tensor in op.derives_from:
                    want(read.tensor, [rule.demand(i, extent) for i in regions[name]])
                if trains:
                    want(read.tensor, [rule.demand(i, extent) for i in self.owned(axis, name)])
        return values
