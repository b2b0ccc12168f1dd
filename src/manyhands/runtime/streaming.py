"""A stream of samples over members that come and go: every sample that was taken in is answered once, in order.

a worker is lost      what is not answered is run again, by a plan for the remaining ones: each sample once more for
                      each loss at most; weights come from the coordinator, which has them all
one joins or leaves   what is under way is answered first: nothing is run again
no request            all devices wait, for as long as it takes
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from manyhands.executor.log import DeviceLog
from manyhands.facts.errors import ManyhandsError, TimedOut, WorkerLost
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel
from manyhands.graph.batching import answers_of, batch_of
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.job_membership import JobMembership
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.outcome import LogEvent, RunHooks
from manyhands.runtime.pace import Pace
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.runtime.stream_run import StreamRun

MOST_WAITING = 64
SUBMIT_SECONDS = 600.0
FILL_SECONDS = 0.005
"""Seconds that a sample waits for others to share its batch."""
OPEN_END = 2**53
"""Used in place of a last step, as there is none."""

Kernels = Mapping[str, Mapping[str, Kernel]]


class ReplanStream(Protocol):
    """A function that returns a plan for the devices that are there, and their kernels."""

    def __call__(self, plan: Plan, names: tuple[str, ...]) -> tuple[Plan, Kernels]: ...


@dataclass(eq=False)
class WaitingSample:
    """A sample that waits or is under way."""

    values: Mapping[str, torch.Tensor]
    future: Future[Any]
    since: float
    runs: int = 0


@dataclass
class _Recovery:
    """A change of members, until it is logged."""

    since: float
    again: int
    """Samples under way that are run again."""
    lost: list[str] = field(default_factory=list)


class Streaming:
    """Samples in from any thread, answers out as futures; a thread of its own talks to the workers.

    `order` says what is run; its last step is not looked at.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        order: Order,
        replan: ReplanStream,
        retry_policy: RetryPolicy | None = None,
        *,
        most_waiting: int = MOST_WAITING,
        log_event: LogEvent | None = None,
    ) -> None:
        self.coordinator, self.order, self.replan = coordinator, order, replan
        self.retry_policy = retry_policy or RetryPolicy()
        self.most_waiting = most_waiting
        self.log_event: LogEvent = log_event or (lambda event, /, **facts: None)
        self.plan = order.plan
        """The current plan."""
        self.pace = Pace()
        self.answered_samples = 0
        self.reruns = 0
        """Number of times that samples were run again."""
        self.most_runs = 0
        """The most runs of any sample."""
        self.generations = 0
        self.recoveries: list[dict[str, Any]] = []
        """Each recovery as it was logged."""
        self.logs: dict[str, DeviceLog] = {}
        """Logs of the devices of the last generation, once it is over."""
        self.bytes_between: Counter[tuple[str, str]] = Counter()
        self.error: BaseException | None = None
        """The reason why the stream has ended, if it was not closed."""
        self._membership = JobMembership(coordinator, self.retry_policy, self.log_event)
        self._change = threading.Condition()
        self._waiting: deque[WaitingSample] = deque()
        self._under_way: dict[int, list[WaitingSample]] = {}
        """Step -> its batch."""
        self._is_closing = self._is_cancelled = False
        self._is_ready = threading.Event()
        self._run: StreamRun | None = None
        self._recovery: _Recovery | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._work, name="stream", daemon=True)

    # The callers' side; from any thread

    def start(self) -> None:
        """Start the stream, and return when all devices are ready; raises why they are not."""
        self._thread.start()
        self._is_ready.wait()  # preparing has its own limits
        if self.error is not None:
            raise self.error

    def submit(self, values: Mapping[str, torch.Tensor], limit_seconds: float = SUBMIT_SECONDS) -> Future[Any]:
        """Submit one sample's inputs by name (batching.named_sample), and return the future of its answer.

        Waits while too many samples wait already.
        """
        end = time.monotonic() + limit_seconds
        future: Future[Any] = Future()
        may_wait = threading.current_thread() is not self._thread  # an answer's callback may submit again
        with self._change:
            while may_wait and len(self._waiting) >= self.most_waiting and not self._is_over_for_good:
                seconds_left = end - time.monotonic()
                if seconds_left <= 0:
                    raise TimedOut(
                        f"{len(self._waiting)} samples wait, and for {limit_seconds:g} s there was no room for more.",
                        hint="Ask more slowly, or take a cluster of more devices (--devices).",
                    )
                self._change.wait(seconds_left)
            if self._is_over_for_good:
                raise self._refusal()
            self._waiting.append(WaitingSample(values, future, time.monotonic()))
            is_first = len(self._waiting) == 1 or len(self._waiting) % self.plan.step_size == 0
        if is_first:
            self.coordinator.wake()
        return future

    @property
    def _is_over_for_good(self) -> bool:
        return self._is_closing or self.error is not None

    def _refusal(self) -> BaseException:
        return self.error or ManyhandsError("The stream is closed.", hint="Open another one.")

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self, *, cancel: bool = False) -> None:
        """Take no more samples. Those that were taken are answered first; with `cancel` they are dropped."""
        with self._change:
            self._is_closing = True
            self._is_cancelled = self._is_cancelled or cancel
            self._change.notify_all()
        self.coordinator.wake()
        if self._thread.ident is None:
            self._drop()
        elif threading.current_thread() is not self._thread:
            self._thread.join()  # each of its waits has a limit

    # The stream's side: a Flow

    @property
    def is_over(self) -> bool:
        return self._is_closing and (self._is_cancelled or not self._waiting)

    def ready_in(self, size: int) -> float:
        with self._change:
            while self._waiting and self._waiting[0].future.cancelled():
                self._waiting.popleft().future.set_running_or_notify_cancel()
                self._change.notify_all()
            if not self._waiting or self._is_cancelled:
                return math.inf
            if len(self._waiting) >= size or self._is_closing:
                return 0.0
            return max(0.0, self._waiting[0].since + FILL_SECONDS - time.monotonic())

    def take(self, step: int, size: int) -> Mapping[str, torch.Tensor] | None:
        batch: list[WaitingSample] = []
        with self._change:
            while self._waiting and len(batch) < size:
                sample = self._waiting.popleft()
                if sample.runs or sample.future.set_running_or_notify_cancel():
                    batch.append(sample)
            self._change.notify_all()
        if not batch:
            return None
        for sample in batch:
            sample.runs += 1
            self.reruns += sample.runs > 1
            self.most_runs = max(self.most_runs, sample.runs)
        self._under_way[step] = batch
        return batch_of(self.order.graph, [sample.values for sample in batch], size)

    def answered(self, step: int, outputs: dict[str, torch.Tensor]) -> None:
        answers = answers_of(self.order.graph, outputs, len(self._under_way[step]))
        batch = self._under_way.pop(step)
        self._failures = 0
        self.answered_samples += len(batch)
        for sample, answer in zip(batch, answers):
            sample.future.set_result(answer)
        self._log_recovered()

    def check(self) -> None:
        if self._is_cancelled:
            raise _Cancelled("The stream was closed.")

    # The thread

    def _work(self) -> None:
        try:
            self._membership.know_all()
            self._travel(self.order)
        except _Cancelled:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._is_ready.set()
            self._drop()

    def _drop(self) -> None:
        """End all samples that will not be answered: no caller waits on."""
        with self._change:
            unanswered = [*(sample for batch in self._under_way.values() for sample in batch), *self._waiting]
            self._under_way.clear()
            self._waiting.clear()
            self._is_closing = True
            self._change.notify_all()
        error = self.error or ManyhandsError("The stream was closed before this sample was answered.")
        for sample in unanswered:
            if self.error is None and sample.future.cancel():
                continue
            if sample.runs or sample.future.set_running_or_notify_cancel():
                sample.future.set_exception(error)

    def _travel(self, order: Order) -> None:
        """Run generation after generation, each beginning with what is not answered."""
        steps_done = order.start.steps_done
        while True:
            start = RunState(order.start.weights, steps_done=steps_done)
            bounded = dataclasses.replace(order, start=start, last_step=OPEN_END, snapshots=(), backup_every=0)
            run: StreamRun | None = None
            try:
                run = self._run = StreamRun(
                    self.coordinator,
                    bounded,
                    self,
                    RunHooks(should_pause=self._should_pause, on_progress=self.pace.reported),
                )
                self.plan = bounded.plan
                self.pace.forget()
                self._membership.dismiss(run.names)
                run.prepare()
                self.generations += 1
                self._is_ready.set()
                if not self._waiting:
                    self._log_recovered()
                run.stream(with_logs=True)
            except ManyhandsError as error:
                if isinstance(error, _Cancelled) or (self.is_over and not self._under_way):
                    return
                order = self._after_loss(order, error)
            else:
                self.logs = run.outcome.logs
                if self.is_over:
                    return
                self._membership.log_change(run.names)
                order = self._next(order, time.monotonic(), WorkerLost("Nobody is left."))
            finally:
                if run is not None:
                    steps_done = run.answered
                    self.bytes_between += run.outcome.bytes_between

    def _should_pause(self) -> bool:
        assert self._run is not None
        return self._membership.has_changed(self._run.names)

    # When members change

    def _after_loss(self, order: Order, error: ManyhandsError) -> Order:
        since = time.monotonic()
        alive = {member.name for member in self.coordinator.alive()}
        lost = [name for name in order.plan.devices if name not in alive]
        is_theirs = isinstance(error, WorkerLost) or (isinstance(error, TimedOut) and bool(lost))
        self._failures += 1
        if not is_theirs or self._failures > self.retry_policy.attempts:
            raise error
        self.log_event("lost", devices=lost, step=self.answered_samples, reason=error.message)
        return self._next(order, since, error, lost)

    def _next(self, order: Order, since: float, error: ManyhandsError, lost: list[str] | None = None) -> Order:
        """Return the order of the next generation; what was under way waits again, before everything else."""
        with self._change:
            again = [sample for step in sorted(self._under_way) for sample in self._under_way[step]]
            self._under_way.clear()
            self._waiting.extendleft(reversed(again))
        earlier = self._recovery
        self._recovery = _Recovery(since, len(again), list(lost or ()))
        if earlier is not None:  # another was lost before anything was answered: one recovery
            self._recovery = _Recovery(earlier.since, earlier.again + len(again), [*earlier.lost, *self._recovery.lost])
        while True:
            self._membership.wait_for_enough(error, self.check)
            available = self._membership.available()
            if len(available) < self.retry_policy.min_devices:
                continue
            self._membership.know_all()
            try:
                plan, kernels = self.replan(order.plan, tuple(member.name for member in available))
                break
            except (WorkerLost, TimedOut) as failure:
                error = failure
                self._failures += 1
                if self._failures > self.retry_policy.attempts:
                    raise
        self.log_event("replanned", how="inference", reason="", plan=plan.to_dict())
        return dataclasses.replace(order, plan=plan, kernels=kernels, trace_steps=range(0), memory_step=-1)

    def _log_recovered(self) -> None:
        """Log a recovery once the first answer is out, or once all devices are ready while there is no request."""
        recovery, self._recovery = self._recovery, None
        if recovery is None:
            return
        facts = {
            "seconds": time.monotonic() - recovery.since, "samples": recovery.again, "lost": recovery.lost,
            "answered": self.answered_samples, "generation": self.coordinator.generation,
            "devices": list(self.plan.devices),
        }  # fmt: skip
        self.recoveries.append(facts)
        self.log_event("recovered", **facts)


class _Cancelled(ManyhandsError):
    """Raised where the caller no longer wants the answers."""
