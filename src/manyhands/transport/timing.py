"""Measures how fast bytes come from each peer: from when the beginning of a message is seen until all of it is there.

Bytes are counted per connection, not per message: where several messages share it, or one overtakes another, all that
came meanwhile is what the link carried. No byte and no second counts twice.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

SMALLEST_TIMED_BYTES = 8 * 1024
"""The smallest messages that are timed: smaller ones come at once."""
TOLD_EARLY_SECONDS = 1.0
"""A message that takes longer is reported while it comes."""
_MOST_TIMED = 256

Seen = tuple[float, int]
"""A moment, and the bytes that had come over a connection by then."""


class TimedTransfer(NamedTuple):
    """Bytes that came from a peer and the seconds they took, in which the link was never idle."""

    source: str
    bytes: int
    seconds: float
    ended_at: float
    """By time.monotonic()."""


class TransferTiming:
    """The timed transfers of all peers; used under the mailbox's lock."""

    def __init__(self) -> None:
        self._timed: deque[TimedTransfer] = deque(maxlen=_MOST_TIMED)
        self._told: dict[str, Seen] = {}
        """Source -> the moment at which its last timed transfer ended."""

    def forget(self, source: str) -> None:
        """Forget a source's last transfer: a new connection counts anew."""
        self._told.pop(source, None)

    def is_due(self, source: str, seen: Seen) -> bool:
        """Return whether a message that is still coming has taken so long that it is reported."""
        return time.monotonic() - max(seen, self._told.get(source, seen))[0] > TOLD_EARLY_SECONDS

    def add(self, source: str, seen: Seen, came: int) -> None:
        """Note that `came` bytes have come from a source; the beginning of the message was `seen`."""
        now = time.monotonic()
        began, before = max(seen, self._told.get(source, seen))
        if now > began and came >= before:
            self._timed.append(TimedTransfer(source, came - before, now - began, now))
            self._told[source] = (now, came)

    def take(self) -> list[TimedTransfer]:
        transfers = list(self._timed)
        self._timed.clear()
        return transfers
