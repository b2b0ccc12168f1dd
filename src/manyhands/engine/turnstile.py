"""So many may pass in a second, and the others wait for their turn: a flood costs the process next to nothing."""

from __future__ import annotations

import threading
import time


class Turnstile:
    """`burst` may pass at once, then `per_second`."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._gap, self._burst_seconds = 1 / per_second, burst / per_second
        self._lock = threading.Lock()
        self._next = 0.0

    def passes(self, most_seconds: float) -> bool:
        """Wait for a turn; False: it would not come within `most_seconds`, all of which have passed."""
        with self._lock:
            now = time.monotonic()
            turn = max(self._next, now - self._burst_seconds) + self._gap
            wait = turn - now
            if wait <= most_seconds:
                self._next = turn
        time.sleep(max(0.0, min(wait, most_seconds)))
        return wait <= most_seconds
