"""Sharing of links written out plainly, for what links.py does with arrays, islands and things known beforehand: every
flow is one transfer, and whenever anything starts or ends all rates are found anew, in fractions, by definition."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy

from manyhands.facts.cluster import Cluster
from manyhands.simulator.flows import Ended, FlowBundle, FlowShape, Transfer, Wiring


class PlainNetwork:
    """Stands in for links.LinkNetwork."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.wiring = cluster, Wiring(cluster)
        self.under_way: list[Transfer | FlowBundle] = []
        self.is_touched = False

    def start(
        self, source: str, target: str, byte_count: float, label: object, now: float, *, is_urgent: bool = True
    ) -> Transfer:
        route = self.wiring.route(source, target)
        self.under_way.append(Transfer(source, target, byte_count, label, now, is_urgent, route, now))
        self.is_touched = True
        return self.under_way[-1]  # type: ignore[return-value]

    def start_together(
        self, shape: FlowShape, sizes: numpy.ndarray, label: object, now: float, *, is_urgent: bool = True
    ) -> FlowBundle:
        self.under_way.append(FlowBundle(shape, sizes, label, now, is_urgent=is_urgent))
        self.is_touched = True
        return self.under_way[-1]  # type: ignore[return-value]

    def end(self, transfer: Transfer, now: float) -> None:
        transfer.version += 1
        self.under_way.remove(transfer)
        self.is_touched = True

    def end_some(self, bundle: FlowBundle, now: float) -> Ended:
        ended = bundle.end_some(now)
        if bundle.is_over:
            self.under_way.remove(bundle)
        self.is_touched = True
        return ended

    def must_settle(self, until: float) -> bool:
        return self.is_touched

    def settle(self, now: float) -> list[Transfer | FlowBundle]:
        self.is_touched = False
        flows = [(party, place, pair) for party in self.under_way for place, pair in enumerate(_pairs(party))]
        busy = {pair[0] for party, _, pair in flows if party.is_urgent}
        going = [flow for flow in flows if flow[0].is_urgent or flow[2][0] not in busy]
        rates: dict[tuple[Transfer | FlowBundle, int], float] = {(party, place): 0.0 for party, place, _ in flows}
        for (party, place, _), rate in zip(going, self._max_min([pair for _, _, pair in going])):
            rates[party, place] = rate
        changed = []
        for party in self.under_way:
            own = [rates[party, place] for place in range(len(_pairs(party)))]
            if party.give(numpy.array(own), now) if isinstance(party, FlowBundle) else party.give(own[0], now):
                changed.append(party)
        return changed

    def _crossed(self, source: str, target: str) -> dict[tuple[str, ...], Fraction]:
        sender, receiver = self.cluster.device(source), self.cluster.device(target)
        rate, a, b = self.cluster.link_between(source, target).bytes_per_second, sender.host_name, receiver.host_name
        limits: dict[tuple[str, ...], float] = {
            ("link", a, b): rate, ("up", a): sender.up_bytes_per_second, ("down", b): receiver.down_bytes_per_second,
        }  # fmt: skip
        by = self.cluster.relays.get((source, target), "")
        stops = [sender, self.cluster.device(by), receiver] if by in self.cluster.names else [sender, receiver]
        if by and by not in self.cluster.names:
            limits["relay", by] = self.cluster.relay_rates[by]
        for one, other in zip(stops, stops[1:]):
            if one.host_name != other.host_name:
                limits |= {("up", one.host_name): one.up_bytes_per_second}
                limits |= {("down", other.host_name): other.down_bytes_per_second}
            way = self.cluster.tree.way(one.site, other.site)
            limits |= {("out of", site.name): site.up_bytes_per_second for site in way.leaves}
            limits |= {("into", site.name): site.down_bytes_per_second for site in way.enters}
        if a == b:
            limits = {("inside", source, target): rate}
        return {name: Fraction(limit) for name, limit in limits.items() if limit < math.inf}

    def _max_min(self, pairs: list[tuple[str, str]]) -> list[float]:
        """Raise every rate that can still rise, equally, as far as the first full resource allows."""
        uses = [self._crossed(*pair) for pair in pairs]
        room = {name: limit for use in uses for name, limit in use.items()}
        rates = [Fraction(0) if use else math.inf for use in uses]
        rising = {flow for flow, use in enumerate(uses) if use}
        while rising:
            counts = {name: sum(name in uses[flow] for flow in rising) for name in room}
            step = min(room[name] / counts[name] for name in room if counts[name])
            for flow in rising:
                rates[flow] += step
            room = {name: left - step * counts[name] for name, left in room.items()}
            rising = {flow for flow in rising if all(room[name] > 0 for name in uses[flow])}
        return [float(rate) for rate in rates]


def _pairs(party: Transfer | FlowBundle) -> list[tuple[str, str]]:
    if isinstance(party, Transfer):
        return [(party.source, party.target)]
    ends = zip(party.shape.sources[party.flows].tolist(), party.shape.targets[party.flows].tolist())
    return [(party.shape.devices[a], party.shape.devices[b]) for a, b in ends]
