"""The outcome of a run, and the callbacks by which its owner follows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from manyhands.executor.log import DeviceLog
from manyhands.runtime.control_messages import Progress
from manyhands.runtime.control_parts import Arrival
from manyhands.runtime.order import RunState

OnStep = Callable[[int, float | None, float], None]
OnSnapshot = Callable[[RunState], None]
OnArrivals = Callable[[str, tuple[Arrival, ...]], None]
OnProgress = Callable[[str, Progress], None]


class LogEvent(Protocol):
    """A function that logs an event: its name, and facts that can be written down."""

    def __call__(self, event: str, /, **facts: Any) -> None: ...


@dataclass
class Outcome:
    """The results of a run."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    """From one step's end to the next, as the slowest device reported them."""
    staleness: list[int] = field(default_factory=list)
    """With order replay, by how many updates each step's gradient was late; -1: too many, it was discarded."""
    bytes_between: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(from, to) -> bytes sent in the rounds that were done, without copies of state."""
    logs: dict[str, DeviceLog] = field(default_factory=dict)
    state: RunState | None = None


@dataclass(frozen=True)
class RunHooks:
    """The callbacks of a run's owner; called from the run's own loop unless stated otherwise: they return at once."""

    on_step: OnStep = lambda step, loss, seconds: None
    """Called when a step is done on all devices."""
    on_snapshot: OnSnapshot = lambda state: None
    """Called when a snapshot is complete, from a thread of its own."""
    on_safe: Callable[[int], None] = lambda step: None
    """Called when every weight after this step is held in two places."""
    should_pause: Callable[[], bool] = lambda: False
    """Returns whether the round under way is to be the last."""
    on_arrivals: OnArrivals = lambda name, arrivals: None
    """Called when a device has received messages from others, with how long each took."""
    on_progress: OnProgress = lambda name, message: None
    """Called when a device has ended a round."""
    log_event: LogEvent = lambda event, /, **facts: None
