"""Clusters that might be: one more device, a faster network, more memory, a faster device. The rest stays as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.link import DirectedLink, Link
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing


def kinds(cluster: Cluster) -> list[Device]:
    """One device of each kind, the fastest first."""
    found: dict[tuple[str, float, int], Device] = {}
    for device in cluster.devices:
        found.setdefault((device.kind, device.gflops, device.memory_bytes), device)
    return sorted(found.values(), key=lambda device: -device.gflops)


def one_more(cluster: Cluster, profile: Profile, like: Device) -> tuple[Cluster, Profile]:
    """The cluster with a twin of a device: as fast, linked to the others in the same way, behind a port of its own."""
    stem, number = like.name.rstrip("0123456789").rstrip("-") or like.name, 2
    while f"{stem}-{number}" in cluster.names:
        number += 1
    name = f"{stem}-{number}"
    twin = msgspec.structs.replace(like, name=name, host="")
    links = list(cluster.links)
    for one in cluster.links:
        if one.sender == like.name:
            links.append(DirectedLink(name, one.receiver, one.link))
        if one.receiver == like.name:
            links.append(DirectedLink(one.sender, name, one.link))
    grown = Cluster(f"{cluster.name} and {name}", (*cluster.devices, twin), cluster.link, tuple(links))
    known = msgspec.structs.replace(profile.of(like.name), device=name)
    return grown, Profile({**profile.devices, name: known})


def with_network(cluster: Cluster, *, rate: float = 1.0, delay: float = 1.0) -> Cluster:
    """All links and ports so many times as fast, all delays so many times as long."""

    def changed(link: Link) -> Link:
        return Link(link.bytes_per_second * rate, link.delay_seconds * delay)

    devices = tuple(
        msgspec.structs.replace(
            device, up_bytes_per_second=device.up_bytes_per_second * rate,
            down_bytes_per_second=device.down_bytes_per_second * rate,
        )
        for device in cluster.devices
    )  # fmt: skip
    links = tuple(DirectedLink(one.sender, one.receiver, changed(one.link)) for one in cluster.links)
    return Cluster(cluster.name, devices, changed(cluster.link), links)


def with_memory(cluster: Cluster, names: Collection[str], times: float) -> Cluster:
    """Some devices with so many times their memory."""
    devices = tuple(
        msgspec.structs.replace(device, memory_bytes=int(device.memory_bytes * times))
        if device.name in names
        else device
        for device in cluster.devices
    )
    return Cluster(cluster.name, devices, cluster.link, cluster.links)


def with_speed(cluster: Cluster, profile: Profile, names: Collection[str], times: float) -> tuple[Cluster, Profile]:
    """Some devices so many times as fast: their layers, and what their memory gives the optimiser."""
    devices = tuple(
        msgspec.structs.replace(
            device, gflops=device.gflops * times, memory_bytes_per_second=device.memory_bytes_per_second * times,
            copy_seconds_per_gigabyte=device.copy_seconds_per_gigabyte / times,
            message_seconds=device.message_seconds / times,
        )
        if device.name in names
        else device
        for device in cluster.devices
    )  # fmt: skip
    own: Mapping[str, DeviceProfile] = profile.devices
    faster = {name: _faster(one, times) if name in names else one for name, one in own.items()}
    return Cluster(cluster.name, devices, cluster.link, cluster.links), Profile(faster)


def _faster(profile: DeviceProfile, times: float) -> DeviceProfile:
    layers = tuple(
        LayerTiming(
            layer.layer,
            tuple(
                Timing(one.samples, one.forward_seconds / times, one.backward_seconds / times) for one in layer.ladder
            ),
        )
        for layer in profile.layers
    )
    return msgspec.structs.replace(profile, layers=layers)
