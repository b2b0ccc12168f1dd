"""Reports failed proofs without flooding the terminal: the first from an address at once, then a count every minute."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from manyhands.runtime.audit import AuditLog

REPORT_SECONDS = 60.0
_MOST_AT_ONCE = 8
"""How many addresses are reported by name in a minute."""


class FailedProofs:
    """The failed proofs since the last report. Any thread may call `note`; `report` is called periodically."""

    def __init__(
        self, report: Callable[[str], None], audit: AuditLog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report, self._audit, self._clock = report, audit, clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        """Address -> failed proofs since the last report, except those reported at once."""
        self._reported: dict[str, float] = {}
        """Address -> when it was first reported, in this minute."""
        self._since = clock()

    def note(self, origin: str) -> None:
        """Note that a peer at this address has proved another token."""
        with self._lock:
            now = self._clock()
            self._reported = {place: at for place, at in self._reported.items() if now - at < REPORT_SECONDS}
            is_first = origin not in self._reported and not self._counts[origin] and len(self._reported) < _MOST_AT_ONCE
            if is_first:
                self._reported[origin] = now
            else:
                if not self._counts.total():
                    self._since = now
                self._counts[origin] += 1
        if is_first:
            self._report(f"Warning: a wrong token came from {origin}. The sender was not let in.")
            self._audit.record("failed proof", origin=origin, count=1)

    def report(self, *, is_last: bool = False) -> None:
        """Report the failed proofs since the last report; `is_last`: without waiting for the minute to end."""
        with self._lock:
            passed = self._clock() - self._since
            counts = +self._counts
            if not counts or (passed < REPORT_SECONDS and not is_last):
                return
            self._counts.clear()
            self._reported |= dict.fromkeys([place for place, _ in counts.most_common(_MOST_AT_ONCE)], self._clock())
        period = "in the last minute" if passed < 1.5 * REPORT_SECONDS else f"in the last {passed:.0f} s"
        if is_last and passed < REPORT_SECONDS:
            period = f"in the last {max(1, round(passed))} s"
        for origin, count in counts.most_common(_MOST_AT_ONCE):
            self._report(f"Warning: {count} wrong proof{'s' if count > 1 else ''} of the token from {origin} {period}.")
            self._audit.record("failed proof", origin=origin, count=count)
        others = counts.total() - sum(count for _, count in counts.most_common(_MOST_AT_ONCE))
        if others:
            self._report(f"Warning: {others} more from other addresses.")
            self._audit.record("failed proof", origin="other addresses", count=others)
