"""A job over members that come and go: run after run, each of one generation, from the last round that all have ended.

a worker is lost          the others stop where they are and report what they hold; the job goes on from the last round
                          of which all state exists, with a plan for the remaining workers; where some state was on the
                          lost worker alone, from the last checkpoint
a worker joins or leaves  the round under way is completed first: nothing is run again
the job is to stop        likewise; then the workers that have the latest state send it to the coordinator, and the job
                          ends
a batch is smaller        it is a generation of its own (`smaller_batches`), by the same devices with the weights there
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence

from manyhands.data.rewinding import RewindableBatches
from manyhands.executor.log import DeviceLog, merged
from manyhands.facts.errors import ManyhandsError, NotFinite, TimedOut, WorkerLost
from manyhands.runtime import state
from manyhands.runtime.agreement import Suspicions
from manyhands.runtime.control_messages import Retain
from manyhands.runtime.control_parts import Arrival
from manyhands.runtime.controller import Change, Controller, Replan
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.job_membership import JobMembership
from manyhands.runtime.living import Living
from manyhands.runtime.memory_retry import MemoryRetry
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.outcome import JobHooks, JobOutcome, Recovery, RunHooks
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.runtime.run import Run
from manyhands.runtime.smaller_batches import order_of_next
from manyhands.runtime.stall_watch import Usual
from manyhands.runtime.state import Located
from manyhands.runtime.survey import ask_what_they_hold

SURVEY_SECONDS = 120.0
"""How long a survey may take: a worker answers when it has finished what it is computing."""
_RECENT_STEPS = 20


class ElasticJob:
    """Follows one order to its end, whichever workers join and leave meanwhile."""

    def __init__(
        self,
        coordinator: Coordinator,
        order: Order,
        batches: RewindableBatches,
        replan: Replan,
        retry_policy: RetryPolicy,
        *,
        hooks: JobHooks | None = None,
        controller: Controller | None = None,
        living: Living | None = None,
    ) -> None:
        self.coordinator, self.order, self.batches = coordinator, order, batches
        self.replan, self.retry_policy, self.controller, self.living = replan, retry_policy, controller, living
        self.hooks = hooks or JobHooks()
        self.log_event = self.hooks.log_event
        self.saved = order.start
        """The last state that was saved, or where it all began."""
        self.outcome = JobOutcome(plan=order.plan)
        self._furthest = order.start.steps_done
        """Steps that were done and reported; those that are run again are not reported twice."""
        self.safe_step = order.start.steps_done
        """The last step of which copies were where they belong: kept until there is a later one."""
        self._plan = order.plan
        """The present plan; a generation of one smaller batch has another, for this batch alone."""
        self._membership = JobMembership(coordinator, retry_policy, self.log_event)
        self._constants = state.constant_weights(order.graph.network, is_training=order.plan.is_training)
        self._failures = 0
        self._memory_retry = MemoryRetry(self.log_event)
        self._suspicions = Suspicions()
        self._since = coordinator.new_generation()
        """Before all of this job's: what workers have of earlier jobs is none of its state."""
        self._recovery: Recovery | None = None
        self._run: Run | None = None
        self._begun: Run | None = None
        """The last generation whose first round was done."""
        self._logs: dict[str, DeviceLog] = {}
        """What each device did by the present plan, in the generations that are over."""
        self._prepared_seconds: float | None = None
        """The longest that all devices took to get ready."""

    def run(self) -> JobOutcome:
        order = self.order
        self._membership.know_all()
        while True:
            order = self._validated(order)
            bounded = self._bounded(order_of_next(order, self.batches.samples_at(order.first_step)))
            self._plan = order.plan
            hooks = RunHooks(
                on_step=self._stepped, on_snapshot=self._saved, on_safe=self._is_safe,
                should_pause=self._should_pause, on_arrivals=self._arrived, on_ready=self.hooks.on_ready,
                on_progress=self.living.reported if self.living is not None else RunHooks.on_progress,
                log_event=self.log_event,
            )  # fmt: skip
            run = self._run = Run(
                self.coordinator, bounded, hooks, since=self._since, usual=self._usual(), suspicions=self._suspicions
            )
            try:
                if self._recovery is not None:
                    self._recovery.bytes_moved = run.handout.moving_bytes()
                self._dismiss()
                run.prepare()
                ended = run.run(self.batches.from_step(run.first))
            except ManyhandsError as error:
                if isinstance(error, NotFinite):
                    self._acquit(run)
                order = self._after_loss((*order.plan.devices, *run.participants), order, error)
                continue
            finally:
                self.outcome.bytes_between += run.outcome.bytes_between
                self._prepared_seconds = max(
                    filter(None, (self._prepared_seconds, run.times.prepare_seconds)), default=None
                )
            if not self._is_smaller:  # logs are compared with the plan's predictions
                self._logs = merged(self._logs, run.outcome.logs)
            if not run.is_paused and bounded.last_step == order.last_step and bounded.snapshots == order.snapshots:
                self.outcome.state = ended.state or self.saved  # it may be the last one, saved before a loss
                self.outcome.logs, self.outcome.plan = self._logs, order.plan
                return self.outcome
            if self.hooks.should_stop():
                order = self._to_stop(order)
                if order.start.steps_done == order.last_step:
                    self.outcome.state, self.outcome.plan, self.outcome.logs = order.start, order.plan, self._logs
                    return self.outcome
            elif self._is_smaller or self._is_before_another_size(run) or self._is_break(run.steps.steps_done):
                order = self._after_break(order)
            else:
                order = self._after_pause(order)

    def _usual(self) -> Usual:
        """Return how long rounds and preparation took in the generations so far."""
        recent = self.outcome.step_seconds[-_RECENT_STEPS:]
        steps = range(self._furthest - len(recent), self._furthest)
        recent = [self.order.at_longest(step, seconds) for step, seconds in zip(steps, recent)]
        return Usual(statistics.median(recent) if recent else None, self._prepared_seconds)

    def _bounded(self, order: Order) -> Order:
        """Return the order, shortened to the step up to which the controller wants its plan, or at which validation is
        due: what is saved of that step is saved after it."""
        first, validation = order.first_step, self.hooks.validation
        of_plan = self.controller.stop_at(first) if self.controller is not None else None
        stop = min((s for s in (of_plan, validation.next_after(first)) if s is not None), default=order.last_step)
        if not first < stop <= order.last_step:
            return order
        snapshots = (s for s in order.snapshots if s < stop or (s == stop and not validation.is_due(stop)))
        return dataclasses.replace(order, last_step=stop, snapshots=tuple(snapshots))

    def _validated(self, order: Order) -> Order:
        """Validate if it is due, and return the order; where a worker is lost meanwhile, that of the remaining ones."""
        while self.hooks.validation.is_due(order.first_step):
            try:
                self.hooks.validation.evaluate(order, self._since)
            except ManyhandsError as error:
                order = self._after_loss(order.plan.devices, order, error)
        return order

    # While it runs

    def _arrived(self, device: str, arrivals: Sequence[Arrival]) -> None:
        if self.controller is not None and arrivals:
            self.controller.arrived(device, arrivals)
        if self.living is not None:
            self.living.arrived(device, arrivals)

    def _stepped(self, step: int, loss: float | None, seconds: float) -> None:
        if step < self._furthest:
            self.outcome.replayed_steps += 1
        else:
            self._furthest = step + 1
            self._failures = 0
            self.outcome.step_seconds.append(seconds)
            if self._run is not None and step in self._run.feed.waits:
                self.outcome.data_waits[step] = self._run.feed.waits[step]
            if self._is_smaller and self._run is not None:
                self.outcome.smaller[step] = self._run.order.plan.step_size
            if loss is not None:
                self.outcome.losses.append(loss)
            if self._run is not None and self._run.outcome.staleness:
                self.outcome.staleness.append(self._run.outcome.staleness[-1])
            if self._run is not None and self._run.outcome.grad_norms:
                self.outcome.grad_norms.append(self._run.outcome.grad_norms[-1])
                if self.order.scales_loss and not math.isfinite(self.outcome.grad_norms[-1]):
                    self.outcome.skipped_steps.append(step)
                    self.log_event("skipped", step=step)
            self.hooks.on_step(step, loss, seconds)
        recovery, run = self._recovery, self._run
        if recovery is not None and run is not None and not recovery.is_logged:
            recovery.is_logged = True
            facts = {
                "how": recovery.how, "seconds": max(0.0, run.times.first_round_began - recovery.since),
                "step": recovery.from_step, "replayed": recovery.furthest - recovery.from_step,
                "bytes_moved": recovery.bytes_moved, "generation": run.generation, "devices": list(self._plan.devices),
            }  # fmt: skip
            self.outcome.recoveries.append(facts)
            self.outcome.began_at.append(run.times.first_round_began)
            self.log_event("recovered", **facts)
        if run is not None and self.controller is not None and run is not self._begun and not self._is_smaller:
            self._begun = run
            self.controller.began(run.order.plan, step + 1)
        self._dismiss(givers_too=True)
        self.batches.forget_before(self.saved.steps_done)

    def _saved(self, snapshot: RunState) -> None:
        self.hooks.on_snapshot(snapshot)
        self.saved = snapshot

    def _is_safe(self, step: int) -> None:
        self.safe_step = step
        if self.batches.can_come_again:  # else the last checkpoint is what is left where all copies are lost at once
            self.batches.forget_before(step)

    def _should_pause(self) -> bool:
        """Return whether the round under way should be the last: members have changed, or a stop or plan is due."""
        run = self._run
        assert run is not None
        if self.hooks.should_stop() or self.hooks.requests.is_pending or self._is_before_another_size(run):
            run.asks_for_logs = True  # no other generation may have any
            return True
        if self._is_smaller:  # one step: what is to change can wait for its end
            return False
        if self._membership.has_changed(run.names) or self._membership.is_leaving(run.names):
            return self._membership.has_changed(run.names)
        if self.controller is None or run.steps.steps_updated == run.first:  # each plan has one step at least
            return False
        return self.controller.should_change(max(self._furthest, run.steps.steps_updated))

    @property
    def _is_smaller(self) -> bool:
        """Whether the generation under way, or the last one, is of one smaller batch."""
        return self._run is not None and self._run.order.plan is not self._plan

    def _is_before_another_size(self, run: Run) -> bool:
        """Return whether a run can go no further, as the next batch has another size than its plan is for."""
        return run.feed.sent < self.order.last_step and not run.feed.fits(self.batches)

    def _is_break(self, steps_done: int) -> bool:
        """Return whether a checkpoint or a validation is due now."""
        return self.hooks.requests.is_pending or self.hooks.validation.is_due(steps_done)

    def has_news(self) -> bool:
        """Return whether a worker was lost, has joined or wants to leave since the plan was made; handled next."""
        run = self._run
        return run is not None and (self._should_pause() or any(member.is_lost for member in run.members.values()))

    def _dismiss(self, *, givers_too: bool = False) -> None:
        """Dismiss the members that were asked to leave and are no longer needed."""
        run = self._run
        names = () if run is None else run.names if givers_too else run.participants
        if not self._is_smaller:
            self._membership.dismiss(names)

    # When members change

    def _after_loss(self, participants: Sequence[str], order: Order, error: ManyhandsError) -> Order:
        since = time.monotonic()
        alive = {member.name for member in self.coordinator.alive()}
        lost = [name for name in dict.fromkeys(participants) if name not in alive]
        if (change := self._memory_retry.change(order, error)) is not None:
            return self._next(order, since, error, change=change)
        is_theirs = isinstance(error, WorkerLost) or (isinstance(error, TimedOut) and bool(lost))
        self._failures += 1
        if not is_theirs or not order.plan.is_training or self._failures > self.retry_policy.attempts:
            raise error
        self.log_event("lost", devices=lost, step=self._furthest, reason=error.message)
        return self._next(order, since, error, ", ".join(lost))

    def _acquit(self, run: Run) -> None:
        """End the quarantine of a device evicted for numbers that are not finite, if they occur without it too."""
        for step, name in self._suspicions.not_finite.items():
            if step + 1 >= run.reports.agreed_steps:
                self.coordinator.membership.quarantine.end(self.coordinator.members[name].identity.process)

    def _after_pause(self, order: Order) -> Order:
        since = time.monotonic()
        self._membership.log_change(order.plan.devices)
        return self._next(order, since, WorkerLost("Nobody is left."))

    def _after_break(self, order: Order) -> Order:
        """Return the order that goes on from here by the same plan; where members have changed, by another."""
        is_pending = self.hooks.requests.is_pending
        names = order.plan.devices
        if (lost := self._membership.loss_among(names)) is not None:
            order = self._after_loss(names, order, lost)
        elif self._membership.has_changed(names) or not self._are_alive(names):
            order = self._after_pause(order)
        else:
            order = dataclasses.replace(order, located=self._surveyed(WorkerLost("Nobody is left.")), start=self.saved)
        first = order.first_step
        if self._is_smaller and order.memory_step == first - 1:  # counted in a whole batch, as it is predicted
            order = dataclasses.replace(order, memory_step=first)
        wanted = {max(step, first) for step in order.snapshots if step > self.saved.steps_done}
        if is_pending:
            wanted.add(first)
            self.hooks.requests.ordered()
        return dataclasses.replace(order, snapshots=tuple(sorted(wanted)))

    def _are_alive(self, names: Sequence[str]) -> bool:
        return set(names) <= {member.name for member in self.coordinator.alive()}

    def _to_stop(self, order: Order) -> Order:
        """Return the order that only saves the latest state and runs no further step.

        It keeps the plan as long as all workers of the plan are members.
        """
        self.outcome.is_stopped = True
        error = WorkerLost("Nobody is left.")
        if self._are_alive(order.plan.devices):
            order = dataclasses.replace(order, located=self._surveyed(error), start=self.saved)
        else:
            order = self._next(order, time.monotonic(), error)
        assert order.located is not None
        last = order.located.steps_done
        return dataclasses.replace(
            order, last_step=last, snapshots=(last,), backup_every=0, trace_steps=range(0), memory_step=-1,
            watch_every=0,
        )  # fmt: skip

    def _next(
        self, order: Order, since: float, error: ManyhandsError, lost: str = "", change: Change | None = None
    ) -> Order:
        """Return the order of the next generation. A worker that is lost while it is made is not in it. `change`: what
        is known of it already."""
        located = self._surveyed(error)
        while True:
            available = self._membership.available()
            if len(available) < self.retry_policy.min_devices:  # some were lost since they were counted
                located = self._surveyed(error)
                continue
            self._membership.know_all()
            names = tuple(member.name for member in available)
            try:
                if change is None or not set(change.plan.devices) <= set(names):
                    change = self.replan(order.plan, names, self.retry_policy.replan)
                break
            except (WorkerLost, TimedOut) as new_error:
                self._failures += 1
                if self._failures > self.retry_policy.attempts:
                    raise
                located, error = self._surveyed(new_error), new_error
        if located.is_saved_alone(self._constants) and located.steps_done < self._furthest:
            reason = (
                f"some weights were on {lost or 'one device'} alone and are gone: going on from the last checkpoint"
            )
            self.log_event("rewound", step=located.steps_done, reason=reason)
        first, last = located.steps_done, order.last_step
        self.outcome.generations += 1
        self._logs = {}
        self._recovery = Recovery(since, change.how, first, self._furthest, 0)
        self.log_event("replanned", how=change.how, reason=change.reason, plan=change.plan.to_dict())
        return dataclasses.replace(
            order, plan=change.plan, kernels=change.kernels, located=located, start=self.saved,
            snapshots=tuple(sorted({max(step, first) for step in order.snapshots if step > self.saved.steps_done})),
            backup_every=order.backup_every if change.backup_every is None else change.backup_every,
            trace_steps=range(min(first + 2, last - 1), min(first + 5, last)), memory_step=min(first + 1, last - 1),
        )  # fmt: skip

    def _surveyed(self, error: ManyhandsError) -> Located:
        """Return the latest state of which every part exists, with the places where the parts are."""
        timeout_factor = self.coordinator.security.timeout_factor
        limit = time.monotonic() + SURVEY_SECONDS * timeout_factor
        while True:
            self._membership.wait_for_enough(error, self._check_waiting)
            stall_seconds = self._run.stall_seconds if self._run is not None else SURVEY_SECONDS
            soonest = min(limit, time.monotonic() + stall_seconds)
            answers = ask_what_they_hold(self.coordinator, self.coordinator.alive(), self._since, soonest)
            if answers is not None:
                break
            if time.monotonic() > limit:
                raise error
        weights = [spec.name for spec in self.order.graph.weights]
        agreed = self._furthest if self._run is None else min(self._furthest, self._run.reports.agreed_steps)
        located = state.located(
            {name: answer.steps for name, answer in answers.items()},
            {name: answer.scalars for name, answer in answers.items()},
            weights, agreed, self.saved, {name: answer.checksums for name, answer in answers.items()},
            self._constants, state.optimizer_entries(self.order.graph, self.order.optimizer),
        )  # fmt: skip
        assert located is not None, "what was saved has everything"
        self.safe_step = min(self.safe_step, located.steps_done)
        keeps = self._run is not None and bool(self._run.backups.every)  # else no step in between is complete anywhere
        for name in answers:  # parts of this state are in one place only until they are sent on
            self.coordinator.send(name, Retain(self.safe_step, located.steps_done, keeps))
        return located

    def _check_waiting(self) -> None:
        """Raise KeyboardInterrupt where the job is to stop: others may never join, and no further step is needed."""
        if self.hooks.should_stop():
            raise KeyboardInterrupt
