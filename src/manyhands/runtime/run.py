"""One run over joined workers: hand out the parts, feed batches, follow the progress, gather state and results.

The coordinator feeds a few steps ahead and no further: that is what keeps fast devices from running away. It never
waits without watching: every event of every worker passes through `_follow`, and silence beyond the limit is an error.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from manyhands.executor.feeder import Feeder
from manyhands.executor.log import DeviceLog, MeasuredSpan
from manyhands.facts.errors import ManyhandsError, NotFinite, TimedOut, WorkerLost, error_named
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel
from manyhands.graph.document import to_document
from manyhands.graph.graph import Graph
from manyhands.runtime import state
from manyhands.runtime.control import (
    Diagnosis,
    Done,
    Failed,
    Job,
    Prepare,
    Progress,
    Ready,
    Said,
    Send,
    Start,
    State,
    Stop,
)
from manyhands.runtime.coordinator import Coordinator, Lost
from manyhands.schedule.policy import Schedule

STEPS_FED_AHEAD = 3
WAIT_LIMIT_SECONDS = 600.0
PREPARE_SECONDS = 120.0
_CULPRIT_SECONDS = 3.0
"""How long, after somebody missed a peer, to wait for news of who was lost."""

Batch = tuple[int, Any, Any]
Batches = Iterator[Batch]


@dataclass
class RunState:
    """What a run starts from or has come to: weights and buffers by name, the optimiser's state, steps done."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    steps_done: int = 0


@dataclass
class Order:
    """What is to be run."""

    graph: Graph
    plan: Plan
    start: RunState
    last_step: int
    optimizer: Optimizer | None = None
    seed: int = 0
    kernels: Mapping[str, Mapping[str, Kernel]] = field(default_factory=dict)
    """Device -> operator -> kernel."""
    snapshots: tuple[int, ...] = ()
    trace_steps: range = range(0)
    wait_limit_seconds: float = WAIT_LIMIT_SECONDS


@dataclass
class Outcome:
    """What came of it."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    """From one step's end to the next, as the slowest device reported them."""
    logs: dict[str, DeviceLog] = field(default_factory=dict)
    state: RunState | None = None


OnStep = Callable[[int, float | None, float], None]
OnSnapshot = Callable[[RunState], None]
OnResult = Callable[[int, dict[str, torch.Tensor]], None]


class Run:
    """Follows one order to its end."""

    def __init__(
        self,
        coordinator: Coordinator,
        order: Order,
        *,
        on_step: OnStep | None = None,
        on_snapshot: OnSnapshot | None = None,
        on_result: OnResult | None = None,
    ) -> None:
        self.coordinator, self.order = coordinator, order
        self.on_step = on_step or (lambda step, loss, seconds: None)
        self.on_snapshot = on_snapshot or (lambda found: None)
        self.on_result = on_result
        self.schedule = Schedule(order.plan, order.graph.network)
        self.names = order.plan.devices
        self.generation = coordinator.new_generation()
        self.feeder = Feeder(order.graph, self.schedule, coordinator.endpoint, with_targets=order.plan.is_training)
        self.outcome = Outcome()
        self.first = order.start.steps_done
        self._done_step = dict.fromkeys(self.names, self.first - 1)
        self._parts: dict[int, dict[str, float]] = defaultdict(dict)
        self._reported: dict[int, int] = defaultdict(int)
        self._ended_at = 0.0
        self._gathering = _Gathering(self)

    # Preparing

    def prepare(self) -> None:
        """Everybody builds its part and connects to the others."""
        self.coordinator.endpoint.mailbox.open(self.generation, self._expected(), self.first)
        peers = self.coordinator.addresses(self.names)
        document = to_document(self.order.graph)
        for name in self.names:
            self.coordinator.say(name, Prepare(self.generation, self._job(name, document), peers))
        self.coordinator.connect(self.names)
        ready: set[str] = set()

        def hear(name: str, message: Said) -> None:
            if isinstance(message, Ready):
                ready.add(name)

        self._follow(lambda: len(ready) == len(self.names), hear, "to get ready", PREPARE_SECONDS)
        self.coordinator.set_clocks(self.names)

    def _expected(self) -> dict[tuple[str, str], int]:
        return {} if self.order.plan.is_training else self.feeder.expected_results()

    def _stage_of(self, name: str) -> int:
        return self.schedule.lowering.work[name].stage

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        """What a device starts with: its stage's weights, its loss' constants, its part of the optimiser's state."""
        geometry, graph, start = self.schedule.lowering.work[name].geometry, self.order.graph, self.order.start
        found: dict[str, torch.Tensor] = {}
        if geometry is not None:
            own = graph.network.weights_of(geometry.first, geometry.last)
            found |= state.named(state.WEIGHT, {n: start.weights[n] for n in own})
            trained = set(own)
            mine = {key: t for key, t in start.optimizer.items() if key.rpartition("/")[0] in trained}
            found |= state.named(state.OPTIMIZER, mine)
        if graph.loss is not None:
            found |= state.named(state.LOSS, graph.loss.state)
        return {key: tensor.detach().cpu().contiguous() for key, tensor in found.items()}

    def _job(self, name: str, document: dict[str, Any]) -> Job:
        order, stage = self.order, self._stage_of(name)
        kernels = dict(order.kernels.get(name, {}))
        alike = stage < 0 or all(
            dict(order.kernels.get(other, {})) == kernels for other in order.plan.stages[stage].devices
        )
        return Job(
            graph=document, network=order.graph.network, plan=order.plan,
            optimizer=order.optimizer.to_dict() if order.optimizer is not None else None, seed=order.seed,
            kernels=kernels, stored=kernels if alike else {}, state=state.entries(self._tensors(name)),
            scalars=order.start.scalars, steps_done=self.first, with_targets=order.plan.is_training,
            trace_first=order.trace_steps.start, trace_last=order.trace_steps.stop,
            wait_limit_seconds=order.wait_limit_seconds,
        )  # fmt: skip

    # Running

    def run(self, batches: Batches) -> Outcome:
        """Feed every batch and follow until all devices are done."""
        try:
            self._start()
            self._loop(batches)
            self._finish()
        except BaseException as error:
            self._stop(error)
            raise
        self._stop()
        return self.outcome

    def _start(self) -> None:
        keepers = {stage.devices[0] for stage in self.order.plan.stages}
        for name in self.names:
            tensors = list(self._tensors(name).values())
            self.coordinator.endpoint.send(name, self.first, "state", tensors)
            snapshots = self.order.snapshots if name in keepers else ()
            self.coordinator.say(name, Start(self.generation, self.first, self.order.last_step, snapshots))
        self._ended_at = time.monotonic()

    def _loop(self, batches: Batches) -> None:
        fed = self.first
        while (done := min(self._done_step.values()) + 1) < self.order.last_step:
            while fed < min(self.order.last_step, done + STEPS_FED_AHEAD):
                step, inputs, targets = next(batches)
                assert step == fed, "batches come in order"
                self.feeder.send(step, inputs, targets)
                fed += 1
            before = done

            def moved(before: int = before) -> bool:
                return min(self._done_step.values()) + 1 > before

            self._follow(moved, self._hear, f"to end step {done}", self.order.wait_limit_seconds + 30)
            if self.on_result is not None:
                for step in range(before, min(self._done_step.values()) + 1):
                    self.on_result(step, self.feeder.gather(step))
                    self.coordinator.endpoint.mailbox.begin_step(step + 1)

    def _finish(self) -> None:
        def ended() -> bool:
            return len(self.outcome.logs) == len(self.names) and self._gathering.is_complete()

        self._follow(ended, self._hear, "to finish", self.order.wait_limit_seconds + 30)
        self.outcome.state = self._gathering.latest

    def _hear(self, name: str, message: Said) -> None:
        if isinstance(message, Progress):
            self._progress(name, message)
        elif isinstance(message, State):
            self._gathering.take(name, message)
        elif isinstance(message, Done):
            offset = self.coordinator.members[name].clock_offset_seconds
            message.log.spans = [_moved(span, offset) for span in message.log.spans]
            self.outcome.logs[name] = message.log

    def _progress(self, name: str, message: Progress) -> None:
        self._done_step[name] = message.step
        self._reported[message.step] += 1
        if message.loss is not None:
            self._parts[message.step][name] = message.loss
        if self._reported[message.step] < len(self.names):
            return
        del self._reported[message.step]
        parts = self._parts.pop(message.step, {})
        loss = sum(parts[name] for name in self.names if name in parts) if parts else None
        now = time.monotonic()
        seconds, self._ended_at = now - self._ended_at, now
        self.outcome.step_seconds.append(seconds)
        if loss is not None:
            self.outcome.losses.append(loss)
        self.on_step(message.step, loss, seconds)

    def _follow(
        self, is_done: Callable[[], bool], hear: Callable[[str, Said], None], what: str, limit_seconds: float
    ) -> None:
        """Take events until `is_done`; a loss or a failure ends the run with the error that explains it."""
        heard = time.monotonic()
        while not is_done():
            event = self.coordinator.next_event(0.2)
            self._gathering.check()
            if event is None:
                if time.monotonic() - heard > limit_seconds:
                    waiting = ", ".join(n for n in self.names if not self.coordinator.members[n].is_lost)
                    raise TimedOut(f"Waited {limit_seconds:g} s for {waiting} {what}.")
                continue
            name, message = event
            if name not in self.names:
                continue
            heard = time.monotonic()
            if isinstance(message, Lost):
                raise self._lost(name, message.reason)
            if getattr(message, "generation", self.generation) != self.generation:
                continue
            if isinstance(message, Failed):
                raise self._failed(name, message)
            hear(name, message)

    # When something goes wrong

    def _lost(self, name: str, reason: str) -> WorkerLost:
        ending = self.coordinator.local.ending(name, 1.0)
        step = self._done_step[name] + 1
        return WorkerLost(f"Worker {name} was lost at step {step}: {ending or reason}.")

    def _failed(self, name: str, message: Failed) -> ManyhandsError:
        """The error a worker met. Who misses a peer is a witness: the lost one is the cause, if news of it comes."""
        if message.kind in ("WorkerLost", "TimedOut"):
            end = time.monotonic() + _CULPRIT_SECONDS
            while (left := end - time.monotonic()) > 0:
                event = self.coordinator.next_event(left)
                if event is None:
                    break
                if isinstance(event[1], Lost) and event[0] in self.names:
                    return self._lost(event[0], event[1].reason)
                if isinstance(event[1], Failed) and event[1].kind not in ("WorkerLost", "TimedOut"):
                    return self._failed(event[0], event[1])
        prefix = "" if message.kind == "NotFinite" else f"Worker {name}: "
        found = error_named(message.kind, prefix + message.message, message.hint)
        if isinstance(found, NotFinite) and len(self.order.plan.stages) > 1:
            found = self._traced_back(found, message.step)
        return found

    def _traced_back(self, error: NotFinite, step: int) -> NotFinite:
        """In a pipeline the loss is computed at the end: ask every stage where the numbers went wrong first."""
        for name in self.names:
            self.coordinator.say(name, Stop(self.generation, diagnose_step=step))
        found: dict[str, str] = {}
        end = time.monotonic() + 5.0
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
        head = error.message.split("; it began in")[0]
        return NotFinite(f"{head}; it began in layer {named[0]}.", hint=error.hint)

    def _stop(self, error: BaseException | None = None) -> None:
        for name in self.names:
            self.coordinator.say(name, Stop(self.generation))
        self.coordinator.endpoint.mailbox.interrupt(
            error if isinstance(error, ManyhandsError) else WorkerLost("The run has ended.")
        )
        self._gathering.close()


class _Gathering:
    """Snapshots from every stage, put together off the main path."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.latest: RunState | None = None
        self._parts: dict[int, dict[int, tuple[dict[str, torch.Tensor], dict[str, Any]]]] = defaultdict(dict)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._saved = 0
        self._error: BaseException | None = None

    def take(self, name: str, message: State) -> None:
        """A worker has a snapshot: make room for it, ask for it, and wait for it on a thread."""
        listed = message.tensors
        self.run.coordinator.endpoint.mailbox.expect(name, f"state {message.step}", state.byte_count(listed))
        thread = threading.Thread(target=self._receive, args=(name, message), name="gathering", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _receive(self, name: str, message: State) -> None:
        try:
            tensors = state.empty(message.tensors)
            box, topic = self.run.coordinator.endpoint.mailbox, f"state {message.step}"
            first = self.run.first
            box.post(name, first, topic, list(tensors.values()))
            self.run.coordinator.say(name, Send(self.run.generation, message.step))
            box.receive(name, first, topic, list(tensors.values()))
            with self._lock:
                parts = self._parts[message.step]
                parts[self.run._stage_of(name)] = (tensors, message.scalars)
                if len(parts) < len(self.run.order.plan.stages):
                    return
                found = self._joined(message.step)
                self.run.on_snapshot(found)
                self.latest = found
                self._saved += 1
        except BaseException as error:
            self._error = error

    def _joined(self, step: int) -> RunState:
        found = RunState({}, steps_done=step)
        for _, (tensors, scalars) in sorted(self._parts.pop(step).items()):
            found.weights |= state.of(state.WEIGHT, tensors)
            found.optimizer |= state.of(state.OPTIMIZER, tensors)
            found.scalars |= scalars
        return found

    def is_complete(self) -> bool:
        return self._saved == len(self.run.order.snapshots)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        for thread in self._threads:
            thread.join(5)


def _moved(span: MeasuredSpan, offset: float) -> MeasuredSpan:
    return msgspec.structs.replace(span, start=span.start + offset, end=span.end + offset)


def snapshot_steps(first: int, last: int, every: int) -> tuple[int, ...]:
    """Steps done at which state is kept: every so many, and at the end."""
    found = {step for step in range(first + 1, last + 1) if step % every == 0} | {last}
    return tuple(sorted(step for step in found if step > first))
