"""Prices of tiles, by grid, by the size of each tile, and by where boundary data is exchanged (TILE chapter 5).

The paper prices an interior tile by three numbers (grouping.py). Here every tile of the grid is priced, uneven and at
the border, with the profile of its own device and the rates of its own links, forward and backward together, and with
the activations that a larger backward group must fetch to stay exact.

The price is a model: it adds up groups one after another, each as long as its slowest tile. The few groupings that look
best by it, and the two corner cases, are then simulated (strategies.py), and the fastest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import prod

import msgspec
import numpy

from manyhands.facts.boxes import Interval
from manyhands.facts.cluster import Cluster
from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.facts.plan import ByTiles, LayerName, Plan
from manyhands.facts.profile import Profile
from manyhands.planner.cost import CostModel
from manyhands.planner.grouping import cheapest_groups
from manyhands.planner.shares import Numbers
from manyhands.planner.tile_intervals import TileIntervals, overlap

SPLIT_COST = 0.05
"""The extra computing time of an operator in bands, as a fraction (-2 to +3 % on large tiles, and a copy)."""
MOST_PRICES = 4000
LEAST_LONGEST = 3
"""Groups are priced for every tile: the more tiles and places to exchange there are, the shorter the groups that are
considered, beside one group for all."""
MESSAGE_SECONDS = 100e-6
"""Seconds of an exchange besides its bytes and the link's delay: two processes that wake each other."""


@dataclass(frozen=True)
class ExchangeGroups:
    """The layers at which boundary data is exchanged, and the cost of that by the model."""

    name: str
    forward: tuple[LayerName, ...] | None
    backward: tuple[LayerName, ...] | None
    seconds: float = 0.0
    """Forward and backward seconds of the slowest tile of every group, without adding up weight gradients."""
    fetched_seconds: float = 0.0
    """The part of these seconds for activations that backward groups fetch, which the paper's model leaves out."""

    @property
    def count(self) -> int:
        """The number of groups; exchanging at every layer counts as more than any, and the adjoint counts as forward
        does."""
        ahead = 10**6 if self.forward is None else len(self.forward)
        return ahead + (ahead if self.backward is None else len(self.backward))

    def on(self, share: ByTiles) -> ByTiles:
        return msgspec.structs.replace(share, forward_groups=self.forward, backward_groups=self.backward)


def with_groups(plan: Plan, stage: int, groups: ExchangeGroups) -> Plan:
    """Return the plan with other groups in one tiled stage."""
    share = plan.stages[stage].share
    assert isinstance(share, ByTiles)
    changed = msgspec.structs.replace(plan.stages[stage], share=groups.on(share))
    return msgspec.structs.replace(plan, stages=(*plan.stages[:stage], changed, *plan.stages[stage + 1 :]))


class TilePrices(TileIntervals):
    """The cost of groups of a tiled stage: a resolved plan's tiles on a cluster with a profile."""

    def __init__(self, plan: Plan, stage: int, network: Network, cluster: Cluster, profile: Profile) -> None:
        super().__init__(plan, stage, network)
        self.cluster = cluster
        self.samples = plan.micro_batch_size
        self._costs = CostModel(network, cluster, profile)
        self._profile = profile

    @property
    def starts(self) -> tuple[int, ...]:
        """The operators before which groups may start; normalisations are tried besides (`beside_sums`)."""
        return self.geometry.places_to_exchange

    # Seconds of devices and links

    @cached_property
    def _seconds(self) -> tuple[Numbers, Numbers]:
        """[operator, device] -> forward and backward seconds of the whole map, at the speed of the device's own
        tile."""
        count = self.geometry.last - self.geometry.first
        by_device = numpy.zeros((count, len(self.devices))), numpy.zeros((count, len(self.devices)))
        for place in range(count):
            index = self.geometry.first + place
            op = self.network.ops[index]
            is_map = op.outputs and op.outputs[0] in self.geometry.maps
            parts = self._parts(op.outputs[0]) if is_map else numpy.ones(len(self.devices))
            for number, device in enumerate(self.devices):
                part = float(parts[number]) or 1.0 / len(self.devices)
                profile = self._profile.of(device)
                seconds = self._costs.range_seconds(profile, device, index, index + 1, part * self.samples)
                by_device[0][place, number], by_device[1][place, number] = (each / part for each in seconds)
        return by_device

    @cached_property
    def _links(self) -> tuple[Numbers, Numbers]:
        """For each device, the seconds that a byte takes to reach it, and the seconds of an exchange besides its
        bytes."""
        costs = []
        for device in self.devices:
            others = [other for other in self.devices if other != device]
            rate = min(self.cluster.bytes_per_second_between(other, device) for other in others)
            delay = max(self.cluster.link_between(other, device).delay_seconds for other in others)
            costs.append((1.0 / rate, delay + MESSAGE_SECONDS))
        bytes_seconds, exchange_seconds = zip(*costs)
        return numpy.array(bytes_seconds), numpy.array(exchange_seconds)

    # Prices

    def _bytes(self, tensor: str) -> int:
        """Return the bytes of one position of a map: all channels of all samples."""
        elements = prod(self.geometry.shape(tensor)) // prod(self._extent(tensor))
        return elements * DTYPE_BYTES[self.network.tensors[tensor].dtype]

    def _beyond(self, tensor: str, needed: dict[int, list[Interval]], have: dict[int, list[Interval]]) -> Numbers:
        """Return the bytes of each device's box that lie outside another box."""
        common = {axis: [overlap(a, b) for a, b in zip(needed[axis], have[axis])] for axis in self.axes}
        beyond: Numbers = (self._areas(needed) - self._areas(common)) * self._bytes(tensor)
        return beyond

    def forward(self, first: int, last: int, *, both_ways: bool) -> float:
        """Return the seconds of a forward group; with `both_ways` also of its adjoint, which exchanges the same
        boxes."""
        needs = {axis: self._forward_needs(axis, first, last) for axis in self.axes}
        byte_seconds, exchange_seconds = self._links
        compute, hidden = numpy.zeros(len(self.devices)), numpy.zeros(len(self.devices))
        for index, op in self._ops(first, last):
            name = op.outputs[0]
            if any(name not in needs[axis].made for axis in self.axes):
                continue
            part = self._areas({axis: needs[axis].made[name] for axis in self.axes}) / prod(self._extent(name))
            ahead, back = (seconds[index - self.geometry.first] for seconds in self._seconds)
            compute += part * (ahead + back if both_ways else ahead)
            if index == first and self.geometry.splits_backward(index):
                hidden = part * back / 2  # its weight gradients are computed while the rim travels
        fetched = numpy.zeros(len(self.devices))
        for tensor in needs[0].read:
            if self.geometry.is_made_here(tensor):
                needed = {axis: needs[axis].read[tensor] for axis in self.axes}
                fetched += self._beyond(tensor, needed, {a: self.owned(a, tensor) for a in self.axes})
        exchange = numpy.where(fetched > 0, fetched * byte_seconds + exchange_seconds, 0.0)
        if both_ways:
            exchange = exchange + numpy.maximum(0.0, exchange - hidden)
        return float((compute + exchange).max())

    def backward(self, first: int, last: int) -> tuple[float, float]:
        """Return the seconds of a backward group, and how many of them go into fetching activations."""
        regions = {axis: self._backward_regions(axis, first, last) for axis in self.axes}
        needed = {axis: self._wanted(axis, first, last, regions[axis]) for axis in self.axes}
        byte_seconds, exchange_seconds = self._links
        compute, deltas, values = (numpy.zeros(len(self.devices)) for _ in range(3))
        for index, op in self._ops(first, last):
            name = op.outputs[0]
            if not self.network.tensors[name].differentiable:
                continue
            region = {axis: regions[axis][name] for axis in self.axes}
            part = self._areas(region) / prod(self._extent(name))
            if self.network.backward_passes(op) == 2:
                part = (part + self._parts(name)) / 2
            compute += part * self._seconds[1][index - self.geometry.first]
            for made in op.outputs:
                readers = self.network.readers.get(made, ())
                if made in self.network.outputs or any(not first <= reader < last for reader in readers):
                    grown = {axis: regions[axis][made] for axis in self.axes}
                    deltas += self._beyond(made, grown, {a: self.owned(a, made) for a in self.axes})
        for tensor in needed[0]:
            if tensor not in self.network.inputs:
                intervals = {axis: needed[axis][tensor] for axis in self.axes}
                values += self._beyond(tensor, intervals, {a: self._held[a][tensor] for a in self.axes})
        moved = deltas + values
        seconds = compute + moved * byte_seconds + numpy.where(moved > 0, exchange_seconds, 0.0)
        slowest = max(range(len(seconds)), key=lambda place: (seconds[place], values[place] * byte_seconds[place]))
        return float(seconds[slowest]), float(values[slowest] * byte_seconds[slowest])

    # Groupings

    def _price(self, name: str, forward: list[int] | None, backward: list[int] | None) -> ExchangeGroups:
        """Return the price of a grouping given as places in `starts`; None means every start, and for backward the
        adjoint."""
        last, places = self.geometry.last, range(len(self.starts))
        ahead = [self.starts[i] for i in (places if forward is None else forward)]
        seconds = sum(self.forward(a, b, both_ways=backward is None) for a, b in pairwise((*ahead, last)))
        fetched = 0.0
        if backward is not None:
            prices = [self.backward(a, b) for a, b in pairwise((*(self.starts[i] for i in backward), last))]
            seconds += sum(price for price, _ in prices)
            fetched = sum(part for _, part in prices)
        names = None if forward is None else self.geometry.start_names(ahead)
        back = None if backward is None else self.geometry.start_names(self.starts[i] for i in backward)
        return ExchangeGroups(name, names, back, seconds, fetched)

    def interior_first(self) -> tuple[LayerName, ...]:
        """Return the forward groups of this plan whose boundary data travels so long that computing inside the tile
        first pays."""
        starts = []
        for group in self.geometry.groups:
            op = self.network.ops[group.first]
            if not group.fetches or not op.macs or not op.outputs or op.outputs[0] not in self.geometry.maps:
                continue
            gains = []
            parts = self._parts(op.outputs[0])
            for place, device in enumerate(self.devices):
                byte_seconds, exchange_seconds = (costs[place] for costs in self._links)
                size = sum(
                    move.box.volume * DTYPE_BYTES[self.network.tensors[tensor].dtype]
                    for tensor, moves in group.fetches.items()
                    for move in moves
                    if move.target == device
                )
                ahead = self._seconds[0][group.first - self.geometry.first, place] * parts[place]
                gains.append(min(ahead, size * byte_seconds + exchange_seconds) - SPLIT_COST * ahead)
            if min(gains) > 0:
                starts.append(group.first)
        return self.geometry.start_names(starts)

    def every_layer(self) -> ExchangeGroups:
        """Return the price of exchanging before every operator that reads beyond its own tile; backward is the
        adjoint."""
        return self._price("every layer", None, None)

    def beside_sums(self) -> list[ExchangeGroups]:
        """Return groupings that exchange boundary data together with the sums of normalisations, where there are any:
        not through pools, after which there is less of it, and through them. They wait less, and send and compute
        more."""
        groupings: list[ExchangeGroups] = []
        tried = [self.starts]
        for name, through in (("beside sums", False), ("beside sums, through pools", True)):
            starts = self.geometry.beside_sums(through_windows=through)
            if starts not in tried:
                tried.append(starts)
                pairs = pairwise((*starts, self.geometry.last))
                seconds = sum(self.forward(a, b, both_ways=True) for a, b in pairs)
                groupings.append(ExchangeGroups(name, self.geometry.start_names(starts), None, seconds))
        return groupings

    def groupings(self) -> list[ExchangeGroups]:
        """Return the corner cases, those beside sums, and the optima, as the model prices them."""
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
        groupings = [self.every_layer(), self._price("one group", [0], None), *self.beside_sums()]
        groupings.append(self._price("every layer, deltas", None, every))
        groupings.append(self._price("one group each way", [0], [0]))
        best = list(cheapest_groups(count, both, longest))
        groupings.append(self._price("optimal", None if best == every else best, None))
        forward = list(cheapest_groups(count, ahead, longest))
        groupings.append(
            self._price(
                "optimal, deltas", None if forward == every else forward, list(cheapest_groups(count, back, longest))
            )
        )
        return groupings
