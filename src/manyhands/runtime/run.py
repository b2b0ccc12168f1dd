"""One run over joined workers: hand out the parts, feed batches, follow the progress, gather state.

The coordinator feeds a few steps ahead and no further: that is what keeps fast devices from running away. It never
waits without watching: every event of every worker passes through `_follow`, and silence beyond the limit is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import torch

from manyhands.executor.feeder import Feeder
from manyhands.executor.log import DeviceLog, MeasuredSpan
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import (
    BadData,
    BadValue,
    DataNotFinite,
    ManyhandsError,
    NotFinite,
    TimedOut,
    WorkerLost,
    error_named,
)
from manyhands.facts.plan import ByTiles, Plan
from manyhands.facts.plan_check import layer_range
from manyhands.graph.document import to_document
from manyhands.graph.labels import check_labels
from manyhands.graph.loss import has_ignored, ignored_class
from manyhands.graph.tape import bind_inputs
from manyhands.runtime import stalls, state
from manyhands.runtime.agreement import Agreement, Suspicions
from manyhands.runtime.attempt import Attempt
from manyhands.runtime.backing import Backups
from manyhands.runtime.control import Message
from manyhands.runtime.control_messages import (
    Corrupt,
    Diagnosis,
    Done,
    EndAt,
    Failed,
    Heartbeat,
    Held,
    Holds,
    Prepare,
    Progress,
    Ready,
    Start,
    State,
    Stepped,
    Stop,
)
from manyhands.runtime.control_parts import Arrival, Job, TensorEntry
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.gathering import Gathering
from manyhands.runtime.job_membership import LogEvent
from manyhands.runtime.keeping import STATE
from manyhands.runtime.member import Joined, Lost, Member
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.root_cause import find_root_cause, is_symptom, lost
from manyhands.runtime.stall_watch import StallWatch, Usual
from manyhands.runtime.stalls import Verdict
from manyhands.runtime.state import Located
from manyhands.schedule.policy import Schedule

STEPS_FED_AHEAD = 3
LEAST_FED_AHEAD = 3
CONNECT_SECONDS = 30.0
_STOP_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_DIAGNOSIS_SECONDS = 5.0

Batch = tuple[int, Any, Any]
Batches = Iterator[Batch]


@dataclass
class Outcome:
    """What came of it."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    """From one step's end to the next, as the slowest device reported them."""
    staleness: list[int] = field(default_factory=list)
    """Of each step with order replay: by how many updates its gradient was late; -1: too many, it was discarded."""
    bytes_between: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(from, to) -> bytes sent in the rounds that were done, copies of state apart."""
    logs: dict[str, DeviceLog] = field(default_factory=dict)
    state: RunState | None = None


OnStep = Callable[[int, float | None, float], None]
OnSnapshot = Callable[[RunState], None]
OnArrivals = Callable[[str, tuple[Arrival, ...]], None]
OnProgress = Callable[[str, Progress], None]


class Run:
    """Follows one order to its end, or until it is to pause: one generation, whose members and plan do not change."""

    def __init__(
        self,
        coordinator: Coordinator,
        order: Order,
        *,
        on_step: OnStep | None = None,
        on_snapshot: OnSnapshot | None = None,
        on_safe: Callable[[int], None] | None = None,
        should_pause: Callable[[], bool] | None = None,
        on_arrivals: OnArrivals | None = None,
        on_progress: OnProgress | None = None,
        since: int | None = None,
        usual: Usual | None = None,
        suspicions: Suspicions | None = None,
        log_event: LogEvent | None = None,
    ) -> None:
        """`usual`: how long things took in the job's earlier generations; `suspicions`: devices whose numbers were
        wrong in them."""
        self.coordinator = coordinator
        self.usual = usual or Usual()
        self.log_event: LogEvent = log_event or (lambda event, /, **facts: None)
        self.on_safe = on_safe or (lambda step: None)
        self.should_pause = should_pause or (lambda: False)
        self.on_step = on_step or (lambda step, loss, seconds: None)
        self.on_snapshot = on_snapshot or (lambda found: None)
        self.on_arrivals = on_arrivals or (lambda name, arrivals: None)
        self.on_progress = on_progress or (lambda name, message: None)
        self.schedule = Schedule(order.plan, order.graph.network)
        self.stride = order.plan.steps_per_round
        self.names = order.plan.devices
        self.weights = {name: self.schedule.lowering.work[name].weights() for name in self.names}
        located = order.located or Located.at_coordinator(order.start)
        if order.graph.loss is not None:
            located = located.with_here(state.named(state.LOSS, order.graph.loss.state))
        self.located = located
        self.sources = located.assigned({name: self._wanted(name) for name in self.names})
        self.gives = _turned(self.sources)
        givers = [name for name in self.gives if name not in self.names and name != COORDINATOR]
        self.everybody = (*self.names, *givers)
        """Who computes, and who only gives away what it has."""
        self.members: dict[str, Member] = {}
        self.generation = coordinator.new_generation()
        self.since = self.generation if since is None else since
        """The generation its job began with."""
        is_training = order.plan.is_training
        self.feeder = Feeder(
            order.graph, self.schedule, coordinator.endpoint, with_targets=is_training,
            held=coordinator.silos if is_training else None, laying=order.preload,
        )  # fmt: skip
        self.outcome = Outcome()
        self.first = located.steps_done
        self.last_step = order.last_step
        self.order = self._aligned(order)
        self.is_paused = False
        self.first_round_began = 0.0
        """When the first device began the first round; 0: none has ended yet."""
        self._listed: dict[str, tuple[TensorEntry, ...]] = {}
        """What each device's state is made of."""
        self._done_step = dict.fromkeys(self.names, self.first - 1)
        self._updated = dict.fromkeys(self.names, self.first - 1)
        """The last step that each is done with, in the middle of a round too."""
        self._ends_early = False
        self._reported: dict[int, dict[str, Progress]] = defaultdict(dict)
        """Of rounds that somebody has ended."""
        self._fed: dict[int, Any] = {}
        """Inputs of the steps under way."""
        self.fed = self.first
        """Steps whose batches were sent."""
        self._ended_at = 0.0
        self._has_begun = False
        self.prepare_seconds: float | None = None
        """How long everybody took to get ready."""
        self._verdict: BaseException | None = None
        """The error that explains why the run ended; others are looked into."""
        self._looks_for_ignored = _shares_batches(order.plan) and ignored_class(order.graph) is not None
        self._gathering = Gathering(self)
        self.backups = Backups(self)
        self._stalls = StallWatch(self)
        work = stalls.work_of(order.plan, order.graph.network)
        self.agreement = Agreement(self.schedule, work, suspicions or Suspicions())
        self.agreed_steps = self.first
        """Steps that everybody is done with, and whose numbers agree: no later state is trusted."""

    def _aligned(self, order: Order) -> Order:
        """With several steps to a round, what is to happen at a step happens at the round's beginning or end."""
        if self.stride == 1:
            return order
        wanted = (step for step in order.snapshots if step >= self.first)
        ends = sorted({step if step == self.first else self.round_end(step - 1) for step in wanted})
        last = self.round_of(order.last_step - 1)
        traced = min(self.first + self.stride, last)
        spans = range(traced, min(traced + 2 * self.stride, order.last_step)) if order.trace_steps else range(0)
        memory_step = traced if order.memory_step >= 0 else -1
        return dataclasses.replace(order, snapshots=tuple(ends), trace_steps=spans, memory_step=memory_step)

    def round_of(self, step: int) -> int:
        """The first step of the round that a step is in."""
        return self.first + (step - self.first) // self.stride * self.stride

    def round_end(self, step: int) -> int:
        """Steps done when that round is."""
        return min(self.round_of(step) + self.stride, self.last_step)

    def _wanted(self, name: str) -> list[str]:
        """What a device starts with: its stages' weights, their part of the optimiser's state, its loss' constants."""
        constants = [name for name in self.located.here if name.startswith(state.LOSS)]
        return self.located.wanted_by(self.weights[name]) + constants

    def _part(self, device: str, entry: TensorEntry) -> TensorEntry:
        """What a device gets of a tensor: by channels, its own part of a weight."""
        box = self.schedule.lowering.work[device].weight_box(state.weight_of(entry.name))
        return entry if box is None else msgspec.structs.replace(entry, shape=box.shape)

    def _part_of(self, device: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        box = self.schedule.lowering.work[device].weight_box(state.weight_of(name)) if device in self.names else None
        return tensor if box is None else tensor[box.slices()]

    @property
    def wanted_snapshot(self) -> int | None:
        """The oldest snapshot that is not saved yet."""
        return self._gathering.wanted_step

    # Preparing

    def prepare(self) -> None:
        """Everybody builds its part and connects to the others."""
        self.members = self.coordinator.members_for(self.everybody)
        try:
            self._prepare()
        except BaseException as error:
            self._end(error)

    def _prepare(self) -> None:
        self.coordinator.endpoint.mailbox.open(self.generation, self._expected(), self.first, self.stride)
        document = to_document(self.order.graph)
        digest = hashlib.sha256(msgspec.json.encode(document)).hexdigest()
        for name in self.everybody:
            peers = self.coordinator.addresses(self.everybody, name)
            job = self._job(name, document, digest) if name in self.names else None
            if job is not None and not (job.resident_dataset and job.is_preloaded):
                self.members[
                    name
                ].resident_dataset = ""  # it drops what it has; what it is given is there after its first round
            gives = self.gives.get(name, {})
            self.coordinator.send(name, Prepare(self.generation, job, peers, gives, self.since))
        timeout_factor = self.coordinator.security.patience
        is_connected = threading.Event()

        def connect() -> None:
            self.coordinator.connect(self.everybody, CONNECT_SECONDS * timeout_factor)
            is_connected.set()
            self.coordinator.wake()  # nobody may have anything left to say

        connecting = Attempt(connect, "coordinator connect")
        ready: set[str] = set()

        def handle(name: str, message: Message) -> None:
            if isinstance(message, Ready):
                ready.add(name)
                if name in self.names:
                    self.members[name].graph_digest = digest

        def is_ready() -> bool:
            return (is_connected.is_set() or connecting.is_over()) and len(ready) == len(self.everybody)

        began = time.monotonic()
        limit_seconds = self.usual.prepare_limit_seconds * timeout_factor
        self._follow(is_ready, handle, "to get ready", limit_seconds, lambda: set(self.everybody) - ready)
        self.prepare_seconds = time.monotonic() - began
        if self.order.trace_steps or self.order.watch_every:
            self.coordinator.clock_sync.synchronize(self.names)

    def _expected(self) -> dict[tuple[str, str], int]:
        """(device, topic) -> bytes of every message of a round that comes here."""
        return {}

    @property
    def worker_wait_seconds(self) -> float:
        """How long a worker waits for a message of which nothing comes."""
        return self.order.wait_limit_seconds

    @property
    def keepers(self) -> tuple[str, ...]:
        """The first device of every stage: together they have every weight."""
        return tuple(dict.fromkeys(stage.devices[0] for stage in self.order.plan.stages))

    def _job(self, name: str, document: dict[str, Any], digest: str) -> Job:
        order, located = self.order, self.located
        kernels = dict(order.kernels.get(name, {}))
        together = [other for stage in order.plan.stages if name in stage.devices for other in stage.devices]
        alike = all(dict(order.kernels.get(other, {})) == kernels for other in together)
        is_known = self.members[name].graph_digest == digest
        return Job(
            graph=None if is_known else document, network=None if is_known else order.graph.network, digest=digest,
            plan=order.plan, optimizer=order.optimizer.to_dict() if order.optimizer is not None else None,
            seed=order.seed, kernels=kernels, stored=kernels if alike else {},
            state=tuple(self._part(name, located.entries[one]) for one in self._wanted(name)),
            sources=self.sources[name], checksums=self._checksums(name),
            scalars=located.scalars, steps_done=self.first, with_targets=order.plan.is_training,
            trace_first=order.trace_steps.start, trace_last=order.trace_steps.stop,
            memory_step=order.memory_step, watch_every=order.watch_every,
            wait_limit_seconds=self.worker_wait_seconds, held=tuple(sorted(self.feeder.held_by(name))),
            preload_samples=order.preload.count if order.preload is not None else 0,
            resident_dataset=self.feeder.shelf(name),
            is_preloaded=not self._needs_preload(name),
        )  # fmt: skip

    def _checksums(self, name: str) -> dict[str, dict[str, int]]:
        """What a device starts with, as it was when it was kept."""
        found = {}
        for source, tensors in self.sources[name].items():
            known = self.located.checksums.get(source, {})
            if own := {one: known[one] for one in tensors if one in known}:
                found[source] = own
        return found

    def _needs_preload(self, name: str) -> bool:
        """Whether a device is still to be given its part of all samples."""
        return self.feeder.shelf(name) not in ("", self.members[name].resident_dataset)

    # Running

    def run(self, batches: Batches) -> Outcome:
        """Feed every batch and follow until all devices are done."""
        try:
            self._start()
            self._loop(batches)
            if self._steps_done() >= self.last_step:
                self.is_paused = False
            if not self.is_paused:
                self._finish()
        except BaseException as error:
            self._end(error)
        self._stop()
        return self.outcome

    def _end(self, error: BaseException) -> NoReturn:
        """Stop everybody, and raise what explains the error best."""
        try:
            found = self._explained(error)
        finally:
            self._stop(error)
        if found is error:
            raise error
        raise found from error

    def _start(self) -> None:
        here, keepers, order = self.located.here, self.keepers, self.order
        for name, tensors in self.gives.get(COORDINATOR, {}).items():
            own = [self._part_of(name, one, here[one]).detach().cpu().contiguous() for one in tensors]
            self.coordinator.endpoint.send(name, self.first, STATE, own)
        if order.preload is not None:
            self._check_targets("The targets", order.preload.targets)
        for name in filter(self._needs_preload, self.names):
            self.feeder.lay(name, self.first)
        for name in self.everybody:
            snapshots = order.snapshots if name in keepers else ()
            start = Start(self.generation, self.first, order.last_step, snapshots, order.backup_every)
            self.coordinator.send(name, start)
        self._ended_at = time.monotonic()
        self._has_begun = True

    def _loop(self, batches: Batches) -> None:
        def may_feed() -> bool:
            limit = min(self.order.last_step, self._may_be_fed())
            is_behind = self._gathering.is_behind(self.fed) or self.backups.is_behind(self.fed)
            return self.fed < limit and not is_behind and not self.is_paused

        while (done := self._steps_done()) < self.order.last_step:
            self.is_paused = self.is_paused or self.should_pause()
            if self.is_paused and done == self.fed:
                return
            if self.is_paused:
                self._end_early(self.fed)
            while may_feed():
                self._feed(self.fed, batches)
                self.fed += 1

            def moved(done: int = done) -> bool:
                return self._steps_done() > done or may_feed() or (not self.is_paused and self.should_pause())

            limit_seconds = self.order.wait_limit_seconds + 30
            self._follow(moved, self._handle, f"to end step {done}", limit_seconds, self._last_ones)

    @property
    def is_idle(self) -> bool:
        """Whether the devices are done with every batch that was sent: nobody can be late then."""
        return self._has_begun and self.fed <= self.steps_updated

    def owing(self) -> list[tuple[str, str]]:
        """Devices whose copies the coordinator waits for before it goes on, each with who was to get it."""
        found: list[tuple[str, str]] = []
        if self.backups.is_behind(self.fed):
            found += self.backups.owing()
        if self._gathering.is_behind(self.fed) or self._steps_done() >= self.last_step:
            found += [(name, COORDINATOR) for name in self._gathering.owing()]
        return found

    def _may_be_fed(self) -> int:
        """Steps. Where a round has several, as many as can be under way: a change of plans waits for what was fed."""
        if self.stride == 1:
            return self._steps_done() + STEPS_FED_AHEAD
        bound = self.order.plan.replay.k
        ahead = self.stride if bound is None else bound + 1
        return self.steps_updated + max(ahead, LEAST_FED_AHEAD)

    def _end_early(self, fed: int) -> None:
        """A round under way that was not fed to its end has no more steps."""
        if self.stride > 1 and not self._ends_early and fed < self.round_end(fed):
            self._ends_early = True
            for name in self.names:
                self.coordinator.send(name, EndAt(self.generation, fed))

    @property
    def steps_updated(self) -> int:
        """Steps that everybody is done with, those of the round under way too."""
        return min(self._updated.values()) + 1

    def _steps_done(self) -> int:
        return min(self._done_step.values()) + 1

    def _last_ones(self) -> set[str]:
        """The devices that have done the fewest steps."""
        least = min(self._done_step.values())
        return {name for name, step in self._done_step.items() if step == least}

    def _feed(self, fed: int, batches: Batches) -> None:
        step, inputs, targets = next(batches)
        assert step == fed, "batches come in order"
        if self.order.preload is None:
            self._check_targets(f"The targets of step {step}", targets)
        self._fed[step] = inputs
        first = self.round_of(step)
        self.feeder.send(first, inputs, targets, step - first)

    def _check_targets(self, which: str, targets: Any) -> None:
        check_labels(self.order.graph, targets, which)
        if self._looks_for_ignored and has_ignored(self.order.graph, targets):
            raise BadData(
                f"{which} hold the class {ignored_class(self.order.graph)}, which the loss leaves "
                f"out: its mean is over the others, and the parts of a batch differ in how many they have.",
                hint='Train with plan="single" and one micro-batch.',
            )

    def _finish(self) -> None:
        def ended() -> bool:
            return len(self.outcome.logs) == len(self.names) and self._gathering.is_complete()

        limit_seconds = self.order.wait_limit_seconds + 30
        self._follow(ended, self._handle, "to finish", limit_seconds, lambda: set(self.names) - set(self.outcome.logs))
        self.outcome.state = self._gathering.latest

    def _handle(self, name: str, message: Message) -> None:
        if isinstance(message, Progress):
            self._progress(name, message)
        elif isinstance(message, Stepped):
            self._check_step(name, message.step, self._updated[name] + 1)
            self._updated[name] = message.step
        elif isinstance(message, Heartbeat):
            self.on_arrivals(name, message.arrivals)
        elif isinstance(message, State):
            self._offered(name, message)
        elif isinstance(message, Holds):
            self.backups.holds(name, message)
        elif isinstance(message, Held):
            self.backups.held(name, message)
        elif isinstance(message, Corrupt):
            self._corrupt(name, message)
        elif isinstance(message, Done):
            offset = self.coordinator.members[name].clock_offset_seconds
            message.log.spans = [_moved(span, offset) for span in message.log.spans]
            self.outcome.logs[name] = message.log

    def _offered(self, name: str, message: State) -> None:
        """A worker has a copy of its state: for the folder, against losses, or both."""
        if message.tensors is not None:
            self._listed[name] = message.tensors
        listed = self._listed.get(name)
        if listed is None:
            raise BadValue(
                f"Worker {name} offers its state after step {message.step}, made of the same tensors as before; "
                "it has not said yet what those are."
            )
        if message.has_changed:
            reason = f"its copy of its state after step {message.step} has changed while it was kept"
            raise self.evicted(Verdict(name, reason))
        is_wanted = message.step in self.order.snapshots and name in self.keepers
        if not (is_wanted or self.backups.is_backup(message.step)):
            raise BadValue(f"Worker {name} offers its state after step {message.step}; nobody asked for it.")
        if is_wanted:
            self._gathering.take(name, message, listed)
        self.backups.kept(name, message, listed)

    def _corrupt(self, name: str, message: Corrupt) -> None:
        """Go on without a device whose copy has changed since it made it; the state is taken from elsewhere."""
        source = message.source if message.tensor in self.sources.get(name, {}).get(message.source, ()) else name
        whose = "its own copy" if source == name else f"what it gave {name}"
        raise self.evicted(Verdict(source, f"{whose} of {message.tensor:.80} is not what it was when it was kept"))

    def _noted(self, name: str, message: Progress) -> bool:
        """A device has ended a round; False where that was known."""
        if message.step <= self._done_step[name]:
            return False
        self._check_step(name, message.step, self.round_end(self._done_step[name] + 1) - 1)
        self._stalls.ended_round(name, message.seconds, message.step - self._done_step[name])
        if self.round_of(message.step) == self.first:
            began = time.monotonic() - message.seconds
            self.first_round_began = min(began, self.first_round_began or began)
            self.members[name].resident_dataset = self.feeder.shelf(name)
        self._done_step[name] = self._updated[name] = message.step
        self.on_arrivals(name, message.arrivals)
        self.outcome.bytes_between |= Counter({(name, to): count for to, count in message.sent.items()})
        self.on_progress(name, message)
        return True

    def _progress(self, name: str, message: Progress) -> None:
        if not self._noted(name, message):
            return
        reported = self._reported[message.step]
        reported[name] = message
        if len(reported) < len(self.names):
            return
        del self._reported[message.step]
        self._compare(message.step, reported)
        now = time.monotonic()
        first, end = self.round_of(message.step), message.step + 1
        seconds, self._ended_at = (now - self._ended_at) / (end - first), now
        for place, step in enumerate(range(first, end)):
            self._fed.pop(step, None)
            parts = [reported[one].losses[place] for one in self.names if reported[one].losses]
            late = [reported[one].staleness[place] for one in self.names if reported[one].staleness]
            loss = sum(parts) if parts else None
            self.outcome.step_seconds.append(seconds)
            if loss is not None:
                self.outcome.losses.append(loss)
            if late or self.order.plan.order == "replay":
                self.outcome.staleness.append(max(late, default=0))
            self.on_step(step, loss, seconds)
        self._gathering.ended(message.step)

    def _compare(self, step: int, reported: Mapping[str, Progress]) -> None:
        """Go on without a device whose numbers of a round contradict those of the others. Asked before anything of the
        round is reported, kept or safe: the next generation begins with a state from before it."""
        sums = {name: one.sums for name, one in reported.items()}
        sources = {name: one.not_finite_from for name, one in reported.items() if one.not_finite_from in reported}
        if (verdict := self.agreement.compare(step, sums, sources)) is not None:
            raise self.evicted(verdict)
        self.agreed_steps = step + 1

    def _follow(
        self,
        is_done: Callable[[], bool],
        handle: Callable[[str, Message], None],
        what: str,
        limit_seconds: float,
        missing: Callable[[], Collection[str]] = lambda: (),
    ) -> None:
        """Take events until `is_done`; a loss or a failure ends the run with the error that explains it.

        `limit_seconds`: so long nobody may say anything; then the run ends without those that are still `missing`.
        """
        received_at = time.monotonic()
        while not is_done():
            event = self.coordinator.next_event(self._look_seconds())
            self._check()
            if (verdict := self._stalls.look()) is not None:
                raise self.evicted(verdict)
            name, message = event or ("", None)
            if name not in self.members or message is None or isinstance(message, Joined):
                if time.monotonic() - received_at > limit_seconds:
                    raise self._too_late(what, limit_seconds, missing())
                continue
            if isinstance(message, Lost):
                has_given = name not in self.names and bool(self.first_round_began)
                if message.member is self.members[name] and not has_given:
                    raise self._lost(name, message.reason)
                continue
            if getattr(message, "generation", self.generation) != self.generation:
                continue
            received_at = time.monotonic()
            if isinstance(message, Failed):
                raise self._failed(name, message)
            handle(name, message)

    def _check(self) -> None:
        """Raise what has gone wrong on this side."""
        self._gathering.check()

    def _look_seconds(self) -> float:
        """How long to wait for the next event before looking around."""
        return _LOOK_SECONDS

    # When nothing happens

    @property
    def stall_seconds(self) -> float:
        """How long a device may make no progress before the run goes on without it."""
        return self._stalls.limit_seconds

    def evicted(self, verdict: Verdict) -> ManyhandsError:
        """The error of a run that is to go on without a device, which is put out now."""
        self.coordinator.evict(verdict.device, verdict.reason)
        return self._lost(verdict.device, verdict.reason)

    def _check_step(self, name: str, step: int, next_end: int) -> None:
        """Go on without a device that says it has done what it cannot have done."""
        if step > next_end or step >= self.fed:
            reason = f"it says that it has done step {step}; the next one was {next_end}, and {self.fed} were sent"
            raise self.evicted(Verdict(name, reason))

    def _too_late(self, what: str, limit_seconds: float, missing: Collection[str]) -> ManyhandsError:
        """Nobody has said anything for the limit: whoever is missing is evicted, unless that is everybody."""
        if missing and len(missing) < len(self.everybody):
            errors = [self.evicted(Verdict(one, f"waited {limit_seconds:g} s for it {what}")) for one in missing]
            return errors[0]
        return TimedOut(f"Waited {limit_seconds:g} s for {', '.join(self.names)} {what}; nothing was received.")

    # When something goes wrong

    def _explained(self, error: BaseException) -> BaseException:
        """The cause of an error that is only a witness' account."""
        if error is self._verdict or not is_symptom(error):
            return error
        return self._root_cause() or error

    def _root_cause(self) -> ManyhandsError | None:
        found = find_root_cause(self.coordinator, self.members, self.generation)
        if found is None:
            return self._suspect()
        name, what = found
        return self._lost(name, what) if isinstance(what, str) else self._failed(name, what)

    def _suspect(self) -> ManyhandsError | None:
        """Everybody is there: a device that others cannot reach, or that sends what is not in the plan, is put out."""
        verdict = self._stalls.suspect()
        return None if verdict is None else self.evicted(verdict)

    def _lost(self, name: str, reason: str) -> ManyhandsError:
        step = self._done_step.get(name, self.first - 1) + 1
        if not self._has_begun:
            when = "while it got ready"
        elif step < self.order.last_step:
            when = f"at step {step}"
        else:
            when = f"after its last step, {step - 1}, before everything was gathered"
        self._verdict = found = lost(self.coordinator, name, when, reason)
        return found

    def _failed(self, name: str, message: Failed) -> ManyhandsError:
        """The error a worker met. Who misses a peer is a witness: the lost one is the cause, if news of it comes."""
        if is_symptom(message) and (cause := self._root_cause()) is not None:
            return cause
        found = error_named(message.kind, message.message, message.hint)
        if not isinstance(found, NotFinite):
            found = error_named(message.kind, f"Worker {name}: {message.message}", message.hint)
            self._verdict = found
            return found
        self._receive_rounds_before(message.step)
        if (divergence := self.agreement.divergence) is not None:
            found = type(found)(f"{_head(found)}; it began {divergence}.", hint=found.hint)
        elif len(self.order.plan.stages) > 1:
            found = self._in_data(found, message.step) or self._traced_back(found, message.step)
        self._verdict = found
        return found

    def _receive_rounds_before(self, step: int) -> None:
        """What others report of the rounds before a failure may explain it: a gradient that was not finite makes the
        weights of all devices so, and the next loss on any of them. Raises the error of an eviction."""
        end = time.monotonic() + _DIAGNOSIS_SECONDS
        while min(self._done_step.values()) < step - 1 and (left := end - time.monotonic()) > 0:
            event = self.coordinator.next_event(left)
            if event is None or isinstance(event[1], Lost):
                return
            name, message = event
            if isinstance(message, Progress) and message.generation == self.generation and name in self.names:
                self._progress(name, message)

    def _in_data(self, error: NotFinite, step: int) -> NotFinite | None:
        """Stages behind the first do not see the data: this side does."""
        for name, tensor in bind_inputs(self.order.graph, self._fed[step]).items() if step in self._fed else ():
            if not bool(torch.isfinite(tensor).all()):
                where = f"the input '{name}': the data holds a number that is none"
                return DataNotFinite(f"{_head(error)}; it began in {where}.", hint="Mend the data of that step.")
        return None

    def _traced_back(self, error: NotFinite, step: int) -> NotFinite:
        """In a pipeline the loss is computed at the end: ask every stage where the numbers went wrong first."""
        for name in self.names:
            self.coordinator.send(name, Stop(self.generation, diagnose_step=step))
        found: dict[str, str] = {}
        end = time.monotonic() + _DIAGNOSIS_SECONDS
        while len(found) < len(self.names) and (left := end - time.monotonic()) > 0:
            event = self.coordinator.next_event(left)
            if event is None or isinstance(event[1], Lost):
                break
            if isinstance(event[1], Diagnosis):
                found[event[0]] = event[1].layer
        layers = [n.name for n in self.order.graph.network.layers]
        named = sorted((layer for layer in found.values() if layer in layers), key=layers.index)
        if not named:
            return error
        first = layers.index(named[0])
        stages = [stage for stage in self.order.plan.stages if first in range(*layer_range(stage))]
        devices = " or ".join(name for stage in stages for name in stage.devices)
        return NotFinite(f"{_head(error)}; it began in layer {named[0]}, on {devices}.", hint=error.hint)

    def _stop(self, error: BaseException | None = None) -> None:
        for name in self.everybody:
            self.coordinator.send(name, Stop(self.generation), _STOP_SECONDS)
        self.coordinator.endpoint.mailbox.interrupt(
            error if isinstance(error, ManyhandsError) else WorkerLost("The run has ended.")
        )
        self._gathering.close()


def _turned(sources: Mapping[str, Mapping[str, tuple[str, ...]]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Source -> device -> tensors, of device -> source -> tensors; without what devices have themselves."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for device, own in sources.items():
        for source, names in own.items():
            if source != device:
                found.setdefault(source, {})[device] = names
    return found


def _shares_batches(plan: Plan) -> bool:
    last = plan.stages[-1]
    shared = len(last.devices) > 1 and not isinstance(last.share, ByTiles)
    return plan.is_training and (plan.micro_batches > plan.steps_per_round or shared)


def _head(error: NotFinite) -> str:
    return error.message.split("; it began in")[0]


def _moved(span: MeasuredSpan, offset: float) -> MeasuredSpan:
    return msgspec.structs.replace(span, start=span.start + offset, end=span.end + offset)
