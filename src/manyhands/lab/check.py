"""Compares the requested properties of a lab with the measured ones, device by device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import psutil

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import LabError
from manyhands.lab import measure
from manyhands.lab.control_groups import quota_and_period
from manyhands.lab.lab import Lab
from manyhands.lab.spaces import COORDINATOR_SPACE

TOLERANCE = 0.10
LEAST_SECONDS = 0.2e-3
"""A round trip may be this much late whatever was requested: sending and receiving take time of their own."""
_SHARE_SECONDS, _MOST_SHARE_SECONDS = 2.0, 20.0
_SHARE_PERIODS = 40
"""The periods of the kernel's quota to measure over: a small share is granted in few pieces per second."""

Say = Callable[[str], None]


class Finding(msgspec.Struct, frozen=True):
    """One property that was requested and measured."""

    what: str
    """One of: rate up, rate down, rate of pair, round trip, share, memory."""
    who: str
    unit: str
    asked: float
    got: float | None
    """None: not measured, or it did not happen."""
    note: str = ""
    slack: float = 0.0
    """The deviation allowed beyond the tolerance."""

    @property
    def error(self) -> float:
        return abs(self.got - self.asked) / self.asked if self.got is not None else math.inf

    @property
    def is_good(self) -> bool:
        if self.got is None:
            return bool(self.note)
        return self.error <= TOLERANCE or abs(self.got - self.asked) <= self.slack


def check(lab: Lab, say: Say) -> Iterator[Finding]:
    """Yield all findings. Not to be used while something runs: devices are run out of memory, and the kernel kills any
    process there."""
    busy = [device.name for device in lab.status() if device.processes]
    if busy:
        raise LabError(
            f"Something runs on {', '.join(busy)}; a check would disturb it, and could kill it.",
            hint=f"Stop it first: manyhands lab kill {busy[0]} --lab {lab.name}",
        )
    names = lab.played.network.names
    yield from _rates(lab, names, say)
    yield from _pair_rates(lab, say)
    yield from _round_trips(lab, names, say)
    say("shares of the processor, all at once")
    shares = measure.shares(lab, names, share_seconds([seat.share for seat in lab.played.seats]))
    for seat in lab.played.seats:
        yield Finding("share", seat.device, "of a core", seat.share, shares[seat.device])
    yield from _memory(lab, say)


def share_seconds(shares: Sequence[float]) -> float:
    """Return for how long shares of the processor are measured."""
    longest = max(quota_and_period(share)[1] for share in shares) / 1e6
    return min(_MOST_SHARE_SECONDS, max(_SHARE_SECONDS, _SHARE_PERIODS * longest))


def _rates(lab: Lab, names: tuple[str, ...], say: Say) -> Iterator[Finding]:
    for name in names:
        device = lab.played.network.device(name)
        for direction, set_rate, ends in (
            ("rate up", device.up_bytes_per_second, (name, COORDINATOR_SPACE)),
            ("rate down", device.down_bytes_per_second, (COORDINATOR_SPACE, name)),
        ):
            if math.isfinite(set_rate) and name not in dict(lab.played.traces):
                say(f"{direction} of {name}")
                yield Finding(direction, name, "B/s", set_rate, measure.rate(lab, *ends, set_rate))


def _around(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return every device once as the near end and once as the far one."""
    return [(name, other) for name, other in zip(names, (*names[1:], *names[:1])) if name != other]


def slow_pairs(cluster: Cluster) -> list[tuple[str, str]]:
    """Return the pairs (sender, receiver), around the ring in both directions, whose own link is slower than both
    ports."""
    pairs = [pair for name, other in _around(cluster.names) for pair in ((name, other), (other, name))]
    return [
        (sender, receiver)
        for sender, receiver in dict.fromkeys(pairs)
        if cluster.link_between(sender, receiver).bytes_per_second
        < min(cluster.device(sender).up_bytes_per_second, cluster.device(receiver).down_bytes_per_second)
    ]


def _pair_rates(lab: Lab, say: Say) -> Iterator[Finding]:
    network, traced = lab.played.network, dict(lab.played.traces)
    for sender, receiver in slow_pairs(network):
        if sender in traced or receiver in traced:
            continue
        say(f"rate from {sender} to {receiver}")
        set_rate = network.link_between(sender, receiver).bytes_per_second
        got = measure.rate(lab, sender, receiver, set_rate, _delay_of(network, sender, receiver))
        yield Finding("rate of pair", f"{sender}, {receiver}", "B/s", set_rate, got)


def _delay_of(network: Cluster, name: str, other: str) -> float:
    """Return the delay of the round trip."""
    return network.link_between(name, other).delay_seconds + network.link_between(other, name).delay_seconds


def _round_trips(lab: Lab, names: tuple[str, ...], say: Say) -> Iterator[Finding]:
    for name, other in _around(names):
        set_delay = _delay_of(lab.played.network, name, other)
        if set_delay:
            say(f"round trip from {name} to {other}")
            got = measure.round_trip(lab, name, other, set_delay)
            yield Finding("round trip", f"{name}, {other}", "s", set_delay, got, slack=LEAST_SECONDS)


def _memory(lab: Lab, say: Say) -> Iterator[Finding]:
    """Yield one finding per memory size: devices of one size are limited in one way."""
    measured_sizes: set[int] = set()
    for seat in lab.played.seats:
        if seat.memory_bytes in measured_sizes:
            continue
        measured_sizes.add(seat.memory_bytes)
        if seat.memory_bytes > 0.8 * psutil.virtual_memory().available:
            yield Finding("memory", seat.device, "B", seat.memory_bytes, None, "this machine has less: not tried")
            continue
        say(f"running {seat.device} out of memory")
        share_before = lab.groups.share(lab.name, seat.device)
        lab.groups.set_cpu(lab.name, seat.device, None)
        try:
            killed_at = measure.memory_at_death(lab, seat.device)
        finally:
            lab.groups.set_cpu(lab.name, seat.device, share_before)
        yield Finding("memory", seat.device, "B", seat.memory_bytes, killed_at)
