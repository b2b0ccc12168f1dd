"""Interprets a schedule's actions with torch: one device's part of a run, as the simulator does under a virtual clock.

The executor asks the policy for an action, calls what was bound to it (bound_calls.py), and records its time. Actions
are carried out by:

    forward, backward     pass_calls.py, by the stage's runner (runner.py): whole samples (segments.py), tiles, channels
    loss                  the captured loss of what the network returned (share_loss.py)
    send, receive         Messenger (messenger.py): boxes of tensors, packed where the plan says so (codec.py)
    reduce, await         Reductions (reductions.py): statistics, and gradients on a thread of their own (reducer.py)
    reduce norm, step     WeightUpdates (updates.py): the optimizer, once all gradients are added up, and clipped
    discard               InFlightMicroBatches (in_flight.py), which knows where every micro-batch is

All of these hold tensors of one graph's shapes: they are a GraphPart (graph_part.py), and batches of another length
have another. DeviceFeed (device_feed.py) receives what the coordinator sends; NumberDiagnosis (diagnosis.py) finds
where numbers stopped being finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch

from manyhands.executor.arrivals import ArrivedMessages, FedMicroBatches
from manyhands.executor.averaging import WeightAverage
from manyhands.executor.bound_calls import Binder, BoundCalls, Call
from manyhands.executor.graph_part import DeviceSetup, GraphPart
from manyhands.executor.late_loss import LateLoss
from manyhands.executor.log import DeviceLog, Recorder
from manyhands.executor.loss_scale import loss_scale_of
from manyhands.executor.messages import COORDINATOR
from manyhands.executor.optimizers import Stepper
from manyhands.executor.options import ExecutorOptions
from manyhands.executor.pass_calls import bind_backward, bind_forward
from manyhands.executor.round_result import RoundResult
from manyhands.executor.runner import Runner
from manyhands.executor.slowdown import UNSLOWED, Slowdown
from manyhands.executor.tensor_memory import TensorMemory
from manyhands.facts.errors import BadSchedule
from manyhands.graph.accelerators import synchronize
from manyhands.graph.graph import Graph
from manyhands.graph.lengths import LengthGraphs
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Await, Backward, Discard, Forward, Loss, Receive, Reduce, Send, Step
from manyhands.schedule.feeding import result_topic
from manyhands.schedule.interleave import InterleavedOrder
from manyhands.schedule.policies import DONE, WAIT, DeviceState, FixedOrder, Policy
from manyhands.schedule.policy import Schedule
from manyhands.schedule.replay import MiniBatches
from manyhands.transport.endpoint import Endpoint
from manyhands.transport.mailbox import ExpectedMessages


class Executor:
    """One device of a schedule. `round` runs one mini-batch; every wait has the mailbox's time limit.

    With `lengths`, each round has the graph of its step's length, scheduled by the same plan; `graph` and `schedule`
    are those of the longest.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        endpoint: Endpoint,
        weights: Weights,
        stepper: Stepper | None,
        options: ExecutorOptions,
        lengths: LengthGraphs | None = None,
    ) -> None:
        self.endpoint, self.options, self.lengths = endpoint, options, lengths
        self.plan, self.device, self.weights, self.stepper = schedule.plan, endpoint.name, weights, stepper
        self.torch_device = torch.device(options.torch_device)
        self.recorder = Recorder(
            DeviceLog(self.device), options.trace_steps, waits_for_device=self.torch_device.type == "cpu",
            watch_every=options.watch_every,
        )  # fmt: skip
        self.slowdown = Slowdown(options.slowdown, self.torch_device)
        waits = self.torch_device.type == "cpu" or options.is_exact or schedule.plan.steps_per_round > 1
        self.puts_off_losses = not waits
        """Whether a round ends before its loss is known: the next one may begin meanwhile. See `settle`."""
        self._losses: list[torch.Tensor] = []
        """The losses of this round's micro-batches, where they are not waited for."""
        self.loss_scale = loss_scale_of(schedule, self.device) if options.scales_loss else None
        """The factor of the loss, alike on all devices that exchange the gradients' norm; None: it is not scaled."""
        self.average = WeightAverage(options.ema, stepper.weights) if options.ema is not None and stepper else None
        """The average of the weights that this device steps, where one is kept."""
        setup = DeviceSetup(
            endpoint, weights, stepper, options, self.recorder, self.slowdown, self.loss_scale, self.average,
            has_boards=lengths is None,
        )  # fmt: skip
        longest = GraphPart(graph, schedule, setup)
        self.parts: dict[int, GraphPart] = {
            length: longest if other is graph else GraphPart(other, Schedule(self.plan, other.network), setup)
            for length, other in (lengths.graphs if lengths is not None else {0: graph}).items()
        }
        """Length -> this device's part of the graph of that length; 0: all batches have the same."""
        self._longest = longest
        self._use(longest)
        self.step = -1
        """The first step of the round under way, or of the last one; -1: there was none."""
        self.result = RoundResult(-1)
        self.last_step: int | None = None
        """The step at which the round under way ends, if that is earlier than it otherwise would."""
        self.on_update: Callable[[int], None] = lambda step: None
        """Called with each step that this device is done with, where a round has several."""
        self.actions_done = 0
        """Actions carried out in all rounds: rises for as long as this device makes progress; see `runtime.stalls`."""
        self.settled_step: int | None = None
        """The number of steps that the weights and buffers have been through; None in the middle of one."""

    def _use(self, part: GraphPart) -> None:
        """Carry out the actions of one graph from now on."""
        self.part = part
        self.graph, self.schedule, self.work, self.actions = part.graph, part.schedule, part.work, part.actions
        self.runners, self.in_flight, self.diagnosis = part.runners, part.in_flight, part.diagnosis
        self.messenger, self.reductions, self.updates = part.messenger, part.reductions, part.updates
        self.exchange, self.loss = part.exchange, part.loss
        if part.calls is None:
            part.calls = self._bound_calls(part)
        self._calls = part.calls

    def _bound_calls(self, part: GraphPart) -> BoundCalls:
        """Return the calls of a part's actions, each bound when it is first due."""

        def as_is(carry_out: Callable[[Any], None]) -> Binder:
            return lambda action: partial(carry_out, action)

        return BoundCalls({
            Forward: partial(bind_forward, self, part), Backward: partial(bind_backward, self, part),
            Loss: as_is(self._loss), Send: part.messenger.bind_send, Receive: part.messenger.bind_receive,
            Reduce: partial(self._bind_reduce, part), Await: as_is(part.reductions.finish_statistics),
            Step: as_is(self._step), Discard: as_is(self._discard),
        })  # fmt: skip

    def _part_at(self, step: int) -> GraphPart | None:
        """Return the part whose graph a step runs; None for a step that is not in the run."""
        if self.lengths is None:
            return self.part
        length = self.lengths.length(step)
        return None if length is None else self.parts[length]

    def rest(self) -> None:
        """Prepare the runners for weights that are all here; only in inference, where the weights stay as they are."""
        for part in self.parts.values():
            part.rest()

    def expected(self) -> dict[tuple[str, str], int]:
        """Return (source, topic) -> bytes of every message that this device receives in a round of this length."""
        return self.part.expected()

    def expected_by_step(self) -> ExpectedMessages:
        """Return the messages of every round, or where those differ a function that returns them for a step."""
        if self.lengths is None:
            return self.expected()
        by_length = {length: part.expected() for length, part in self.parts.items()}
        lengths, nothing = self.lengths, dict[tuple[str, str], int]()
        return lambda step: by_length.get(lengths.length(step) or 0, nothing)

    def load_loss(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Take the constants of the loss, by name."""
        losses = [part.loss for part in self.parts.values() if part.loss is not None]
        for loss in losses:
            for name, tensor in constants.items():
                loss.piece.weights.tensors[name].copy_(tensor)

    @property
    def log(self) -> DeviceLog:
        log = self.recorder.log
        log.elements = sum(runner.elements for part in self.parts.values() for runner in part.runners.values())
        log.sent_bytes, log.received_bytes = dict(self.endpoint.sent_bytes), dict(self.endpoint.mailbox.received_bytes)
        log.state_bytes, log.group_sums = dict(self.endpoint.unplanned_bytes), self.reductions.group_sums
        log.refused_frames, log.host_bytes = (
            self.endpoint.mailbox.refused,
            sum(p.host_bytes for p in self.parts.values()),
        )
        return log

    def close(self) -> None:
        for part in self.parts.values():
            part.messenger.close()
            part.reductions.close()

    def end_at(self, step: int) -> None:
        """End the round under way at a step: none beyond it is fed. May be called from any thread."""
        self.last_step = step
        self.endpoint.mailbox.nudge()

    def diagnose(self, step: int) -> str:
        """Return the layer of this device where numbers stopped being finite in a round that was interrupted."""
        return self.diagnosis.layer(step)

    # One round

    def round(self, step: int, count: int | None = None) -> RoundResult:
        """Run one mini-batch, or with order replay as many as a round has; `count`: fewer, at the end."""
        steps = self.plan.steps_per_round if count is None else count
        if step != self.options.memory_step:
            return self._round(step, steps)
        memory = TensorMemory(self.weights, self.stepper, self.average, (self._part_at(step) or self.part).runners)
        with memory.counting():
            result = self._round(step, steps)
        self.recorder.log.peak_bytes, self.recorder.log.peak_parts = memory.peak_bytes, memory.parts
        return result

    def _round(self, step: int, steps: int) -> RoundResult:
        """Carry out the policy's actions, until it says that it is done."""
        start = time.monotonic()
        self._begin_round(step)
        self.slowdown.begin_round()
        policy = self.schedule.policy_of(self.device, steps)
        is_fed_singly = self.plan.order in ("replay", "interleave") and bool(self.in_flight.feed.parts)
        box = self.endpoint.mailbox
        arrived = ArrivedMessages(box, step, self.messenger.topic)
        state = DeviceState(arrived, FedMicroBatches(box, step) if is_fed_singly else None)
        is_slowed, torch_device, is_on_gpu = self.slowdown.is_on, self.torch_device, self.torch_device.type != "cpu"
        with torch.no_grad(), self.part.on_stream():  # code that needs autograd enables it
            for action in islice(self._in_turn(policy, state), self._launch(), None):
                slowdown = self._slowdown_of(action) if is_slowed else UNSLOWED
                began, started = time.monotonic(), slowdown.begin() if slowdown.is_on else None
                self._act(action)
                if is_on_gpu and self.recorder.is_traced:
                    synchronize(torch_device)  # a GPU computes while Python goes on
                if started is not None:
                    slowdown.stretch(started)
                self.recorder.took(action, began, time.monotonic())
                self.actions_done += 1
            if self._losses:
                self.result.pending = LateLoss(self._losses)
                self._losses = []
        self.part.end_round()
        if self.lengths is None:
            self.in_flight.feed.look_ahead(step + steps)
        if isinstance(policy, MiniBatches):
            steps = policy.count
        if steps:  # else nothing was fed
            self.recorder.end(is_longest=self.part is self._longest)
        passes = steps * self.plan.micro_batches // self.plan.steps_per_round
        self.recorder.log.samples += self.part.samples_in(self.work.stage) * passes
        self.result.not_finite_from = self.diagnosis.first_source
        self.result.seconds, self.settled_step = time.monotonic() - start, step + steps
        return self.result

    def settle(self, result: RoundResult) -> None:
        """Wait for the loss of a round, where that was put off. It may be called when the next round has been begun."""
        if result.pending is None:
            return
        number = result.pending.wait()
        result.pending = None
        if not math.isfinite(number):
            raise self.diagnosis.late_loss_error(result.step, number)
        result.add_loss(number, is_step=False)

    def _launch(self) -> int:
        """Compute the passes of the round with a CUDA graph, where there is one or can be one by now; return how many
        actions it has carried out."""
        captured = self.part.captured
        if captured is None or self.recorder.is_traced or self.step == self.options.memory_step:
            return 0
        if not captured.is_there and not captured.is_due:
            captured.ran()
            return 0
        began = time.monotonic()
        for number in range(self.plan.micro_batches):
            self.in_flight.fed(number)
        if not captured.is_there:
            is_captured = captured.capture(self._act, self._losses)
            self.part.begin_round(self.step)
            if not is_captured:
                return 0
        self.settled_step = None
        self._losses = [captured.launch(self.step)]
        for action in captured.passes:
            self.recorder.took(action, began, began)
            self.actions_done += 1
        return len(captured.passes)

    def _begin_round(self, step: int) -> None:
        part = self._part_at(step)
        if part is None:
            raise BadSchedule(f"{self.device} was to begin step {step}, which has no length in the job.")
        self._use(part)
        self.step = step
        self.endpoint.mailbox.begin_step(step)
        self.recorder.begin(step, is_captured=part.captured is not None and not part.captured.failure)
        self.result, self.settled_step, self._losses = RoundResult(step), step, []
        part.begin_round(step)

    def _in_turn(self, policy: Policy, state: DeviceState) -> Iterator[Action]:
        """Yield the policy's actions until it is done; between any two actions an interruption is noticed."""
        box = self.endpoint.mailbox
        if isinstance(policy, FixedOrder):
            for action in policy.actions:
                if box.interruption is not None:
                    raise box.interruption
                yield action
            box.check()
            return
        while True:
            box.check()
            news = box.news
            if isinstance(policy, MiniBatches) and self.last_step is not None:
                policy.end_at(self.last_step - self.step)
            answer = policy.next(state)
            if isinstance(policy, InterleavedOrder):
                self.in_flight.answered = policy.answered
            if answer == DONE:
                return
            if answer == WAIT:
                box.wait_for_news(news)
                continue
            assert not isinstance(answer, str)
            yield answer

    def _slowdown_of(self, action: Action) -> Slowdown:
        if isinstance(action, (Forward, Backward, Step)):
            return self.slowdown
        return self.messenger.slowdown if isinstance(action, Send) else UNSLOWED

    def _act(self, action: Action) -> None:
        self._calls.of(action)()

    # Computing

    def answer(self, runner: Runner, micro_batch: int) -> None:
        """Send the network's outputs to the coordinator, in inference, once the last stage has made them."""
        if runner.geometry.is_last:
            results = runner.results(micro_batch)
            if results:
                self.endpoint.send(COORDINATOR, self.step, result_topic(micro_batch), results)
        if runner.geometry is self.work.geometries[-1]:
            self.in_flight.finish(micro_batch)
            if self.plan.steps_per_round > 1:
                self.on_update(self.step + micro_batch)

    def _loss(self, action: Loss) -> None:
        if self.loss is None:
            return
        runner, batch = self.runners[action.stage], self.in_flight.fed(action.micro_batch)
        outputs, samples = runner.outputs(action.micro_batch), self.part.samples_in(action.stage)
        value, gradients = self.loss(outputs, batch.targets, samples)
        if self.puts_off_losses:
            self._losses.append(value)
        else:
            number = float(value)
            if not math.isfinite(number):
                raise self.diagnosis.loss_error(action.micro_batch, number)
            self.result.add_loss(number, is_step=self.plan.order == "replay")
        runner.take_gradients(action.micro_batch, gradients)

    def _bind_reduce(self, part: GraphPart, action: Reduce) -> Call:
        return partial(self._exchange_norm, action) if action.what == "norm" else part.reductions.bind(action)

    def _exchange_norm(self, action: Reduce) -> None:
        self.result.grad_norms.append(self.updates.exchange_norm(action))

    def _step(self, action: Step) -> None:
        number = action.micro_batch
        if self.updates.is_done(number):
            return
        batch = self.in_flight.get(number)  # none: the step is of the whole round
        if batch is not None and batch.updates_before is not None:
            self.result.staleness.append(self.updates.count - batch.updates_before)
        self.result.sums += self.updates.update(number)
        if number >= 0:
            self.in_flight.finish(number)
            self.on_update(self.step + number)

    def _discard(self, action: Discard) -> None:
        """Give up a micro-batch: its gradients came back too late, or none come back."""
        if action.stage == self.work.stage and self.messenger.coding.expects_gradients:
            self.result.staleness.append(-1)
        self.in_flight.begin_pass(action.stage, action.micro_batch)
        self.in_flight.discard(action.stage, action.micro_batch)
        self.on_update(self.step + action.micro_batch)
