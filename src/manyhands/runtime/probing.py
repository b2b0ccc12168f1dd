"""The cost of exchanging data among workers, all at once and while they compute, over a run's channels.

A probe is a sum over made-up numbers: a small round between two pieces of computing, from every device to every other,
as batch statistics travel; and a large one in two rounds, as gradients do, beside a thread that computes. The first
gives the delay, as a network sees it: with nothing of the exchange in the processor's caches, and other processes at
work on the cores. The second gives the rate of a device's port, and how much computing is lost to each byte: nothing
where a core is free for it.

Then every pair is measured by itself, the pairs of a round side by side, as in a tournament: a small message there and
back, then a large one each way. This gives the delay and the rate of every link.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from manyhands.facts.boxes import cut_points
from manyhands.facts.link import Link
from manyhands.transport.endpoint import Endpoint

SMALL_BYTES = 1024
LARGE_BYTES = 8_000_000
PIECES, PIECE_SECONDS = 6, 0.002
"""Number of pieces of computing, with a small exchange after each or none, and the processor time of each."""
_SMALL_STRIDE = PIECES + 2
_NUMBER_BYTES = 8
_SETS = 6
"""Sets of memory, used in turn: gradients are in no cache when they are added up."""
PAIR_BYTES = 1_000_000


@dataclass(frozen=True)
class Extent:
    """The number of repeats of each measurement."""

    small: int
    large: int
    pair: int
    alone_seconds: float
    """Total time of computing with nothing exchanged: a part of it before each large exchange, as machines' speeds
    vary."""
    takes_least: bool = False
    """Whether the least of a few repeats counts, in place of the median: other work of the machine only ever adds."""


WHOLE = Extent(small=5, large=7, pair=3, alone_seconds=0.3)
QUICK = Extent(small=3, large=4, pair=1, alone_seconds=0.1, takes_least=True)


@dataclass(frozen=True)
class Probe:
    """The measured cost of an exchange on one device."""

    small_seconds: float
    large_seconds: float
    lost_seconds: float
    """Computing time lost to one large exchange."""
    links: dict[str, Link] = field(default_factory=dict)
    """The links to every other device."""

    def of(self, count: int) -> tuple[float, float, float]:
        """Return seconds of delay, bytes per second of a port, seconds of computing lost per byte sent or received."""
        byte_count = 2 * (count - 1) / count * LARGE_BYTES
        rate = byte_count / max(self.large_seconds - 2 * self.small_seconds, 0.1 * self.large_seconds)
        return self.small_seconds, rate, self.lost_seconds / (2 * byte_count)


def expected(devices: Sequence[str], name: str) -> dict[tuple[str, str], int]:
    """Return (source, topic) -> bytes of what one device will receive in each repeat."""
    sizes = _chunks(len(devices))
    own_chunk = sizes[devices.index(name)]
    sizes_in: dict[tuple[str, str], int] = {}
    for size, other in zip(sizes, devices):
        if other != name:
            sizes_in |= {(other, "start"): SMALL_BYTES, (other, "small"): SMALL_BYTES}
            sizes_in |= {(other, "gather"): own_chunk, (other, "spread"): size}
            sizes_in |= {(other, "ping"): SMALL_BYTES, (other, "pong"): SMALL_BYTES}
            sizes_in |= {(other, "much"): PAIR_BYTES, (other, "came"): SMALL_BYTES}
    return sizes_in


def tournament(devices: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return rounds of pairs: every device meets every other once, and never two at a time."""
    ring: list[str | None] = [*devices, *([None] if len(devices) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        met = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]))
        rounds.append([(first, other) for first, other in met if first is not None and other is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _chunks(count: int) -> list[int]:
    points = cut_points(LARGE_BYTES // 4, (1,) * count)
    return [4 * (points[i + 1] - points[i]) for i in range(count)]


class _Computing:
    """A thread that convolves all the time and counts its steps.

    The steps are small, so that a short exchange shows too, and like a network's: partly multiplications, partly passes
    over memory.
    """

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
        step = _step_of_computing()
        while not self._is_over:
            step()
            self.count += 1

    def per_second(self, seconds: float) -> float:
        before, start = self.count, time.perf_counter()
        time.sleep(seconds)
        return (self.count - before) / (time.perf_counter() - start)


def _step_of_computing() -> Callable[[], object]:
    data, weight = torch.randn(4, 32, 48, 48), torch.randn(32, 32, 1, 1)
    return lambda: torch.relu(torch.conv2d(data, weight))


@torch.no_grad()
def _small_seconds(exchange: _Exchange, extent: Extent) -> float:
    """Return what a small exchange adds to the computing around it, where all devices compute.

    A faster device waits for the slowest, and that is not counted as the exchange's cost.
    """
    compute = _step_of_computing()

    def piece() -> None:
        until = time.thread_time() + PIECE_SECONDS
        while time.thread_time() < until:
            compute()

    def pieces(step: int, *, exchanging: bool) -> float:
        """Return the seconds of each piece."""
        exchange.endpoint.mailbox.begin_step(step)
        exchange.little(step, "start")  # brings all devices to the same point
        start = time.perf_counter()
        for number in range(PIECES):
            piece()
            if exchanging:
                exchange.little(step + number, "small")
        return (time.perf_counter() - start) / PIECES

    added = []
    for step in range(0, extent.small * _SMALL_STRIDE, _SMALL_STRIDE):
        with_exchange, alone = pieces(step, exchanging=True), pieces(step + PIECES, exchanging=False)
        added.append(with_exchange - exchange.largest(step + PIECES + 1, alone))
    return max(0.0, min(added[1:])) if extent.takes_least else statistics.median(added[1:])


def run(endpoint: Endpoint, devices: Sequence[str], extent: Extent = WHOLE) -> Probe:
    """Take part in the exchange; all devices named do so at the same time."""
    exchange = _Exchange(endpoint, devices)
    small = _small_seconds(exchange, extent)
    large, lost = [], []
    first = extent.small * _SMALL_STRIDE
    with _Computing() as computing:
        time.sleep(0.02)
        for step in range(first, first + extent.large + 1):
            endpoint.mailbox.begin_step(step)
            alone = computing.per_second(extent.alone_seconds / (extent.large + 1))
            exchange.little(step, "start")
            start, before = time.perf_counter(), computing.count
            exchange.large(step)
            large.append(time.perf_counter() - start)
            lost.append(large[-1] - (computing.count - before) / alone if alone else 0.0)
    lost_seconds = max(0.0, min(lost) if extent.takes_least else statistics.mean(lost))
    large_seconds = min(large) if extent.takes_least else statistics.median(large)
    links = exchange.links(first + extent.large + 1, devices, extent.pair)
    nearest = min((link.delay_seconds for link in links.values()), default=0.0)  # nothing is faster, whatever the noise
    return Probe(max(small, nearest), large_seconds, lost_seconds, links)


class _Exchange:
    """One device's part in sums of made-up numbers."""

    def __init__(self, endpoint: Endpoint, devices: Sequence[str]) -> None:
        self.endpoint = endpoint
        self.others = [name for name in devices if name != endpoint.name]
        sizes = dict(zip(devices, _chunks(len(devices))))
        self._sets = [{name: torch.zeros(size // 4) for name, size in sizes.items()} for _ in range(_SETS)]
        self.small, self.much = (torch.zeros(size, dtype=torch.uint8) for size in (SMALL_BYTES, PAIR_BYTES))
        self.into = {name: torch.zeros(SMALL_BYTES, dtype=torch.uint8) for name in self.others}

    def little(self, step: int, topic: str) -> None:
        self._pass(step, topic, dict.fromkeys(self.others, self.small), self.into, urgent=True)

    def largest(self, step: int, number: float) -> float:
        """Return the largest of all devices' numbers."""
        self.small[:_NUMBER_BYTES].view(torch.float64).fill_(number)
        self.little(step, "start")
        return max(number, *(float(data[:_NUMBER_BYTES].view(torch.float64)) for data in self.into.values()))

    def large(self, step: int) -> None:
        memory = self._sets[step % _SETS]
        own_chunk = memory[self.endpoint.name]
        box = self.endpoint.mailbox
        for name in self.others:
            box.post(name, step, "spread", [memory[name]])
        for name in self.others:
            self.endpoint.send(name, step, "gather", [memory[name]])
        total: Any = own_chunk.numpy()
        for name in self.others:
            total += numpy.frombuffer(box.take(name, step, "gather"), numpy.float32)
        self._pass(step, "spread", dict.fromkeys(self.others, own_chunk), memory)

    def links(self, first_step: int, devices: Sequence[str], repeats: int) -> dict[str, Link]:
        """Return the link to each of the others, measured while its pair has it to itself."""
        trips: dict[str, list[tuple[float, float]]] = {name: [] for name in self.others}
        step = first_step
        for pairs in tournament(devices):
            own_pair = next((pair for pair in pairs if self.endpoint.name in pair), None)
            for _ in range(repeats):
                self.endpoint.mailbox.begin_step(step)
                self.little(step, "start")
                if own_pair is not None:
                    other = own_pair[own_pair[0] == self.endpoint.name]
                    trips[other].append(self._with(other, step, is_first=other == own_pair[1]))
                step += 1
        links = {}
        for name, pair_trips in trips.items():
            there_and_back = min(trip for trip, _ in pair_trips)
            seconds = max(statistics.median(large for _, large in pair_trips) - there_and_back, 1e-9)
            links[name] = Link(PAIR_BYTES / seconds, there_and_back / 2)
        return links

    def _with(self, other: str, step: int, *, is_first: bool) -> tuple[float, float]:
        """Return the seconds of a small message there and back, and of a large one there and a small one back."""
        little = trip = 0.0
        for turn in (is_first, not is_first):
            for sent, answered, tensor in (("ping", "pong", self.small), ("much", "came", self.much)):
                if turn:
                    start = time.perf_counter()
                    self.endpoint.send(other, step, sent, [tensor], urgent=True)
                    self.endpoint.mailbox.receive(other, step, answered, [self.into[other]])
                    little, trip = trip, time.perf_counter() - start
                else:
                    self.endpoint.mailbox.receive(other, step, sent, [torch.empty_like(tensor)])
                    self.endpoint.send(other, step, answered, [self.small], urgent=True)
        return little, trip

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
