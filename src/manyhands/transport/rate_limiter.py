"""Rate limiters: so many calls pass per second and the others wait, so that a flood costs the process next to
nothing."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from manyhands.transport.admission import client_network

_MOST_ADDRESSES = 1024
"""The number of addresses that are remembered; the least recent one is forgotten for a new one."""


class RateLimiter:
    """A rate limiter: `burst` calls may pass at once, then `per_second`."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._gap, self._burst_seconds = 1 / per_second, burst / per_second
        self._lock = threading.Lock()
        self._next = 0.0

    def passes(self, most_seconds: float, sleep: Callable[[float], object] = time.sleep) -> bool:
        """Wait for a turn; return False if it would not come within `most_seconds`, all of which have passed. `sleep`
        waits, and may return early where the turn is no longer needed."""
        with self._lock:
            now = time.monotonic()
            turn = max(self._next, now - self._burst_seconds) + self._gap
            wait = turn - now
            if wait <= most_seconds:
                self._next = turn
        sleep(max(0.0, min(wait, most_seconds)))
        return wait <= most_seconds


class AddressRateLimiter:
    """A rate limiter for each client address, and one for all of them together.

    One address gets at most a quarter of the total, so that a client that floods the server slows down only itself, and
    the process still spends a bounded part of its time on clients.
    """

    def __init__(self, per_second: float, burst: float) -> None:
        """Make the limiters; `per_second` and `burst` are those of one client address."""
        self._per_second, self._burst = per_second, burst
        self._everybody = RateLimiter(4 * per_second, 4 * burst)
        self._own: OrderedDict[str, RateLimiter] = OrderedDict()
        self._lock = threading.Lock()

    def passes(self, host: str, most_seconds: float, sleep: Callable[[float], object] = time.sleep) -> bool:
        """Wait for a turn of a client at `host`; see `RateLimiter.passes`."""
        network = client_network(host)
        with self._lock:
            limiter = self._own.pop(network, None) or RateLimiter(self._per_second, self._burst)
            self._own[network] = limiter
            if len(self._own) > _MOST_ADDRESSES:
                self._own.popitem(last=False)
        return limiter.passes(most_seconds, sleep) and self._everybody.passes(most_seconds, sleep)
