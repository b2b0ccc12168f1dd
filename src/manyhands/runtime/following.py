"""Makes the link between two workers follow a recorded trace while they work.

    with Following(coordinator, read_link_trace("bus_0001.txt"), up=("edge", "server"), down=("server", "edge")):
        ...  # the first rates hold before this begins

Each sender imitates its own direction (`transport.shaping`); this module only sends it the rate whenever that changes,
and at most `MOST_A_SECOND` times a second: where a trace changes more often, the mean rate until the next time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from manyhands.facts.errors import BadValue
from manyhands.facts.trace import LinkTrace, Trace
from manyhands.runtime.control_messages import Reshape
from manyhands.runtime.control_parts import Shape
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.member import Member

MOST_A_SECOND = 20.0
_STEP_SECONDS = 1 / MOST_A_SECOND
_SEND_SECONDS = 2.0
_MOST_NOTES = 100_000
_END_SECONDS = 10.0


class Setting(NamedTuple):
    """The rates that were set, and when, in seconds since the beginning."""

    seconds: float
    up_bytes_per_second: float
    down_bytes_per_second: float


class _Direction:
    """One sender, which is sent a rate when that changes, and when the sender is another member than before."""

    def __init__(self, coordinator: Coordinator, trace: Trace, ends: tuple[str, str], delay_seconds: float) -> None:
        self._coordinator, self._trace, (self._sender, self._receiver) = coordinator, trace, ends
        self._delay_seconds = delay_seconds
        self._informed: Member | None = None
        self.rate = math.nan
        self.due = 0.0
        """When the rate may change next, in seconds since the beginning."""

    def follow(self, seconds: float) -> bool:
        """Send the rate that holds from now on, if it is new to the sender. Return whether the rate has changed."""
        before = self.rate
        if seconds >= self.due:
            self.rate, lasts = self._next(seconds)
            self.due = seconds + lasts
        member = self._coordinator.members.get(self._sender)
        if member is not None and not member.is_lost and (member is not self._informed or self.rate != before):
            self._shape(Shape(self.rate, self._delay_seconds))
            self._informed = member
        return self.rate != before

    def lift(self) -> None:
        """Stop imitating a link: the sender uses the real one."""
        if self._informed is not None and not self._informed.is_lost:
            self._shape(Shape(None, 0.0))

    def _shape(self, shape: Shape) -> None:
        self._coordinator.send(self._sender, Reshape({self._receiver: shape}), _SEND_SECONDS)

    def _next(self, seconds: float) -> tuple[float, float]:
        """Return the rate at a moment and how many seconds it is to hold."""
        rate, lasts = self._trace.at(seconds)
        if lasts >= _STEP_SECONDS:
            return rate, lasts
        return self._trace.integral(seconds, seconds + _STEP_SECONDS) / _STEP_SECONDS, _STEP_SECONDS


class Following:
    """A thread that sets the rates of both directions until `close`. `up` and `down`: (sender, receiver)."""

    def __init__(
        self,
        coordinator: Coordinator,
        trace: LinkTrace,
        up: tuple[str, str],
        down: tuple[str, str],
        *,
        delay_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if up != down[::-1]:
            raise BadValue(f"Up is from {up[0]} to {up[1]}, but down is from {down[0]} to {down[1]}, not the reverse.")
        if not 0 <= delay_seconds < math.inf:
            raise BadValue(f"The link's delay is {delay_seconds} s; it must be finite and >= 0.")
        self.trace, self._clock = trace, clock
        self.set: deque[Setting] = deque(maxlen=_MOST_NOTES)
        self._up = _Direction(coordinator, trace.up, up, delay_seconds)
        self._down = _Direction(coordinator, trace.down, down, delay_seconds)
        self._began = clock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    def rates(self, seconds: float | None = None) -> tuple[float, float]:
        """Return bytes per second, up and down, at a moment in seconds after the beginning; None: now."""
        moment = self.seconds if seconds is None else seconds
        return self.trace.up.rate(moment), self.trace.down.rate(moment)

    def start(self) -> Following:
        """Start the thread. The first rates have been sent when this returns."""
        if self._thread is None:
            self._began = self._clock()
            self.follow()
            self._thread = threading.Thread(target=self._run, name="following", daemon=True)
            self._thread.start()
        return self

    def follow(self) -> float:
        """Send the rates that are new now. Return when to look again, in seconds since the beginning."""
        now = self.seconds
        news = [direction.follow(now) for direction in (self._up, self._down)]
        if any(news):
            self.set.append(Setting(now, self._up.rate, self._down.rate))
        return min(self._up.due, self._down.due, now + _STEP_SECONDS)

    def _run(self) -> None:
        due = 0.0
        while not self._ended.wait(max(0.0, due - self.seconds)):
            due = self.follow()

    def close(self) -> None:
        """End the thread, and stop imitating links in both directions."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        for direction in (self._up, self._down):
            direction.lift()

    def __enter__(self) -> Following:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
