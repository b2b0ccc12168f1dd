"""A job of `manyhands bench recovery`: connected workers, a network, a plan, and runs through a failure."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

from manyhands.data.loader import Prefetcher, length
from manyhands.data.order import BatchOrder
from manyhands.data.rewinding import Rewindable
from manyhands.executor.optimizers import slots
from manyhands.facts.cluster import Cluster
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BatchNorm, Plan
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.graph.graph import Graph
from manyhands.job.replanning import Replanner, chosen_backups
from manyhands.plans.pipelines import pipeline_plan
from manyhands.runtime.assembly import JOIN_SECONDS
from manyhands.runtime.elastic_job import ElasticJob
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.outcome import JobHooks, JobOutcome
from manyhands.runtime.processes import WorkerProcess
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.runtime.run import Run
from manyhands.session.measuring import measure
from manyhands.session.session import Session
from manyhands.simulator.simulate import simulate

WARM_UP_STEPS = 2
STRATEGY = "pipeline"
"""The strategy that full re-planning searches, as in the paper."""
Groups = tuple[tuple[str, ...], ...]
"""The devices of every stage."""
OnStep = Callable[[int, ElasticJob], None]
"""Called with a step and the job that has completed it."""
OnJob = Callable[[ElasticJob], None]


class DrawnPictures(Dataset[Any]):
    """Pictures and classes drawn at random; no two samples are alike, so a batch run twice or left out shows."""

    def __init__(self, shape: tuple[int, ...], samples: int, classes: int, dtype: torch.dtype) -> None:
        drawing = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, *shape, generator=drawing, dtype=dtype)
        self.targets = torch.randint(classes, (samples,), generator=drawing)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


@dataclass(frozen=True)
class Strike:
    """A signal to a worker, sent some time after a step has ended, so that it falls into a round."""

    name: str
    after_step: int
    delay_seconds: float
    signal: signal.Signals = signal.SIGKILL
    after_copies: int = 0
    """The step of which copies must have arrived where they belong before."""


@dataclass
class Trip:
    """A run through a failure, with the moments of its events by this process's clock."""

    outcome: JobOutcome = field(default_factory=JobOutcome)
    struck_at: float = 0.0
    steps: list[tuple[float, int, float]] = field(default_factory=list)
    """(moment at which it ended, step, loss)."""
    events: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)

    def when(self, event: str) -> float:
        """Return the moment at which the event was first logged."""
        return next(moment for moment, name, _ in self.events if name == event)

    @property
    def recovery_seconds(self) -> float:
        """Seconds from the signal to the start of the next round that was completed."""
        return self.outcome.began_at[0] - self.struck_at

    @property
    def detect_seconds(self) -> float:
        return self.when("lost") - self.struck_at

    @property
    def replan_seconds(self) -> float:
        """Seconds from the loss to the new plan, in which the remaining devices report what they hold."""
        return self.when("replanned") - self.when("lost")

    @property
    def first_round_seconds(self) -> float:
        """Seconds from the signal to the end of the first completed round, even if it is run again."""
        return self.when("recovered") - self.struck_at

    @property
    def caught_up_seconds(self) -> float:
        """Seconds from the signal to the end of the first round that had not been completed before."""
        lost = self.when("lost")
        return next(moment for moment, _, _ in self.steps if moment >= lost) - self.struck_at

    def recoveries_after(self, event: str) -> list[float]:
        """Return the seconds of each recovery whose last cause was `event`, such as a loss or a join."""
        seconds, cause = [], ""
        for _, name, facts in self.events:
            if name == "recovered" and cause == event:
                seconds.append(float(facts["seconds"]))
            cause = name if name in ("lost", "joined", "leaving") else cause
        return seconds

    @property
    def facts(self) -> dict[str, Any]:
        return self.outcome.recoveries[0]

    @property
    def losses(self) -> list[float]:
        return [loss for _, _, loss in self.steps]

    def rounds_lost(self, steps: int) -> int:
        """Return the number of rounds that were not reported exactly once; 0 only if they were also in order."""
        completed = [step for _, step, _ in self.steps]
        return (
            0
            if completed == list(range(steps))
            else len(set(range(steps)) ^ set(completed)) + len(completed) - len(set(completed))
        )


@dataclass
class Site:
    """The workers, the network and data they train, and the plan by which they share it."""

    session: Session
    graph: Graph
    data: Dataset[Any]
    optimizer: Optimizer
    plan: Plan
    cluster: Cluster
    profile: Profile
    backup_every: int
    seed: int = 0

    @classmethod
    def of(
        cls, session: Session, graph: Graph, data: Dataset[Any], optimizer: Optimizer, *, samples: int,
        micro_batches: int, groups: Groups, measure_seconds: float, batch_norm: BatchNorm = "synchronised",
    ) -> Site:  # fmt: skip
        """Return a job whose stages are `groups`, with balanced cuts and shares by speed.

        measure_seconds   how long the devices are measured first; 0: their times are estimated from the catalogue
        """
        size = samples // micro_batches
        cluster = session.cluster
        if measure_seconds:
            cluster, profile = measure(
                session, graph, samples, optimizer=optimizer, seconds=measure_seconds, refresh=True,
                ladder=tuple(sorted({max(1, size // 2), size})),
            )  # fmt: skip
        else:
            profile = estimate_cluster(graph.network, cluster)
        plan = pipeline_plan(
            graph, cluster, devices=groups, micro_batches=micro_batches, batch_size=samples,
            optimizer_slots=slots(optimizer), profile=profile, batch_norm=batch_norm,
        )  # fmt: skip
        seconds = simulate(plan, graph.network, cluster, profile, keep_spans=False).seconds
        every = chosen_backups(plan, graph.network, cluster, seconds)
        return cls(session, graph, data, optimizer, plan, cluster, profile, every)

    def travel(
        self, steps: int, *, how: str = "light", strike: Strike | None = None, on_step: OnStep | None = None,
        snapshots: tuple[int, ...] = (), job_type: type[ElasticJob] = ElasticJob, on_job: OnJob = lambda job: None,
    ) -> Trip:  # fmt: skip
        """Train `steps` steps from the beginning as `mh.train` does, whatever happens to the workers.

        `on_job` is called with the job before it begins.
        """
        trip = Trip()
        replanner = Replanner(
            self.session, self.graph, self.cluster, self.profile, STRATEGY, self.optimizer,
            self.predicted_seconds(self.plan), None,
        )  # fmt: skip
        order = Order(
            graph=self.graph, plan=self.plan, start=RunState(dict(self.graph.state)), last_step=steps,
            optimizer=self.optimizer, seed=self.seed, kernels=replanner.kernels(self.plan), snapshots=snapshots,
            backup_every=self.backup_every,
        )  # fmt: skip

        strikes: list[Strike] = []

        def stepped(step: int, loss: float | None, seconds: float) -> None:
            trip.steps.append((time.monotonic(), step, float("nan") if loss is None else loss))
            is_due = strike is not None and step >= strike.after_step and job.safe_step >= strike.after_copies
            if strike is not None and is_due and not strikes:
                strikes.append(strike)
                threading.Thread(target=self._strike, args=(strike, trip), name="strike", daemon=True).start()
            if on_step is not None:
                on_step(step, job)

        def log(event: str, /, **facts: Any) -> None:
            trip.events.append((time.monotonic(), event, facts))

        with Rewindable(lambda step: self._batches(step, steps), 0) as batches:
            job = job_type(
                self.session.coordinator, order, batches, replanner, RetryPolicy(how, wait_seconds=JOIN_SECONDS),
                hooks=JobHooks(stepped, log_event=log),
            )  # fmt: skip
            on_job(job)
            trip.outcome = job.run()
        return trip

    def predicted_seconds(self, plan: Plan) -> float:
        """Return the predicted seconds of a round."""
        return simulate(plan, self.graph.network, self.cluster, self.profile, keep_spans=False).seconds

    def _batches(self, first: int, last: int) -> Prefetcher:
        order = BatchOrder(length(self.data), self.plan.batch_size, True, self.seed)
        return Prefetcher(self.data, order, first, last, wake=self.session.coordinator.wake)

    def _strike(self, strike: Strike, trip: Trip) -> None:
        time.sleep(strike.delay_seconds)
        process = self.session.coordinator.local.processes[strike.name].pid
        trip.struck_at = time.monotonic()
        os.kill(process, strike.signal)

    def round_seconds(self, plan: Plan, steps: int, backup_every: int = 0) -> float:
        """Return the mean seconds of a round in a block of steps, without those that warm up."""
        whole = steps + WARM_UP_STEPS
        order = Order(
            graph=self.graph, plan=plan, start=RunState(dict(self.graph.state)), last_step=whole,
            optimizer=self.optimizer, seed=self.seed, backup_every=backup_every,
            kernels={name: self.profile.of(name).kernels for name in plan.devices},
        )  # fmt: skip
        run = Run(self.session.coordinator, order)
        run.prepare()
        with self._batches(0, whole) as batches:
            return statistics.mean(run.run(iter(batches)).step_seconds[WARM_UP_STEPS:])

    def bring_back(self, names: Sequence[str], *, wait: bool = True) -> None:
        """Restart workers that were struck, each in its old place; with `wait`, wait until all have joined."""
        local, session = self.session.coordinator.local, self.session
        restarts = []
        for name in names:
            process = local.processes[name]
            end_process(process.pid)
            process.wait()
            before = local.started_as[name].before  # what brings it into a lab
            restarts.append(WorkerProcess((name,), session.cluster.device(name).compute, before, name))
        if wait:
            session.coordinator.start_workers(restarts, session.threads, JOIN_SECONDS)
        else:
            local.start(
                restarts, session.coordinator.address, session.coordinator.security, threads=session.threads,
                joins_later=True,
            )  # fmt: skip


def end_process(process: int) -> None:
    """Kill a process of ours, which may be stopped or have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
