"""The outcome of a run, and the callbacks by which its owner follows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from manyhands.executor.log import DeviceLog
from manyhands.facts.plan import Plan
from manyhands.runtime.control_messages import Progress
from manyhands.runtime.control_parts import Arrival
from manyhands.runtime.order import RunState
from manyhands.runtime.validating import CheckpointRequests, NoValidation, Validation

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
    grad_norms: list[float] = field(default_factory=list)
    """The norm of all gradients of each step before they were clipped, where that was asked for."""
    bytes_between: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(from, to) -> bytes sent in the rounds that were done, without copies of state."""
    logs: dict[str, DeviceLog] = field(default_factory=dict)
    state: RunState | None = None

    @property
    def of_last_step(self) -> tuple[int | None, float | None]:
        """The staleness of the last step, and the norm of its gradients; None: the run has none."""
        return self.staleness[-1] if self.staleness else None, self.grad_norms[-1] if self.grad_norms else None


@dataclass(frozen=True)
class RunHooks:
    """The callbacks of a run's owner; called from the run's own loop unless stated otherwise: they return at once."""

    on_step: OnStep = lambda step, loss, seconds: None
    """Called when a step is done on all devices."""
    on_snapshot: OnSnapshot = lambda state: None
    """Called when a snapshot is complete, from a thread of its own."""
    on_safe: Callable[[int], None] = lambda step: None
    """Called when every weight after this step is held in two places."""
    on_ready: Callable[[], None] = lambda: None
    """Called when all devices are ready; nothing is sent to them before it returns."""
    should_pause: Callable[[], bool] = lambda: False
    """Returns whether the round under way is to be the last."""
    on_arrivals: OnArrivals = lambda name, arrivals: None
    """Called when a device has received messages from others, with how long each took."""
    on_progress: OnProgress = lambda name, message: None
    """Called when a device has ended a round."""
    log_event: LogEvent = lambda event, /, **facts: None


@dataclass(frozen=True)
class JobHooks:
    """Callbacks by which the owner of an elastic job follows it; all from the job's own loop."""

    on_step: OnStep = lambda step, loss, seconds: None
    """A step was completed on all devices; a step that is run again is not reported twice."""
    on_snapshot: OnSnapshot = lambda state: None
    """A snapshot is complete."""
    log_event: LogEvent = lambda event, /, **facts: None
    should_stop: Callable[[], bool] = lambda: False
    """Whether the job is to end after the round under way."""
    validation: Validation = field(default_factory=NoValidation)
    requests: CheckpointRequests = field(default_factory=CheckpointRequests)
    """Checkpoints besides those that the order lists; the round under way ends first."""
    on_ready: Callable[[], None] = lambda: None
    """All devices are ready: what must be done before their first step is waited for here."""


@dataclass
class Recovery:
    """A recovery that is under way, until it is logged."""

    since: float
    """When the previous generation ended, by the clock of this process."""
    how: str
    from_step: int
    furthest: int
    bytes_moved: int
    is_logged: bool = False


@dataclass
class JobOutcome(Outcome):
    """The outcome of a job over all generations. Logs and plan are the last generation's."""

    plan: Plan | None = None
    is_stopped: bool = False
    """Whether it was stopped on request, before the last step."""
    generations: int = 1
    replayed_steps: int = 0
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """Each recovery as it was logged: how, seconds, from which step, bytes moved."""
    skipped_steps: list[int] = field(default_factory=list)
    """Steps that all devices skipped, since gradients of the scaled loss were not finite."""
    smaller: dict[int, int] = field(default_factory=dict)
    """Step -> samples of its batch, of those that were smaller than the plan's."""
    data_waits: dict[int, float] = field(default_factory=dict)
    """Step -> seconds for which all devices waited for its batch, where they did."""
    began_at: list[float] = field(default_factory=list)
    """When the first round after each recovery began, by the clock of this process."""

    def of_full_batches(self, first: int) -> list[float]:
        """Return the seconds of each step whose batch was as large as the plan's; `first`: the job's first step."""
        return [seconds for step, seconds in enumerate(self.step_seconds, first) if step not in self.smaller]

    def throughput(self, batch_size: int, first: int, warm_up_steps: int) -> float:
        """Return the samples per second after so many steps, or of all if there are no more; 0: there was no step."""
        steps = list(enumerate(self.step_seconds, first))
        steady = steps[warm_up_steps:] or steps
        seconds = sum(seconds for _, seconds in steady)
        return sum(self.smaller.get(step, batch_size) for step, _ in steady) / seconds if seconds else 0.0
