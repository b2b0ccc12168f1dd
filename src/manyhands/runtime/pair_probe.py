"""A short look at the link between two workers: so many bytes one way, then so many the other.

What `probing` measures takes as long as it takes; here the sizes are given, so that a slow link is not kept busy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from manyhands.facts.link import Link
from manyhands.runtime.probing import SMALL_BYTES
from manyhands.transport.endpoint import Endpoint

MOST_BYTES = 64_000_000
"""No look at a link is longer."""


def expected(devices: Sequence[str], name: str, sizes: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """What one of the two will get."""
    other = _other(devices, name)
    found = {(other, topic): SMALL_BYTES for topic in ("ping", "pong", "came")}
    if sizes.get(other):
        found[(other, "much")] = min(sizes[other], MOST_BYTES)
    return found


def run(endpoint: Endpoint, devices: Sequence[str], sizes: Mapping[str, int]) -> dict[str, Link]:
    """Take part. The link to the other one, where this one was to send something."""
    other = _other(devices, endpoint.name)
    small, into = (torch.zeros(SMALL_BYTES, dtype=torch.uint8) for _ in range(2))
    found: dict[str, Link] = {}
    endpoint.mailbox.begin_step(0)
    for sender in devices:
        if not sizes.get(sender):
            continue
        much = torch.zeros(min(sizes[sender], MOST_BYTES), dtype=torch.uint8)
        trips = []
        for sent, answered, tensor in (("ping", "pong", small), ("much", "came", much)):
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
            found[other] = Link(len(much) / max(trip - little, 1e-6), little / 2)
    return found


def _other(devices: Sequence[str], name: str) -> str:
    one, two = devices
    return two if name == one else one
