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
from manyhands.schedule.reduction import Counts
from manyhands.simulator.fairness import NO_LINK, SAME, Numbers, Places, fair_rates

MOST_SIZES = 16
"""The most sizes that the flows of one phase of a sum have: each is an event of its own."""
MOST_APART = 256
"""The most flows of a phase that end each at its own time. Of more, those end together that are apart by no more than
one part in `MOST_SIZES` of the time since they started: each end shares all rates again."""


class Route(NamedTuple):
    """The ports, the uplinks and the link that a transfer from one device to another crosses."""

    number: int
    sender: int
    ports: tuple[int, ...]
    """Places among the ports: of hosts, the uplinks of sites and relays; all routes have as many."""
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


class Wiring:
    """The ports of a cluster. Port h is the way up from host h, port hosts + h the way down to it; the next one is for
    flows inside a host, which cross none. Then come the uplinks of sites, up and down, and relays that are no devices.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.place = {device.name: place for place, device in enumerate(cluster.devices)}
        hosts = {
            name: place for place, name in enumerate(dict.fromkeys(device.host_name for device in cluster.devices))
        }
        self.host = numpy.array([hosts[device.host_name] for device in cluster.devices])
        self.hosts, self.nowhere = len(hosts), 2 * len(hosts)
        outside = sorted(relay for relay in cluster.relay_rates if relay not in self.place)
        self.room = numpy.full(self.nowhere + 1 + 2 * len(cluster.sites) + len(outside), numpy.inf)
        self.room[self.host] = [device.up_bytes_per_second for device in cluster.devices]
        self.room[self.hosts + self.host] = [device.down_bytes_per_second for device in cluster.devices]
        self._numbers = {("up", host): place for host, place in hosts.items()}
        """The place of each port, by its key in `Cluster.ports_between`."""
        self._numbers |= {("down", host): self.hosts + place for host, place in hosts.items()}
        behind = [(key, site.name) for site in cluster.sites for key in ("out of", "into")]
        behind += [("relay", relay) for relay in outside]
        self._numbers |= {key: place for place, key in enumerate(behind, start=self.nowhere + 1)}
        for site in cluster.sites:
            self.room[self._numbers["out of", site.name]] = site.up_bytes_per_second
            self.room[self._numbers["into", site.name]] = site.down_bytes_per_second
        for relay in outside:
            self.room[self._numbers["relay", relay]] = cluster.relay_rates[relay]
        names = ["", *(site.name for site in cluster.sites)]
        self.site = numpy.array([names.index(device.site) for device in cluster.devices]) if cluster.sites else None
        """The site of each device, by number; 0: in none."""
        self._site_names = names
        self.most_uplinks = 2 * max(map(len, cluster.tree.paths.values()))
        self.most_ports = (2 + self.most_uplinks) * (2 if cluster.relays else 1)
        self._rooms, self._hosts = self.room.tolist(), self.host.tolist()
        self._is_shared = (numpy.bincount(self.host) > 1).tolist()
        """Whether several devices send through a host's port: its own, or those that it relays for."""
        for relay in set(cluster.relay_rates) & set(self.place):
            self._is_shared[self._hosts[self.place[relay]]] = True
        self._routes: dict[tuple[str, str], Route] = {}
        none = numpy.zeros(0, numpy.int64)
        self._columns: tuple[Places, Places, Numbers] = (none.reshape(self.most_ports, 0), none, numpy.zeros(0))

    def route(self, source: str, target: str) -> Route:
        route = self._routes.get((source, target))
        if route is None:
            route = self._routes[source, target] = self._route(source, target)
        return route

    def _route(self, source: str, target: str) -> Route:
        sender, receiver = self.place[source], self.place[target]
        a, b = self._hosts[sender], self._hosts[receiver]
        limit = self.cluster.link_between(source, target).bytes_per_second
        direct = self.direct(sender, receiver)
        ports = direct + (self.nowhere,) * (self.most_ports - len(direct))
        if (source, target) in self.cluster.relays:
            crossed_ports = [self._numbers[key] for key in self.cluster.ports_between(source, target)]
            ports = (*crossed_ports, *[self.nowhere] * (self.most_ports - len(crossed_ports)))
        is_limit = limit < min(self._rooms[place] for place in direct)  # see FlowShape
        link = (a * self.hosts + b if a != b else self.inside(sender, receiver)) if is_limit else NO_LINK
        crossed = tuple((place, self._rooms[place]) for place in ports if self._rooms[place] < math.inf)
        if link != NO_LINK:
            crossed += ((len(self._rooms) + link, limit),)
        number, alone = len(self._routes), min(limit, *(self._rooms[place] for place in ports))
        return Route(number, sender, ports, link, limit, alone, crossed, self.nodes({sender}, set(ports)))

    def direct(self, sender: int, receiver: int) -> tuple[int, ...]:
        """Return the ports between two devices without a relay, always as many."""
        a, b = self._hosts[sender], self._hosts[receiver]
        ends = (a, self.hosts + b) if a != b else (self.nowhere, self.nowhere)
        return (*ends, *self.uplinks(*(self.cluster.devices[place].site for place in (sender, receiver))))

    def uplinks(self, sender: str, receiver: str) -> tuple[int, ...]:
        """Return the uplinks between two sites, always as many."""
        way = self.cluster.tree.way(sender, receiver)
        ups = [self._numbers["out of", site.name] for site in way.leaves]
        downs = [self._numbers["into", site.name] for site in way.enters]
        return (*ups, *downs, *[self.nowhere] * (self.most_uplinks - len(ups) - len(downs)))

    def columns(self, routes: Places) -> tuple[Places, Places, Numbers]:
        """Return the ports, the links and their limits of some routes, by number."""
        if len(self._columns[1]) < len(self._routes):
            _, _, *columns = zip(*self._routes.values())
            self._columns = numpy.array(columns[0]).T, numpy.array(columns[1]), numpy.array(columns[2])
        ports, links, limits = self._columns
        return ports[:, routes], links[routes], limits[routes]

    def between(
        self, devices: Sequence[str], places: Places, sources: Places, targets: Places
    ) -> tuple[Places, Numbers]:
        """Return the uplinks between some pairs, a column for each, and the bytes per second that their links carry."""
        uplinks = numpy.full((self.most_uplinks, len(sources)), self.nowhere)
        limits = numpy.full(len(sources), self.cluster.link.bytes_per_second)
        if self.site is not None:
            count = len(self._site_names)
            pairs = self.site[places][sources] * count + self.site[places][targets]
            codes, of_flow = numpy.unique(pairs, return_inverse=True)
            names = [(self._site_names[code // count], self._site_names[code % count]) for code in codes.tolist()]
            ways = [self.uplinks(*pair) for pair in names]
            uplinks = numpy.array(ways, numpy.int64).reshape(len(names), -1).T[:, of_flow.reshape(-1)]
            rates = [self.cluster.tree.way(*pair).link.bytes_per_second for pair in names]
            limits = numpy.array(rates, float)[of_flow.reshape(-1)]
        if self.cluster.links:
            link_between = self.cluster.link_between
            ends = zip(sources.tolist(), targets.tolist())
            limits = numpy.array([link_between(devices[a], devices[b]).bytes_per_second for a, b in ends])
        return uplinks, limits

    def with_relays(self, direct: Places, devices: Sequence[str], sources: Places, targets: Places) -> Places:
        """Return the ports of flows, given those that they cross without relays."""
        if not self.cluster.relays:
            return direct
        ports = numpy.full((self.most_ports, len(sources)), self.nowhere)
        ports[: len(direct)] = direct
        for flow, (source, target) in enumerate(zip(sources.tolist(), targets.tolist())):
            if (devices[source], devices[target]) in self.cluster.relays:
                ports[:, flow] = self.route(devices[source], devices[target]).ports
        return ports

    def inside(self, sender: Any, receiver: Any) -> Any:
        """Return the link between two devices of one host, numbered after those between hosts; arrays work too."""
        return self.hosts**2 + sender * len(self.place) + receiver

    def nodes(self, senders: set[int], ports: set[int]) -> tuple[int, ...]:
        """Return the nodes of flows with these senders, across these ports."""
        hosts = {self._hosts[sender] for sender in senders} | {port for port in ports if port < self.hosts}
        sender_nodes = [len(self._rooms) + sender for sender in sorted(senders)]
        shared = [host for host in sorted(hosts) if self._is_shared[host]]
        others = (port for port in sorted(ports) if port >= self.hosts and self._rooms[port] < math.inf)
        return (*sender_nodes, *shared, *others)


class FlowShape:
    """Flows among some devices: from devices[sources[i]] to devices[targets[i]]."""

    def __init__(self, wiring: Wiring, devices: Sequence[str], sources: Places, targets: Places) -> None:
        self._wiring, self.devices, self.sources, self.targets = wiring, tuple(devices), sources, targets
        self.all = numpy.arange(len(sources))
        self.places = numpy.array([wiring.place[name] for name in devices])
        self.sender, receiver = self.places[sources], self.places[targets]
        a, b = wiring.host[self.sender], wiring.host[receiver]
        is_inside = a == b
        uplinks, self.limit = wiring.between(devices, self.places, sources, targets)
        ends = [numpy.where(is_inside, wiring.nowhere, port) for port in (a, wiring.hosts + b)]
        self.link = numpy.where(is_inside, wiring.inside(self.sender, receiver), a * wiring.hosts + b)
        # Whatever crosses a link crosses its ports too, through a relay or not: a relayed transfer leaves and enters
        # the same sites, and more. One that carries as much as any of them never limits.
        direct = numpy.concatenate((ends, uplinks))
        self.link[self.limit >= wiring.room[direct].min(0)] = NO_LINK
        self.ports = wiring.with_relays(direct, devices, sources, targets)
        self._alone: dict[bytes, Numbers] = {}

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return self._wiring.nodes(set(self.sender.tolist()), set(self.ports.reshape(-1).tolist()))

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
            crossed = self.ports[:, flows], self.link[flows], self.limit[flows]
            rates = self._alone[key] = fair_rates(self._wiring.room, *crossed)
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


def few_sizes(sizes: Counts) -> Numbers:
    """Return the bytes of the flows of a sum, rounded up where they are of very many sizes, so that many end together:
    by no more than one part in `MOST_SIZES` of the largest."""
    if len(numpy.unique(sizes)) <= MOST_SIZES:
        return sizes.astype(float)
    part = sizes.max() / MOST_SIZES
    rounded: Numbers = numpy.ceil(sizes / part) * part
    return rounded


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
        """The time at which the first of them ends; of very many, those that end at nearly the same time do so with the
        last of these."""
        seconds = numpy.divide(self.left, self.rate, out=numpy.full(len(self.left), numpy.inf), where=self.rate > 0)
        first = max(0.0, float(seconds.min()))
        together = first + (self.since + first) * SAME
        if len(self.shape.all) > MOST_APART and first < math.inf:
            together = first + (self.since + first - self.started) / MOST_SIZES
        self._ending = seconds <= together
        return self.since + max(0.0, float(seconds[self._ending].max()))

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
