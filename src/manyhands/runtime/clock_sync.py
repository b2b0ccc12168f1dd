"""Measures how far the workers' clocks are from this process', and whether a worker answers at all.

A worker answers `AskClock` with its clocks; answers are filed under the worker and the ticket of the question.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable

from manyhands.facts.errors import ManyhandsError
from manyhands.runtime.control import encode
from manyhands.runtime.control_messages import AskClock, Clock
from manyhands.runtime.membership import Membership

_TRIES = 5
_ANSWER_SECONDS = 2.0
_MOST_ANSWERS = 10_000
PROBE_TICKET = -1
"""The ticket of a question whose answer is not read: that it came is enough."""


class ClockSync:
    """Asks workers for their clocks, and keeps their answers."""

    def __init__(self, membership: Membership, send_seconds: float) -> None:
        """`send_seconds`: how long a question may take to leave."""
        self._membership, self._send_seconds = membership, send_seconds
        self._answers: dict[tuple[str, int], Clock] = {}
        self._tickets = itertools.count(PROBE_TICKET - 1, -1)

    def answered(self, name: str, answer: Clock) -> None:
        """File a worker's answer."""
        if len(self._answers) >= _MOST_ANSWERS:
            self._answers.clear()  # no coordinator asks this many questions
        self._answers[name, answer.ticket] = answer

    def ask(self, name: str, ticket: int | None = None) -> int:
        """Ask a worker whether it responds, without waiting: see `has_answered`. Return the ticket."""
        number = next(self._tickets) if ticket is None else ticket
        channel, data = self._membership.members[name].channel, encode(AskClock(number))

        def send() -> None:
            with contextlib.suppress(ManyhandsError):
                channel.send(data, self._send_seconds)  # this blocks where the worker does not read

        threading.Thread(target=send, name="coordinator probe", daemon=True).start()
        return number

    def has_answered(self, name: str, ticket: int) -> bool:
        """Return whether a worker has answered the question of this ticket."""
        return (name, ticket) in self._answers

    def synchronize(self, names: Iterable[str]) -> dict[str, float]:
        """Set the clock offsets of these workers from the middle of the quickest of a few round trips.

        Returns the seconds of that round trip, for each worker that answered.
        """
        round_trips: dict[str, float] = {}
        for name in names:
            best = float("inf")
            for ticket in range(_TRIES):
                start = time.monotonic()
                self._answers.pop((name, ticket), None)
                self._membership.send(name, AskClock(ticket))
                while (name, ticket) not in self._answers and time.monotonic() - start < _ANSWER_SECONDS:
                    if self._membership.members[name].is_lost:
                        break  # the loss is in the events
                    time.sleep(0.0002)
                end = time.monotonic()
                if (name, ticket) not in self._answers:
                    break
                if end - start < best:
                    best = round_trips[name] = end - start
                    clock, member = self._answers[name, ticket], self._membership.members[name]
                    member.clock_offset_seconds = (start + end) / 2 - clock.seconds
                    if clock.wall_seconds:
                        member.wall_offset_seconds = time.time() - (end - start) / 2 - clock.wall_seconds
        return round_trips
