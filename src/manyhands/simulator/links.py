"""Transfers that share links and ports fairly, under a virtual clock.

Every transfer crosses its pair's link, the sender's port and the receiver's port, the uplinks of the sites that it
leaves and enters, and where a device relays between the two, that one's ports and the uplinks before and behind it;
devices of one host share the ports, and between these there is only the pair's link. Rates are max-min fair
(fairness.py). Bulk transfers wait while their sender has urgent ones under way, as in the engine.

Rates are shared once for all that starts and ends at one moment, when the clock moves on, and only for the transfers
connected to it. The flows of a sum are one bundle: arrays, and one event for all that end together.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy

from manyhands.facts.cluster import Cluster
from manyhands.simulator.fairness import SAME, Numbers, fair_rates, fair_rates_of_few
from manyhands.simulator.flows import Ended, FlowBundle, FlowShape, Transfer, Wiring

Party = Transfer | FlowBundle
MOST_FEW = 64
"""The most transfers that are shared one by one, which is faster than as arrays."""


class LinkNetwork:
    """All transfers under way on the links of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.wiring = Wiring(cluster)
        self._on: dict[int, dict[Transfer | FlowShape, None]] = defaultdict(dict)
        """Node -> its transfers, in the order they came: sets would make two runs differ in the last digit."""
        self._bundles: dict[FlowShape, dict[FlowBundle, None]] = defaultdict(dict)
        """The bundles of each shape."""
        self._urgent = numpy.zeros(len(cluster.devices), numpy.int64)
        """Urgent transfers under way, by sender."""
        self._touched: dict[int, None] = {}
        """Nodes at which something started or ended since rates were last shared."""
        self._touched_at = 0.0

    def start(
        self, source: str, target: str, byte_count: float, label: object, now: float, *, is_urgent: bool = True
    ) -> Transfer:
        """Start a transfer. Its rate is known after `settle`."""
        route = self.wiring.route(source, target)
        transfer = Transfer(source, target, byte_count, label, now, is_urgent, route, now)
        if is_urgent:
            self._urgent[route.sender] += 1
        self._enter(transfer)
        self._touch(transfer, now)
        return transfer

    def start_together(
        self, shape: FlowShape, sizes: Numbers, label: object, now: float, *, is_urgent: bool = True
    ) -> FlowBundle:
        """Start a transfer of these bytes for each flow of a shape."""
        bundle = FlowBundle(shape, sizes, label, now, is_urgent=is_urgent)
        if is_urgent:
            self._urgent[shape.places[shape.senders]] += 1
        if not self._bundles[shape]:
            self._enter(shape)
        self._bundles[shape][bundle] = None
        self._touch(bundle, now)
        return bundle

    def _enter(self, item: Transfer | FlowShape) -> None:
        for node in item.nodes:
            self._on[node][item] = None

    def _leave(self, item: Transfer | FlowShape) -> None:
        for node in item.nodes:
            del self._on[node][item]

    def _touch(self, party: Party, now: float) -> None:
        if not self._touched:
            self._touched_at = now
        self._touched.update(dict.fromkeys(party.nodes))

    def end(self, transfer: Transfer, now: float) -> None:
        """End a transfer: its last byte has left."""
        if transfer.is_urgent:
            self._urgent[transfer.route.sender] -= 1
        transfer.version += 1
        self._leave(transfer)
        self._touch(transfer, now)

    def end_some(self, bundle: FlowBundle, now: float) -> Ended:
        """End some flows of a bundle: their last byte has left."""
        ended = bundle.end_some(now)
        if bundle.is_urgent:
            self._urgent[ended.senders] -= 1
        if bundle.is_over:
            del self._bundles[bundle.shape][bundle]
            if not self._bundles[bundle.shape]:
                self._leave(bundle.shape)
        self._touch(bundle, now)
        return ended

    def must_settle(self, until: float) -> bool:
        """Return whether rates must be shared before the clock moves on to `until`."""
        return bool(self._touched) and until > self._touched_at * (1 + SAME)

    def settle(self, now: float) -> list[Party]:
        """Share rates again at the touched nodes. Returns the transfers whose rate changed."""
        changed: list[Party] = []
        visited: set[int] = set()
        for node in self._touched:
            if node not in visited:
                connected = self._connected(node, visited)
                if connected:
                    changed += self._share(connected, now)
        self._touched.clear()
        return changed

    def _connected(self, node: int, visited: set[int]) -> dict[Transfer | FlowShape, None]:
        connected: dict[Transfer | FlowShape, None] = {}
        frontier = [node]
        visited.add(node)
        while frontier:
            for party in self._on[frontier.pop()]:
                if party not in connected:
                    connected[party] = None
                    for other in party.nodes:
                        if other not in visited:
                            visited.add(other)
                            frontier.append(other)
        return connected

    def _share(self, connected: dict[Transfer | FlowShape, None], now: float) -> list[Party]:
        """Give fair rates; bulk transfers wait while their sender has an urgent one."""
        changed: list[Party] = []
        singles: list[Transfer] = []
        bundles: dict[FlowShape, list[FlowBundle]] = defaultdict(list)
        for party in connected:
            if isinstance(party, FlowShape):
                for bundle in self._bundles[party]:
                    if bundle.is_urgent or not self._urgent[bundle.senders].all():
                        bundles[party].append(bundle)
                    elif bundle.hold(now):
                        changed.append(bundle)
            elif party.is_urgent or not self._urgent[party.route.sender]:
                singles.append(party)
            elif party.give(0.0, now):
                changed.append(party)
        if bundles or len(singles) > MOST_FEW:
            return changed + self._share_as_arrays(singles, bundles, now)
        if len(singles) == 1:
            rates = [singles[0].route.alone]
        else:
            rates = fair_rates_of_few([transfer.route.crossed for transfer in singles])
        return [*changed, *(transfer for transfer, rate in zip(singles, rates) if transfer.give(rate, now))]

    def _share_as_arrays(
        self, singles: list[Transfer], bundles: dict[FlowShape, list[FlowBundle]], now: float
    ) -> list[Party]:
        """Share rates as arrays. Bundles of one shape have the same flows with the same rates: they are shared as one,
        counted."""
        counts = {shape: self._counts(same_shape) for shape, same_shape in bundles.items()}
        going = {shape: numpy.flatnonzero(count) for shape, count in counts.items()}
        if not singles and [len(same_shape) for same_shape in bundles.values()] == [1]:
            (shape,) = bundles
            rates = shape.rates_alone(going[shape])
        else:
            numbers = numpy.array([transfer.route.number for transfer in singles], int)
            parts: list[list[Any]] = [[column] for column in (*self.wiring.columns(numbers), numpy.ones(len(singles)))]
            for shape, flows in going.items():
                of_all = (shape.ports, shape.link, shape.limit, counts[shape])
                for part, column in zip(parts, of_all):
                    part.append(column[..., flows])
            rates = fair_rates(self.wiring.room, *(numpy.concatenate(part, axis=-1) for part in parts))
        changed: list[Party] = [
            transfer
            for transfer, rate in zip(singles, rates.tolist())
            if rate != transfer.rate and transfer.give(rate, now)
        ]
        at = len(singles)
        for shape, same_shape in bundles.items():
            every = numpy.zeros(len(shape.all))
            every[going[shape]] = rates[at : at + len(going[shape])]
            at += len(going[shape])
            changed += [
                bundle for bundle in same_shape if bundle.give(every if bundle.is_whole else every[bundle.flows], now)
            ]
        return changed

    def _counts(self, bundles: list[FlowBundle]) -> Numbers:
        """Return how many of the bundles, all of one shape, have each flow under way and need not wait with it."""
        shape = bundles[0].shape
        total = numpy.zeros(len(shape.all))
        for bundle in bundles:
            if bundle.is_whole:
                total += 1
            else:
                total[bundle.flows] += 1
        if not bundles[0].is_urgent:
            total[self._urgent[shape.sender] > 0] = 0
        return total
