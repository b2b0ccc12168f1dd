"""One run over joined workers: hand out the parts, feed batches, follow the progress, gather state.

The coordinator feeds a few steps ahead and no further: this keeps fast devices from running away. It never waits
without watching: every event of every worker passes through `Run.follow`, where each wait has a limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from manyhands.executor.feeder import Feeder
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import BadPlan, ManyhandsError, TimedOut, WorkerLost
from manyhands.graph.graph import Graph
from manyhands.runtime import stalls
from manyhands.runtime.agreement import Agreement, Suspicions
from manyhands.runtime.backing import Backups
from manyhands.runtime.batch_feed import Batches, BatchFeed
from manyhands.runtime.collective_store import CollectiveStore
from manyhands.runtime.control import Message
from manyhands.runtime.control_messages import (
    EndAt,
    Failed,
    Start,
    Stop,
)
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.failure_diagnosis import FailureDiagnosis
from manyhands.runtime.gathering import Gathering
from manyhands.runtime.handout import Handout
from manyhands.runtime.keeping import STATE
from manyhands.runtime.member import Lost, Member, MemberJoined
from manyhands.runtime.order import IDLE_SECONDS, Order
from manyhands.runtime.outcome import Outcome, RunHooks
from manyhands.runtime.preparation import prepare
from manyhands.runtime.reports import Reports
from manyhands.runtime.stall_watch import StallWatch, Usual
from manyhands.runtime.stalls import Verdict
from manyhands.runtime.step_progress import StepProgress
from manyhands.schedule.policy import Schedule
from manyhands.weights.mapped import give_back_pages

STEPS_FED_AHEAD = 3
LEAST_FED_AHEAD = 3
_STOP_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_LOG_SECONDS = 10.0


@dataclass
class RunTimes:
    """When the phases of a run began, by the clock of this process, and how long they took."""

    prepare_seconds: float | None = None
    """Time until all devices were ready."""
    has_begun: bool = False
    """Whether all devices were told to start."""
    first_round_began: float = 0.0
    """When the first device began the first round; 0: none has ended it yet."""
    round_ended: float = 0.0
    """When the last round ended, or the run began."""


class Run:
    """One generation: follows one order to its end, or until it is to pause; its members and plan do not change."""

    reports_class: ClassVar[type[Reports]] = Reports

    def __init__(
        self, coordinator: Coordinator, order: Order, hooks: RunHooks | None = None, *, since: int | None = None,
        usual: Usual | None = None, suspicions: Suspicions | None = None,
    ) -> None:  # fmt: skip
        """`since`: the generation that the job began with; None: this one. `usual`: how long things took in the job's
        earlier generations; `suspicions`: devices whose numbers were wrong in them."""
        self.coordinator, self.hooks, self.usual = coordinator, hooks or RunHooks(), usual or Usual()
        schedule = Schedule(order.plan, order.graph.network)
        self.handout = Handout(order, schedule)
        self.members: dict[str, Member] = {}
        self.generation = coordinator.new_generation()
        self.since = self.generation if since is None else since
        first = self.handout.located.steps_done
        self.steps = StepProgress(self.names, first, order.last_step, order.plan.steps_per_round)
        is_training = order.plan.is_training
        feeder = Feeder(
            order.graph, schedule, coordinator.endpoint, with_targets=is_training,
            local=coordinator.silos if is_training else None, preload=order.preload,
        )  # fmt: skip
        self.feed = BatchFeed(order, feeder, first, self._feeders_of_lengths(order))
        self.order = self._aligned(order)
        self.outcome, self.times = Outcome(), RunTimes()
        self.is_paused = self._ends_early = False
        self.asks_for_logs = False
        """Whether the devices report what they did where the run pauses, too."""
        self.gathering = Gathering(self)
        self.backups = Backups(self)
        self.stalls = StallWatch(self)
        self.store: CollectiveStore | None = None
        self._diagnosis = FailureDiagnosis(self)
        work = stalls.work_of(order.plan, order.graph.network)
        self.reports = self.reports_class(
            self, Agreement(schedule, work, suspicions or Suspicions(), order.scales_loss, order.uses_groups)
        )

    def _feeders_of_lengths(self, order: Order) -> dict[Graph, Feeder]:
        """Return the feeders of batches that are shorter than the longest, by their graphs."""
        if order.lengths is None:
            return {}
        if self.coordinator.silos or order.preload is not None or order.plan.steps_per_round > 1:
            raise BadPlan(
                "Batches of several lengths are fed step by step: by no silo, not at the start, and in no round of "
                "several steps.",
                hint="Give one length, like lengths=(128,).",
            )
        graphs = [graph for graph in order.lengths.graphs.values() if graph is not order.graph]
        endpoint = self.coordinator.endpoint
        return {graph: Feeder(graph, Schedule(order.plan, graph.network), endpoint) for graph in graphs}

    @property
    def names(self) -> tuple[str, ...]:
        """The devices that compute."""
        return self.handout.names

    @property
    def participants(self) -> tuple[str, ...]:
        """The devices that compute, and those that only give away the state they have."""
        return self.handout.participants

    @property
    def first(self) -> int:
        """The step that the run begins with."""
        return self.steps.first

    @property
    def stride(self) -> int:
        """The number of steps in a round."""
        return self.steps.stride

    def _aligned(self, order: Order) -> Order:
        """Return the order with events moved to a round's beginning or end, where a round has several steps."""
        if self.stride == 1:
            return order
        snapshots = (step for step in order.snapshots if step >= self.first)
        ends = sorted({step if step == self.first else self.steps.round_end(step - 1) for step in snapshots})
        last = self.steps.round_of(order.last_step - 1)
        traced = min(self.first + self.stride, last)
        spans = range(traced, min(traced + 2 * self.stride, order.last_step)) if order.trace_steps else range(0)
        memory_step = traced if order.memory_step >= 0 else -1
        return dataclasses.replace(order, snapshots=tuple(ends), trace_steps=spans, memory_step=memory_step)

    @property
    def wanted_snapshot(self) -> int | None:
        """The oldest snapshot that is not saved yet."""
        return self.gathering.wanted_step

    # Preparing

    def prepare(self) -> None:
        """Make every device build its part and connect to the others."""
        self.members = self.coordinator.members_for(self.participants)
        try:
            prepare(self)
        except BaseException as error:
            self._end(error)

    def expected(self) -> dict[tuple[str, str], int]:
        """Return (device, topic) -> bytes of every message of a round that comes to the coordinator."""
        return {}

    @property
    def worker_wait_seconds(self) -> float:
        """Seconds that a worker waits for a message of which nothing comes."""
        return IDLE_SECONDS if self.order.waits_for_batches else self.order.wait_limit_seconds

    @property
    def keepers(self) -> tuple[str, ...]:
        """The first device of every stage: together they have every weight."""
        return tuple(dict.fromkeys(stage.devices[0] for stage in self.order.plan.stages))

    # Running

    def run(self, batches: Batches) -> Outcome:
        """Feed every batch and follow until all devices are done."""
        try:
            self.hooks.on_ready()
            self._start()
            self._loop(batches)
            if self.steps.steps_done >= self.steps.last_step:
                self.is_paused = False
            if self.is_paused:
                self._save_due_snapshots()
            else:
                self._finish()
        except BaseException as error:
            self._end(error)
        if self.is_paused and self.asks_for_logs:
            self._ask_for_logs()
        self._stop()
        return self.outcome

    def _end(self, error: BaseException) -> NoReturn:
        """Stop all devices, and raise the error that explains this one best."""
        try:
            cause = self._diagnosis.explained(error)
        finally:
            self._stop(error)
        if cause is error:
            raise error
        raise cause from error

    def _start(self) -> None:
        keepers, order = self.keepers, self.order
        for name, tensors in self.handout.given_here():
            self.coordinator.endpoint.send(name, self.first, STATE, tensors, unplanned=True)
        self.feed.preload({name: self.members[name] for name in self.names}, self.first)
        for name in self.participants:
            snapshots = order.snapshots if name in keepers else ()
            start = Start(self.generation, self.first, order.last_step, snapshots, order.backup_every)
            self.coordinator.send(name, start)
        self.times.round_ended = time.monotonic()
        self.times.has_begun = True

    def _loop(self, batches: Batches) -> None:
        def may_feed() -> bool:
            limit = min(self.order.last_step, self._may_be_fed())
            is_behind = self.gathering.is_behind(self.feed.sent) or self.backups.is_behind(self.feed.sent)
            has_room = self.feed.sent < limit and not is_behind and not self.is_paused and self.feed.may_send
            return has_room and self.feed.has_next(batches, is_idle=self.is_idle)

        while (step := self.steps.steps_done) < self.order.last_step:
            self.is_paused = self.is_paused or self.hooks.should_pause()
            if self.is_paused and step == self.feed.sent:
                return
            if self.is_paused:
                self._end_early(self.feed.sent)
            while may_feed():
                self.feed.send(batches, self.steps.round_of(self.feed.sent))

            def moved(step: int = step) -> bool:
                return self.steps.steps_done > step or may_feed() or (not self.is_paused and self.hooks.should_pause())

            limit_seconds = self.order.wait_limit_seconds + 30
            if self.order.waits_for_batches and step == self.feed.sent:
                limit_seconds = math.inf
            self.follow(moved, self.reports.handle, f"to end step {step}", limit_seconds, self.steps.last_ones)

    @property
    def is_idle(self) -> bool:
        """Whether the devices are done with every batch that was sent: none can be late then."""
        return self.times.has_begun and self.feed.sent <= self.steps.steps_updated

    def owing(self) -> list[tuple[str, str]]:
        """Return the devices whose copies the coordinator waits for before it goes on, each with the copy's target."""
        pairs: list[tuple[str, str]] = []
        if self.backups.is_behind(self.feed.sent):
            pairs += self.backups.owing()
        if self.gathering.is_behind(self.feed.sent) or self.steps.steps_done >= self.steps.last_step:
            pairs += [(name, COORDINATOR) for name in self.gathering.owing()]
        return pairs

    def _may_be_fed(self) -> int:
        """Return how many steps may be fed.

        Where a round has several, as many as can be under way: a change of plans waits for what was fed.
        """
        if self.stride == 1:
            return self.steps.steps_done + STEPS_FED_AHEAD
        bound = self.order.plan.replay.k
        ahead = self.stride if bound is None else bound + 1
        return self.steps.steps_updated + max(ahead, LEAST_FED_AHEAD)

    def _end_early(self, fed: int) -> None:
        """End a round under way that was not fed to its end: it has no more steps."""
        if self.stride > 1 and not self._ends_early and fed < self.steps.round_end(fed):
            self._ends_early = True
            for name in self.names:
                self.coordinator.send(name, EndAt(self.generation, fed))

    def _finish(self) -> None:
        def ended() -> bool:
            return len(self.outcome.logs) == len(self.names) and self.gathering.is_complete()

        limit_seconds = self.order.wait_limit_seconds + 30
        self.follow(
            ended, self.reports.handle, "to finish", limit_seconds, lambda: set(self.names) - set(self.outcome.logs)
        )
        self.outcome.state = self.gathering.latest

    def _save_due_snapshots(self) -> None:
        """Wait for the snapshots of steps that are done: the next generation would save one later step for all."""

        def are_saved() -> bool:
            wanted = self.gathering.wanted_step
            return wanted is None or wanted > self.steps.steps_done

        limit_seconds = self.order.wait_limit_seconds + 30
        self.follow(are_saved, self.reports.handle, "to save its snapshots", limit_seconds, self.gathering.owing)

    def _ask_for_logs(self) -> None:
        """Ask all devices for their logs. One that does not answer has none: every step has been reported already."""
        for name in self.names:
            self.coordinator.send(name, Stop(self.generation, with_log=True))

        def are_here() -> bool:
            return len(self.outcome.logs) == len(self.names)

        with contextlib.suppress(ManyhandsError):
            self.follow(are_here, self.reports.handle, "to report what they did", _LOG_SECONDS)

    def follow(
        self,
        is_done: Callable[[], bool],
        handle: Callable[[str, Message], None],
        task: str,
        limit_seconds: float,
        missing: Callable[[], Collection[str]] = lambda: (),
    ) -> None:
        """Handle events until `is_done`; a loss or a failure ends the run with the error that explains it.

        `limit_seconds`: if nothing is received for this long, the run ends without those that are still `missing`.
        """
        received_at = time.monotonic()
        while not is_done():
            event = self.coordinator.next_event(self._look_seconds())
            self._check()
            if not self.times.first_round_began:
                give_back_pages()  # of weights that were read from a file to be sent
            if (verdict := self.stalls.look()) is not None:
                raise self.evicted(verdict)
            name, message = event or ("", None)
            if name not in self.members or message is None or isinstance(message, MemberJoined):
                if time.monotonic() - received_at > limit_seconds:
                    raise self._too_late(task, limit_seconds, missing())
                continue
            if isinstance(message, Lost):
                has_given = name not in self.names and bool(self.times.first_round_began)
                if message.member is self.members[name] and not has_given:
                    raise self._diagnosis.lost(name, message.reason)
                continue
            if getattr(message, "generation", self.generation) != self.generation:
                continue
            received_at = time.monotonic()
            if isinstance(message, Failed):
                raise self._diagnosis.failed(name, message)
            handle(name, message)

    def _check(self) -> None:
        """Raise what has gone wrong in the coordinator's process."""
        self.gathering.check()

    def _look_seconds(self) -> float:
        """Return how long to wait for the next event before looking around."""
        return _LOOK_SECONDS

    # When nothing happens

    @property
    def stall_seconds(self) -> float:
        """Seconds that a device may make no progress before the run goes on without it."""
        return self.stalls.limit_seconds

    def evicted(self, verdict: Verdict) -> ManyhandsError:
        """Evict a device, and return the error of a run that is to go on without it; or with it, where those that do
        not reach each other can be connected in another way."""
        if verdict.pairs and self.coordinator.routes.give_up(verdict.pairs):
            return self._diagnosis.parted(verdict.pairs)
        self.coordinator.evict(verdict.device, verdict.reason)
        return self._diagnosis.lost(verdict.device, verdict.reason)

    def evict_suspect(self) -> ManyhandsError | None:
        """Evict the suspect of a run whose devices are all alive, and return the error; None where there is no suspect.

        A suspect is a device that others cannot reach, or that sends what is not in the plan.
        """
        verdict = self.stalls.suspect()
        return None if verdict is None else self.evicted(verdict)

    def _too_late(self, task: str, limit_seconds: float, missing: Collection[str]) -> ManyhandsError:
        """Return the error for a wait in which nothing was received for the limit.

        The missing devices are evicted, unless all are missing.
        """
        if missing and len(missing) < len(self.participants):
            errors = [self.evicted(Verdict(name, f"waited {limit_seconds:g} s for it {task}")) for name in missing]
            return errors[0]
        return TimedOut(f"Waited {limit_seconds:g} s for {', '.join(self.names)} {task}; nothing was received.")

    def _stop(self, error: BaseException | None = None) -> None:
        for name in self.participants:
            self.coordinator.send(name, Stop(self.generation), _STOP_SECONDS)
        self.coordinator.endpoint.mailbox.interrupt(
            error if isinstance(error, ManyhandsError) else WorkerLost("The run has ended.")
        )
        self.gathering.close()
        self.store = None
