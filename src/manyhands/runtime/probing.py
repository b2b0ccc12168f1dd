"""What it takes workers to exchange data among each other, all at once and while they compute, over a run's channels.

A probe is a sum over made-up numbers: a small round, everybody to everybody, as batch statistics travel; and a large
one in two rounds, as gradients do, beside a thread that computes. From the first comes the delay; from the second the
rate of a device's port, and how much computing is lost to each byte: nothing where a core is free for it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from manyhands.engine.endpoint import Endpoint
from manyhands.facts.boxes import cut_points

SMALL_BYTES = 1024
LARGE_BYTES = 8_000_000
REPEATS = 7
ALONE_SECONDS = 0.3


@dataclass(frozen=True)
class Probe:
    """What an exchange took on one device."""

    small_seconds: float
    large_seconds: float
    lost_seconds: float
    """Of computing, to one large exchange."""

    def of(self, count: int) -> tuple[float, float, float]:
        """Seconds of delay, bytes per second of a port, seconds of computing lost per byte sent or received."""
        byte_count = 2 * (count - 1) / count * LARGE_BYTES
        rate = byte_count / max(self.large_seconds - 2 * self.small_seconds, 0.1 * self.large_seconds)
        return self.small_seconds, rate, self.lost_seconds / (2 * byte_count)


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
    points = cut_points(LARGE_BYTES // 4, (1,) * count)
    return [4 * (points[i + 1] - points[i]) for i in range(count)]


class _Computing:
    """A thread that convolves all the time, and counts."""

    def __init__(self) -> None:
        self.count = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="probe computing", daemon=True)

    def __enter__(self) -> _Computing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(10)

    @torch.no_grad()
    def _run(self) -> None:
        data, weight = torch.randn(16, 64, 32, 32), torch.randn(64, 64, 3, 3)
        while not self._is_over:
            torch.conv2d(data, weight, padding=1)
            self.count += 1

    def per_second(self, seconds: float) -> float:
        before, start = self.count, time.perf_counter()
        time.sleep(seconds)
        return (self.count - before) / (time.perf_counter() - start)


def run(endpoint: Endpoint, devices: Sequence[str]) -> Probe:
    """Take part in the exchange; everybody named does at the same time."""
    exchange = _Exchange(endpoint, devices)
    small = []
    for step in range(REPEATS + 1):
        endpoint.mailbox.begin_step(step)
        exchange.little(step, "start")  # brings everybody to the same point
        start = time.perf_counter()
        exchange.little(step, "small")
        small.append(time.perf_counter() - start)
    large, done, spent = [], 0, 0.0
    with _Computing() as computing:
        time.sleep(0.02)
        alone = computing.per_second(ALONE_SECONDS)
        for step in range(REPEATS + 1, 2 * REPEATS + 2):
            endpoint.mailbox.begin_step(step)
            exchange.little(step, "start")
            start, before = time.perf_counter(), computing.count
            exchange.large(step)
            large.append(time.perf_counter() - start)
            done, spent = done + computing.count - before, spent + large[-1]
    lost = max(0.0, spent - done / alone) / len(large) if alone else 0.0
    return Probe(statistics.median(small[1:]), statistics.median(large), lost)


class _Exchange:
    """One device's part in sums of made-up numbers."""

    def __init__(self, endpoint: Endpoint, devices: Sequence[str]) -> None:
        self.endpoint = endpoint
        self.others = [name for name in devices if name != endpoint.name]
        sizes = dict(zip(devices, _chunks(len(devices))))
        self.memory = {name: torch.zeros(size // 4) for name, size in sizes.items()}
        self.small = torch.zeros(SMALL_BYTES, dtype=torch.uint8)
        self.into = {name: torch.zeros(SMALL_BYTES, dtype=torch.uint8) for name in self.others}

    def little(self, step: int, topic: str) -> None:
        self._pass(step, topic, dict.fromkeys(self.others, self.small), self.into, urgent=True)

    def large(self, step: int) -> None:
        own = self.memory[self.endpoint.name]
        box = self.endpoint.mailbox
        for name in self.others:
            box.post(name, step, "spread", [self.memory[name]])
        for name in self.others:
            self.endpoint.send(name, step, "gather", [self.memory[name]])
        total: Any = own.numpy()
        for name in self.others:
            total += numpy.frombuffer(box.take(name, step, "gather"), numpy.float32)
        self._pass(step, "spread", dict.fromkeys(self.others, own), self.memory)

    def _pass(
        self,
        step: int,
        topic: str,
        send: dict[str, torch.Tensor],
        take: dict[str, torch.Tensor],
        *,
        urgent: bool = False,
    ) -> None:
        for name in self.others:
            self.endpoint.send(name, step, topic, [send[name]], urgent=urgent)
        for name in self.others:
            self.endpoint.mailbox.receive(name, step, topic, [take[name]])
