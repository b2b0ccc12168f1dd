"""One run over joined workers: hand out the parts, feed batches, follow the progress, gather state and results.

The coordinator feeds a few steps ahead and no further: that is what keeps fast devices from running away. It never
waits without watching: every event of every worker passes through `_follow`, and silence beyond the limit is an error.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import torch

from manyhands.executor.feeder import Feeder
from manyhands.executor.log import DeviceLog, MeasuredSpan
from manyhands.facts.errors import BadData, ManyhandsError, NotFinite, TimedOut, WorkerLost, error_named
from manyhands.facts.plan import ByTiles, Plan
from manyhands.graph.document import to_document
from manyhands.graph.loss import has_ignored, ignored_class
from manyhands.graph.tape import bind_inputs
from manyhands.runtime import state
from manyhands.runtime.attempt import Attempt
from manyhands.runtime.blame import culprit, is_witness, lost
from manyhands.runtime.control import (
    Diagnosis,
    Done,
    Failed,
    Job,
    Prepare,
    Progress,
    Ready,
    Said,
    Start,
    State,
    Stop,
)
from manyhands.runtime.coordinator import Coordinator, Lost, Member
from manyhands.runtime.gathering import Gathering
from manyhands.runtime.order import Order, RunState
from manyhands.schedule.policy import Schedule

STEPS_FED_AHEAD = 3
PREPARE_SECONDS = 120.0
CONNECT_SECONDS = 30.0
_STOP_SECONDS = 2.0
_DIAGNOSIS_SECONDS = 5.0

Batch = tuple[int, Any, Any]
Batches = Iterator[Batch]


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
        self.members: dict[str, Member] = {}
        self.generation = coordinator.new_generation()
        self.feeder = Feeder(order.graph, self.schedule, coordinator.endpoint, with_targets=order.plan.is_training)
        self.outcome = Outcome()
        self.first = order.start.steps_done
        self._done_step = dict.fromkeys(self.names, self.first - 1)
        self._parts: dict[int, dict[str, float]] = defaultdict(dict)
        self._reported: dict[int, int] = defaultdict(int)
        self._fed: dict[int, Any] = {}
        """Inputs of the steps under way."""
        self._ended_at = 0.0
        self._has_begun = False
        self._verdict: BaseException | None = None
        """The error that explains why the run ended; others are looked into."""
        self._looks_for_ignored = _shares_batches(order.plan) and ignored_class(order.graph) is not None
        self._gathering = Gathering(self)

    # Preparing

    def prepare(self) -> None:
        """Everybody builds its part and connects to the others."""
        self.members = self.coordinator.muster(self.names)
        try:
            self._prepare()
        except BaseException as error:
            self._end(error)

    def _prepare(self) -> None:
        self.coordinator.endpoint.mailbox.open(self.generation, self._expected(), self.first)
        document = to_document(self.order.graph)
        for name in self.names:
            peers = self.coordinator.addresses(self.names, name)
            self.coordinator.say(name, Prepare(self.generation, self._job(name, document), peers))
        patience = self.coordinator.security.patience
        connecting = Attempt(
            lambda: self.coordinator.connect(self.names, CONNECT_SECONDS * patience), "coordinator connect"
        )
        ready: set[str] = set()

        def hear(name: str, message: Said) -> None:
            if isinstance(message, Ready):
                ready.add(name)

        def is_ready() -> bool:
            return connecting.is_over() and len(ready) == len(self.names)

        self._follow(is_ready, hear, "to get ready", PREPARE_SECONDS * patience)
        self.coordinator.set_clocks(self.names)

    def _expected(self) -> dict[tuple[str, str], int]:
        return {} if self.order.plan.is_training else self.feeder.expected_results()

    @property
    def keepers(self) -> tuple[str, ...]:
        """The first device of every stage: together they have every weight."""
        return tuple(dict.fromkeys(stage.devices[0] for stage in self.order.plan.stages))

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        """What a device starts with: its stage's weights, its loss' constants, its part of the optimiser's state."""
        own, graph, start = self.schedule.lowering.work[name].weights(), self.order.graph, self.order.start
        found: dict[str, torch.Tensor] = {}
        if own:
            found |= state.named(state.WEIGHT, {n: start.weights[n] for n in own})
            trained = set(own)
            mine = {key: t for key, t in start.optimizer.items() if key.rpartition("/")[0] in trained}
            found |= state.named(state.OPTIMIZER, mine)
        if graph.loss is not None:
            found |= state.named(state.LOSS, graph.loss.state)
        return {key: tensor.detach().cpu().contiguous() for key, tensor in found.items()}

    def _job(self, name: str, document: dict[str, Any]) -> Job:
        order = self.order
        kernels = dict(order.kernels.get(name, {}))
        together = [other for stage in order.plan.stages if name in stage.devices for other in stage.devices]
        alike = all(dict(order.kernels.get(other, {})) == kernels for other in together)
        return Job(
            graph=document, network=order.graph.network, plan=order.plan,
            optimizer=order.optimizer.to_dict() if order.optimizer is not None else None, seed=order.seed,
            kernels=kernels, stored=kernels if alike else {}, state=state.entries(self._tensors(name)),
            scalars=order.start.scalars, steps_done=self.first, with_targets=order.plan.is_training,
            trace_first=order.trace_steps.start, trace_last=order.trace_steps.stop,
            memory_step=order.memory_step,
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
        keepers = self.keepers
        for name in self.names:
            tensors = list(self._tensors(name).values())
            self.coordinator.endpoint.send(name, self.first, "state", tensors)
            snapshots = self.order.snapshots if name in keepers else ()
            self.coordinator.say(name, Start(self.generation, self.first, self.order.last_step, snapshots))
        self._ended_at = time.monotonic()
        self._has_begun = True

    def _loop(self, batches: Batches) -> None:
        fed = self.first

        def may_feed() -> bool:
            limit = min(self.order.last_step, self._steps_done() + STEPS_FED_AHEAD)
            return fed < limit and not self._gathering.is_behind(fed)

        while (done := self._steps_done()) < self.order.last_step:
            while may_feed():
                self._feed(fed, batches)
                fed += 1

            def moved(done: int = done) -> bool:
                return self._steps_done() > done or may_feed()

            self._follow(moved, self._hear, f"to end step {done}", self.order.wait_limit_seconds + 30)
            if self.on_result is not None:
                for step in range(done, self._steps_done()):
                    self.on_result(step, self.feeder.gather(step))
                    self.coordinator.endpoint.mailbox.begin_step(step + 1)

    def _steps_done(self) -> int:
        return min(self._done_step.values()) + 1

    def _feed(self, fed: int, batches: Batches) -> None:
        step, inputs, targets = next(batches)
        assert step == fed, "batches come in order"
        if self._looks_for_ignored and has_ignored(self.order.graph, targets):
            raise BadData(
                f"The targets of step {step} hold the class {ignored_class(self.order.graph)}, which the loss leaves "
                f"out: its mean is over the others, and the parts of a batch differ in how many they have.",
                hint='Train with plan="single" and one micro-batch.',
            )
        self._fed[step] = inputs
        self.feeder.send(step, inputs, targets)

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
        self._fed.pop(message.step, None)
        parts = self._parts.pop(message.step, {})
        loss = sum(parts[name] for name in self.names if name in parts) if parts else None
        now = time.monotonic()
        seconds, self._ended_at = now - self._ended_at, now
        self.outcome.step_seconds.append(seconds)
        if loss is not None:
            self.outcome.losses.append(loss)
        self.on_step(message.step, loss, seconds)
        self._gathering.ended(message.step)

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
                    waiting = ", ".join(self.names)
                    raise TimedOut(f"Waited {limit_seconds:g} s for {waiting} {what}; nobody said anything.")
                continue
            name, message = event
            if name not in self.members:
                continue
            if isinstance(message, Lost):
                if message.member is self.members[name]:
                    raise self._lost(name, message.reason)
                continue
            if getattr(message, "generation", self.generation) != self.generation:
                continue
            heard = time.monotonic()
            if isinstance(message, Failed):
                raise self._failed(name, message)
            hear(name, message)

    # When something goes wrong

    def _explained(self, error: BaseException) -> BaseException:
        """The cause of an error that is only a witness' account."""
        if error is self._verdict or not is_witness(error):
            return error
        return self._culprit() or error

    def _culprit(self) -> ManyhandsError | None:
        found = culprit(self.coordinator, self.members, self.generation)
        if found is None:
            return None
        name, what = found
        return self._lost(name, what) if isinstance(what, str) else self._failed(name, what)

    def _lost(self, name: str, reason: str) -> ManyhandsError:
        step = self._done_step[name] + 1
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
        if is_witness(message) and (cause := self._culprit()) is not None:
            return cause
        prefix = "" if message.kind == "NotFinite" else f"Worker {name}: "
        found = error_named(message.kind, prefix + message.message, message.hint)
        if isinstance(found, NotFinite) and len(self.order.plan.stages) > 1:
            found = self._in_data(found, message.step) or self._traced_back(found, message.step)
        self._verdict = found
        return found

    def _in_data(self, error: NotFinite, step: int) -> NotFinite | None:
        """Stages behind the first do not see the data: this side does."""
        for name, tensor in bind_inputs(self.order.graph, self._fed[step]).items() if step in self._fed else ():
            if not bool(torch.isfinite(tensor).all()):
                where = f"the input '{name}': the data holds a number that is none"
                return NotFinite(f"{_head(error)}; it began in {where}.", hint=error.hint)
        return None

    def _traced_back(self, error: NotFinite, step: int) -> NotFinite:
        """In a pipeline the loss is computed at the end: ask every stage where the numbers went wrong first."""
        for name in self.names:
            self.coordinator.say(name, Stop(self.generation, diagnose_step=step))
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
        return NotFinite(f"{_head(error)}; it began in layer {named[0]}.", hint=error.hint)

    def _stop(self, error: BaseException | None = None) -> None:
        for name in self.names:
            self.coordinator.say(name, Stop(self.generation), _STOP_SECONDS)
        self.coordinator.endpoint.mailbox.interrupt(
            error if isinstance(error, ManyhandsError) else WorkerLost("The run has ended.")
        )
        self._gathering.close()


def _shares_batches(plan: Plan) -> bool:
    last = plan.stages[-1]
    shared = len(last.devices) > 1 and not isinstance(last.share, ByTiles)
    return plan.is_training and (plan.micro_batches > 1 or shared)


def _head(error: NotFinite) -> str:
    return error.message.split("; it began in")[0]


def _moved(span: MeasuredSpan, offset: float) -> MeasuredSpan:
    return msgspec.structs.replace(span, start=span.start + offset, end=span.end + offset)
