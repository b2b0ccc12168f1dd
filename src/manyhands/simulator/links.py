"""Transfers that share links and ports fairly, under a virtual clock.

Every transfer crosses its pair's link, the sender's port and the receiver's port; devices of one host share them, and
between these there is only the pair's link. Rates are max-min fair: the most crowded of these gives each of its
transfers an equal part; what they leave is shared by the others in the same way. Bulk transfers wait while their sender
has urgent ones under way, as in the engine. Only what is connected to the one that starts or ends is looked at again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from manyhands.facts.cluster import Cluster

Resource = tuple[Hashable, ...]


@dataclass(eq=False)
class Transfer:
    """Bytes on their way. `version` tells a stale finish time from the current one."""

    source: str
    target: str
    left: float
    label: object
    started: float
    is_urgent: bool = True
    crosses: tuple[Resource, ...] = ()
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


@dataclass
class Network:
    """All transfers under way."""

    cluster: Cluster
    on: dict[Resource, dict[Transfer, None]] = field(default_factory=dict)
    """Who crosses a resource, in the order they came: sets would make two runs differ in the last digit."""
    capacity: dict[Resource, float] = field(default_factory=dict)
    bulk_of: dict[str, dict[Transfer, None]] = field(default_factory=lambda: defaultdict(dict))
    """Sender -> its bulk transfers."""
    urgent_of: Counter[str] = field(default_factory=Counter)

    def start(
        self, source: str, target: str, byte_count: float, label: object, now: float, *, is_urgent: bool = True
    ) -> list[Transfer]:
        """Begin a transfer. Returns the transfers whose rate changed, the new one among them."""
        return self.start_all([(source, target, byte_count)], label, now, is_urgent=is_urgent)

    def start_all(
        self, flows: Sequence[tuple[str, str, float]], label: object, now: float, *, is_urgent: bool = True
    ) -> list[Transfer]:
        """Begin several transfers (source, target, bytes) at once, and share only once."""
        new = []
        held_back: dict[Transfer, None] = {}
        for source, target, byte_count in flows:
            crosses = self._resources(source, target)
            transfer = Transfer(source, target, byte_count, label, now, is_urgent, crosses, since=now)
            for resource in crosses:
                self.on.setdefault(resource, {})[transfer] = None
            if is_urgent:
                self.urgent_of[source] += 1
                if self.urgent_of[source] == 1:
                    held_back.update(self.bulk_of[source])
            else:
                self.bulk_of[source][transfer] = None
            new.append(transfer)
        if len(new) == 1 and not held_back:
            return self._share_again(new[0], now)
        return self._fill(self._connected(*new, *held_back), now)

    def finish(self, transfers: Sequence[Transfer], now: float) -> list[Transfer]:
        """End transfers. Returns those whose rate changed."""
        let_go: dict[Transfer, None] = {}
        for transfer in transfers:
            if not transfer.is_urgent:
                del self.bulk_of[transfer.source][transfer]
                continue
            self.urgent_of[transfer.source] -= 1
            if not self.urgent_of[transfer.source]:
                let_go.update(self.bulk_of[transfer.source])
        touched = self._connected(*transfers, *let_go)
        for transfer in transfers:
            del touched[transfer]
            for resource in transfer.crosses:
                del self.on[resource][transfer]
        return self._fill(touched, now) if touched else []

    def _waits(self, transfer: Transfer) -> bool:
        return not transfer.is_urgent and self.urgent_of[transfer.source] > 0

    def _resources(self, source: str, target: str) -> tuple[Resource, ...]:
        found: list[Resource] = []
        sender, receiver = self.cluster.device(source), self.cluster.device(target)
        a, b = sender.host_name, receiver.host_name
        rate = self.cluster.link_between(source, target).bytes_per_second
        candidates: tuple[tuple[Resource, float], ...] = (
            (("link", a, b), rate),
            (("up", a), sender.up_bytes_per_second),
            (("down", b), receiver.down_bytes_per_second),
        )
        if a == b:
            candidates = ((("inside", source, target), rate),)
        for resource, capacity in candidates:
            if capacity < math.inf:
                self.capacity[resource] = capacity
                found.append(resource)
        return tuple(found)

    def _connected(self, *transfers: Transfer) -> dict[Transfer, None]:
        found = dict.fromkeys(transfers)
        frontier = list(transfers)
        seen: set[Resource] = set()
        while frontier:
            for resource in frontier.pop().crosses:
                if resource not in seen:
                    seen.add(resource)
                    fresh = [other for other in self.on[resource] if other not in found]
                    found.update(dict.fromkeys(fresh))
                    frontier.extend(fresh)
        return found

    def _share_again(self, transfer: Transfer, now: float) -> list[Transfer]:
        if all(len(self.on[resource]) == 1 for resource in transfer.crosses):  # alone: the common case
            if self._waits(transfer):
                return []
            transfer.rate = min((self.capacity[resource] for resource in transfer.crosses), default=math.inf)
            return [transfer]
        return self._fill(self._connected(transfer), now)

    def _fill(self, transfers: dict[Transfer, None], now: float) -> list[Transfer]:
        """Max-min fair rates by progressive filling."""
        resources = dict.fromkeys(resource for transfer in transfers for resource in transfer.crosses)
        left = {resource: self.capacity[resource] for resource in resources}
        crowd = {resource: {one: None for one in self.on[resource] if not self._waits(one)} for resource in resources}
        rates = {transfer: 0.0 for transfer in transfers if self._waits(transfer)}
        while len(rates) < len(transfers):
            open_resources = [resource for resource in resources if crowd[resource]]
            if not open_resources:
                rates.update({transfer: math.inf for transfer in transfers if transfer not in rates})
                break
            tightest = min(open_resources, key=lambda resource: left[resource] / len(crowd[resource]))
            part = left[tightest] / len(crowd[tightest])
            for transfer in list(crowd[tightest]):
                rates[transfer] = part
                for resource in transfer.crosses:
                    left[resource] = max(0.0, left[resource] - part)
                    del crowd[resource][transfer]
        changed = []
        for transfer, rate in rates.items():
            if rate != transfer.rate:
                transfer.left -= transfer.rate * (now - transfer.since) if transfer.rate else 0.0
                transfer.since, transfer.rate = now, rate
                transfer.version += 1
                changed.append(transfer)
        return changed
