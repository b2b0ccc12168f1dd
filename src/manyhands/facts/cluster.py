"""The devices, and the links between them: frozen facts, read from what a person writes.

    name: home
    devices:
      - {name: laptop, kind: laptop}
      - {kind: pi4, count: 2}                                  # pi4-1, pi4-2
      - {name: nano, kind: jetson-nano, memory: 3 GB, gflops: 60, port: 100 Mbit/s}
    link: {rate: 100 Mbit/s, delay: 1 ms}                      # any pair not named below
    links:
      - {from: laptop, to: pi4-1, rate: 1 Gbit/s}              # one direction
      - {between: [laptop, nano], delay: 2 ms}             # both; rate as above
      - {between: [nano, pi4-2], rate: 20 Mbit/s, relay: laptop}   # they reach each other through the laptop only

With sites (`site`), each behind an uplink that its devices share; `link` is then the link between sites:

    sites:
      - {name: paris, rate: 100 Mbit/s, delay: 10 ms, link: {rate: 1 Gbit/s, delay: 0.3 ms}}
      - {name: lab, count: 3, up: 20 Mbit/s, down: 100 Mbit/s, delay: 5 ms, within: paris}    # lab-1 to lab-3
    devices:
      - {kind: pi4, count: 8, site: lab}                         # in each of them: lab-1.pi4-1 to lab-3.pi4-8

Device fields and their units are the table `_DEVICE` in `cluster_document`; what is left out comes from the catalogue.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice

import msgspec

from manyhands.facts.cluster_document import (
    MOST_DEVICES,
    in_each_site,
    read_devices,
    read_link,
    read_list,
    read_mapping,
    read_override,
    read_sites,
    read_text,
    write_device,
    write_link,
    write_site,
)
from manyhands.facts.device import Device
from manyhands.facts.errors import BadValue, unknown
from manyhands.facts.link import HERE, DirectedLink, Link
from manyhands.facts.presets import PRESETS
from manyhands.facts.ray_cluster import RayCluster
from manyhands.facts.site import Site, SiteTree

MOST_SLOTS = 16


class Cluster(msgspec.Struct, frozen=True, dict=True):
    """The devices in order, the link between any two, and the pairs where it differs."""

    name: str
    devices: tuple[Device, ...]
    link: Link = HERE
    links: tuple[DirectedLink, ...] = ()
    sites: tuple[Site, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.devices) <= MOST_DEVICES:
            raise BadValue(f"devices: there are {len(self.devices)}; there must be 1 to {MOST_DEVICES}.")
        names: set[str] = set()
        for device in self.devices:
            if device.name in names:
                hint = "Give each its own name, or write one entry with a count."
                raise BadValue(f"devices: two devices have the name '{device.name}'.", hint=hint)
            names.add(device.name)
        pairs: set[tuple[str, str]] = set()
        for directed in self.links:
            for end in (directed.sender, directed.receiver):
                if end not in names:
                    raise unknown("device", end, names)
            pair = (directed.sender, directed.receiver)
            if directed.relay in pair:
                raise BadValue(f"links: '{directed.relay}' cannot relay between itself and another device.")
            if pair in pairs or directed.sender == directed.receiver:
                problem = "is written twice" if pair in pairs else "leads back to itself"
                raise BadValue(f"links: the link from '{directed.sender}' to '{directed.receiver}' {problem}.")
            pairs.add(pair)
        for device in self.devices:
            if device.site not in self.tree.paths:
                raise unknown("site", device.site, self.tree.sites)
        if any(device.host for device in self.devices):
            self._check_hosts()

    def _check_hosts(self) -> None:
        """Refuse devices of one host that give its port, or its link to another host, different rates."""
        ports: dict[str, Device] = {}
        for device in self.devices:
            first = ports.setdefault(device.host_name, device)
            for field in ("up_bytes_per_second", "down_bytes_per_second"):
                if device.site != first.site:
                    raise BadValue(
                        f"devices: '{first.name}' and '{device.name}' are on one host, but in different sites."
                    )
                if getattr(device, field) != getattr(first, field):
                    hint = f"Write the whole port's rate for each device of {device.host_name}."
                    raise BadValue(
                        f"devices: '{first.name}' and '{device.name}' share one port; {field} differs.", hint=hint
                    )
        sizes = Counter(device.host_name for device in self.devices)
        written: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for directed in self.links:
            hosts = self.device(directed.sender).host_name, self.device(directed.receiver).host_name
            if hosts[0] != hosts[1]:
                written[hosts].append(directed.link.bytes_per_second)
        for (a, b), rates in written.items():
            usual = self.tree.way(ports[a].site, ports[b].site).link.bytes_per_second
            left_out = [usual] if len(rates) < sizes[a] * sizes[b] else []
            if len({*rates, *left_out}) > 1:
                hint = "Write it with the same rate for every pair of their devices."
                raise BadValue(f"links: from {a} to {b} there is one link, but its rate differs.", hint=hint)

    # Built at the first lookup, so that a thousand devices cost a dictionary and not a search.

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    @cached_property
    def _by_name(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _by_pair(self) -> dict[tuple[str, str], Link]:
        return {(directed.sender, directed.receiver): directed.link for directed in self.links}

    @cached_property
    def tree(self) -> SiteTree:
        return SiteTree(self.sites, self.link)

    @cached_property
    def _shared_hosts(self) -> frozenset[str]:
        """The hosts that several devices are workers of."""
        counts = Counter(device.host_name for device in self.devices)
        return frozenset(host for host, count in counts.items() if count > 1)

    def place(self, name: str, *, hosts: bool = True, sites: bool = True) -> str:
        """Return where a device is, as plans have it (`Plan.places`): its sites, then the host it shares."""
        device = self.device(name)
        path = [site.name for site in self.tree.paths[device.site]] if sites else []
        if hosts and device.host_name in self._shared_hosts:
            path.append(device.host_name)
        return "/".join(path)

    @cached_property
    def relays(self) -> dict[tuple[str, str], str]:
        """(Sender, receiver) -> the device that relays between them, for those that do not reach each other."""
        return {(directed.sender, directed.receiver): directed.relay for directed in self.links if directed.relay}

    @cached_property
    def relay_rates(self) -> dict[str, float]:
        """Relay -> the bytes per second of the fastest link through it: as much as it carries for all of them."""
        rates: defaultdict[str, float] = defaultdict(float)
        for directed in self.links:
            if directed.relay:
                rates[directed.relay] = max(rates[directed.relay], directed.link.bytes_per_second)
        return dict(rates)

    def device(self, name: str) -> Device:
        device = self._by_name.get(name)
        if device is None:
            raise unknown("device", name, self.names)
        return device

    def link_between(self, sender: str, receiver: str) -> Link:
        """Return the link from `sender` to `receiver`. To itself a device moves nothing: no limit, no delay."""
        link = self._by_pair.get((sender, receiver))
        if link is not None:
            return link
        a, b = self.device(sender), self.device(receiver)
        return HERE if a is b else self.link if not self.sites else self.tree.way(a.site, b.site).link

    def bytes_per_second_between(self, sender: str, receiver: str) -> float:
        """Return a single transfer's rate: the least of the link, the sender's port up and the receiver's port down,
        the uplinks of the sites between them, and where a device relays, those that it passes there and back.

        Inside a host it passes no port.
        """
        rate = self.link_between(sender, receiver).bytes_per_second
        return min([rate, *self.ports_between(sender, receiver).values()])

    def ports_between(self, sender: str, receiver: str) -> dict[tuple[str, str], float]:
        """Return what a transfer crosses besides its link, and how many bytes per second each carries: ports up and
        down of hosts, uplinks out of sites and into them, and a relay that is no device.

        A device that relays is crossed like any other, by its ports and the uplinks before and behind it. Inside a host
        there is nothing to cross.
        """
        a, b = self.device(sender), self.device(receiver)
        name = self.relays.get((sender, receiver), "") if a.host_name != b.host_name else ""
        relay = self._by_name.get(name)
        ports = {("relay", name): self.relay_rates[name]} if name and relay is None else {}
        for sender_of_hop, receiver_of_hop in ((a, b),) if relay is None else ((a, relay), (relay, b)):
            if sender_of_hop.host_name != receiver_of_hop.host_name:
                way = self.tree.way(sender_of_hop.site, receiver_of_hop.site)
                ports["up", sender_of_hop.host_name] = sender_of_hop.up_bytes_per_second
                ports |= {("out of", site.name): site.up_bytes_per_second for site in way.leaves}
                ports |= {("into", site.name): site.down_bytes_per_second for site in way.enters}
                ports["down", receiver_of_hop.host_name] = receiver_of_hop.down_bytes_per_second
        return ports

    def with_link(self, link: Link, pair: tuple[str, str] | None = None) -> Cluster:
        """Return the same devices with another default link, or with another link from pair[0] to pair[1]."""
        if pair is None:
            return Cluster(self.name, self.devices, link, self.links, self.sites)
        other_links = tuple(directed for directed in self.links if (directed.sender, directed.receiver) != pair)
        links = (*other_links, DirectedLink(*pair, link, self.relays.get(pair, "")))
        return Cluster(self.name, self.devices, self.link, links, self.sites)

    def with_devices(self, name: str, devices: tuple[Device, ...]) -> Cluster:
        """Return other devices, joined by the same default link."""
        return Cluster(name, devices, self.link, sites=self.sites)

    def without(self, name: str) -> Cluster:
        """Return the cluster after `name` has left."""
        leaving = self.device(name)
        devices = tuple(device for device in self.devices if device is not leaving)
        links = tuple(directed for directed in self.links if name not in (directed.sender, directed.receiver))
        return Cluster(self.name, devices, self.link, links, self.sites)

    @classmethod
    def local(
        cls,
        count: int,
        *,
        gflops: float = 50.0,
        memory_bytes: int = 4 * 10**9,
        memory_bytes_per_second: float = 10e9,
        cores: int = 1,
        operator_seconds: float = 20e-6,
        bytes_per_second: float = 3e9,
        delay_seconds: float = 60e-6,
        estimated: bool = True,
        gpus: int | Sequence[int] = 0,
    ) -> Cluster:
        """Return `count` workers on this machine, joined by loopback. The first ones are on GPUs: `gpus` of them each
        on its own, or those that `gpus` lists, as [0, 0] for two workers on the first GPU."""
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DEVICES:
            raise BadValue(f"local: {count!r} workers asked for; it must be 1 to {MOST_DEVICES}.")
        of_workers = list(range(gpus) if isinstance(gpus, int) else gpus)
        is_sensible = gpus >= 0 if isinstance(gpus, int) else all(gpu >= 0 for gpu in of_workers)
        if not is_sensible or len(of_workers) > count:
            raise BadValue(
                f"local: {count} worker(s), and gpus={gpus!r}.",
                hint="Write how many workers have a GPU of their own, or the GPU of each worker: gpus=[0, 0].",
            )
        devices = tuple(
            Device(
                name=f"local-{number + 1}", kind="local", gflops=gflops, memory_bytes=memory_bytes,
                memory_bytes_per_second=memory_bytes_per_second, cores=cores, operator_seconds=operator_seconds,
                estimated=estimated, source="A worker on this machine.",
                compute=f"cuda:{of_workers[number]}" if number < len(of_workers) else "cpu",
            )
            for number in range(count)
        )  # fmt: skip
        return cls(f"local:{count}", devices, Link(bytes_per_second, delay_seconds))

    @staticmethod
    def lab(
        cluster: Cluster | str,
        *,
        scale: float | None = None,
        slots: int = 1,
        traces: Mapping[str, str] | None = None,
    ) -> LabCluster:
        """Return a cluster, or the preset of that name, to be played on this machine: mh.train(...,
        cluster=Cluster.lab(...)).

        `scale`: how many times slower than real time everything goes. `slots`: workers on each device.
        `traces`: device -> file of recorded rates, which its port follows.
        """
        real = preset(cluster) if isinstance(cluster, str) else cluster
        return LabCluster(real, scale, slots, tuple((traces or {}).items()))

    @staticmethod
    def ray(
        count: int,
        *,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        memory_bytes: int = 0,
        resources: Mapping[str, float] | None = None,
        address: str = "",
    ) -> RayCluster:
        """Return `count` workers that Ray starts, and replaces when they are lost: mh.train(...,
        cluster=Cluster.ray(4)).

        The other arguments are what each worker asks Ray for, with Ray's names; `num_cpus` is also its number of
        threads. `address`: the Ray cluster, such as "auto"; empty: the one this program has connected to, else
        RAY_ADDRESS, else one that is started on this machine.
        """
        return RayCluster(count, num_cpus, num_gpus, memory_bytes, tuple((resources or {}).items()), address)

    @classmethod
    def from_dict(cls, raw: object) -> Cluster:
        """Return the cluster that a document describes; see the top of this file. An error names the field's path."""
        document = read_mapping(raw, "", ("name", "sites", "devices", "link", "links"))
        groups: dict[str, list[str]] = {}
        sites: list[Site] = []
        for index, entry in enumerate(read_list(document.get("sites", []), "sites", "{name: paris, rate: 1 Gbit/s}")):
            entered = list(read_sites(entry, f"sites[{index}]"))
            sites += entered
            if isinstance(entry, dict) and "count" in entry:
                groups[str(entry["name"])] = [site.name for site in entered]
        entries = read_list(document.get("devices"), "devices", "{kind: pi4, count: 2}")
        read = (
            device
            for index, entry in enumerate(entries)
            for placed in in_each_site(entry, groups)
            for device in read_devices(placed, f"devices[{index}]")
        )
        devices = tuple(islice(read, MOST_DEVICES + 1))
        name = read_text(document.get("name", "cluster"), "name")
        unlinked = cls(name, devices, sites=tuple(sites))  # duplicates are found here
        lone = len(devices) == 1 and "link" not in document
        default = write_link(HERE) if lone else read_mapping(document.get("link"), "link", ("rate", "delay"))
        link = read_link(default, "link")
        links: list[DirectedLink] = []
        overrides = read_list(document.get("links", []), "links", "{from: a, to: b, rate: 1 Gbit/s}")
        for index, entry in enumerate(overrides):
            links.extend(read_override(entry, f"links[{index}]", default, unlinked._by_name))
        return cls(unlinked.name, devices, link, tuple(links), unlinked.sites)

    def to_dict(self) -> dict[str, object]:
        """Return a plain document that `from_dict` reads back to an equal cluster."""
        links = [
            {"from": directed.sender, "to": directed.receiver, **write_link(directed.link)}
            | ({"relay": directed.relay} if directed.relay else {})
            for directed in self.links
        ]
        devices = [write_device(device) for device in self.devices]
        document: dict[str, object] = {"name": self.name, "devices": devices, "link": write_link(self.link)}
        document |= {"sites": [write_site(site) for site in self.sites]} if self.sites else {}
        return {**document, "links": links} if links else document


@lru_cache
def preset(name: str) -> Cluster:
    """Return the preset cluster called `name`."""
    entry = PRESETS.get(name)
    if entry is None:
        raise unknown("preset cluster", name, PRESETS)
    return Cluster.from_dict({"name": name, **entry.document})


class LabCluster(msgspec.Struct, frozen=True):
    """A cluster that is to be played on this machine: `Cluster.lab(...)`."""

    cluster: Cluster
    """The devices and links in real time."""
    scale: float | None = None
    """The factor by which all is slower; None: what this machine's cores need, and never faster than real time."""
    slots: int = 1
    """The number of workers on each device."""
    traces: tuple[tuple[str, str], ...] = ()
    """(device, file): the device's port follows a recorded rate."""

    def __post_init__(self) -> None:
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise BadValue(f"The lab's scale is {self.scale}; it must be > 0.", hint="20: everything 20 times slower.")
        if not 1 <= self.slots <= MOST_SLOTS:
            raise BadValue(f"slots is {self.slots}; it must be 1 to {MOST_SLOTS}.")
        hosted = [device.name for device in self.cluster.devices if device.host]
        if hosted:
            raise BadValue(
                f"{hosted[0]} shares a host: in a lab every device has its own.", hint="Leave out host; use slots."
            )
        if self.cluster.sites:
            raise BadValue(
                f"{self.cluster.name} has sites: a lab plays no uplinks.", hint="Simulate it: manyhands simulate."
            )
        for device, _ in self.traces:
            if device not in self.cluster.names:
                raise unknown("device", device, self.cluster.names)
