"""The link from one device to another: a rate and a delay."""

from __future__ import annotations

import math

import msgspec

from manyhands.facts.errors import BadValue


class Link(msgspec.Struct, frozen=True):
    """A link in one direction between two devices: a rate, and the one-way delay before the first byte arrives."""

    bytes_per_second: float
    delay_seconds: float

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise BadValue(f"A link's rate is {self.bytes_per_second} B/s; it must be > 0.")
        if not 0 <= self.delay_seconds < math.inf:
            raise BadValue(f"A link's delay is {self.delay_seconds} s; it must be finite and >= 0.")

    def seconds(self, byte_count: float) -> float:
        """Return the seconds from the first byte sent to the last received, on an idle link."""
        return self.delay_seconds + byte_count / self.bytes_per_second


HERE = Link(math.inf, 0.0)  # from a device to itself


class DirectedLink(msgspec.Struct, frozen=True):
    """The link from one device to another, where it differs from the cluster's default."""

    sender: str
    receiver: str
    link: Link
    relay: str = ""
    """The device that passes everything on, where the two do not reach each other: all pairs that it serves share what
    it carries. The coordinator, or any device; empty: none."""
