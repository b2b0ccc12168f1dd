"""Messages of one device: boxes of tensors cut out and packed on the way out, unpacked and put in place on the way in.

send       runner ──box──▶ codec ──bytes──▶ endpoint
receive    mailbox ──bytes──▶ codec ──box──▶ runner
"""

from __future__ import annotations

import torch

from manyhands.executor.boxes import cut_out, empty
from manyhands.executor.channels import ChannelRunner
from manyhands.executor.codec import Coding, NoRange
from manyhands.executor.diagnosis import NumberDiagnosis
from manyhands.executor.in_flight import InFlightMicroBatches
from manyhands.executor.log import Recorder
from manyhands.executor.runner import Runner
from manyhands.executor.slowdown import Slowdown
from manyhands.facts.boxes import Box
from manyhands.graph.weights import Weights, dense_gradient
from manyhands.schedule.actions import Message, Part, Receive, Send, is_urgent
from manyhands.schedule.policy import Schedule
from manyhands.transport.endpoint import Endpoint

_BEGINS_A_PASS = frozenset({"value", "input", "gradient"})
_OF_WEIGHTS = frozenset({"weights", "weight-gradient"})


class Messenger:
    """Sends and receives the messages of a schedule, for one device."""

    def __init__(
        self,
        endpoint: Endpoint,
        schedule: Schedule,
        weights: Weights,
        in_flight: InFlightMicroBatches,
        coding: Coding,
        diagnosis: NumberDiagnosis,
        recorder: Recorder,
        slowdown: Slowdown,
    ) -> None:
        self.endpoint, self.network, self.weights = endpoint, schedule.network, weights
        self.in_flight, self.runners, self.coding = in_flight, in_flight.runners, coding
        self.diagnosis, self.recorder, self.slowdown = diagnosis, recorder, slowdown
        self._keeps_messages = schedule.keeps_messages
        self._topics: dict[int, str] = {}
        """Topics of messages, by their identity: the schedule keeps them."""

    def topic(self, message: Message) -> str:
        """Return the name that a message travels under."""
        if not self._keeps_messages:
            return message.topic
        topic = self._topics.get(id(message))
        if topic is None:
            topic = self._topics[id(message)] = message.topic
        return topic

    def forget(self) -> None:
        """Drop what is kept of features until their gradients come back."""
        self.coding.forget()

    def _channel_runner(self, message: Message) -> ChannelRunner | None:
        """Return the runner that packs a message itself: one of channels, for others of its stage."""
        runner = self.runners.get(message.stage) if message.kind == "halo" else None
        return runner if isinstance(runner, ChannelRunner) else None

    # Out

    def send(self, action: Send) -> None:
        """Hand a message to the endpoint; does not wait until it has left."""
        message = action.message
        if (runner := self._channel_runner(message)) is not None:
            parts = runner.outgoing(message)
        else:
            parts = [self._packed(action.to, message, part) for part in message.parts]
        self.recorder.sent(message)
        self.diagnosis.watch(self.endpoint.name, parts)
        self.endpoint.send(action.to, self.in_flight.step, self.topic(message), parts, urgent=is_urgent(message))

    def _packed(self, to: str, message: Message, part: Part) -> torch.Tensor:
        data = self._outgoing(message, part)
        try:
            return self.coding.packed(to, message, part, data)
        except NoRange as error:
            raise self.diagnosis.packing_error(message, part, self.coding.bits(message, part), error) from error

    def _outgoing(self, message: Message, part: Part) -> torch.Tensor:
        """Return the box that a part names, on the CPU."""
        tensor, box, micro_batch = part.tensor, part.box, message.micro_batch
        if message.kind == "weights":
            return self.weights.tensors[tensor].detach().contiguous().cpu().clone()
        if message.kind == "weight-gradient":
            return dense_gradient(self.weights.tensors[tensor]).contiguous().cpu()
        if message.kind == "input":
            whole = self.in_flight.fed(micro_batch).at_home[tensor]
            return cut_out(whole, Box.whole(whole.shape), box)
        if message.kind == "value":
            return self._maker(tensor).value(micro_batch, tensor, box)
        runner = self.runners[message.stage]
        if message.kind == "partial":
            assert isinstance(runner, ChannelRunner)
            return runner.partial(micro_batch, tensor, box)
        if message.kind == "output-gradient":
            return runner.output_gradient(micro_batch, tensor, box)
        if part.is_value or message.kind in ("halo", "output"):
            return runner.value(micro_batch, tensor, box)
        return runner.gradient(micro_batch, tensor, box)

    def _maker(self, tensor: str) -> Runner:
        """Return the runner of the stage on this device that makes a tensor."""
        return next(runner for runner in self.runners.values() if runner.geometry.is_made_here(tensor))

    # In

    def receive(self, action: Receive) -> None:
        """Wait for a message and put its boxes where they are read."""
        message, step = action.message, self.in_flight.step
        if (runner := self._channel_runner(message)) is not None:
            memory = [bundle.room() for bundle in runner.bundles(message, is_sent=False)]
            self.endpoint.mailbox.receive(action.source, step, self.topic(message), memory)
            started = self.slowdown.now()
            runner.incoming(message, memory)
            self.slowdown.stretch(started)
            return
        if message.kind in _BEGINS_A_PASS:  # room for what it brings
            self.in_flight.begin_pass(number=message.micro_batch)
        table = self.network.weights if message.kind in _OF_WEIGHTS else self.network.tensors
        tensors = [
            empty(part.box, table[part.tensor].dtype) if (room := self.coding.room(message, part)) is None else room
            for part in message.parts
        ]
        self.endpoint.mailbox.receive(action.source, step, self.topic(message), tensors)
        started = self.slowdown.now()
        self.diagnosis.watch(action.source, tensors)
        for part, tensor in zip(message.parts, tensors):
            data = self.coding.unpacked(message, part, tensor, self.in_flight.feed.torch_device)
            if message.kind == "gradient":
                self.coding.feed_back(action.source, message, part, data)
            self._incoming(action.source, message, part, data)
        if message.kind == "gradient":
            self.coding.came_back(action.source, message)
        self.slowdown.stretch(started)

    def _incoming(self, source: str, message: Message, part: Part, data: torch.Tensor) -> None:
        """Put a box that has arrived where it is read, or add it there."""
        name, micro_batch = part.tensor, message.micro_batch
        if message.kind == "weights":
            self.weights.tensors[name].copy_(data)
            self.weights.tensors[name].grad = None
        elif message.kind == "weight-gradient":
            dense_gradient(self.weights.tensors[name]).add_(data)
        elif message.kind == "partial":
            runner = self.runners[message.stage]
            assert isinstance(runner, ChannelRunner)
            runner.put_partial(micro_batch, source, name, data)
        elif message.kind == "gradient":
            self._maker(name).add_gradient(micro_batch, name, part.box, data)
        elif message.kind == "output":
            self.runners[message.stage].put_output(micro_batch, name, part.box, data)
        elif message.kind in ("halo-gradient", "output-gradient") and not part.is_value:
            self.runners[message.stage].add_gradient(micro_batch, name, part.box, data)
        else:
            self.runners[message.stage].put_value(micro_batch, name, part.box, data)
