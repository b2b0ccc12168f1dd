"""Changed clusters for what-ifs: one more device, a faster network, more memory, a faster device; all else equal."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.link import DirectedLink, Link
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing


def kinds(cluster: Cluster) -> list[Device]:
    """Return one device of each kind, the fastest first."""
    by_kind: dict[tuple[str, float, int], Device] = {}
    for device in cluster.devices:
        by_kind.setdefault((device.kind, device.gflops, device.memory_bytes), device)
    return sorted(by_kind.values(), key=lambda device: -device.gflops)


def one_more(cluster: Cluster, profile: Profile, like: Device) -> tuple[Cluster, Profile]:
    """Return the cluster with a twin of a device: as fast, with the same links to the others, behind a port of its
    own."""
    stem, number = like.name.rstrip("0123456789").rstrip("-") or like.name, 2
    while f"{stem}-{number}" in cluster.names:
        number += 1
    name = f"{stem}-{number}"
    twin = msgspec.structs.replace(like, name=name, host="")
    links = list(cluster.links)
    for link in cluster.links:
        if link.sender == like.name:
            links.append(DirectedLink(name, link.receiver, link.link, link.relay))
        if link.receiver == like.name:
            links.append(DirectedLink(link.sender, name, link.link, link.relay))
    grown = Cluster(f"{cluster.name} and {name}", (*cluster.devices, twin), cluster.link, tuple(links), cluster.sites)
    twin_profile = msgspec.structs.replace(profile.of(like.name), device=name)
    return grown, Profile({**profile.devices, name: twin_profile})


def with_network(cluster: Cluster, *, rate: float = 1.0, delay: float = 1.0) -> Cluster:
    """Return the cluster with all rates of links and ports, and all delays, multiplied."""

    def changed(link: Link) -> Link:
        return Link(link.bytes_per_second * rate, link.delay_seconds * delay)

    devices = tuple(
        msgspec.structs.replace(
            device, up_bytes_per_second=device.up_bytes_per_second * rate,
            down_bytes_per_second=device.down_bytes_per_second * rate,
        )
        for device in cluster.devices
    )  # fmt: skip
    links = tuple(msgspec.structs.replace(link, link=changed(link.link)) for link in cluster.links)
    sites = tuple(
        msgspec.structs.replace(
            site, up_bytes_per_second=site.up_bytes_per_second * rate,
            down_bytes_per_second=site.down_bytes_per_second * rate, delay_seconds=site.delay_seconds * delay,
            link=None if site.link is None else changed(site.link),
        )
        for site in cluster.sites
    )  # fmt: skip
    return Cluster(cluster.name, devices, changed(cluster.link), links, sites)


def with_memory(cluster: Cluster, names: Collection[str], times: float) -> Cluster:
    """Return the cluster with the memory of some devices multiplied."""
    devices = tuple(
        msgspec.structs.replace(device, memory_bytes=int(device.memory_bytes * times))
        if device.name in names
        else device
        for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)


def with_speed(cluster: Cluster, profile: Profile, names: Collection[str], times: float) -> tuple[Cluster, Profile]:
    """Return the cluster with some devices faster: their layers, and their memory for the optimiser."""
    devices = tuple(
        msgspec.structs.replace(
            device, gflops=device.gflops * times, memory_bytes_per_second=device.memory_bytes_per_second * times,
            copy_seconds_per_gigabyte=device.copy_seconds_per_gigabyte / times,
            message_seconds=device.message_seconds / times, round_seconds=device.round_seconds / times,
        )
        if device.name in names
        else device
        for device in cluster.devices
    )  # fmt: skip
    profiles: Mapping[str, DeviceProfile] = profile.devices
    faster = {
        name: _faster(device_profile, times) if name in names else device_profile
        for name, device_profile in profiles.items()
    }
    return msgspec.structs.replace(cluster, devices=devices), Profile(faster)


def _faster(profile: DeviceProfile, times: float) -> DeviceProfile:
    layers = tuple(
        LayerTiming(
            layer.layer,
            tuple(
                Timing(timing.samples, timing.forward_seconds / times, timing.backward_seconds / times)
                for timing in layer.ladder
            ),
        )
        for layer in profile.layers
    )
    return msgspec.structs.replace(profile, layers=layers)
