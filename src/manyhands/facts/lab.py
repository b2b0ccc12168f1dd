"""The facts of a cluster as one machine plays it: how much slower everything is, and each device's share of the cores.

All speeds are divided by one number, the scale: computing and links alike, while delays grow with it. Relative speeds
stay the same, and an hour in the lab is an hour divided by the scale outside. Memory is not scaled. Several workers of
one device (slots) divide its speed and its memory, and share its port.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.device import Device
from manyhands.facts.errors import LabError, unknown
from manyhands.facts.link import DirectedLink, Link

BUSIEST = 0.8
"""The most of a core that devices may use: the rest is for the links between them and for monitoring."""
SLOWEST_SHARE = 0.001
"""The least share of a core; the kernel gives no less than a millisecond in a second."""
SLOWEST_BYTES_PER_SECOND = 1000.0
"""The rate used for a recorded rate of zero: a queue that never moves cannot be told from a broken one."""
LAB_NAME = re.compile(r"[a-z0-9][a-z0-9_.]{0,31}")


class Seat(msgspec.Struct, frozen=True):
    """The part of this machine that a device gets."""

    device: str
    share: float
    """The share of one core; more than 1 where its slots run on several."""
    cores: tuple[int, ...]
    memory_bytes: int


class Played(msgspec.Struct, frozen=True):
    """The facts of a lab, in lab numbers."""

    scale: float
    slots: int
    network: Cluster
    """The devices as they are on the network."""
    seats: tuple[Seat, ...]
    traces: tuple[tuple[str, str], ...] = ()

    @property
    def slowest_share(self) -> float:
        """The least share of one core that any device has."""
        return min(1.0, *(seat.share for seat in self.seats))

    def seat(self, device: str) -> Seat:
        for seat in self.seats:
            if seat.device == device:
                return seat
        raise unknown("device", device, self.network.names)

    @property
    def workers(self) -> Cluster:
        """The cluster that plans are made for: one device for each worker."""
        return with_slots(self.network, self.slots)

    def workers_of(self, device: str) -> tuple[str, ...]:
        return slot_names(device, self.slots)


def play(lab: LabCluster, *, core_gflops: float, cores: Sequence[int]) -> Played:
    """Return how this machine plays a cluster; `cores` are its cores' numbers, `core_gflops` the speed of each."""
    least = fitting_scale(lab.cluster, lab.slots, core_gflops, len(cores))
    scale = lab.scale if lab.scale is not None else max(1.0, rounded_up(least))
    if scale < least * (1 - 1e-9):
        raise LabError(
            f"At scale {scale:g} the devices of {lab.cluster.name} need more than {BUSIEST:.0%} of this machine's "
            f"{len(cores)} core(s).",
            hint=f"Give scale={rounded_up(least):g} (--scale {rounded_up(least):g}) or more.",
        )
    placed, _ = _packed(lab.cluster.devices, lab.slots, len(cores))
    seats = []
    for device, places in zip(lab.cluster.devices, placed):
        share = device.gflops / (core_gflops * scale)
        if share < SLOWEST_SHARE:
            raise LabError(
                f"At scale {scale:g} {device.name} would get {share:.2g} of a core; the kernel gives no less than "
                f"{SLOWEST_SHARE:g}.",
                hint="The devices are too unequal for so few cores: leave out the fastest, or use more cores.",
            )
        seat_cores = tuple(sorted({cores[place] for place in places}))
        seats.append(Seat(device.name, share, seat_cores, device.memory_bytes))
    return Played(scale, lab.slots, scaled(lab.cluster, scale), tuple(seats), lab.traces)


def fitting_scale(cluster: Cluster, slots: int, core_gflops: float, cores: int) -> float:
    """Return the least scale at which no core is busier than `BUSIEST`."""
    _, busiest = _packed(cluster.devices, slots, cores)
    return busiest / (core_gflops * BUSIEST)


def _packed(devices: Sequence[Device], slots: int, cores: int) -> tuple[list[list[int]], float]:
    """Return each device's cores, one per slot, and the speed that the busiest core must have: the fastest are placed
    first."""
    load = [0.0] * cores
    placed: list[list[int]] = [[] for _ in devices]
    for index in sorted(range(len(devices)), key=lambda i: -devices[i].gflops):
        for _ in range(slots):
            place = min(range(cores), key=lambda core: load[core])
            load[place] += devices[index].gflops / slots
            placed[index].append(place)
    return placed, max(load)


def rounded_up(number: float) -> float:
    """Return the number rounded up to two digits."""
    if number <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return float(f"{math.ceil(number / unit - 1e-9) * unit:.6g}")


def scale_text(scale: float) -> str:
    """Return the time scale in words, for every result."""
    if scale == 1:
        return "time scale 1: real time"
    way = "slower" if scale > 1 else "faster"
    return f"time scale {scale:g}: computing and links are {max(scale, 1 / scale):g} times {way} than real time"


def scaled(cluster: Cluster, scale: float) -> Cluster:
    """Return the same cluster, `scale` times slower."""
    devices = tuple(
        msgspec.structs.replace(
            device, gflops=device.gflops / scale, memory_bytes_per_second=device.memory_bytes_per_second / scale,
            operator_seconds=device.operator_seconds * scale, up_bytes_per_second=device.up_bytes_per_second / scale,
            down_bytes_per_second=device.down_bytes_per_second / scale,
            copy_seconds_per_gigabyte=device.copy_seconds_per_gigabyte * scale,
            message_seconds=device.message_seconds * scale, round_seconds=device.round_seconds * scale,
        )
        for device in cluster.devices
    )  # fmt: skip
    links = tuple(msgspec.structs.replace(directed, link=_scaled(directed.link, scale)) for directed in cluster.links)
    return Cluster(cluster.name, devices, _scaled(cluster.link, scale), links)


def _scaled(link: Link, scale: float) -> Link:
    return Link(link.bytes_per_second / scale, link.delay_seconds * scale)


def slot_names(device: str, slots: int) -> tuple[str, ...]:
    return (device,) if slots == 1 else tuple(f"{device}.{number}" for number in range(1, slots + 1))


def with_slots(cluster: Cluster, slots: int) -> Cluster:
    """Return every device as so many workers, each with its part of the device's speed and memory.

    They share its port, and its link to another device, all of which a single worker may use. Between workers of one
    device there is no network: what passes there is as fast as its memory.
    """
    if slots == 1:
        return cluster
    devices, inside = [], []
    for device in cluster.devices:
        names = slot_names(device.name, slots)
        devices += [
            msgspec.structs.replace(
                device, name=name, gflops=device.gflops / slots, memory_bytes=device.memory_bytes // slots, cores=1,
                memory_bytes_per_second=device.memory_bytes_per_second / slots, host=device.host_name,
            )
            for name in names
        ]  # fmt: skip
        memory_link = Link(device.memory_bytes_per_second, 2 * device.operator_seconds)
        inside += [DirectedLink(a, b, memory_link) for a in names for b in names if a != b]
    relays = {device.name: slot_names(device.name, slots)[0] for device in cluster.devices}
    between = [
        DirectedLink(a, b, directed.link, relays.get(directed.relay, directed.relay))
        for directed in cluster.links
        for a in slot_names(directed.sender, slots)
        for b in slot_names(directed.receiver, slots)
    ]
    return Cluster(cluster.name, tuple(devices), cluster.link, (*between, *inside), cluster.sites)
