"""A whole cluster in one process, and faults that come at a named action of a named device.

with FaultCluster(("a", "b", "c"), Fault("b", "backward", step=5)) as cluster:
    trip = cluster.travel(plan)
trip.check(...)

Silence is judged by a clock that stands still until somebody is frozen; then it goes on turn by turn, each one only
when everybody else has been heard: nobody is lost because two cores have much to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import Dataset

from hand_made import cluster as made_cluster
from hand_made import even_profile
from manyhands.data.loader import Prefetcher
from manyhands.data.order import BatchOrder
from manyhands.data.preload import Numbered, Preload
from manyhands.data.rewinding import Rewindable, RewindableBatches
from manyhands.executor.device_feed import DeviceFeed
from manyhands.executor.executor import Executor
from manyhands.executor.messages import COORDINATOR, feed_parts
from manyhands.executor.optimizers import slots
from manyhands.executor.process_groups import GroupKey, ProcessGroups
from manyhands.executor.scheduling import Scheduling
from manyhands.facts.collectives import BUILTIN
from manyhands.facts.errors import ManyhandsError, WorkerLost
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.graph.document import to_document
from manyhands.graph.document_reader import read_document
from manyhands.graph.graph import Graph
from manyhands.graph.lengths import LengthGraphs
from manyhands.graph.weights import Weights
from manyhands.planner.replanning import replanned
from manyhands.plans.simulating import simulate
from manyhands.runtime.controller import Change, Controller
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.elastic_job import ElasticJob
from manyhands.runtime.joining import Joining
from manyhands.runtime.keeping import STATE, Keeping
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.outcome import JobHooks, JobOutcome
from manyhands.runtime.part_builder import PartBuilder
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.runtime.state_exchange import StateExchange
from manyhands.runtime.validating import CheckpointRequests, NoValidation, Validation
from manyhands.runtime.worker import Worker
from manyhands.schedule.actions import Action, Backward, Forward, Loss, Receive, Reduce, Send, Step
from manyhands.schedule.backup import holders
from manyhands.schedule.policy import Schedule
from manyhands.transport.inprocess import InProcessTransport
from real_runs import ADAM, BATCH, LAYERS, SGD, Pictures, network

STEPS = 8
BACKUP_EVERY = 2
HEARTBEAT_TIMEOUT_SECONDS = 2.0
HEARTBEAT_SECONDS = 0.05
TURN_SECONDS = HEARTBEAT_TIMEOUT_SECONDS / 8
SHUFFLED = BatchOrder(6 * BATCH, BATCH, True, 5)
LIMIT_SECONDS = 30.0
"""For whatever a test waits for."""
WITNESSES = {"WorkerLost", "TimedOut"}
"""What a worker may complain of when another is gone."""

_PLACES: dict[type, str] = {
    Forward: "forward", Backward: "backward", Loss: "loss", Receive: "receive", Send: "send", Step: "step",
}  # fmt: skip


@dataclass
class Fault:
    """What goes wrong, at which action of which device."""

    device: str
    place: str
    """forward, backward, loss, receive, send, step: an action of the schedule; collective: a sum by a process group,
    before it is begun; feed: a batch comes from the
    coordinator; statistics, all-reduce; keep, send copy, hold copy: backups; survey, prepare, give, load: recovery."""
    kind: str = "killed"
    """Or "silent" (nothing from or to it arrives any more), "unlinked" (from `to` alone, which still lives), "parted"
    (as unlinked, and nobody is told), "hung" (it goes on with its heartbeats and does nothing else), or "called"
    (`does` is called with its worker)."""
    step: int | None = None
    """None: in any. Of backups: the steps done when it was taken."""
    nth: int = 1
    """Of the actions that match."""
    after: Fault | None = None
    """Counted from when this one has happened."""
    also: tuple[str, ...] = ()
    """Who else is killed in the same moment."""
    to: str = ""
    does: Callable[[Worker], None] | None = None
    fired: list[str] = field(default_factory=list)
    """The action it happened at; more than one would be wrong."""
    _met: int = 0


class VirtualClock:
    """Stands still but when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FaultCluster:
    """A coordinator and workers as threads of this process, over a transport that plays faults."""

    def __init__(self, names: Sequence[str], *faults: Fault, max_devices: int | None = None) -> None:
        self.faults = list(faults)
        self.transport = InProcessTransport(limit_seconds=60.0)
        self.clock = VirtualClock()
        self.workers: dict[str, Worker] = {}
        self.threads: list[threading.Thread] = []
        self.ended: list[tuple[str, ManyhandsError | None]] = []
        """Workers whose thread has ended, and why."""
        self.reports: list[tuple[str, str, str]] = []
        """What workers complained of: who, which kind, what."""
        self.strange: list[BaseException] = []
        """What should never come out of a thread."""
        self.trip: Trip | None = None
        self.silent: list[str] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._patch = pytest.MonkeyPatch()
        self._install()
        try:
            self.coordinator = Coordinator(
                heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS, heartbeat_seconds=HEARTBEAT_SECONDS,
                transport=self.transport, clock=self.clock, max_devices=max_devices,
            )  # fmt: skip
            self.pump = threading.Thread(target=self._pump, name="virtual time", daemon=True)
            self.pump.start()
            for name in names:
                self.start(name)
        except BaseException:
            self._patch.undo()
            raise

    def __enter__(self) -> FaultCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._closing.set()
            for name in self.silent:
                self.transport.cut(name)
            self.coordinator.close()
            for thread in [*self.threads, self.pump]:
                thread.join(LIMIT_SECONDS)
                assert not thread.is_alive() or error is not None, f"{thread.name} hangs"
        finally:
            self._patch.undo()

    # Members

    def start(self, name: str) -> None:
        """A worker joins; it is there when this returns."""
        thread = threading.Thread(target=self._work, args=(name,), name=f"worker {name}", daemon=True)
        self.threads.append(thread)
        thread.start()
        self.coordinator.wait_for([name], LIMIT_SECONDS)

    def _work(self, name: str) -> None:
        host, port = self.coordinator.address
        try:
            worker = Worker(Joining(host, port, self.coordinator.token, name), transport=self.transport)
            self.workers[name] = worker
            worker.run()
            self.ended.append((name, None))
        except ManyhandsError as error:
            self.ended.append((name, error))
        except BaseException as error:
            self.strange.append(error)

    def ask_to_leave(self, name: str) -> None:
        """The coordinator has heard it when this returns."""
        self.workers[name].ask_to_leave()
        self.until(lambda: self.coordinator.members[name].is_leaving)

    def until_saved(self, step: int) -> None:
        """To be called at a step that comes two later at least: by then it was asked for."""
        trip = self.trip
        assert trip is not None
        self.until(lambda: step in trip.saved)

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not is_so():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.002)

    # Faults

    def _install(self) -> None:
        """Every place where something can happen asks first whether it does."""

        def before(owner: Any, name: str, meet: Callable[..., None]) -> None:
            real = getattr(owner, name)

            def asked(itself: Any, *words: Any, **named: Any) -> Any:
                if itself.endpoint.__dict__.get("transport") is self.transport:
                    meet(itself, *words, **named)
                return real(itself, *words, **named)

            self._patch.setattr(owner, name, asked)

        def act(executor: Executor, action: Action) -> None:
            if isinstance(action, Reduce):
                if action.what == "statistics":
                    self.meet(executor.device, "statistics", executor.step, str(action))
            else:
                self.meet(executor.device, _PLACES[type(action)], executor.step, str(action))

        before(Executor, "_act", act)
        before(
            DeviceFeed, "take",
            lambda feed, batch, step: self.meet(feed.endpoint.name, "feed", step, f"feed m{batch.number}"),
        )  # fmt: skip
        before(StateExchange, "keep", lambda one, assignment, step, *rest: self._at(one, "keep", step))
        before(StateExchange, "send_copy", lambda one, assignment, message: self._at(one, "send copy", message.step))
        before(StateExchange, "make_room", lambda one, assignment, message: self._at(one, "hold copy", message.step))
        before(PartBuilder, "build", lambda one, generation, job, *rest: self._at(one, "prepare", job.steps_done))
        before(
            StateExchange, "load",
            lambda one, assignment, executor, command: self._at(one, "load", command.first_step),
        )  # fmt: skip
        before(Keeping, "listing", lambda one: self._at(one, "survey", None))
        before(Worker, "_report", lambda one, generation, kind, message, hint: self._complained(one, kind, message))

        def sending(source: str, target: str, step: int, topic: str) -> None:
            if source != COORDINATOR and topic == STATE:
                self.meet(source, "give", step, f"give {target}")
            elif topic.startswith("reduce") and "gradients" in topic:
                self.meet(source, "all-reduce", step, topic)

        self.transport.before_send = sending
        add_up = ProcessGroups.all_reduce

        def adding(groups: ProcessGroups, key: GroupKey, numbers: torch.Tensor, name: str) -> None:
            worker = self.workers.get(groups.name)
            if worker is not None and worker.endpoint.mailbox is groups._mailbox:
                self.meet(groups.name, "collective", int(name.rsplit(" ", 1)[1]), name)
            add_up(groups, key, numbers, name)

        self._patch.setattr(ProcessGroups, "all_reduce", adding)

    def _at(self, one: StateExchange | PartBuilder | Keeping, place: str, step: int | None) -> None:
        self.meet(one.endpoint.name, place, step, f"{place} {step}")

    def _complained(self, worker: Worker, kind: str, message: str) -> None:
        self.reports.append((worker.endpoint.name, kind, message))

    def meet(self, device: str, place: str, step: int | None, action: str) -> None:
        """`device` is about to do something: does it ever?"""
        with self._lock:
            for fault in self.faults:
                is_it = (fault.device, fault.place) == (device, place) and fault.step in (None, step)
                if not is_it or (fault.after is not None and not fault.after.fired):
                    continue
                fault._met += 1
                if fault._met == fault.nth:
                    fault.fired.append(action)
                    break
            else:
                return
        if fault.kind == "unlinked":
            self.workers[device].endpoint.lose(fault.to)
            return
        if fault.kind == "parted":
            self.transport.part(device, fault.to)
            return
        if fault.kind == "hung":
            assert self._closing.wait(LIMIT_SECONDS), "the cluster ends first"
            raise WorkerLost(f"{device} hung here.")
        if fault.kind == "called":
            assert fault.does is not None
            fault.does(self.workers[device])
            return
        for name in (device, *fault.also):
            (self.freeze if fault.kind == "silent" else self.transport.cut)(name)
        if fault.kind == "killed":
            raise WorkerLost(f"{device} was killed here.")

    def freeze(self, name: str) -> None:
        self.transport.freeze(name)
        self.silent.append(name)

    def thaw(self, name: str) -> None:
        """One that was taken for dead says all it had to say."""
        self.silent.remove(name)
        self.transport.thaw(name)

    def _pump(self) -> None:
        """Time goes by while somebody is silent and not yet given up."""
        while not self._closing.wait(0.005):
            alive = self.coordinator.alive()
            if not any(member.name in self.silent for member in alive):
                continue
            self.clock.now += TURN_SECONDS
            self.coordinator.heartbeats.look_around()
            others = [member for member in alive if member.name not in self.silent]
            while not self._closing.wait(0.002) and any(
                not one.is_lost
                and one.name not in self.silent
                and self.coordinator.membership.silent_seconds(one.name) > 0
                for one in others
            ):
                pass

    # Training

    def travel(
        self,
        plan: Plan,
        *,
        steps: int = STEPS,
        optimizer: Optimizer = SGD,
        backup_every: int = BACKUP_EVERY,
        snapshots: tuple[int, ...] = (),
        retry_policy: RetryPolicy | None = None,
        at_step: Mapping[int, Callable[[], None]] | None = None,
        at_event: Mapping[str, Callable[[], None]] | None = None,
        on_event: Callable[[str], None] | None = None,
        rewrite: Callable[[Plan, tuple[str, ...]], Plan] | None = None,
        controller: Controller | None = None,
        should_stop: Callable[[], bool] | None = None,
        start: RunState | None = None,
        is_preloaded: bool = False,
        graph: Graph | None = None,
        data: Dataset[Any] | None = None,
        batches_of: BatchOrder = SHUFFLED,
        lengths: LengthGraphs | None = None,
        loaded: AbstractContextManager[RewindableBatches] | None = None,
        validation: Validation | None = None,
        requests: CheckpointRequests | None = None,
        collectives: str = BUILTIN,
    ) -> Trip:
        """Train to the end, whatever happens.

        `at_step`, `at_event`: done once, when that step or event is told; `on_event`: each time. `rewrite`: plans for
        others, in place of the planner's incremental ones. `is_preloaded`: all samples are sent before the
        first step.
        `graph`: another network than `captured()`, for the same pictures, or for `data` in the order `batches_of`;
        `lengths`: its graphs for samples of several lengths. `loaded`: the batches, in place of `data`'s.
        """
        graph = captured() if graph is None else graph
        trip = self.trip = Trip(self, graph, steps)
        by_step, by_event = dict(at_step or {}), dict(at_event or {})

        def stepped(step: int, loss: float | None, seconds: float) -> None:
            trip.steps.append((step, loss))
            by_step.pop(step, lambda: None)()

        def logged(event: str, /, **facts: Any) -> None:
            trip.logged.append((event, facts))
            by_event.pop(event, lambda: None)()
            if on_event is not None:
                on_event(event)

        def change(old: Plan, names: tuple[str, ...], wanted: str) -> Change:
            present, known = made_cluster(names), even_profile(graph.network, names)

            def price(candidate: Plan) -> float:
                return simulate(candidate, graph.network, present, known, keep_spans=False).seconds

            if rewrite is not None:
                plan = rewrite(old, names)
            else:
                plan = replanned(old, graph.network, present, known, how=wanted, price=price).plan
            chosen = resolve(plan, graph.network, present)
            trip.plans.append(chosen)
            return Change(chosen, {}, wanted, "as the test has it", backup_every if len(chosen.devices) > 1 else 0)

        chosen = resolve(plan, graph.network, made_cluster(plan.devices))
        order = Order(
            graph, chosen, start or RunState(Weights.copied(graph).tensors), steps, optimizer,
            rates=Scheduling.by_name(optimizer), seed=5,
            snapshots=(*snapshots, steps), wait_limit_seconds=60.0,
            backup_every=backup_every if len(chosen.devices) > 1 else 0,
            preload=Preload.of(Pictures()) if is_preloaded else None, lengths=lengths, collectives=collectives,
        )  # fmt: skip
        given = data if data is not None else Pictures()
        fed: Dataset[Any] = Numbered(given) if is_preloaded else given
        if loaded is None:
            wake = self.coordinator.wake
            loaded = Rewindable(
                lambda step: Prefetcher(fed, batches_of, step, steps, wake=wake), order.start.steps_done
            )
        with loaded as batches:
            job = ElasticJob(
                self.coordinator, order, batches, change, retry_policy or RetryPolicy("light"),
                hooks=JobHooks(
                    stepped, lambda snapshot: trip.saved.append(snapshot.steps_done), logged,
                    should_stop or (lambda: False), validation or NoValidation(), requests or CheckpointRequests(),
                ),
                controller=controller,
            )  # fmt: skip
            trip.outcome = job.run()
        return trip


@dataclass
class Trip:
    """What came of a job, and what was told meanwhile."""

    cluster: FaultCluster
    graph: Graph
    length: int
    outcome: JobOutcome = field(default_factory=JobOutcome)
    steps: list[tuple[int, float | None]] = field(default_factory=list)
    logged: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    """One for each change."""
    saved: list[int] = field(default_factory=list)

    def facts(self, event: str) -> list[dict[str, Any]]:
        return [facts for name, facts in self.logged if name == event]

    @property
    def events(self) -> list[str]:
        return [name for name, _ in self.logged]

    def check(self, reference: Reference, *, generations: int | None = None) -> None:
        """The run is the one that nothing happened to, and every fault happened once, where it should."""
        for fault in self.cluster.faults:
            assert len(fault.fired) == 1, fault
        assert self.cluster.strange == []
        assert {kind for _, kind, _ in self.cluster.reports} <= WITNESSES, self.cluster.reports
        if generations is not None:
            assert self.outcome.generations == generations, self.logged
        assert [step for step, _ in self.steps] == list(range(self.length))
        losses = [loss for _, loss in self.steps]
        assert losses == self.outcome.losses
        assert_near(losses, reference.losses)
        found = self.outcome.state
        assert found is not None
        assert found.steps_done == self.length
        assert_equal(found.weights, reference.state.weights)
        assert_equal(found.optimizer, reference.state.optimizer)
        assert found.scalars == reference.state.scalars


@dataclass
class Reference:
    """What the same network comes to on one device, undisturbed."""

    losses: list[float]
    state: RunState


@cache
def captured() -> Graph:
    generator = torch.Generator().manual_seed(9)
    batch = torch.randn(4, 1, 8, 8, generator=generator, dtype=torch.float64)
    target = torch.tensor([0, 1, 2, 3])
    graph = capture(network(), batch, loss=functional.cross_entropy, target=target, granularity="blocks")
    read_document(to_document(graph))  # msgspec crashes where several threads are the first to read a document
    return graph


@cache
def reference(micro_batches: int, steps: int = STEPS, optimizer: str = "SGD") -> Reference:
    chosen = {"SGD": SGD, "Adam": ADAM}[optimizer]
    stage = Stage((0, LAYERS), ("alone",), Single())
    plan = Plan("Sequential", BATCH, (stage,), micro_batches=micro_batches, optimizer_slots=slots(chosen))
    with FaultCluster(("alone",)) as cluster:
        trip = cluster.travel(plan, steps=steps, optimizer=chosen)
    assert trip.outcome.state is not None
    assert trip.outcome.generations == 1
    return Reference(trip.outcome.losses, trip.outcome.state)


def assert_near(losses: Sequence[float | None], wanted: Sequence[float], tolerance: float = 1e-10) -> None:
    assert len(losses) == len(wanted)
    for step, (one, other) in enumerate(zip(losses, wanted)):
        assert one is not None
        assert abs(one - other) <= tolerance * max(1.0, abs(other)), f"losses of step {step} are not close"


def assert_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.shape == other[name].shape, name
        scale = float(other[name].abs().max()) or 1.0
        assert float((tensor - other[name]).abs().max()) <= tolerance * scale, f"{name} and the other are not close"


# Plans over devices a, b and c

PLANS: dict[str, Plan] = {
    "samples": Plan("Sequential", BATCH, (Stage((0, LAYERS), ("a", "b", "c"), BySamples((5, 4, 3))),)),
    "pipeline": Plan(
        "Sequential", BATCH,
        (Stage((0, 1), ("a",), Single()), Stage((1, 2), ("b",), Single()), Stage((2, LAYERS), ("c",), Single())),
        micro_batches=2,
    ),
    "hybrid": Plan(
        "Sequential", BATCH,
        (Stage((0, 2), ("a", "b"), BySamples((2, 4))), Stage((2, LAYERS), ("c",), Single())),
        micro_batches=2,
    ),
    "tiles+single": Plan(
        "Sequential", BATCH,
        (Stage((0, 2), ("a", "b"), ByTiles((2, 1))), Stage((2, LAYERS), ("c",), Single())),
    ),
    "tiles": Plan(
        "Sequential", BATCH,
        (Stage((0, 2), ("a", "b", "c"), ByTiles((3, 3, 2))), Stage((2, LAYERS), ("c",), Single())),
        order="sequential",
    ),
}  # fmt: skip


def all_alike(old: Plan, names: tuple[str, ...]) -> Plan:
    """Everybody has every layer, and an equal part of the samples: all state must be everywhere."""
    size = old.micro_batch_size
    each = tuple(size // len(names) + (place < size % len(names)) for place in range(len(names)))
    share = BySamples(each) if len(names) > 1 else Single()
    return Plan(old.network, old.batch_size, (Stage((0, LAYERS), names, share),), micro_batches=old.micro_batches)


def places_of(plan: Plan, device: str) -> list[str]:
    """Where something can go wrong on a device, as long as nothing has gone wrong."""
    graph = captured()
    schedule = Schedule(resolve(plan, graph.network, made_cluster(plan.devices)), graph.network)
    actions = schedule.every_action(device)
    work = {name: schedule.lowering.work[name] for name in plan.devices}
    stepped = {name: each.stepped_weights() for name, each in work.items()}
    holding = holders(plan, {name: each.weights() for name, each in work.items()}, stepped)
    found = ["feed"] if feed_parts(graph, schedule.lowering, device, targets=True) else []
    found += [name for kind, name in _PLACES.items() if any(isinstance(action, kind) for action in actions)]
    for what, name in (("statistics", "statistics"), ("gradients", "all-reduce")):
        if any(isinstance(action, Reduce) and action.what == what for action in actions):
            found.append(name)
    found.append("keep")
    found += ["send copy"] if device in holding else []
    found += ["hold copy"] if device in holding.values() else []
    return found
