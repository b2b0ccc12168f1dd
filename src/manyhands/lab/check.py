"""What was asked of a lab against what it gives, device by device, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import psutil

from manyhands.lab import measure
from manyhands.lab.lab import DESK, Lab

TOLERANCE = 0.10
LEAST_SECONDS = 0.2e-3
"""A round trip may be this much late whatever was asked: sending and receiving take time of their own."""
_SHARE_SECONDS = 2.0

Say = Callable[[str], None]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was asked for and measured."""

    what: str
    """rate up, rate down, round trip, share or memory."""
    who: str
    unit: str
    asked: float
    got: float | None
    """None: not measured, or it did not happen."""
    note: str = ""
    slack: float = 0.0
    """How far it may be off beside the tolerance."""

    @property
    def error(self) -> float:
        return abs(self.got - self.asked) / self.asked if self.got is not None else math.inf

    @property
    def is_good(self) -> bool:
        if self.got is None:
            return bool(self.note)
        return self.error <= TOLERANCE or abs(self.got - self.asked) <= self.slack


def check(lab: Lab, say: Say) -> Iterator[Finding]:
    """All of it."""
    names = lab.played.network.names
    yield from _rates(lab, names, say)
    yield from _round_trips(lab, names, say)
    say("shares of the processor, all at once")
    found = measure.shares(lab, names, _SHARE_SECONDS)
    for seat in lab.played.seats:
        yield Finding("share", seat.device, "of a core", seat.share, found[seat.device])
    yield from _memory(lab, say)


def _rates(lab: Lab, names: tuple[str, ...], say: Say) -> Iterator[Finding]:
    for name in names:
        device = lab.played.network.device(name)
        for what, asked, ends in (
            ("rate up", device.up_bytes_per_second, (name, DESK)),
            ("rate down", device.down_bytes_per_second, (DESK, name)),
        ):
            if math.isfinite(asked) and name not in dict(lab.played.traces):
                say(f"{what} of {name}")
                yield Finding(what, name, "B/s", asked, measure.rate(lab, *ends, asked))


def _round_trips(lab: Lab, names: tuple[str, ...], say: Say) -> Iterator[Finding]:
    """Around the ring: every device once as the near end and once as the far one."""
    network = lab.played.network
    for one, other in zip(names, (*names[1:], names[0])):
        if one != other:
            asked = network.link_between(one, other).delay_seconds + network.link_between(other, one).delay_seconds
            if asked:
                say(f"round trip from {one} to {other}")
                got = measure.round_trip(lab, one, other)
                yield Finding("round trip", f"{one}, {other}", "s", asked, got, slack=LEAST_SECONDS)


def _memory(lab: Lab, say: Say) -> Iterator[Finding]:
    """Each size once: devices of one size are limited in one way."""
    seen: set[int] = set()
    for seat in lab.played.seats:
        if seat.memory_bytes in seen:
            continue
        seen.add(seat.memory_bytes)
        if seat.memory_bytes > 0.8 * psutil.virtual_memory().available:
            yield Finding("memory", seat.device, "B", seat.memory_bytes, None, "this machine has less: not tried")
            continue
        say(f"running {seat.device} out of memory")
        lab.groups.set_cpu(lab.name, seat.device, None)
        try:
            killed_at = measure.memory_at_death(lab, seat.device)
        finally:
            lab.groups.set_cpu(lab.name, seat.device, seat.share)
        yield Finding("memory", seat.device, "B", seat.memory_bytes, killed_at)
