"""Training whose batches a user's own loop pushes: one job, in stretches, each an elastic job on a thread of its own.

    step(batch)  ──push──▶  kept batches ──▶ elastic job (thread)  ──▶ losses ──▶ whoever reads them
    evaluate, state_dict, close: the stretch ends after what was pushed; its state comes here; the next push begins
    another from there

A stretch ends as a job that is stopped does, so its state is exact whatever happened on the way. Only one thread talks
to the workers at a time: that of the stretch, or between two stretches the loop's own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from manyhands.data.pushed import BatchRows, PushedBatches
from manyhands.executor.rates import EACH_UPDATES, Accumulation
from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.errors import ManyhandsError, WorkerLost
from manyhands.facts.plan import Plan
from manyhands.graph.weights import Weights
from manyhands.job.base import Guide
from manyhands.job.evaluation import EvaluateResult
from manyhands.job.ordering import order_of
from manyhands.job.workload import CHECKPOINT_SECONDS, Workload
from manyhands.runtime.elastic_job import ElasticJob
from manyhands.runtime.order import RunState
from manyhands.runtime.outcome import JobHooks
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.training.loop_optimizer import LoopOptimizer, mark_absent
from manyhands.training.train import TrainJob

OPEN_END = 2**53
"""In place of a last step, as nobody knows it."""
CHECKPOINTS_AHEAD = 1000
"""Checkpoints of one stretch: then another begins, which takes no longer than an evaluation."""
MOST_UNDER_WAY = 6
"""Most steps that the loop may be ahead of the workers, so that it neither waits for each nor fills the memory."""


@dataclass
class LoopWorkload(Workload):
    """A workload whose data is the first batch of a loop, and which goes on for as long as there are batches."""

    @property
    def last_step(self) -> int:
        return OPEN_END

    @property
    def known_steps(self) -> None:
        """None: the loop knows."""

    def checkpoint_steps(self, step_seconds: float, trained_bytes: int) -> int:
        return max(1, int(CHECKPOINT_SECONDS / max(step_seconds, 1e-6)))


class PushedTraining:
    """A job that trains on what is pushed, until it is closed or has failed."""

    def __init__(
        self, job: TrainJob, planned: PlannedRun, strategy: str, retry_policy: RetryPolicy, batches: PushedBatches,
        optimizer: LoopOptimizer,
    ) -> None:  # fmt: skip
        self.job, self.planned, self.retry_policy, self.batches = job, planned, retry_policy, batches
        self.optimizer = optimizer
        self.guide: Guide = job.replanner(planned, strategy)
        self.plan: Plan = planned.plan
        """The current plan."""
        self.state = job.start
        """The state after the last stretch, or the last checkpoint in the one under way."""
        self.recoveries: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        """What has ended it, if it was not closed."""
        self.is_closed = False
        self.resources = ExitStack()
        """The workers and the folder, closed with it."""
        self._change = threading.Condition()
        self._losses: dict[int, Future[float]] = {}
        """The losses of the steps under way."""
        self._reported = job.start.steps_done
        """Steps whose losses were passed on."""
        self._done = job.start.steps_done
        """Steps that are done in the stretch under way, or were before it."""
        self._is_over = True
        """Whether the stretch has ended."""
        self._thread: threading.Thread | None = None
        self._is_to_end = False
        self._owner = threading.get_ident()
        self._loaded = 0
        """The steps whose weights the module has."""

    # The loop's side

    def push(self, inputs: Any, targets: Any, accumulation: Accumulation = EACH_UPDATES) -> tuple[int, Future[float]]:
        """Add a batch, and return its step and its loss, which is yet to come. Waits while many are under way."""
        with self._change:
            self._change.wait_for(lambda: len(self._losses) < MOST_UNDER_WAY or self.error is not None)
            self.raise_error()
            self.optimizer.note(self.batches.end, accumulation)
            future: Future[float] = Future()
            self._losses[self.batches.end] = future
            step = self.batches.push(inputs, targets)
        if self._thread is None:
            self._begin()
        else:
            self.job.session.coordinator.wake()
        return step, future

    def expect_no_gradients(self) -> None:
        """Make gradients in this process tell whoever reads them that they are not here."""
        if not self.is_closed:
            mark_absent(self.job.workload.model)

    def awaited(self, future: Future[float]) -> float:
        """Return a step's loss, after waiting for it."""
        with self.ending_on_failure():
            return future.result()

    def settle(self) -> RunState:
        """Return the state after all that was pushed; the workers then wait."""
        while self._thread is not None or self.state.steps_done < self.batches.end:
            if self._thread is None:
                self._begin()  # a worker was lost just when the last stretch ended: some steps are run again
            with self._change:
                self._change.wait_for(lambda: self._done >= self.batches.end or self._is_over or self.error is not None)
                self._is_to_end = True
            self.job.session.coordinator.wake()
            self._join()
            self.raise_error()
        return self.state

    def evaluated(self, inputs: Any, targets: Any) -> EvaluateResult:
        """Return loss, accuracy and outputs for a batch, with the current weights."""
        self.job.trained = self.settle()
        return self.job.evaluated(self._planned(), BatchRows(inputs, targets), keep_outputs=True)

    def refresh(self) -> None:
        """Load the weights after all that was pushed into the module, unless it has them."""
        if threading.get_ident() != self._owner or self.is_closed or self._loaded == self.batches.end:
            return  # a checkpoint is written from another thread, and has its own weights
        with self.ending_on_failure():
            self.settle()
            self._load()

    def _load(self) -> None:
        Weights(self.state.weights).load_into(self.job.workload.model, self.job.graph)
        self._loaded = self.state.steps_done

    @contextlib.contextmanager
    def ending_on_failure(self) -> Iterator[None]:
        """Close where the job has failed in this context, or is interrupted."""
        try:
            yield
        except BaseException as error:
            if self.error is not None or isinstance(error, KeyboardInterrupt):
                self.close()
            raise

    def close(self) -> None:
        """Load the weights after all that was pushed into the module, and end the workers.

        Where the job has failed, or this is interrupted, the module gets the weights of the last checkpoint.
        """
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if self.error is None:
                self.settle()
                self.job.record.event("finished", steps=self.state.steps_done)
        except BaseException as error:
            self.error = error
        finally:
            self._load()
            self.optimizer.take_back(self.state)
            self._end()

    def _end(self) -> None:
        """End the workers and close the folder; the error that has ended the job is raised."""
        with self._change:
            self._is_to_end = True
            futures, self._losses = list(self._losses.values()), {}
        for future in futures:
            future.set_exception(ManyhandsError("The training was closed before this step was done."))
        if self.error is None or isinstance(self.error, KeyboardInterrupt):
            self.resources.close()
        else:
            self.resources.__exit__(type(self.error), self.error, self.error.__traceback__)
        if self.error is not None:
            raise self.error

    def raise_error(self) -> None:
        """Raise what has ended the job."""
        if self.error is not None:
            raise self.error

    # The stretch

    def _begin(self) -> None:
        self._is_to_end, self._is_over, self._done = False, False, self.state.steps_done
        self._thread = threading.Thread(target=self._stretch, name="training", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()  # each of its waits has a limit, or ends with `_is_to_end`
        self._thread = None

    def _stretch(self) -> None:
        elastic_job: ElasticJob | None = None
        try:
            job, planned = self.job, self._planned()
            every = job.checkpoint_every(planned)
            order = order_of(job, planned, self.guide, self.state, self.state.steps_done + CHECKPOINTS_AHEAD * every)
            order.waits_for_batches = True
            if self.optimizer.rates is not None:
                order.rates = self.optimizer.rates
            elastic_job = ElasticJob(
                job.session.coordinator, order, self.batches, self.guide, self.retry_policy,
                hooks=JobHooks(self._stepped, self._saved, job.tell, lambda: self._is_to_end), living=job.record.living,
            )  # fmt: skip
            outcome = elastic_job.run()
            assert outcome.state is not None
            assert outcome.plan is not None
            self.state, self.plan = outcome.state, outcome.plan
            self.recoveries += outcome.recoveries
        except BaseException as error:
            self._failed(error)
        finally:
            with self._change:
                self._is_over = True
                self._change.notify_all()

    def _planned(self) -> PlannedRun:
        cluster, profile = self.guide.present(self.plan, self.plan.devices)
        return replace(self.planned, plan=self.plan, cluster=cluster, profile=profile)

    def _stepped(self, step: int, loss: float | None, seconds: float) -> None:
        if step < self._reported:  # it is run again
            with self._change:
                self._done = max(self._done, step + 1)
                self._change.notify_all()
            return
        job = self.job
        self._reported = step + 1
        job.record.step(step, 0, loss, seconds, self.batches.samples_at(step) or job.workload.batch_size)
        with self._change:
            future = self._losses.pop(step, None)
            self._done = max(self._done, step + 1)
            self._change.notify_all()
        if future is not None:  # else it was closed in the meantime
            future.set_result(loss if loss is not None else float("nan"))

    def _saved(self, state: RunState) -> None:
        self.job._keep(state)
        self.state = state
        self.optimizer.forget_before(state.steps_done)

    def _failed(self, error: BaseException) -> None:
        """End all waits of the loop with the error."""
        if not isinstance(error, ManyhandsError):
            error = error if isinstance(error, Exception) else WorkerLost(f"The training thread has ended: {error!r}")
        with self._change:
            self.error = error
            futures = list(self._losses.values())
            self._losses.clear()
            self._change.notify_all()
        for future in futures:
            future.set_exception(error)
