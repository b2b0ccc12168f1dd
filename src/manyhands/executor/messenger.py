"""Messages of one device: boxes of tensors cut out and packed on the way out, unpacked and put in place on the way in.

send       runner ──box──▶ codec ──bytes──▶ endpoint
receive    mailbox ──bytes──▶ codec ──box──▶ runner

A box for a worker on the same GPU stays there: its descriptor travels (gpu_peers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from manyhands.executor.boxes import cut_out, dtype_of, empty
from manyhands.executor.channels import ChannelRunner
from manyhands.executor.codec import Coding, NoRange
from manyhands.executor.device_boards import DeviceBoards
from manyhands.executor.diagnosis import NumberDiagnosis
from manyhands.executor.gpu_peers import DESCRIPTOR_BYTES, GpuPeers
from manyhands.executor.in_flight import InFlightMicroBatches
from manyhands.executor.log import Recorder
from manyhands.executor.runner import Runner
from manyhands.executor.slowdown import Slowdown
from manyhands.facts.boxes import Box
from manyhands.facts.network import DTYPE_BYTES, TensorSpec, WeightSpec
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
        gpu_peers: GpuPeers,
        *,
        has_boards: bool = False,
    ) -> None:
        """`has_boards`: whether small messages go by boards to workers of this machine (device_boards.py)."""
        self.endpoint, self.network, self.weights = endpoint, schedule.network, weights
        self.in_flight, self.runners, self.coding = in_flight, in_flight.runners, coding
        self.diagnosis, self.recorder, self.slowdown = diagnosis, recorder, slowdown
        self.gpu_peers = gpu_peers
        self.host_bytes = 0
        """Bytes of a GPU's boxes that went through the machine's memory."""
        self._keeps_messages = schedule.keeps_messages
        self._topics: dict[int, str] = {}
        """Topics of messages, by their identity: the schedule keeps them."""
        self._is_training = schedule.plan.is_training
        self.boards = DeviceBoards(endpoint, schedule, self._goes_apart, gpu_peers.takes, is_used=has_boards)

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

    def _goes_apart(self, other: str, message: Message) -> bool:
        """Return whether a message travels in another form than that of its tensors."""
        is_packed = any(self.coding.bits(message, part) for part in message.parts)
        return is_packed or other in self.gpu_peers or self._channel_runner(message) is not None

    def _channel_runner(self, message: Message) -> ChannelRunner | None:
        """Return the runner that packs a message itself: one of channels, for others of its stage."""
        runner = self.runners.get(message.stage) if message.kind == "halo" else None
        return runner if isinstance(runner, ChannelRunner) else None

    def _stays_on_gpu(self, other: str, message: Message, part: Part) -> bool:
        """Return whether a box to or from another worker stays on the GPU of both."""
        return other in self.gpu_peers and not self.coding.bits(message, part)

    def expected_bytes(self, action: Receive) -> int:
        """Return the bytes of a message as it arrives."""
        message = action.message
        if action.source not in self.gpu_peers or self._channel_runner(message) is not None:
            return message.bytes
        staying = [part for part in message.parts if self._stays_on_gpu(action.source, message, part)]
        return message.bytes + sum(DESCRIPTOR_BYTES - self._size_of(message, part) for part in staying)

    def _size_of(self, message: Message, part: Part) -> int:
        return part.box.volume * DTYPE_BYTES[self._table(message)[part.tensor].dtype]

    def _table(self, message: Message) -> Mapping[str, WeightSpec | TensorSpec]:
        """Return the tensors among which the message's are."""
        return self.network.weights if message.kind in _OF_WEIGHTS else self.network.tensors

    # Out

    def send(self, action: Send) -> None:
        """Hand a message to the endpoint; does not wait until it has left."""
        message, topic = action.message, self.topic(action.message)
        self.recorder.sent(message)
        if (runner := self._channel_runner(message)) is not None:
            parts = runner.outgoing(message)
            self.diagnosis.watch(self.endpoint.name, parts)
        else:
            boxes = [self._outgoing(message, part) for part in message.parts]
            self.diagnosis.watch(self.endpoint.name, boxes)
            if self.boards.put(action.to, topic, boxes):
                return
            parts = [self._packed(action.to, message, part, box) for part, box in zip(message.parts, boxes)]
        self.endpoint.send(action.to, self.in_flight.step, topic, parts, urgent=is_urgent(message))

    def _packed(self, to: str, message: Message, part: Part, data: torch.Tensor) -> torch.Tensor:
        """Return a box as it travels, in the machine's memory."""
        if self._stays_on_gpu(to, message, part):
            return self.gpu_peers.described(data)
        if not data.is_cpu:
            self.host_bytes += data.nbytes
            data = data.cpu()
        try:
            return self.coding.packed(to, message, part, data)
        except NoRange as error:
            raise self.diagnosis.packing_error(message, part, self.coding.bits(message, part), error) from error

    def _outgoing(self, message: Message, part: Part) -> torch.Tensor:
        """Return the box that a part names, where it is computed."""
        tensor, box, micro_batch = part.tensor, part.box, message.micro_batch
        if message.kind == "weights":
            return self.weights.tensors[tensor].detach().contiguous().clone()
        if message.kind == "weight-gradient":
            return dense_gradient(self.weights.tensors[tensor]).contiguous()
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
        message, step, topic = action.message, self.in_flight.step, self.topic(action.message)
        if (runner := self._channel_runner(message)) is not None:
            memory = [bundle.room() for bundle in runner.bundles(message, is_sent=False)]
            self.endpoint.mailbox.receive(action.source, step, topic, memory)
            started = self.slowdown.now()
            runner.incoming(message, memory)
            self.slowdown.stretch(started)
            return
        if message.kind in _BEGINS_A_PASS:  # room for what it brings
            self.in_flight.begin_pass(number=message.micro_batch)
        if self.boards.has_place(action.source, topic):
            tensors: Sequence[torch.Tensor] = self.boards.take(action.source, step, topic)
            if not self._is_training:  # a stream's results may be such a tensor, and leave when the round has ended
                tensors = [tensor.clone() for tensor in tensors]
            started = self.slowdown.now()
        else:
            rooms = [self._room(action.source, message, part) for part in message.parts]
            self.endpoint.mailbox.receive(action.source, step, topic, rooms)
            started = self.slowdown.now()
            tensors = [self._opened(action.source, message, part, room) for part, room in zip(message.parts, rooms)]
        self.diagnosis.watch(action.source, tensors)
        for part, tensor in zip(message.parts, tensors):
            data = self.coding.unpacked(message, part, tensor, self.in_flight.feed.torch_device)
            if message.kind == "gradient":
                self.coding.feed_back(action.source, message, part, data)
            self._incoming(action.source, message, part, data)
        if message.kind == "gradient":
            self.coding.came_back(action.source, message)
        self.slowdown.stretch(started)

    def _room(self, source: str, message: Message, part: Part) -> torch.Tensor:
        """Return memory for what is to arrive of a part."""
        if self._stays_on_gpu(source, message, part):
            return torch.empty(DESCRIPTOR_BYTES, dtype=torch.uint8)
        room = self.coding.room(message, part)
        return empty(part.box, self._table(message)[part.tensor].dtype) if room is None else room

    def _opened(self, source: str, message: Message, part: Part, arrived: torch.Tensor) -> torch.Tensor:
        """Return what has arrived, or what it describes."""
        if not self._stays_on_gpu(source, message, part):
            return arrived
        return self.gpu_peers.opened(arrived, part.box.shape, dtype_of(self._table(message)[part.tensor].dtype))

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
