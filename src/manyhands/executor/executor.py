"""Interprets a schedule's actions with torch: one device's part of a run, as the simulator does under a virtual clock.

The executor asks the policy for an action, dispatches it, and records its time. Actions are carried out by:

    forward, backward     the stage's runner (runner.py): whole samples (segments.py), tiles, or channels
    loss                  the captured loss of what the network returned (share_loss.py)
    send, receive         Messenger (messenger.py): boxes of tensors, packed where the plan says so (codec.py)
    reduce, await         Reductions (reductions.py): statistics, and gradients on a thread of their own (reducer.py)
    step                  WeightUpdates (updates.py): the optimizer, once all gradients are added up
    discard               InFlightMicroBatches (in_flight.py), which knows where every micro-batch is

DeviceFeed (device_feed.py) receives what the coordinator sends; NumberDiagnosis (diagnosis.py) finds where numbers
stopped being finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from manyhands.executor.arrivals import ArrivedMessages, FedMicroBatches
from manyhands.executor.codec import Coding
from manyhands.executor.device_feed import DeviceFeed
from manyhands.executor.diagnosis import NumberDiagnosis
from manyhands.executor.in_flight import InFlightMicroBatches
from manyhands.executor.in_flight_micro_batch import Phase
from manyhands.executor.local_exchange import LocalExchange
from manyhands.executor.log import DeviceLog, Recorder
from manyhands.executor.messages import COORDINATOR, expected_messages, feed_parts, runs_here
from manyhands.executor.messenger import Messenger
from manyhands.executor.optimizers import Stepper
from manyhands.executor.options import ExecutorOptions
from manyhands.executor.reductions import Reductions
from manyhands.executor.round_result import RoundResult
from manyhands.executor.runner import Runner
from manyhands.executor.share_loss import ShareLoss, trained_weights
from manyhands.executor.sharing import RunnerSetup, make_runner
from manyhands.executor.slowdown import Slowdown
from manyhands.executor.tensor_memory import TensorMemory
from manyhands.executor.updates import WeightUpdates
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Await, Backward, Discard, Forward, Loss, Receive, Reduce, Send, Step
from manyhands.schedule.feeding import feed_topic, result_topic, samples_of
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.interleave import InterleavedOrder
from manyhands.schedule.policies import DONE, WAIT, DeviceState, FixedOrder, Policy
from manyhands.schedule.policy import Schedule
from manyhands.schedule.replay import MiniBatches
from manyhands.transport.endpoint import Endpoint

_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD


class Executor:
    """One device of a schedule. `round` runs one mini-batch; every wait has the mailbox's time limit."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        endpoint: Endpoint,
        weights: Weights,
        stepper: Stepper | None,
        options: ExecutorOptions,
    ) -> None:
        self.graph, self.schedule, self.endpoint, self.options = graph, schedule, endpoint, options
        self.plan, self.device, self.weights = schedule.plan, endpoint.name, weights
        runs_here(self.plan, schedule.network)
        torch_device = torch.device(options.torch_device)
        self.work = schedule.lowering.work[self.device]
        self.actions = tuple(schedule.every_action(self.device))
        self.recorder = Recorder(
            DeviceLog(self.device), options.trace_steps, waits_for_device=torch_device.type == "cpu",
            watch_every=options.watch_every,
        )  # fmt: skip
        self.runners: dict[int, Runner] = {g.index: self._runner(g) for g in self.work.geometries}
        samples = {g.index: samples_of(g, self.device) for g in self.work.geometries}
        parts = feed_parts(
            graph, schedule.lowering, self.device, targets=options.with_targets, local=options.local_names
        )
        feed = DeviceFeed(endpoint, parts, self.runners, options, torch_device)
        self.in_flight = InFlightMicroBatches(self.plan, self.runners, samples, feed, options.seed)
        self.diagnosis = NumberDiagnosis(schedule.network, self.device, self.in_flight)
        self.slowdown = Slowdown(options.slowdown)
        self.messenger = Messenger(
            endpoint, schedule, weights, self.in_flight, Coding(self.plan, schedule.network, self.actions),
            self.diagnosis, self.recorder, self.slowdown,
        )  # fmt: skip
        self.reductions = Reductions(endpoint, schedule, weights, self.in_flight, self.diagnosis, self.recorder)
        self.updates = WeightUpdates(weights, stepper, self.reductions, set(weights.tensors) - trained_weights(graph))
        self.exchange = LocalExchange(schedule, self.device, self.runners, torch_device)
        has_loss = options.with_targets and any(isinstance(action, Loss) for action in self.actions)
        self.loss = ShareLoss(graph, self.plan, torch_device) if has_loss else None
        self.result = RoundResult(-1)
        self.last_step: int | None = None
        """The step at which the round under way ends, if that is earlier than it otherwise would."""
        self.on_update: Callable[[int], None] = lambda step: None
        """Called with each step that this device is done with, where a round has several."""
        self.actions_done = 0
        """Actions carried out in all rounds: rises for as long as this device makes progress; see `runtime.stalls`."""
        self.settled_step: int | None = None
        """The number of steps that the weights and buffers have been through; None in the middle of one."""
        self._acts: dict[type[Action], Callable[[Any], None]] = {
            Forward: self._forward, Backward: self._backward, Loss: self._loss, Send: self.messenger.send,
            Receive: self.messenger.receive, Reduce: self.reductions.start, Await: self.reductions.finish_statistics,
            Step: self._step, Discard: self._discard,
        }  # fmt: skip
        """The method that carries out each type of action."""

    def _runner(self, geometry: StageGeometry) -> Runner:
        torch_device = torch.device(self.options.torch_device)
        setup = RunnerSetup(
            self.graph, self.weights, self.device, self.actions, self.options.kernels, torch_device
        )  # fmt: skip
        return make_runner(geometry, setup)

    @property
    def step(self) -> int:
        """The first step of the round under way, or of the last one; -1: there was none."""
        return self.in_flight.step

    @property
    def stepper(self) -> Stepper | None:
        return self.updates.stepper

    def rest(self) -> None:
        """Prepare the runners for weights that are all here; only in inference, where the weights stay as they are."""
        if not self.plan.is_training:
            for stage, runner in self.runners.items():
                runner.rest(max(1, self._samples_in(stage)))

    def expected(self) -> dict[tuple[str, str], int]:
        """Return (source, topic) -> bytes of every message that this device receives in a round."""
        messages = expected_messages(self.actions, self.device, self.schedule.network)
        size = self.in_flight.feed.bytes
        if size:
            messages |= {(COORDINATOR, feed_topic(m)): size for m in range(self.plan.micro_batches)}
        return messages

    @property
    def log(self) -> DeviceLog:
        """The log of what was done so far."""
        log = self.recorder.log
        log.elements = sum(runner.elements for runner in self.runners.values())
        log.sent_bytes, log.received_bytes = dict(self.endpoint.sent_bytes), dict(self.endpoint.mailbox.received_bytes)
        log.refused_frames = self.endpoint.mailbox.refused
        return log

    def close(self) -> None:
        self.reductions.close()

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
        memory = TensorMemory(self.weights, self.stepper, self.runners)
        with memory.counting():
            result = self._round(step, steps)
        self.recorder.log.peak_bytes, self.recorder.log.peak_parts = memory.peak_bytes, memory.parts
        return result

    def _round(self, step: int, steps: int) -> RoundResult:
        """Carry out the policy's actions, until it says that it is done."""
        start = time.monotonic()
        self._begin_round(step)
        policy = self.schedule.policy_of(self.device, steps)
        is_fed_singly = self.plan.order in ("replay", "interleave") and bool(self.in_flight.feed.parts)
        box = self.endpoint.mailbox
        arrived = ArrivedMessages(box, step, self.messenger.topic)
        state = DeviceState(arrived, FedMicroBatches(box, step) if is_fed_singly else None)
        is_slowed, torch_device = self.slowdown.is_on, self.in_flight.feed.torch_device
        is_on_gpu = torch_device.type == "cuda"
        with torch.no_grad():  # code that needs autograd enables it
            for action in self._in_turn(policy, state):
                began, started = time.monotonic(), self.slowdown.now() if is_slowed else 0.0
                self._act(action)
                if is_on_gpu and self.recorder.is_traced:
                    torch.cuda.synchronize(torch_device)  # a GPU computes while Python goes on
                if is_slowed and isinstance(action, (Forward, Backward, Step, Send)):
                    self.slowdown.stretch(started)
                self.recorder.took(action, began, time.monotonic())
                self.actions_done += 1
        self.in_flight.clear()
        self.messenger.forget()
        if isinstance(policy, MiniBatches):
            steps = policy.count
        if steps:  # else nothing was fed
            self.recorder.end()
        passes = steps * self.plan.micro_batches // self.plan.steps_per_round
        self.recorder.log.samples += self._samples_in(self.work.stage) * passes
        self.result.not_finite_from = self.diagnosis.first_source
        self.result.seconds = time.monotonic() - start
        self.settled_step = step + steps
        return self.result

    def _begin_round(self, step: int) -> None:
        self.endpoint.mailbox.begin_step(step)
        self.recorder.begin(step)
        self.result, self.settled_step = RoundResult(step), step
        self.in_flight.begin_round(step)
        self.messenger.forget()
        self.updates.begin_round()
        self.diagnosis.begin_round()

    def _samples_in(self, stage: int) -> int:
        first, last = self.in_flight.samples.get(stage, (0, 0))
        return last - first

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

    def _act(self, action: Action) -> None:
        self._acts[type(action)](action)

    # Computing

    def _forward(self, action: Forward) -> None:
        stage, number, part = action.stage, action.micro_batch, action.part
        runner, in_flight = self.runners[stage], self.in_flight
        in_flight.begin_pass(stage, number)
        batch = in_flight.fed(number)
        is_recomputed = part == "again" and self.plan.order != "replay"  # in the midst of the backward pass
        if not is_recomputed:
            batch.enter(stage, _FORWARD)
        self.settled_step = None
        context = in_flight.context(stage, number)
        if part in ("ahead", "again"):
            context = replace(context, records=part == "again", moves_buffers=part == "ahead")
        if self.plan.order == "replay" and part != "again" and not runner.geometry.is_last:
            batch.updates_before = self.updates.count
        runner.forward(action, context)
        if is_recomputed:
            return
        if action.last != runner.geometry.last or part in ("interior", "partial"):
            return
        self.exchange.pass_values(stage, number)
        in_flight.end_forward(stage, batch, awaits_gradients=runner.geometry.runs_backward)
        if not self.plan.is_training:
            self._answer(runner, number)

    def _answer(self, runner: Runner, micro_batch: int) -> None:
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
        outputs, samples = runner.outputs(action.micro_batch), self._samples_in(action.stage)
        value, gradients = self.loss(outputs, batch.targets, samples)
        number = float(value)
        if not math.isfinite(number):
            raise self.diagnosis.loss_error(action.micro_batch, number)
        self.result.add_loss(number, is_step=self.plan.order == "replay")
        runner.take_gradients(action.micro_batch, gradients)

    def _backward(self, action: Backward) -> None:
        stage, number, part = action.stage, action.micro_batch, action.part
        runner, in_flight = self.runners[stage], self.in_flight
        in_flight.begin_pass(stage, number)
        batch = in_flight[number]
        if part != "weights":  # which may have been put off until the rest is done
            batch.enter(stage, _BACKWARD)
        runner.backward(action, in_flight.context(stage, number))
        if action.first != runner.geometry.backward_first or part == "rim":
            return
        if part != "weights":
            self.exchange.pass_gradients(stage, number)
        if part != "inputs":
            in_flight.end_backward(stage, batch)

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
