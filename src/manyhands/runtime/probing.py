"""What it takes workers to exchange data among each other, all at once, measured over the very channels of a run.

A probe is a sum over made-up numbers: a small round, everybody to everybody, as batch statistics travel; and a large
one in two rounds, as gradients do. From the first comes the delay, from the second the rate of a device's port and the
processor time that a byte costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manyhands.engine.endpoint import Endpoint
from manyhands.facts.boxes import cut_points

SMALL_BYTES = 1024
LARGE_BYTES = 8_000_000
REPEATS = 5
_TOPICS = ("start", "small", "gather", "spread")


@dataclass(frozen=True)
class Probe:
    """What an exchange took on one device, medians."""

    small_seconds: float
    large_seconds: float
    processor_seconds: float
    """Of all threads, during the large exchange."""

    def of(self, count: int) -> tuple[float, float, float]:
        """Seconds of delay, bytes per second of a port, processor seconds per byte sent or received."""
        byte_count = 2 * (count - 1) / count * LARGE_BYTES
        rate = byte_count / max(self.large_seconds - 2 * self.small_seconds, 0.1 * self.large_seconds)
        return self.small_seconds, rate, self.processor_seconds / (2 * byte_count)


def expected(devices: Sequence[str], name: str) -> dict[tuple[str, str], int]:
    """What one device will get in each repeat."""
    sizes = _chunks(len(devices))
    own = sizes[devices.index(name)]
    found: dict[tuple[str, str], int] = {}
    for size, other in zip(sizes, devices):
        if other != name:
            found |= {(other, "start"): SMALL_BYTES, (other, "small"): SMALL_BYTES}
            found |= {(other, "gather"): own, (other, "spread"): size}
    return found


def _chunks(count: int) -> list[int]:
    points = cut_points(LARGE_BYTES, (1,) * count)
    return [points[i + 1] - points[i] for i in range(count)]


def run(endpoint: Endpoint, devices: Sequence[str]) -> Probe:
    """Take part in the exchange; everybody named does at the same time."""
    others = [name for name in devices if name != endpoint.name]
    sizes = dict(zip(devices, _chunks(len(devices))))
    memory = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    own = torch.zeros(SMALL_BYTES, dtype=torch.uint8)

    def exchange(step: int, topic: str, send: dict[str, torch.Tensor], take: dict[str, torch.Tensor]) -> None:
        for name in others:
            endpoint.send(name, step, topic, [send[name]], urgent=topic in ("start", "small"))
        for name in others:
            endpoint.mailbox.receive(name, step, topic, [take[name]])

    little = dict.fromkeys(others, own)
    into = {name: torch.zeros(SMALL_BYTES, dtype=torch.uint8) for name in others}
    mine = {name: torch.zeros(sizes[endpoint.name], dtype=torch.uint8) for name in others}
    small, large, processor = [], [], []
    for step in range(REPEATS + 1):
        endpoint.mailbox.begin_step(step)
        exchange(step, "start", little, into)  # brings everybody to the same point
        begin = time.perf_counter()
        exchange(step, "small", little, into)
        middle, busy = time.perf_counter(), time.process_time()
        exchange(step, "gather", memory, mine)
        exchange(step, "spread", dict.fromkeys(others, memory[endpoint.name]), memory)
        if step:  # the first warms up
            small.append(middle - begin)
            large.append(time.perf_counter() - middle)
            processor.append(time.process_time() - busy)
    return Probe(statistics.median(small), statistics.median(large), statistics.median(processor))
