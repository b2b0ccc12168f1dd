"""Transfers under way, and the ports and links they cross, numbered so that arrays can be indexed with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from manyhands.facts.cluster import Cluster
from manyhands.simulator.fairness import NO_LINK, SAME, Numbers, Places, fair_rates


class Route(NamedTuple):
    """The ports and the link that a transfer from one device to another crosses."""

    number: int
    sender: int
    up: int
    down: int
    link: int
    """`NO_LINK` where a port limits before the link does."""
    limit: float
    """The link's bytes per second."""
    alone: float
    """Bytes per second of a transfer that shares nothing."""
    crossed: tuple[tuple[int, float], ...]
    """Ports, and the link if it limits, with the bytes per second that they carry."""
    nodes: tuple[int, ...]
    """Transfers with no node in common share no port, link, relay or sender."""
    through: tuple[int, int]
    """What a transfer crosses at its relay; see `Wiring.through`."""


class Wiring:
    """The ports of a cluster. Port h is the way up from host h, port hosts + h the way down to it; the last one is for
    flows inside a host, which cross none, and for flows without a relay. Behind it come relays that are no devices."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.place = {device.name: place for place, device in enumerate(cluster.devices)}
        hosts = {
            name: place for place, name in enumerate(dict.fromkeys(device.host_name for device in cluster.devices))
        }
        self.host = numpy.array([hosts[device.host_name] for device in cluster.devices])
        self.hosts = len(hosts)
        self.nowhere = 2 * self.hosts
        outside = sorted(relay for relay in cluster.relay_rates if relay not in self.place)
        self._outside = {relay: self.nowhere + number for number, relay in enumerate(outside, start=1)}
        self.room = numpy.full(self.nowhere + 1 + len(outside), numpy.inf)
        self.room[self.nowhere + 1 :] = [cluster.relay_rates[relay] for relay in outside]
        self.room[self.host] = [device.up_bytes_per_second for device in cluster.devices]
        self.room[self.hosts + self.host] = [device.down_bytes_per_second for device in cluster.devices]
        self._rooms, self._hosts = self.room.tolist(), self.host.tolist()
        self._is_shared = (numpy.bincount(self.host) > 1).tolist()
        self._routes: dict[tuple[str, str], Route] = {}
        none = numpy.zeros(0, numpy.int64)
        self._columns: tuple[Places, Places, Places, Numbers, Places, Places]
        self._columns = (none, none, none, numpy.zeros(0), none, none)

    def route(self, source: str, target: str) -> Route:
        route = self._routes.get((source, target))
        if route is None:
            route = self._routes[source, target] = self._route(source, target)
        return route

    def _route(self, source: str, target: str) -> Route:
        sender, receiver = self.place[source], self.place[target]
        a, b = self._hosts[sender], self._hosts[receiver]
        limit = self.cluster.link_between(source, target).bytes_per_second
        up, down = (a, self.hosts + b) if a != b else (self.nowhere, self.nowhere)
        through = self.through(source, target)
        port = min(self._rooms[up], self._rooms[down])
        link = NO_LINK if limit >= port else a * self.hosts + b if a != b else self.inside(sender, receiver)
        places = (up, down, *through)
        crossed = tuple((place, self._rooms[place]) for place in places if self._rooms[place] < math.inf)
        if link != NO_LINK:
            crossed += ((len(self._rooms) + link, limit),)
        number = len(self._routes)
        alone = min(limit, port, self._rooms[through[0]], self._rooms[through[1]])
        nodes = (*self.nodes({sender}, {down}), *self.relay_nodes({through}))
        return Route(number, sender, up, down, link, limit, alone, crossed, nodes, through)

    def through(self, source: str, target: str) -> tuple[int, int]:
        """Return what a transfer crosses at its relay: the ports of a device, which its own transfers cross too, or
        what a relay that is no device carries; `nowhere` where there is none, or it is on the host of an end."""
        relay = self.cluster.relays.get((source, target), "")
        if not relay or relay in self._outside:
            return self._outside.get(relay, self.nowhere), self.nowhere
        host = self._hosts[self.place[relay]]
        if host in (self._hosts[self.place[source]], self._hosts[self.place[target]]):
            return self.nowhere, self.nowhere
        return self.hosts + host, host

    def columns(self, routes: Places) -> tuple[Places, Places, Places, Numbers, Places, Places]:
        """Return ports up and down, links and their limits, and what is crossed at a relay, of some routes by
        number."""
        if len(self._columns[0]) < len(self._routes):
            made = list(self._routes.values())
            self._columns = (
                numpy.array([route.up for route in made]), numpy.array([route.down for route in made]),
                numpy.array([route.link for route in made]), numpy.array([route.limit for route in made]),
                numpy.array([route.through[0] for route in made]), numpy.array([route.through[1] for route in made]),
            )  # fmt: skip
        ups, downs, links, limits, ins, outs = self._columns
        return ups[routes], downs[routes], links[routes], limits[routes], ins[routes], outs[routes]

    def limits(self, devices: Sequence[str], sources: Places, targets: Places) -> Numbers:
        """Return the bytes per second that the links of some pairs carry."""
        if not self.cluster.links:
            return numpy.full(len(sources), self.cluster.link.bytes_per_second)
        pairs = zip(sources.tolist(), targets.tolist())
        between = self.cluster.link_between
        return numpy.array([between(devices[a], devices[b]).bytes_per_second for a, b in pairs])

    def inside(self, sender: Any, receiver: Any) -> Any:
        """Return the link between two devices of one host, numbered after those between hosts; arrays work too."""
        return self.hosts**2 + sender * len(self.place) + receiver

    def nodes(self, senders: set[int], downs: set[int]) -> tuple[int, ...]:
        """Return the nodes of flows with these senders, down these ports."""
        hosts = {self._hosts[sender] for sender in senders}
        sender_nodes = [2 * self.hosts + 1 + sender for sender in sorted(senders)]
        shared = [host for host in sorted(hosts) if self._is_shared[host]]
        return (*sender_nodes, *shared, *(down for down in sorted(downs) if self._rooms[down] < math.inf))

    def relay_nodes(self, through: set[tuple[int, int]]) -> tuple[int, ...]:
        """Return the nodes of flows that cross these at their relays: those of the device that relays, or the relay's
        own."""
        nodes: set[int] = set()
        for into, out in through:
            if out != self.nowhere:  # a device's port: its own transfers have its node
                senders = {place for place, host in enumerate(self._hosts) if host == out}
                nodes.update(self.nodes(senders, {into}))
            elif into != self.nowhere:
                nodes.add(2 * self.hosts + 1 + len(self.place) + into)
        return tuple(sorted(nodes))


class FlowShape:
    """Flows among some devices: from devices[sources[i]] to devices[targets[i]]."""

    def __init__(self, wiring: Wiring, devices: Sequence[str], sources: Places, targets: Places) -> None:
        self._wiring, self.devices, self.sources, self.targets = wiring, tuple(devices), sources, targets
        self.all = numpy.arange(len(sources))
        self.places = numpy.array([wiring.place[name] for name in devices])
        self.sender, receiver = self.places[sources], self.places[targets]
        a, b, nowhere = wiring.host[self.sender], wiring.host[receiver], wiring.nowhere
        is_inside = a == b
        self.up, self.down = numpy.where(is_inside, nowhere, a), numpy.where(is_inside, nowhere, wiring.hosts + b)
        self.limit = wiring.limits(devices, sources, targets)
        self.link = numpy.where(is_inside, wiring.inside(self.sender, receiver), a * wiring.hosts + b)
        # Whatever crosses a link crosses both ports: one that carries as much as either of them never limits.
        self.link[self.limit >= numpy.minimum(wiring.room[self.up], wiring.room[self.down])] = NO_LINK
        self._through = [(nowhere, nowhere)]
        if wiring.cluster.relays:
            self._through = [wiring.through(devices[a], devices[b]) for a, b in zip(sources, targets)]
        ins_and_outs = numpy.array(self._through)
        self.into, self.out = (numpy.broadcast_to(ins_and_outs[:, way], len(sources)) for way in (0, 1))
        self._alone: dict[bytes, Numbers] = {}

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        nodes = self._wiring.nodes(set(self.sender.tolist()), set(self.down.tolist()))
        return tuple(dict.fromkeys((*nodes, *self._wiring.relay_nodes(set(self._through)))))

    @cached_property
    def senders(self) -> NDArray[numpy.bool_]:
        return self.senders_of(self.all)

    @cached_property
    def users(self) -> NDArray[numpy.bool_]:
        """The devices that send or receive, as a mask."""
        return self.senders | self.receivers_of(self.all)

    def rates_alone(self, flows: Places) -> Numbers:
        """Return the rates of some flows while nothing else is under way: the same for every sum among these
        devices."""
        key = flows.tobytes()
        rates = self._alone.get(key)
        if rates is None:
            crossed = self.up[flows], self.down[flows], self.link[flows], self.limit[flows]
            through = (self.into[flows], self.out[flows]) if self._wiring.cluster.relays else ()
            rates = self._alone[key] = fair_rates(self._wiring.room, *crossed, through=through)
        return rates

    def senders_of(self, flows: Places) -> NDArray[numpy.bool_]:
        """Return which of the devices send some of the flows."""
        return numpy.bincount(self.sources[flows], minlength=len(self.devices)) > 0

    def receivers_of(self, flows: Places) -> NDArray[numpy.bool_]:
        return numpy.bincount(self.targets[flows], minlength=len(self.devices)) > 0


@dataclass(eq=False)
class Transfer:
    """Bytes under way. `version` distinguishes a stale finish time from the current one."""

    source: str
    target: str
    left: float
    label: object
    started: float
    is_urgent: bool
    route: Route
    since: float
    rate: float = 0.0
    version: int = 0

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.route.nodes

    @property
    def ends(self) -> float:
        """The time at which its last byte leaves, at this rate."""
        if not self.rate:
            return math.inf
        return self.since + max(0.0, self.left / self.rate)

    def give(self, rate: float, now: float) -> bool:
        """Set the rate from now on, and return whether it changed."""
        if rate == self.rate:
            return False
        if now > self.since:
            self.left -= self.rate * (now - self.since)
        self.since, self.rate = now, rate
        self.version += 1
        return True


class Ended(NamedTuple):
    """The part of a bundle that has ended."""

    flows: Places
    senders: Places
    """Devices that send nothing more of it, by their places in the cluster."""
    users: Places
    """Devices that neither send nor receive more of it, by their places in the shape."""


class FlowBundle:
    """Transfers that start together, like those of a sum. The arrays hold those still under way."""

    def __init__(self, shape: FlowShape, sizes: Numbers, label: object, now: float, *, is_urgent: bool) -> None:
        self.shape, self.flows, self.left, self.label, self.is_urgent = shape, shape.all, sizes, label, is_urgent
        self.started = self.since = now
        self.rate = numpy.zeros(len(sizes))
        self.version = 0
        self.senders = shape.places[shape.senders]
        """The devices that still send some of it, by places in the cluster."""
        self._senders, self._users = shape.senders, shape.users
        self._is_going = False
        self._ending = numpy.zeros(len(sizes), bool)

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.shape.nodes

    @property
    def is_over(self) -> bool:
        return not len(self.flows)

    @property
    def is_whole(self) -> bool:
        return self.flows is self.shape.all

    @property
    def ends(self) -> float:
        """The time at which the first of them ends."""
        seconds = numpy.divide(self.left, self.rate, out=numpy.full(len(self.left), numpy.inf), where=self.rate > 0)
        first = max(0.0, float(seconds.min()))
        self._ending = seconds <= first + (self.since + first) * SAME
        return self.since + first

    def give(self, rate: Numbers, now: float) -> bool:
        """Set the rates from now on, and return whether they changed."""
        if rate is self.rate or numpy.array_equal(rate, self.rate):
            return False
        self._sent_until(now)
        self.rate = rate
        self.version += 1
        self._is_going = bool(rate.any())
        return True

    def hold(self, now: float) -> bool:
        """Stop sending from now on, and return whether anything was being sent."""
        return self._is_going and self.give(numpy.zeros(len(self.flows)), now)

    def end_some(self, now: float) -> Ended:
        """End the flows that `ends` announced: their last byte has left."""
        self._sent_until(now)
        flows, stays = self.flows, ~self._ending
        ended, self.flows, self.left = flows[self._ending], flows[stays], self.left[stays]
        self.rate = numpy.zeros(len(self.flows))  # until things have settled
        self.version += 1
        senders, users = self._senders, self._users
        self._senders = self.shape.senders_of(self.flows)
        self._users = self._senders | self.shape.receivers_of(self.flows)
        silent, self.senders = self.shape.places[senders & ~self._senders], self.shape.places[self._senders]
        self._is_going = False
        return Ended(ended, silent, numpy.flatnonzero(users & ~self._users))

    def _sent_until(self, now: float) -> None:
        if now > self.since:
            self.left = self.left - self.rate * (now - self.since)
        self.since = now
