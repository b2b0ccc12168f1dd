"""A rate limiter for failed proofs, by address and in total, which bounds how often a token may be guessed.

With a PAKE (`pake`) every guess costs a connection, so limiting connections limits guesses. One address has 5 failures
free; then it waits 1, 2, 4 ... 300 s. All addresses together have 30, and get one more every minute: 30 at once,
then 1,440 a day, or 525,600 a year. For a token that was drawn at random, guessing takes on average:

    8 letters and digits   36**8 / 2 guesses    2.7 million years
    8 digits               10**8 / 2            95 years
    one of 10,000 words    10**4 / 2            3.5 days, with a warning every minute

A guess is charged when it begins and refunded when it was right, so guesses in parallel gain nothing. Devices whose
keys are known prove no token: this limiter does not affect them, however much others guess.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from manyhands.transport.admission import client_network

FREE_FAILURES = 5
LONGEST_WAIT_SECONDS = 300.0
TOTAL_FAILURES = 30.0
REFILL_SECONDS = 60.0
_FORGET_SECONDS = 3600.0
_MOST_PENDING = 16
_BUSY_SECONDS = 1.0
_MOST_ADDRESSES = 4096


class Limited(Exception):
    """Raised where no proof is accepted now; `seconds` says for how long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"too many proofs of the token have failed: wait {seconds:.0f} s")
        self.seconds = seconds


@dataclass
class _Address:
    failures: int = 0
    pending: int = 0
    until: float = 0.0
    failed_at: float = 0.0


class ProofAttempt:
    """One proof under way."""

    def __init__(self) -> None:
        self.has_succeeded = False

    def succeeded(self) -> None:
        self.has_succeeded = True


class ProofLimiter:
    """Counts failed proofs and decides when the next may come. Several threads may use it at once."""

    def __init__(self, total: float = TOTAL_FAILURES, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._total = clock, total
        self._lock = threading.Lock()
        self._addresses: OrderedDict[str, _Address] = OrderedDict()
        self._left, self._refilled_at = total, clock()

    @contextmanager
    def attempt(self, origin: str) -> Iterator[ProofAttempt]:
        """Begin one proof from this address; it has failed unless `succeeded` is called. Limited where none is accepted
        now."""
        place = client_network(origin)
        with self._lock:
            address = self._begin(place)
        attempt = ProofAttempt()
        try:
            yield attempt
        finally:
            with self._lock:
                self._end(address, attempt.has_succeeded)

    def check(self, origin: str) -> None:
        """Raise Limited where no proof from this address is accepted now; nothing is charged."""
        with self._lock:
            self._look(client_network(origin))

    def _begin(self, place: str) -> _Address:
        address = self._look(place)
        self._left -= 1
        address.pending += 1
        return address

    def _look(self, place: str) -> _Address:
        now = self._clock()
        self._left = min(self._total, self._left + (now - self._refilled_at) / REFILL_SECONDS)
        self._refilled_at = now
        address = self._addresses.get(place)
        if address is None:
            self._make_room()
            address = self._addresses[place] = _Address()
        self._addresses.move_to_end(place)
        if address.failures and now - address.failed_at > _FORGET_SECONDS:
            address.failures = 0
        if now < address.until:
            raise Limited(address.until - now)
        if address.pending >= _MOST_PENDING:
            raise Limited(_BUSY_SECONDS)
        if self._left < 1:
            raise Limited((1 - self._left) * REFILL_SECONDS)
        return address

    def _end(self, address: _Address, has_succeeded: bool) -> None:
        address.pending -= 1
        if has_succeeded:
            self._left = min(self._total, self._left + 1)
            address.failures, address.until = 0, 0.0
            return
        now = self._clock()
        address.failures, address.failed_at = address.failures + 1, now
        over = address.failures - FREE_FAILURES
        if over >= 0:
            address.until = now + min(LONGEST_WAIT_SECONDS, 2.0 ** min(over, 30))

    def _make_room(self) -> None:
        """Forget the address that was used longest ago; the total goes on counting."""
        if len(self._addresses) >= _MOST_ADDRESSES:
            place = next((place for place, address in self._addresses.items() if not address.pending), None)
            if place is not None:
                del self._addresses[place]

    def reset(self) -> None:
        """Forget every failure."""
        with self._lock:
            self._addresses.clear()
            self._left = self._total
