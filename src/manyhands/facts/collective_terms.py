"""The terms by which the devices of a generation form process groups, as they travel."""

from __future__ import annotations

import msgspec


class CollectiveTerms(msgspec.Struct, frozen=True):
    """The terms by which a device forms process groups with the others of its generation."""

    way: str
    """TORCH or AUTO."""
    store_port: int
    """The port of the coordinator's store; its host is where the device has reached the coordinator."""
    trusts_network: bool
    """Whether they may connect beyond one machine."""
    gpu_devices: tuple[str, ...] = ()
    """Devices that have a GPU of their own: groups of these alone use NCCL, all others gloo."""
