"""Has the link between two workers follow a recorded one, while they work.

    with Following(coordinator, read_link_trace("bus_0001.txt"), up=("edge", "server"), down=("server", "edge")):
        ...  # the first rates hold before this begins

Each sender imitates its own direction (`engine.shaping`); this only tells it the rate, whenever that changes, and at
most `MOST_A_SECOND` times a second: of a trace that changes more often, the mean of what it does until the next time.
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
    """What was set, and when: seconds since it began."""

    seconds: float
    up_bytes_per_second: float
    down_bytes_per_second: float


class _Direction:
    """One sender, which is told when its rate changes, and when it is another member than before."""

    def __init__(self, coordinator: Coordinator, trace: Trace, ends: tuple[str, str], delay_seconds: float) -> None:
        self._coordinator, self._trace, (self._sender, self._receiver) = coordinator, trace, ends
        self._delay_seconds = delay_seconds
        self._informed: Member | None = None
        self.rate = math.nan
        self.due = 0.0
        """When the rate may be another, in seconds since the beginning."""

    def follow(self, seconds: float) -> bool:
        """Say what holds from now on, if it is new to the sender. Whether the rate is another."""
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
        """The link is as it is."""
        if self._informed is not None and not self._informed.is_lost:
            self._shape(Shape(None, 0.0))

    def _shape(self, shape: Shape) -> None:
        self._coordinator.send(self._sender, Reshape({self._receiver: shape}), _SEND_SECONDS)

    def _next(self, seconds: float) -> tuple[float, float]:
        """A rate, and how long it is to hold."""
        rate, lasts = self._trace.at(seconds)
        if lasts >= _STEP_SECONDS:
            return rate, lasts
        return self._trace.integral(seconds, seconds + _STEP_SECONDS) / _STEP_SECONDS, _STEP_SECONDS


class Following:
    """A thread that ends with `close`. `up` and `down`: who sends, who receives."""

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
            raise BadValue(f"What goes up from {up[0]} to {up[1]} does not come down from {down[0]} to {down[1]}.")
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
        """Since it began."""
        return self._clock() - self._began

    def rates(self, seconds: float | None = None) -> tuple[float, float]:
        """Bytes per second, up and down, at a moment after the beginning; None: now."""
        moment = self.seconds if seconds is None else seconds
        return self.trace.up.rate(moment), self.trace.down.rate(moment)

    def start(self) -> Following:
        """The first rates are said when this returns."""
        if self._thread is None:
            self._began = self._clock()
            self.follow()
            self._thread = threading.Thread(target=self._run, name="following", daemon=True)
            self._thread.start()
        return self

    def follow(self) -> float:
        """Say what is new now. When to look again, in seconds since the beginning."""
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
        """From now on the link is as it is."""
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
