"""What comes of a run, and the callbacks by which its owner follows it."""

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
    """Logs an event: its name, and facts that can be written down."""

    def __call__(self, event: str, /, **facts: Any) -> None: ...


@dataclass
class Outcome:
    """What came of a run."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    """From one step's end to the next, as the slowest device reported them."""
    staleness: list[int] = field(default_factory=list)
    """Of each step with order replay: by how many updates its gradient was late; -1: too many, it was discarded."""
    bytes_between: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(from, to) -> bytes sent in the rounds that were done, copies of state apart."""
    logs: dict[str, DeviceLog] = field(default_factory=dict)
    state: RunState | None = None


@dataclass(frozen=True)
class RunHooks:
    """What the owner of a run is called for; all from the run's own loop, so they return at once."""

    on_step: OnStep = lambda step, loss, seconds: None
    """A step is done on all devices."""
    on_snapshot: OnSnapshot = lambda state: None
    """A snapshot is complete; called from a thread of its own."""
    on_safe: Callable[[int], None] = lambda step: None
    """Every weight after this step is at two places."""
    should_pause: Callable[[], bool] = lambda: False
    """Whether the round under way is to be the last."""
    on_arrivals: OnArrivals = lambda name, arrivals: None
    """A device has received messages of others, and how long each took."""
    on_progress: OnProgress = lambda name, message: None
    """A device has ended a round."""
    log_event: LogEvent = lambda event, /, **facts: None
