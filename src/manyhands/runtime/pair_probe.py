"""A short look at the link between two workers: a given number of bytes one way, then a given number the other way.

A measurement in `probing` takes as long as the link needs; here the sizes are given, so that a slow link is not kept
busy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from manyhands.facts.link import Link
from manyhands.runtime.probing import SMALL_BYTES
from manyhands.transport.endpoint import Endpoint

MOST_BYTES = 64_000_000
"""Most bytes that are sent in one direction."""


def expected(devices: Sequence[str], name: str, sizes: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Return (source, topic) -> bytes of what one of the two will receive."""
    other = _other(devices, name)
    sizes_in = {(other, topic): SMALL_BYTES for topic in ("ping", "pong", "came")}
    if sizes.get(other):
        sizes_in[(other, "much")] = min(sizes[other], MOST_BYTES)
    return sizes_in


def run(endpoint: Endpoint, devices: Sequence[str], sizes: Mapping[str, int]) -> dict[str, Link]:
    """Take part, and return the other worker -> the link to it, where this one was to send something."""
    other = _other(devices, endpoint.name)
    small, into = (torch.zeros(SMALL_BYTES, dtype=torch.uint8) for _ in range(2))
    links: dict[str, Link] = {}
    endpoint.mailbox.begin_step(0)
    for sender in devices:
        if not sizes.get(sender):
            continue
        large = torch.zeros(min(sizes[sender], MOST_BYTES), dtype=torch.uint8)
        trips = []
        for sent, answered, tensor in (("ping", "pong", small), ("much", "came", large)):
            start = time.perf_counter()
            if sender == endpoint.name:
                endpoint.send(other, 0, sent, [tensor], urgent=True)
                endpoint.mailbox.receive(other, 0, answered, [into])
            else:
                endpoint.mailbox.receive(other, 0, sent, [torch.empty_like(tensor)])
                endpoint.send(other, 0, answered, [small], urgent=True)
            trips.append(time.perf_counter() - start)
        if sender == endpoint.name:
            little, trip = trips
            links[other] = Link(len(large) / max(trip - little, 1e-6), little / 2)
    return links


def _other(devices: Sequence[str], name: str) -> str:
    first, second = devices
    return second if name == first else first
