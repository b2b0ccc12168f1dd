"""Plans for tiles: which grid, how large each tile, and where boundary data is exchanged (TILE chapter 5).

The paper prices an interior tile by three numbers (grouping.py). Here every tile of the grid is priced, uneven and at
the border, with the profile of its own device and the rates of its own links, forward and backward together, and with
the activations that a larger backward group must fetch to stay exact. Rows and columns are walked apart: a grid of
R x C tiles has R + C intervals on each map, not R * C boxes.

The price is a model: it adds up groups one after another, each as long as its slowest tile. The few groupings that look
best by it, and the two corner cases, are then simulated (strategies.py), and the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import prod

import msgspec
import numpy

from manyhands.facts.boxes import Interval, cut_points
from manyhands.facts.cluster import Cluster
from manyhands.facts.network import DTYPE_BYTES, Network, Op
from manyhands.facts.plan import ByTiles, LayerName, Plan
from manyhands.facts.profile import Profile
from manyhands.planner.cost import CostModel
from manyhands.planner.grouping import cheapest_groups
from manyhands.planner.shares import Numbers
from manyhands.schedule.tiles import TileGeometry

_AXES = (-2, -1)
SPLIT_COST = 0.05
"""What computing an operator in bands costs more than at once (-2 to +3 % on large tiles, and a copy)."""
MOST_PRICES = 4000
LEAST_LONGEST = 3
"""Groups are priced for every tile: the more there are, and the more places to exchange, the shorter the groups that
are looked at, beside one group for all."""
MESSAGE_SECONDS = 100e-6
"""What an exchange takes beside its bytes and the link's delay: two processes that wake each other."""


@dataclass(frozen=True)
class Groups:
    """Where boundary data is exchanged, and what that costs by the model."""

    name: str
    forward: tuple[LayerName, ...] | None
    backward: tuple[LayerName, ...] | None
    seconds: float = 0.0
    """Forward and backward, the slowest tile of every group; the adding up of weight gradients not included."""
    fetched_seconds: float = 0.0
    """Of these, for activations that backward groups fetch, which the paper's model leaves out."""

    @property
    def count(self) -> int:
        """How many groups; exchanging at every layer counts as more than any, and the adjoint as forward does."""
        ahead = 10**6 if self.forward is None else len(self.forward)
        return ahead + (ahead if self.backward is None else len(self.backward))

    def on(self, share: ByTiles) -> ByTiles:
        return msgspec.structs.replace(share, forward_groups=self.forward, backward_groups=self.backward)


def with_groups(plan: Plan, stage: int, groups: Groups) -> Plan:
    """The plan with other groups in one tiled stage."""
    share = plan.stages[stage].share
    assert isinstance(share, ByTiles)
    changed = msgspec.structs.replace(plan.stages[stage], share=groups.on(share))
    return msgspec.structs.replace(plan, stages=(*plan.stages[:stage], changed, *plan.stages[stage + 1 :]))


def _hull(one: Interval, other: Interval) -> Interval:
    if one[0] >= one[1]:
        return other
    if other[0] >= other[1]:
        return one
    return (min(one[0], other[0]), max(one[1], other[1]))


def _common(one: Interval, other: Interval) -> Interval:
    return (max(one[0], other[0]), min(one[1], other[1]))


def _length(interval: Interval) -> int:
    return max(0, interval[1] - interval[0])


@dataclass
class _Needs:
    """Of each tensor, the interval that each place of the grid computes, or reads from outside, on one axis."""

    made: dict[str, list[Interval]] = field(default_factory=dict)
    read: dict[str, list[Interval]] = field(default_factory=dict)


class TilePrices:
    """What groups of a tiled stage cost: a resolved plan's tiles on a cluster with a profile."""

    def __init__(self, plan: Plan, stage: int, network: Network, cluster: Cluster, profile: Profile) -> None:
        self.network, self.cluster = network, cluster
        self.geometry = TileGeometry(plan, stage, network)
        share = self.geometry.share
        self.weights = {-2: share.rows, -1: share.columns}
        self.devices = self.geometry.devices
        self.samples = plan.micro_batch_size
        self._costs = CostModel(network, cluster, profile)
        self._profile = profile
        self._owned: dict[tuple[int, str], list[Interval]] = {}
        self._extents: dict[str, tuple[int, int]] = {}
        columns = len(share.columns)
        places = numpy.arange(len(self.devices))
        self._line = {-2: places // columns, -1: places % columns}
        """Axis -> the row, or column, of the grid that each device is in."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Operators before which groups are tried to start; beside those, normalisations (`beside_sums`)."""
        return self.geometry.places_to_exchange

    # What devices and links take

    @cached_property
    def _seconds(self) -> tuple[Numbers, Numbers]:
        """[operator, device] -> forward and backward seconds of the whole map, as fast as for the device's own tile."""
        count = self.geometry.last - self.geometry.first
        found = numpy.zeros((count, len(self.devices))), numpy.zeros((count, len(self.devices)))
        for place in range(count):
            index = self.geometry.first + place
            op = self.network.ops[index]
            is_map = op.outputs and op.outputs[0] in self.geometry.maps
            parts = self._parts(op.outputs[0]) if is_map else numpy.ones(len(self.devices))
            for number, device in enumerate(self.devices):
                part = float(parts[number]) or 1.0 / len(self.devices)
                own = self._profile.of(device)
                seconds = self._costs.range_seconds(own, device, index, index + 1, part * self.samples)
                found[0][place, number], found[1][place, number] = (one / part for one in seconds)
        return found

    @cached_property
    def _links(self) -> tuple[Numbers, Numbers]:
        """For each device the seconds that a byte takes to reach it, and an exchange beside its bytes."""
        found = []
        for device in self.devices:
            others = [other for other in self.devices if other != device]
            rate = min(self.cluster.bytes_per_second_between(other, device) for other in others)
            delay = max(self.cluster.link_between(other, device).delay_seconds for other in others)
            found.append((1.0 / rate, delay + MESSAGE_SECONDS))
        bytes_seconds, exchange_seconds = zip(*found)
        return numpy.array(bytes_seconds), numpy.array(exchange_seconds)

    # Intervals

    def _extent(self, tensor: str) -> tuple[int, int]:
        """Rows and columns of a map."""
        if tensor not in self._extents:
            *_, rows, columns = self.geometry.shape(tensor)
            self._extents[tensor] = (rows, columns)
        return self._extents[tensor]

    def owned(self, axis: int, tensor: str) -> list[Interval]:
        key = (axis, tensor)
        if key not in self._owned:
            self._owned[key] = list(pairwise(cut_points(self._extent(tensor)[axis], self.weights[axis])))
        return self._owned[key]

    def _areas(self, intervals: dict[int, list[Interval]]) -> Numbers:
        """Each device's places of a map that has these rows and columns of the grid."""
        high, wide = (numpy.array([_length(one) for one in intervals[axis]], float)[self._line[axis]] for axis in _AXES)
        found: Numbers = high * wide
        return found

    def _parts(self, tensor: str) -> Numbers:
        """What each device owns of a map."""
        rows, columns = self._extent(tensor)
        found: Numbers = self._areas({axis: self.owned(axis, tensor) for axis in _AXES}) / (rows * columns)
        return found

    def _ops(self, first: int, last: int) -> Iterator[tuple[int, Op]]:
        """Operators of a range that make maps."""
        for index in range(first, last):
            op = self.network.ops[index]
            if op.outputs and op.outputs[0] in self.geometry.maps:
                yield index, op

    def _forward_needs(self, axis: int, first: int, last: int) -> _Needs:
        """The walk of a forward group on one axis, last operator first."""
        maps, count = self.geometry.maps, len(self.weights[axis])
        need: dict[str, list[Interval]] = {}
        made = set()
        for _, op in reversed(list(self._ops(first, last))):
            name = op.outputs[0]
            made.add(name)
            readers = self.network.readers.get(name, ())
            if any(reader >= last for reader in readers) or name in self.network.outputs or self.geometry.adds_up(op):
                own = self.owned(axis, name)
                need[name] = [_hull(a, b) for a, b in zip(need[name], own)] if name in need else list(own)
            for read in op.reads if name in need else ():
                if read.tensor not in maps:
                    continue
                extent, rule = self._extent(read.tensor)[axis], read.rules[axis]
                wanted = [rule.demand(interval, extent) for interval in need[name]]
                known = need.get(read.tensor, [(0, 0)] * count)
                need[read.tensor] = [_hull(a, b) for a, b in zip(known, wanted)]
        return _Needs(
            {name: found for name, found in need.items() if name in made},
            {name: found for name, found in need.items() if name not in made},
        )

    def _backward_regions(self, axis: int, first: int, last: int) -> dict[str, list[Interval]]:
        """The walk of a backward group on one axis, first operator first."""
        grown: dict[str, list[Interval]] = {}
        for _, op in self._ops(first, last):
            name = op.outputs[0]
            region = list(self.owned(axis, name))
            for read in op.reads:
                if read.tensor in self.geometry.maps and self.network.tensors[read.tensor].differentiable:
                    of_input = grown.get(read.tensor) or self.owned(axis, read.tensor)
                    extent, rule = self._extent(name)[axis], read.rules[axis]
                    region = [_hull(a, rule.touched(b, extent)) for a, b in zip(region, of_input)]
            grown[name] = region
        return grown

    # Prices

    def _bytes(self, tensor: str) -> int:
        """Of one place of a map: all channels of all samples."""
        return prod(self.geometry.shape(tensor)[:-2]) * DTYPE_BYTES[self.network.tensors[tensor].dtype]

    def _beyond(self, tensor: str, wanted: dict[int, list[Interval]], have: dict[int, list[Interval]]) -> Numbers:
        """Bytes of each device's box that lie outside another."""
        common = {axis: [_common(a, b) for a, b in zip(wanted[axis], have[axis])] for axis in _AXES}
        found: Numbers = (self._areas(wanted) - self._areas(common)) * self._bytes(tensor)
        return found

    def forward(self, first: int, last: int, *, both_ways: bool) -> float:
        """Seconds of a forward group; `both_ways`: and of its adjoint, which exchanges the same boxes."""
        needs = {axis: self._forward_needs(axis, first, last) for axis in _AXES}
        byte_seconds, exchange_seconds = self._links
        compute, hidden = numpy.zeros(len(self.devices)), numpy.zeros(len(self.devices))
        for index, op in self._ops(first, last):
            high, wide = (needs[axis].made.get(op.outputs[0]) for axis in _AXES)
            if high is None or wide is None:
                continue
            rows, columns = self._extent(op.outputs[0])
            part = self._areas({-2: high, -1: wide}) / (rows * columns)
            ahead, back = (seconds[index - self.geometry.first] for seconds in self._seconds)
            compute += part * (ahead + back if both_ways else ahead)
            if index == first and self.network.backward_passes(op) == 2:
                hidden = part * back / 2  # its weight gradients are computed while the rim travels
        fetched = numpy.zeros(len(self.devices))
        for tensor in needs[-2].read:
            if self.geometry.is_made_here(tensor):
                wanted = {axis: needs[axis].read[tensor] for axis in _AXES}
                fetched += self._beyond(tensor, wanted, {a: self.owned(a, tensor) for a in _AXES})
        exchange = numpy.where(fetched > 0, fetched * byte_seconds + exchange_seconds, 0.0)
        if both_ways:
            exchange = exchange + numpy.maximum(0.0, exchange - hidden)
        return float((compute + exchange).max())

    @cached_property
    def _held(self) -> dict[int, dict[str, list[Interval]]]:
        """What forward leaves on each place of the grid if it exchanges before every operator that reads beyond."""
        found: dict[int, dict[str, list[Interval]]] = {}
        for axis in _AXES:
            own: dict[str, list[Interval]] = {t: list(self.owned(axis, t)) for t in self.geometry.maps}
            for _, op in self._ops(self.geometry.first, self.geometry.last):
                for read in op.reads:
                    if read.tensor in own:
                        extent, rule = self._extent(read.tensor)[axis], read.rules[axis]
                        wanted = [rule.demand(i, extent) for i in self.owned(axis, op.outputs[0])]
                        own[read.tensor] = [_hull(a, b) for a, b in zip(own[read.tensor], wanted)]
            found[axis] = own
        return found

    def backward(self, first: int, last: int) -> tuple[float, float]:
        """Seconds of a backward group, and how many of them go into fetching activations."""
        regions = {axis: self._backward_regions(axis, first, last) for axis in _AXES}
        wanted = {axis: self._wanted(axis, first, last, regions[axis]) for axis in _AXES}
        byte_seconds, exchange_seconds = self._links
        compute, deltas, values = (numpy.zeros(len(self.devices)) for _ in range(3))
        for index, op in self._ops(first, last):
            name = op.outputs[0]
            if not self.network.tensors[name].differentiable:
                continue
            rows, columns = self._extent(name)
            region = {axis: regions[axis][name] for axis in _AXES}
            part = self._areas(region) / (rows * columns)
            if self.network.backward_passes(op) == 2:
                part = (part + self._parts(name)) / 2
            compute += part * self._seconds[1][index - self.geometry.first]
            readers = self.network.readers.get(name, ())
            if name in self.network.outputs or any(not first <= reader < last for reader in readers):
                deltas += self._beyond(name, region, {a: self.owned(a, name) for a in _AXES})
        for tensor in wanted[-2]:
            if tensor not in self.network.inputs:
                asked = {axis: wanted[axis][tensor] for axis in _AXES}
                values += self._beyond(tensor, asked, {a: self._held[a][tensor] for a in _AXES})
        moved = deltas + values
        seconds = compute + moved * byte_seconds + numpy.where(moved > 0, exchange_seconds, 0.0)
        slowest = max(range(len(seconds)), key=lambda place: (seconds[place], values[place] * byte_seconds[place]))
        return float(seconds[slowest]), float(values[slowest] * byte_seconds[slowest])

    def _wanted(
        self, axis: int, first: int, last: int, regions: dict[str, list[Interval]]
    ) -> dict[str, list[Interval]]:
        """Forward values that a backward group's derivatives read."""
        found: dict[str, list[Interval]] = {}

        def want(tensor: str, intervals: list[Interval]) -> None:
            known = found.get(tensor)
            found[tensor] = intervals if known is None else [_hull(a, b) for a, b in zip(known, intervals)]

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
                extent, rule = self._extent(read.tensor)[axis], read.rules[axis]
                if read.tensor in op.derives_from:
                    want(read.tensor, [rule.demand(i, extent) for i in regions[name]])
                if trains:
                    want(read.tensor, [rule.demand(i, extent) for i in self.owned(axis, name)])
        return found

    # Groupings

    def _price(self, name: str, forward: list[int] | None, backward: list[int] | None) -> Groups:
        """A grouping given as places in `starts`; None: every start, and for backward the adjoint."""
        last, places = self.geometry.last, range(len(self.starts))
        ahead = [self.starts[i] for i in (places if forward is None else forward)]
        seconds = sum(self.forward(a, b, both_ways=backward is None) for a, b in pairwise((*ahead, last)))
        fetched = 0.0
        if backward is not None:
            found = [self.backward(a, b) for a, b in pairwise((*(self.starts[i] for i in backward), last))]
            seconds += sum(one for one, _ in found)
            fetched = sum(one for _, one in found)
        names = None if forward is None else self.geometry.start_names(ahead)
        back = None if backward is None else self.geometry.start_names(self.starts[i] for i in backward)
        return Groups(name, names, back, seconds, fetched)

    def interior_first(self) -> tuple[LayerName, ...]:
        """Forward groups of this plan whose boundary data travels for so long that computing inside the tile first
        pays."""
        found = []
        for group in self.geometry.groups:
            op = self.network.ops[group.first]
            if not group.fetches or not op.macs or not op.outputs or op.outputs[0] not in self.geometry.maps:
                continue
            gains = []
            parts = self._parts(op.outputs[0])
            for place, device in enumerate(self.devices):
                byte_seconds, exchange_seconds = (one[place] for one in self._links)
                size = sum(
                    move.box.volume * DTYPE_BYTES[self.network.tensors[tensor].dtype]
                    for tensor, moves in group.fetches.items()
                    for move in moves
                    if move.target == device
                )
                ahead = self._seconds[0][group.first - self.geometry.first, place] * parts[place]
                gains.append(min(ahead, size * byte_seconds + exchange_seconds) - SPLIT_COST * ahead)
            if min(gains) > 0:
                found.append(group.first)
        return self.geometry.start_names(found)

    def every_layer(self) -> Groups:
        """Boundary data exchanged before every operator that reads beyond its own tile; backward is the adjoint."""
        return self._price("every layer", None, None)

    def beside_sums(self) -> list[Groups]:
        """Boundary data exchanged together with the sums of normalisations, where there are any to travel beside; not
        through pools, after which there is less of it, and through them. Fewer waits; more bytes and computing."""
        found: list[Groups] = []
        known = [self.starts]
        for name, through in (("beside sums", False), ("beside sums, through pools", True)):
            starts = self.geometry.beside_sums(through_windows=through)
            if starts not in known:
                known.append(starts)
                pairs = pairwise((*starts, self.geometry.last))
                seconds = sum(self.forward(a, b, both_ways=True) for a, b in pairs)
                found.append(Groups(name, self.geometry.start_names(starts), None, seconds))
        return found

    def groupings(self) -> list[Groups]:
        """The corner cases, those beside sums, and the optima, as the model prices them."""
        bounds = (*self.starts, self.geometry.last)
        count = len(self.starts)

        def both(first: int, last: int) -> Fraction:
            return Fraction(self.forward(bounds[first], bounds[last], both_ways=True))

        def ahead(first: int, last: int) -> Fraction:
            return Fraction(self.forward(bounds[first], bounds[last], both_ways=False))

        def back(first: int, last: int) -> Fraction:
            return Fraction(self.backward(bounds[first], bounds[last])[0])

        longest = max(LEAST_LONGEST, MOST_PRICES // (count * len(self.devices)))
        every = list(range(count))
        found = [self.every_layer(), self._price("one group", [0], None), *self.beside_sums()]
        found.append(self._price("every layer, deltas", None, every))
        found.append(self._price("one group each way", [0], [0]))
        best = list(cheapest_groups(count, both, longest))
        found.append(self._price("optimal", None if best == every else best, None))
        forward = list(cheapest_groups(count, ahead, longest))
        found.append(
            self._price(
                "optimal, deltas", None if forward == every else forward, list(cheapest_groups(count, back, longest))
            )
        )
        return found
