"""Measures and plans again while training, where there was no time for all of it before the first step.

    first step                               pause at a step boundary
    |  step  step  step  ...  step  step  step |measure|plan| step  step  step ...
                                                          `-- by the plan that is faster over the steps that remain

This happens once, and not before it takes less than PART of the time trained so far, nor later than when it takes less
than PART of the time that remains: short runs keep their plan. It is given up when devices come or go, since that has
the job planned anew anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError, TimedOut, WorkerLost
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel, Profile
from manyhands.facts.units import format_seconds
from manyhands.job.replanning import KEPT, SWITCHED, Replanner, chosen_backups
from manyhands.plans.simulating import simulate
from manyhands.runtime.control_parts import Arrival
from manyhands.runtime.controller import Change

PART = 1 / 30
"""The most that measuring and planning may take of the time trained so far, and of the time that remains."""
LEAST_STEPS = 10
LEAST_GAIN = 1.03
"""How much faster another plan must be, as predicted: what predictions are worth."""

Measuring = Callable[[], tuple[Cluster, Profile]]
Planning = Callable[[Cluster, Profile], Plan]


@dataclass(frozen=True)
class Refinement:
    """The measuring and planning that are left, how long they are likely to take, and when the run ends."""

    seconds: float
    """Likely for measuring and planning."""
    last_step: int
    measure: Measuring | None
    """None: the profile is good; only planning is left."""
    plan: Planning
    on_measured: Callable[[Cluster, Profile], None]
    clock: Callable[[], float] = time.monotonic


class Refiner:
    """The controller of an elastic job that began with less than was worth knowing; it is also the job's `Replan`."""

    def __init__(self, replanner: Replanner, planned: PlannedRun, course: Refinement) -> None:
        self.replanner, self.course = replanner, course
        self.cluster, self.profile = planned.cluster, planned.profile
        self.is_over = self._is_due = False
        """Whether nothing is left to do; whether the next plan is to be made from a new measurement."""
        self.steps = 0
        self._began: tuple[float, int] | None = None
        """When the first round ended, and the steps done by then."""

    # While a round runs

    def stop_at(self, step: int) -> int | None:
        return None

    def should_change(self, steps_done: int) -> bool:
        """Return whether measuring and planning are worth their time now."""
        self.steps = steps_done
        if self.is_over or self._began is None:
            return False
        began, first = self._began
        trained, steps = self.course.clock() - began, steps_done - first
        if steps < LEAST_STEPS:
            return False
        remaining = trained / steps * (self.course.last_step - steps_done)
        most = self.course.seconds / PART
        if remaining < most:
            self.is_over = True
            return False
        self._is_due = trained >= most
        return self._is_due

    def arrived(self, device: str, arrivals: Sequence[Arrival]) -> None:
        pass

    def began(self, plan: Plan, steps_done: int) -> None:
        if self._began is None:
            self._began = self.course.clock(), steps_done

    # Between rounds

    def __call__(self, plan: Plan, names: tuple[str, ...], how: str) -> Change:
        is_due, self._is_due, self.is_over = self._is_due, False, True
        if not is_due or set(names) != set(self.cluster.names):
            return self.replanner(plan, names, how)
        try:
            return self._refined(plan)
        except (WorkerLost, TimedOut):
            raise
        except ManyhandsError as error:
            return self._change(plan, KEPT, f"The plan stays: it could not be measured anew. {error.message}")

    def _refined(self, plan: Plan) -> Change:
        began, course = self.course.clock(), self.course
        if course.measure is not None:
            self.cluster, self.profile = course.measure()
            self.replanner.learnt(self.cluster, self.profile)
            course.on_measured(self.cluster, self.profile)
        other = course.plan(self.cluster, self.profile)
        before, after = self._step_seconds(plan), self._step_seconds(other)
        spent = course.clock() - began
        saved = (before - after) * (course.last_step - self.steps)
        what = "measuring" if course.measure is not None else "planning"
        took = f"after {what} for {format_seconds(spent)} more"
        if other == plan or before < LEAST_GAIN * after or saved < spent:
            return self._change(plan, KEPT, f"The plan stays, {took}: {format_seconds(before)} a step.")
        text = f"Another plan is faster, {took}: {format_seconds(after)} a step, not {format_seconds(before)}."
        self.replanner.begins_anew(other, after * other.steps_per_round)
        return self._change(other, SWITCHED, text)

    def _step_seconds(self, plan: Plan) -> float:
        network = self.replanner.graph.network
        prediction = simulate(plan, network, self.cluster, self.profile, keep_spans=False, within_memory=True)
        return prediction.seconds / plan.steps_per_round

    def _change(self, plan: Plan, how: str, reason: str) -> Change:
        network = self.replanner.graph.network
        seconds = simulate(plan, network, self.cluster, self.profile, keep_spans=False).seconds
        every = chosen_backups(plan, network, self.cluster, seconds, self.replanner.backup_every)
        return Change(plan, self.kernels(plan), how, reason, every)

    # What the job needs of a re-planner

    def kernels(self, plan: Plan) -> Mapping[str, Mapping[str, Kernel]]:
        return self.replanner.kernels(plan)

    def present(self, plan: Plan, names: tuple[str, ...]) -> tuple[Cluster, Profile]:
        return self.replanner.present(plan, names)
