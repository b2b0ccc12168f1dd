"""Computes how fast bytes may leave over a link that is made slower than it is: arithmetic on given times, no clock, no
thread.

Bytes leave in segments. Each is booked when the one before it has left, on its link and on the port that all links of a
device share, and leaves when the last of its bytes would have been through both:

    link a   |--1--|     |--4--|          1 to 4: in the order in which they were booked.
    link b         |--2--|     |--3--|    A port goes on with the next segment where the last one ended.
    port     |--1--|--2--|--4--|--3--|

Times are those of an ideal link, not of the caller: a caller that comes late catches up, by `GRACE_SECONDS` at most. So
from any moment on, no more leaves than the rate allows, and `burst_bytes`.

A rate may change at any moment (`cancel`): what would have been through by then leaves, the rest is booked anew. So
along a rate that changes all the time, as much passes as its integral.

The first segment of a frame is a packet: the receiver sees when it began, and can compute the rate from the rest.
"""

from __future__ import annotations

import math

from manyhands.facts.link import Link

GRACE_SECONDS = 0.05
"""The most lateness that is made up for. Longer delays were not the shaper's: the receiver did not read, or the machine
slept."""
STOPPED_BYTES_PER_SECOND = 1.0
"""The rate that remains on a link through which nothing passes: an occasional byte shows that its sender is alive."""
_SEGMENT_SECONDS = 0.005
_PACKET_BYTES = 1500
_LONGEST_SEGMENT_SECONDS = 0.05
"""At low rates a segment is a packet, or less: bytes that trickle show that their sender is alive."""


def segment_bytes(bytes_per_second: float) -> float:
    """Return how many bytes leave at once."""
    packet = min(_PACKET_BYTES, bytes_per_second * _LONGEST_SEGMENT_SECONDS)
    return max(1.0, packet, bytes_per_second * _SEGMENT_SECONDS)


def burst_bytes(bytes_per_second: float) -> float:
    """Return the most bytes that may leave in an instant, beyond the rate, after a time in which too little left."""
    return bytes_per_second * GRACE_SECONDS + segment_bytes(bytes_per_second)


class Port:
    """The port that all links of one device share."""

    def __init__(self, bytes_per_second: float = math.inf) -> None:
        self.bytes_per_second = bytes_per_second
        self.free_at = -math.inf


class Shaper:
    """The schedule of one connection: `begin` a frame, look when it is `due`, write up to `room` bytes, `spend` what
    was written."""

    def __init__(self, link: Link, port: Port, now: float) -> None:
        self.link, self._port = link, port
        self.room = 0
        """Bytes that may leave when they are due."""
        self._due = self._begun = self._free_at = now
        self._is_first = True
        self._credit = 0.0
        """The part of a byte that was through when a rate changed."""

    def begin(self, ready_at: float) -> None:
        """Begin a frame of a message that was ready from `ready_at` on."""
        self._free_at = max(self._free_at, ready_at)
        self._is_first = True

    def let_pass(self, count: int) -> None:
        """Begin a frame that need not wait and delays no other."""
        self.room, self._due = count, -math.inf

    def due(self, left_bytes: int, now: float) -> float:
        """Return when the next bytes of a frame with `left_bytes` left may leave."""
        if not self.room:
            self._book(left_bytes, now)
        return self._due

    def _book(self, left_bytes: int, now: float) -> None:
        link_rate, port_rate = self.link.bytes_per_second, self._port.bytes_per_second
        most_bytes = segment_bytes(min(link_rate, port_rate))
        self.room = int(min(left_bytes, most_bytes, _PACKET_BYTES if self._is_first else most_bytes))
        self._is_first = False
        self._begun = max(self._free_at, now - GRACE_SECONDS)
        new_bytes = self.room - self._credit
        self._credit = 0.0
        self._port.free_at = max(self._port.free_at, self._begun) + new_bytes / port_rate
        self._due = self._free_at = max(self._port.free_at, self._begun + new_bytes / link_rate)

    def spend(self, count: int) -> None:
        """Note that `count` bytes of `room` have left."""
        self.room -= count

    def cancel(self, now: float) -> None:
        """Prepare for a change of rate: of what was booked and is not due yet, the part that is through by now may
        leave, and the rest is booked anew."""
        if not self.room or self._due <= now:
            return
        rate = min(self.link.bytes_per_second, self._port.bytes_per_second)
        unsent = min(float(self.room), (self._due - now) * rate)
        self._port.free_at -= unsent / self._port.bytes_per_second
        through = self.room - unsent
        self.room = int(through)
        self._credit = through - self.room
        self._due = now
        self._free_at = max(now, self._begun)
