"""Messages of one device: boxes of tensors cut out and packed on the way out, unpacked and put in place on the way in.

send       runner ──box──▶ codec ──bytes──▶ endpoint
receive    mailbox ──bytes──▶ codec ──box──▶ runner

A box for a worker on the same GPU stays there: its descriptor travels (gpu_peers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from manyhands.executor.bound_calls import Call
from manyhands.executor.boxes import cut_out, dtype_of, empty
from manyhands.executor.channels import ChannelRunner
from manyhands.executor.codec import Coding, NoRange
from manyhands.executor.device_boards import DeviceBoards
from manyhands.executor.diagnosis import NumberDiagnosis
from manyhands.executor.gpu_peers import DESCRIPTOR_BYTES, GpuPeers
from manyhands.executor.host_transfers import HostTransfers
from manyhands.executor.in_flight import InFlightMicroBatches
from manyhands.executor.log import Recorder
from manyhands.executor.runner import Runner
from manyhands.executor.slowdown import Slowdown
from manyhands.facts.boxes import Box
from manyhands.facts.network import DTYPE_BYTES, TensorSpec, WeightSpec
from manyhands.graph.weights import Weights, dense_gradient
from manyhands.schedule.actions import Message, Part, Receive, Send, is_urgent
from manyhands.schedule.policy import Schedule
from manyhands.transport.board import TensorShape
from manyhands.transport.endpoint import Endpoint
from manyhands.transport.memory import as_bytes

_BEGINS_A_PASS = frozenset({"value", "input", "gradient"})
_BETWEEN_STAGES = frozenset({"value", "gradient"})
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
        self.diagnosis, self.recorder, self.slowdown = diagnosis, recorder, slowdown.of_messages()
        self.gpu_peers = gpu_peers
        self.host_bytes = 0
        """Bytes of a GPU's boxes that went through the machine's memory."""
        self._keeps_messages = schedule.keeps_messages
        self._topics: dict[int, str] = {}
        """Topics of messages, by their identity: the schedule keeps them."""
        self._is_training = schedule.plan.is_training
        self.boards = DeviceBoards(endpoint, schedule, self._form_on_board, gpu_peers.takes, is_used=has_boards)
        self._transfers: HostTransfers | None = None
        if in_flight.feed.torch_device.type == "cuda":
            self._transfers = HostTransfers(
                endpoint, in_flight.feed.torch_device, partial(diagnosis.watch, endpoint.name)
            )

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

    def end_round(self) -> None:
        """Wait until a GPU has handed over what it was to send, and forget the round."""
        if self._transfers is not None:
            self._transfers.wait()
        self.boards.end_round()
        self.forget()

    def close(self) -> None:
        """End what runs beside the rounds."""
        self.boards.close()
        if self._transfers is not None:
            self._transfers.close()

    def _form_on_board(self, other: str, message: Message) -> tuple[TensorShape, ...] | None:
        """Return the tensors as which a message may lie on a board; None: it travels in another form."""
        if other in self.gpu_peers or any(self.coding.bits(message, part) for part in message.parts):
            return None
        if self._channel_runner(message) is not None:
            return (TensorShape(torch.uint8, (message.bytes,)),)
        specs = self._table(message)
        return tuple(TensorShape(dtype_of(specs[part.tensor].dtype), part.box.shape) for part in message.parts)

    def _channel_runner(self, message: Message) -> ChannelRunner | None:
        """Return the runner that packs a message itself: one of channels, for others of its stage."""
        runner = self.runners.get(message.stage) if message.kind == "halo" else None
        return runner if isinstance(runner, ChannelRunner) else None

    def _transfers_of(self, other: str, message: Message) -> HostTransfers | None:
        """Return what copies a message from or to a GPU while it goes on computing: what a pipeline's stages exchange
        as it is. For other messages somebody waits at once."""
        is_plain = message.kind in _BETWEEN_STAGES and self._form_on_board(other, message) is not None
        return self._transfers if is_plain else None

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

    def bind_send(self, action: Send) -> Call:
        """Return the call that leaves a message on a board or hands it to the endpoint; it does not wait until it has
        left."""
        to, message, topic, name = action.to, action.message, self.topic(action.message), self.endpoint.name
        runner, urgent = self._channel_runner(message), is_urgent(message)
        boxes = [self._bind_outgoing(message, part) for part in message.parts] if runner is None else []
        transfers = self._transfers_of(to, message)

        def call() -> None:
            self.recorder.sent(message)
            tensors = [box() for box in boxes] if runner is None else runner.outgoing(message)
            if transfers is not None:
                self.host_bytes += sum(tensor.nbytes for tensor in tensors)
                transfers.send(to, self.in_flight.step, topic, tensors)
                return
            self.diagnosis.watch(name, tensors)
            if runner is not None:
                if self.boards.put_bytes(to, topic, [as_bytes(tensor) for tensor in tensors]):
                    return
            elif self.boards.put(to, topic, tensors):
                return
            else:
                tensors = [self._packed(to, message, part, box) for part, box in zip(message.parts, tensors)]
            self.endpoint.send(to, self.in_flight.step, topic, tensors, urgent=urgent)

        return call

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

    def _bind_outgoing(self, message: Message, part: Part) -> Callable[[], torch.Tensor]:
        """Return a function that returns the box that a part names, where it is computed."""
        tensor, box, micro_batch = part.tensor, part.box, message.micro_batch
        if message.kind == "weights":
            return lambda: self.weights.tensors[tensor].detach().contiguous().clone()
        if message.kind == "weight-gradient":
            return lambda: dense_gradient(self.weights.tensors[tensor]).contiguous()
        if message.kind == "input":
            return partial(self._cut_from_home, micro_batch, tensor, box)
        if message.kind == "value":
            return partial(self._maker(tensor).value, micro_batch, tensor, box)
        runner = self.runners[message.stage]
        if message.kind == "partial":
            assert isinstance(runner, ChannelRunner)
            return partial(runner.partial, micro_batch, tensor, box)
        if message.kind == "output-gradient":
            return partial(runner.output_gradient, micro_batch, tensor, box)
        if part.is_value or message.kind in ("halo", "output"):
            return partial(runner.value, micro_batch, tensor, box)
        return partial(runner.gradient, micro_batch, tensor, box)

    def _cut_from_home(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        whole = self.in_flight.fed(micro_batch).at_home[tensor]
        return cut_out(whole, Box.whole(whole.shape), box)

    def _maker(self, tensor: str) -> Runner:
        """Return the runner of the stage on this device that makes a tensor."""
        return next(runner for runner in self.runners.values() if runner.geometry.is_made_here(tensor))

    # In

    def bind_receive(self, action: Receive) -> Call:
        """Return the call that waits for a message and puts its boxes where they are read."""
        source, message, topic = action.source, action.message, self.topic(action.message)
        if (runner := self._channel_runner(message)) is not None:
            return partial(self._receive_channels, source, message, topic, runner)
        begins_a_pass, has_place = message.kind in _BEGINS_A_PASS, self.boards.has_place(source, topic)
        incoming = [self._bind_incoming(source, message, part) for part in message.parts]
        transfers, torch_device = self._transfers_of(source, message), self.in_flight.feed.torch_device

        def call() -> None:
            if begins_a_pass:  # room for what it brings
                self.in_flight.begin_pass(number=message.micro_batch)
            if has_place:
                # A stream's result may be such a tensor, and leaves after the round.
                tensors: Sequence[torch.Tensor] = self.boards.take(
                    source, self.in_flight.step, topic, outlives_round=not self._is_training
                )
                started = self.slowdown.begin()
            else:
                rooms = [self._room(source, message, part) for part in message.parts]
                self.endpoint.mailbox.receive(source, self.in_flight.step, topic, rooms)
                started = self.slowdown.begin()
                tensors = [self._opened(source, message, part, room) for part, room in zip(message.parts, rooms)]
            self.diagnosis.watch(source, tensors)
            for part, tensor, put in zip(message.parts, tensors, incoming):
                if transfers is not None:
                    data = transfers.on_gpu(tensor)
                else:
                    data = self.coding.unpacked(message, part, tensor, torch_device)
                if message.kind == "gradient":
                    self.coding.feed_back(source, message, part, data)
                put(data)
            if message.kind == "gradient":
                self.coding.came_back(source, message)
            self.slowdown.stretch(started)

        return call

    def _receive_channels(self, source: str, message: Message, topic: str, runner: ChannelRunner) -> None:
        memory = [bundle.room() for bundle in runner.bundles(message, is_sent=False)]
        if self.boards.has_place(source, topic):
            self.boards.store(source, self.in_flight.step, topic, [as_bytes(room) for room in memory])
        else:
            self.endpoint.mailbox.receive(source, self.in_flight.step, topic, memory)
        started = self.slowdown.begin()
        runner.incoming(message, memory)
        self.slowdown.stretch(started)

    def _room(self, source: str, message: Message, part: Part) -> torch.Tensor:
        """Return memory for what is to arrive of a part."""
        if self._stays_on_gpu(source, message, part):
            return torch.empty(DESCRIPTOR_BYTES, dtype=torch.uint8)
        dtype = self._table(message)[part.tensor].dtype
        if (transfers := self._transfers_of(source, message)) is not None:
            return transfers.room(part.box.shape, dtype_of(dtype))
        room = self.coding.room(message, part)
        return empty(part.box, dtype) if room is None else room

    def _opened(self, source: str, message: Message, part: Part, arrived: torch.Tensor) -> torch.Tensor:
        """Return what has arrived, or what it describes."""
        if not self._stays_on_gpu(source, message, part):
            return arrived
        return self.gpu_peers.opened(arrived, part.box.shape, dtype_of(self._table(message)[part.tensor].dtype))

    def _bind_incoming(self, source: str, message: Message, part: Part) -> Callable[[torch.Tensor], None]:
        """Return a function that puts a box that has arrived where it is read, or adds it there."""
        name, box, micro_batch = part.tensor, part.box, message.micro_batch
        if message.kind == "weights":
            return partial(self._take_weight, name)
        if message.kind == "weight-gradient":
            return partial(self._add_weight_gradient, name)
        if message.kind == "gradient":
            return partial(self._maker(name).add_gradient, micro_batch, name, box)
        runner = self.runners[message.stage]
        if message.kind == "partial":
            assert isinstance(runner, ChannelRunner)
            return partial(runner.put_partial, micro_batch, source, name)
        if message.kind == "output":
            return partial(runner.put_output, micro_batch, name, box)
        if message.kind in ("halo-gradient", "output-gradient") and not part.is_value:
            return partial(runner.add_gradient, micro_batch, name, box)
        return partial(runner.put_value, micro_batch, name, box)

    def _take_weight(self, name: str, data: torch.Tensor) -> None:
        self.weights.tensors[name].copy_(data)
        self.weights.tensors[name].grad = None

    def _add_weight_gradient(self, name: str, data: torch.Tensor) -> None:
        dense_gradient(self.weights.tensors[name]).add_(data)
