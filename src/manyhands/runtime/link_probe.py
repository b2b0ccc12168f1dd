"""A worker's part in measuring links: between all devices (`probing`), or between one pair (`pair_probe`)."""

from __future__ import annotations

from manyhands.runtime import pair_probe, probing
from manyhands.runtime.control_messages import Probed, ProbeLinks
from manyhands.transport.endpoint import Endpoint


def expected(command: ProbeLinks, name: str) -> dict[tuple[str, str], int]:
    """Return (peer, topic) -> bytes, for every message that comes to the device of this name."""
    pair_bytes = pair_probe.expected(command.devices, name, command.sizes) if command.sizes else None
    return pair_bytes if pair_bytes is not None else probing.expected(command.devices, name)


def run(command: ProbeLinks, endpoint: Endpoint) -> Probed:
    """Measure the links, and return what the device has measured."""
    if command.sizes:
        links = pair_probe.run(endpoint, command.devices, command.sizes)
        return Probed(command.generation, 0.0, 0.0, 0.0, links)
    measured = probing.run(endpoint, command.devices, probing.QUICK if command.is_quick else probing.WHOLE)
    return Probed(command.generation, *measured.of(len(command.devices)), measured.links)
