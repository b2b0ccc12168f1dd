"""Plan -> work: for every device, the actions of one forward pass, one backward pass, and the end of a round.

A stage's geometry determines what happens inside it (forward_pass.py, backward_pass.py); here stages are connected with
each other, with the homes of inputs, and with the optimiser's step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from manyhands.facts.boxes import Box, Layout
from manyhands.facts.moves import Move, Moves, adjoint, moves
from manyhands.facts.network import Network
from manyhands.facts.plan import EVERYWHERE, Codec, Plan
from manyhands.schedule.actions import Kind, Loss, Message, Part, Receive, Reduce, Send, Step
from manyhands.schedule.backward_pass import BackwardPass, gradient_buckets
from manyhands.schedule.device_work import DeviceWork
from manyhands.schedule.forward_pass import ForwardPass
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.gradient_norm import GradientNorm, gradient_norm
from manyhands.schedule.packing import Mail, Packed, packed_messages
from manyhands.schedule.recomputation import backward_again, forward_ahead, recomputed_spans
from manyhands.schedule.sharing import geometry_of
from manyhands.schedule.tied_sums import tied_names, tied_sums


def entering_input(geometry: StageGeometry, tensor: str) -> Layout | None:
    """Return what a stage's devices need of a graph input: to read it, or to hand it to the loss; None: nothing."""
    network = geometry.network
    if any(tensor in op.inputs for op in geometry.ops):
        return geometry.entering(tensor)
    if tensor in network.outputs and geometry.is_last:
        return geometry.passing(tensor)
    return None


class Handed(NamedTuple):
    """A box of a tensor that two stages on one device share."""

    producer: int
    consumer: int
    tensor: str
    box: Box


class Lowering:
    """The work that a resolved plan becomes, stage by stage."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self.plan, self.network = plan, network
        self.geometries = [geometry_of(plan, index, network) for index in range(len(plan.stages))]
        self.work = {device: DeviceWork(device) for device in plan.devices}
        for geometry in self.geometries:
            for device in geometry.devices:
                self.work[device].geometries.append(geometry)
        self.incoming: dict[tuple[int, str], list[tuple[str, Message]]] = defaultdict(list)
        """(stage, device) -> the senders and messages that it receives before it starts."""
        self.outgoing: dict[tuple[int, str], list[tuple[str, Message]]] = defaultdict(list)
        self._connect_stages()
        self._connect_inputs()
        for geometry in self.geometries:
            self._lower_forward(geometry)
        self.tied_sums = tied_sums(self.geometries) if plan.is_training else ()
        """The sums of the gradients of weights that several stages hold."""
        self.tied = frozenset(tied_names(self.geometries))
        self.norm: GradientNorm | None = None
        """The exchange of the norm of all gradients, where the plan has it."""
        if plan.is_training:
            for geometry in reversed(self.geometries):
                self._lower_backward(geometry)
            self._lower_end()

    def _packed(self, moved: Moves, kind: Kind, stage: int, codec: Codec | None = None) -> Packed:
        return packed_messages(self.network, moved, kind, stage, codec)

    def _connect_stages(self) -> None:
        """Send every tensor straight from the stage that makes it to each stage that reads it.

        The last stage reads what the network returns: it computes the loss.
        """
        self.between: list[tuple[int, int, Moves]] = []
        for consumer, geometry in enumerate(self.geometries):
            reads = dict.fromkeys(n for op in geometry.ops for n in op.inputs)
            if geometry.is_last:
                reads.update(dict.fromkeys(self.network.outputs))
            by_producer: dict[int, Moves] = defaultdict(dict)
            for tensor in reads:
                made = self.network.producer.get(tensor)
                if made is not None and made < geometry.first:
                    producer = next(i for i, g in enumerate(self.geometries) if g.first <= made < g.last)
                    made_as = self.geometries[producer].owned(tensor)
                    is_read = any(tensor in op.inputs for op in geometry.ops)
                    needed = geometry.entering(tensor) if is_read else geometry.passing(tensor)
                    by_producer[producer][tensor] = moves(made_as, needed)
            self.between.extend((producer, consumer, moved) for producer, moved in by_producer.items())
        for producer, consumer, moved in self.between:
            codec = self.plan.stages[consumer].codec
            for source, target, message in self._packed(moved, "value", consumer, codec):
                self.outgoing[producer, source].append((target, message))
                self.incoming[consumer, target].append((source, message))

    def handed_over(self, device: str) -> list[Handed]:
        """Return what one stage hands to a later one on the same device, without a message."""
        return [
            Handed(producer, consumer, tensor, move.box)
            for producer, consumer, moved in self.between
            for tensor, tensor_moves in moved.items()
            for move in tensor_moves
            if move.is_local and move.source == device and not move.box.is_empty
        ]

    def handed_back(self, device: str) -> list[Handed]:
        """Return the gradients that come back the same way."""
        return [
            Handed(producer, consumer, tensor, move.box)
            for producer, consumer, moved in self.between
            for tensor, tensor_moves in moved.items()
            if self.network.tensors[tensor].differentiable
            for move in self._way_back(tensor, producer, consumer, tensor_moves)
            if move.is_local and move.source == device and not move.box.is_empty
        ]

    def _connect_inputs(self) -> None:
        """Send inputs with a home from there to the devices that read them."""
        for tensor, home in self.plan.homes.items():
            if home == EVERYWHERE:
                continue
            whole = Box.whole(self.network.tensors[tensor].shape_for(self.plan.micro_batch_size))
            for stage, geometry in enumerate(self.geometries):
                layout = entering_input(geometry, tensor)
                if layout is None:
                    continue
                input_moves = [
                    Move(home, device, box.intersect(whole))
                    for device in geometry.devices
                    for box in layout.boxes(device)
                ]
                for source, target, message in self._packed({tensor: tuple(input_moves)}, "input", stage):
                    self.work[source].before.append(Send(target, message))
                    self.incoming[stage, target].insert(0, (source, message))

    def _lower_forward(self, geometry: StageGeometry) -> None:
        stage, training = geometry.index, self.plan.is_training
        inside, spans = ForwardPass(geometry), recomputed_spans(geometry)
        gathered = Mail(self._packed(geometry.gathered_outputs, "output", stage) if training else [])
        for device in geometry.devices:
            out = self.work[device].forward_actions
            out.extend(Receive(source, message) for source, message in self.incoming[stage, device])
            out += forward_ahead(inside.actions(device), spans)
            out.extend(Send(target, message) for target, message in self.outgoing[stage, device])
            out += gathered.sends(device) + gathered.receives(device)
            if geometry.is_last and training and device in geometry.loss_devices:
                out.append(Loss(stage, 0))

    def _backward_messages(self, geometry: StageGeometry) -> tuple[Packed, Packed, Packed]:
        """Return the gradients from later stages, to earlier ones, and from the device here that computes the loss."""
        receives: Packed = []
        sends: Packed = []
        for producer, consumer, moved in self.between:
            if geometry.index in (producer, consumer):
                back = {
                    t: self._way_back(t, producer, consumer, tensor_moves)
                    for t, tensor_moves in moved.items()
                    if self.network.tensors[t].differentiable
                }
                codec = self.plan.stages[consumer].codec
                packed = self._packed(back, "gradient", consumer, codec if codec.gradients else None)
                (receives if geometry.index == producer else sends).extend(packed)
        returned = {
            t: adjoint(ms) for t, ms in geometry.gathered_outputs.items() if self.network.tensors[t].differentiable
        }
        return receives, sends, self._packed(returned, "output-gradient", geometry.index)

    def _way_back(self, tensor: str, producer: int, consumer: int, forward_moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return self.geometries[consumer].returned_gradients(tensor, forward_moves, self.geometries[producer])

    def _lower_backward(self, geometry: StageGeometry) -> None:
        """Add every micro-batch's backward pass, and the round's last one, in which gradients are added up."""
        inside = BackwardPass(geometry, *self._backward_messages(geometry))
        spans = recomputed_spans(geometry)
        for device, actions in inside.actions(dict[int, Reduce]()).items():
            self.work[device].backward_actions += backward_again(actions, spans)
        for device, actions in inside.actions(gradient_buckets(geometry, self.tied)).items():
            self.work[device].last_backward_actions += backward_again(actions, spans)

    def _lower_end(self) -> None:
        """Add the optimiser's step.

        Where a stage has a gateway (TILE Algorithm 1), partial sums go to it before, and updated weights come back
        after. Gradients of tied weights are added up last, when every stage has its own, and in one order on all
        devices: a device does one sum after another. Then the norm of all gradients can be formed.
        """
        partial = {g.index: message for g in self.geometries if (message := self._weights_of(g, "weight-gradient"))}
        updated = {g.index: message for g in self.geometries if (message := self._weights_of(g, "weights"))}
        if self.plan.gradient_norm:
            steppers = {g.index: self._steppers(g, has_gateway=g.index in partial) for g in self.geometries}
            self.norm = gradient_norm(self.geometries, steppers)
        for device, work in self.work.items():
            mine = [g for g in work.geometries if g.index in partial and g.devices[0] == device]
            others = [g for g in work.geometries if g.index in partial and g.devices[0] != device]
            work.end.extend(Send(g.devices[0], partial[g.index]) for g in others)
            work.end.extend(Receive(other, partial[g.index]) for g in mine for other in g.devices[1:])
            work.end.extend(each for each in self.tied_sums if device in each.devices)
            if self.norm is not None and device in self.norm.parts:
                work.end.append(self.norm.reduce)
            work.end.extend(Step(g.index) for g in work.geometries if g not in others)
            work.end.extend(Send(other, updated[g.index]) for g in mine for other in g.devices[1:])
            work.end.extend(Receive(g.devices[0], updated[g.index]) for g in others)

    def _steppers(self, geometry: StageGeometry, *, has_gateway: bool) -> tuple[str, ...]:
        """Return the devices of a stage that step its weights. None does if it runs ahead and nothing comes back."""
        actions = self.work[geometry.devices[0]].backward_actions
        comes_back = any(isinstance(action, Receive) and action.message.kind == "gradient" for action in actions)
        if self.plan.order == "replay" and not geometry.is_last and not comes_back:
            return ()
        return geometry.devices[:1] if has_gateway else geometry.devices

    def _weights_of(self, geometry: StageGeometry, kind: Kind) -> Message | None:
        """Return all trained weights of a stage with a gateway, or their gradients, as one message; else None."""
        weights = self.network.weights
        names = [n for n in self.network.weights_of(geometry.first, geometry.last) if weights[n].trainable]
        if geometry.stage.reduce != "gateway" or len(geometry.devices) == 1 or not names:
            return None
        parts = tuple(Part(name, Box.whole(weights[name].shape)) for name in names)
        return Message(kind, geometry.index, 0, parts, sum(weights[name].bytes for name in names))
