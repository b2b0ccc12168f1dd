"""Interprets a schedule's actions with torch: one device's part of a run, as the simulator does under a virtual clock.

forward, backward     segments of the captured graph (segments.py)
send, receive         boxes of tensors through the engine (boxes.py)
reduce                statistics at once (statistics.py), gradients on a thread of their own (reducer.py)
step                  the optimiser, once all gradients are added up
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from manyhands.engine.endpoint import Endpoint
from manyhands.executor.boxes import cut_out, dtype_of, empty, place_of
from manyhands.executor.flight import Flight
from manyhands.executor.log import DeviceLog, Recorder
from manyhands.executor.loss import ShareLoss, trained_weights
from manyhands.executor.messages import COORDINATOR, expected_messages, feed_parts, runs_here
from manyhands.executor.optimizers import Stepper
from manyhands.executor.reducer import Reducer, dense_gradient
from manyhands.executor.segments import Segments, bounds_of
from manyhands.executor.statistics import merged, own_moments
from manyhands.facts.boxes import Box
from manyhands.facts.errors import NotFinite
from manyhands.facts.plan import EVERYWHERE
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls
from manyhands.graph.piece import Context
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Backward, Forward, Message, Receive, Reduce, Send, Step
from manyhands.schedule.feeding import feed_topic, result_topic, samples_of
from manyhands.schedule.policy import DONE, WAIT, DeviceState, Policy, Schedule
from manyhands.schedule.reduction import completed_at, statistics_rounds, topic


@dataclass
class RoundResult:
    """What one round gave on this device: its part of the loss, where it computes one."""

    step: int
    loss: float | None = None
    seconds: float = 0.0


@dataclass
class Setting:
    """What a device is told about a run beside graph and plan."""

    seed: int = 0
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    torch_device: str = "cpu"
    trace_steps: range = range(0)
    with_targets: bool = True


class Executor:
    """One device of a schedule. `round` runs one mini-batch; everything it waits for has the mailbox's limit."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        endpoint: Endpoint,
        weights: Weights,
        stepper: Stepper | None,
        setting: Setting,
    ) -> None:
        self.graph, self.schedule, self.endpoint, self.setting = graph, schedule, endpoint, setting
        self.plan, self.network = schedule.plan, schedule.network
        self.device = endpoint.name
        self.weights, self.stepper = weights, stepper
        self.torch_device = torch.device(setting.torch_device)
        work = schedule.lowering.work[self.device]
        runs_here(self.plan, self.network)
        self.geometry = work.geometry
        self.actions = tuple(schedule.every_action(self.device))
        self.recorder = Recorder(DeviceLog(self.device), setting.trace_steps)
        self.feed = feed_parts(graph, schedule.lowering, self.device, targets=setting.with_targets)
        self.flights: dict[int, Flight] = {}
        self.boxes: dict[str, Box] = {}
        self._reducer = Reducer(endpoint, self.network, self._reduced)
        self._is_last = False
        self._read_here: set[str] = set()
        self._untrained = set(weights.tensors) - trained_weights(graph)
        self.step = -1
        self._landed: int | None = None
        """The micro-batch whose last pass has just ended."""
        if self.geometry is not None:
            norms = {a.first for a in self.actions if isinstance(a, Reduce) and a.what == "statistics"}
            calls = kernel_calls(graph, setting.kernels)
            bounds = bounds_of(self.actions, norms)
            self.segments = Segments(graph, weights, bounds, kernels=calls, shared_norms=norms)
            self._is_last = self.geometry.last == len(self.network.ops)
            self.samples = samples_of(self.geometry, self.device)
            self._read_here = {name for piece in self.segments.pieces.values() for name in piece.inputs}
            self._completed = completed_at(self.network, self.geometry.first, self.geometry.last)
        self.loss = ShareLoss(graph, self.plan, self.torch_device) if self._is_last and setting.with_targets else None

    def expected(self) -> dict[tuple[str, str], int]:
        """(source, topic) -> bytes of every message of a round that comes here."""
        found = expected_messages(self.actions, self.device, self.network)
        size = sum(part.bytes for part in self.feed)
        if size:
            found |= {(COORDINATOR, feed_topic(m)): size for m in range(self.plan.micro_batches)}
        return found

    @property
    def log(self) -> DeviceLog:
        """What was done so far."""
        log = self.recorder.log
        log.sent_bytes, log.received_bytes = dict(self.endpoint.sent_bytes), dict(self.endpoint.mailbox.received_bytes)
        log.refused_frames = self.endpoint.mailbox.refused
        return log

    def close(self) -> None:
        self._reducer.close()

    # One round

    def round(self, step: int) -> RoundResult:
        """One mini-batch: ask the policy, act, until it says done."""
        start = time.monotonic()
        self.endpoint.mailbox.begin_step(step)
        self.recorder.begin(step)
        self.step, self.result, self._landed = step, RoundResult(step), None
        state, policy = DeviceState(), self.schedule.policy_of(self.device)
        while (action := self._next(policy, state)) is not None:
            began = time.monotonic()
            self._act(action)
            if self.torch_device.type == "cuda" and step in self.setting.trace_steps:
                torch.cuda.synchronize(self.torch_device)  # a GPU computes while Python goes on
            self.recorder.took(action, began, time.monotonic())
        self.flights.clear()
        self.recorder.end()
        self.recorder.log.samples += self._samples_here * self.plan.micro_batches
        self.result.seconds = time.monotonic() - start
        return self.result

    @property
    def _samples_here(self) -> int:
        return self.samples[1] - self.samples[0] if self.geometry is not None else 0

    def _next(self, policy: Policy, state: DeviceState) -> Action | None:
        seen = 0
        while True:
            self.endpoint.mailbox.check()
            if not self.schedule.is_fixed:
                seen = self._look(state)
            answer = policy.next(state)
            if answer == DONE:
                return None
            if answer != WAIT:
                assert not isinstance(answer, str)
                return answer
            self.endpoint.mailbox.wait_for_news(seen)

    def _look(self, state: DeviceState) -> int:
        """Tell an event-driven policy what has arrived; returns the count of news before looking."""
        box = self.endpoint.mailbox
        seen = box.news
        for action in self.actions:
            if isinstance(action, Receive):
                key = (action.source, action.message)
                if key not in state.arrived and box.has_arrived(action.source, self.step, action.message.topic):
                    state.arrived.add(key)
        return seen

    def _act(self, action: Action) -> None:
        if isinstance(action, (Forward, Backward)) and self._landed not in (None, action.micro_batch):
            self.flights.pop(self._landed, None)  # what others need of it has been sent by now
        if isinstance(action, Forward):
            self._forward(action)
        elif isinstance(action, Backward):
            assert self.geometry is not None
            self.segments.backward(self.flights[action.micro_batch], action.first, action.last)
            if action.first == self.geometry.first:
                self._landed = action.micro_batch
        elif isinstance(action, Send):
            self._send(action)
        elif isinstance(action, Receive):
            self._receive(action)
        elif isinstance(action, Reduce):
            if action.what == "gradients":
                names = [n for op in range(action.last - 1, action.first - 1, -1) for n in self._completed.get(op, ())]
                self._reducer.start(action, self.step, [dense_gradient(self.weights.tensors[n]) for n in names])
            else:
                self._statistics(action)
        elif isinstance(action, Step):
            self._reducer.wait()
            assert self.stepper is not None
            for name in self._untrained:  # a zero that was added up is still no gradient: weight decay would see it
                self.weights.tensors[name].grad = None
            self.stepper.step()
            self.stepper.zero()

    def _reduced(self, reduce: Reduce, start: float, end: float) -> None:
        self.recorder.span(reduce, str(reduce), start, end)

    # Computing

    def _flight(self, micro_batch: int) -> Flight:
        found = self.flights.get(micro_batch)
        if found is None:
            found = self.flights[micro_batch] = Flight()
            self._take_feed(found, micro_batch)
        return found

    def _take_feed(self, flight: Flight, micro_batch: int) -> None:
        """Inputs and targets that the coordinator hands to this device."""
        if not self.feed:
            return
        tensors = [empty(part.box, part.dtype) for part in self.feed]
        self.endpoint.mailbox.receive(COORDINATOR, self.step, feed_topic(micro_batch), tensors)
        for part, tensor in zip(self.feed, tensors):
            here = tensor.to(self.torch_device, non_blocking=True)
            if part.is_target:
                flight.targets[part.name] = here
            elif self.plan.homes.get(part.name, EVERYWHERE) == EVERYWHERE:
                flight.values[part.name] = here
                self.boxes[part.name] = part.box
            else:  # the whole of it is here, of which this device may read its own share
                flight.at_home[part.name] = here
                if part.name in self._read_here:
                    flight.values[part.name] = here[place_of(self._hull(part.name), part.box)]

    def _context(self, micro_batch: int) -> Context:
        first, last = self.samples
        place = micro_batch * self.plan.micro_batch_size + first
        return Context(self.plan.is_training, self.setting.seed, self.step, place, last - first)

    def _forward(self, action: Forward) -> None:
        flight = self._flight(action.micro_batch)
        self.segments.forward(flight, action.first, action.last, self._context(action.micro_batch))
        assert self.geometry is not None
        if action.last != self.geometry.last:
            return
        if not self.plan.is_training:
            self._landed = action.micro_batch
        if not self._is_last:
            return
        if self.loss is not None:
            value, gradients = self.loss(flight.values, flight.targets, self._samples_here)
            number = float(value)
            if number != number or number in (float("inf"), float("-inf")):
                raise self._not_finite(action.micro_batch, number)
            self.result.loss = number + (self.result.loss or 0.0)
            if self.plan.is_training:
                flight.add_gradients(gradients)
        if not self.plan.is_training:
            outputs = [flight.values[name].detach().contiguous().cpu() for name in self.graph.outputs]
            self.endpoint.send(COORDINATOR, self.step, result_topic(action.micro_batch), outputs)

    def _not_finite(self, micro_batch: int, number: float) -> NotFinite:
        """Where it began, as far as this device can tell."""
        tensor = self.segments.first_not_finite(self.flights[micro_batch], self._context(micro_batch))
        if tensor is None:
            where = "the loss itself: every layer's output is finite"
        elif tensor in self.network.producer:
            layer = self.network.layers[self.network.layer_of_op[self.network.producer[tensor]]]
            where = f"layer {layer.name} ({tensor})"
        else:
            where = f"the input '{tensor}': the data holds a number that is none"
        return NotFinite(
            f"The loss is {number} at step {self.step}, on {self.device}; it began in {where}.",
            hint="Lower the learning rate, or look at the data of that step. The last checkpoint is from before it.",
        )

    def diagnose(self, step: int) -> str:
        """After an interruption: the layer of this stage where numbers stopped being numbers, or nothing."""
        if self.geometry is None or step != self.step:
            return ""
        for micro_batch in sorted(self.flights):
            tensor = self.segments.first_not_finite(self.flights[micro_batch], self._context(micro_batch))
            if tensor is not None and tensor in self.network.producer:
                return self.network.layers[self.network.layer_of_op[self.network.producer[tensor]]].name
        return ""

    def _statistics(self, reduce: Reduce) -> None:
        """Batch-norm sums of everybody, waited for."""
        flight, norm = self._flight(reduce.micro_batch), self.segments.norms[reduce.first]
        data = flight.values[norm.input]
        if not reduce.backward:
            flight.moments[reduce.first] = merged(self._exchange(reduce, own_moments(data)))
            return
        gradient = flight.gradients.get(norm.output)
        if gradient is None:
            gradient = torch.zeros_like(data)
        scaled, own = norm.own_sums(data, gradient, flight.moments[reduce.first])
        flight.scaled[reduce.first] = (scaled, own, self._exchange(reduce, own))

    def _exchange(self, reduce: Reduce, row: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's row, in the order of the devices."""
        own = row.cpu()
        rows = {self.device: row}
        (hops,) = statistics_rounds(reduce.devices)
        for hop in hops:
            if hop.source == self.device:
                self.endpoint.send(hop.target, self.step, topic(reduce, 0, hop.chunk), [own], urgent=True)
        for hop in hops:
            if hop.target == self.device:
                other = torch.empty_like(own)
                self.endpoint.mailbox.receive(hop.source, self.step, topic(reduce, 0, hop.chunk), [other])
                rows[hop.source] = other.to(row.device)
        return [rows[name] for name in reduce.devices]

    # Messages

    def _hull(self, tensor: str) -> Box:
        """The box of a tensor that this device holds."""
        found = self.boxes.get(tensor)
        if found is None:
            assert self.geometry is not None
            made_here = self.geometry.first <= self.network.producer.get(tensor, -1) < self.geometry.last
            layout = self.geometry.owned(tensor) if made_here else self.geometry.entering(tensor)
            found = self.boxes[tensor] = layout.hull(self.device)
        return found

    def _send(self, action: Send) -> None:
        message = action.message
        parts = [self._outgoing(message, part.tensor, part.box) for part in message.parts]
        urgent = message.kind not in ("weights", "weight-gradient")
        self.endpoint.send(action.to, self.step, message.topic, parts, urgent=urgent)

    def _outgoing(self, message: Message, tensor: str, box: Box) -> torch.Tensor:
        if message.kind == "weights":
            return self.weights.tensors[tensor].detach().contiguous().cpu().clone()
        if message.kind == "weight-gradient":
            return dense_gradient(self.weights.tensors[tensor]).contiguous().cpu()
        flight = self._flight(message.micro_batch)
        if message.kind == "input":
            whole = flight.at_home[tensor]
            return cut_out(whole, Box.whole(whole.shape), box)
        if message.kind == "gradient":
            found = flight.gradients.get(tensor)
            if found is None:
                return torch.zeros(box.shape, dtype=dtype_of(self.network.tensors[tensor].dtype))
            return cut_out(found, self._hull(tensor), box)
        return cut_out(flight.values[tensor], self._hull(tensor), box)

    def _receive(self, action: Receive) -> None:
        message = action.message
        of_weights = message.kind in ("weights", "weight-gradient")
        table = self.network.weights if of_weights else self.network.tensors
        tensors = [empty(part.box, table[part.tensor].dtype) for part in message.parts]
        self.endpoint.mailbox.receive(action.source, self.step, message.topic, tensors)
        for part, tensor in zip(message.parts, tensors):
            self._incoming(message, part.tensor, part.box, tensor)

    @torch.no_grad()
    def _incoming(self, message: Message, name: str, box: Box, tensor: torch.Tensor) -> None:
        here = tensor.to(self.torch_device)
        if message.kind == "weights":
            self.weights.tensors[name].copy_(here)
            self.weights.tensors[name].grad = None
            return
        if message.kind == "weight-gradient":
            dense_gradient(self.weights.tensors[name]).add_(here)
            return
        flight, hull = self._flight(message.micro_batch), self._hull(name)
        if message.kind == "gradient":
            known = flight.gradients.get(name)
            if known is None and box == hull:
                flight.gradients[name] = here
                return
            if known is None:
                known = flight.gradients[name] = here.new_zeros(hull.shape)
            known[place_of(box, hull)] += here
            return
        if box == hull:
            flight.values[name] = here
            return
        if name not in flight.values:
            flight.values[name] = here.new_empty(hull.shape)
        flight.values[name][place_of(box, hull)] = here
