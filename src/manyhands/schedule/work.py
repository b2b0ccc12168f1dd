"""Plan -> work: for every device, the actions of one forward pass, one backward pass, and the end of a round.

Messages and boxes are the same for every micro-batch, so they are computed once and numbered per micro-batch. An order
(orders.py) or a policy (policy.py) then decides which pass comes next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from manyhands.facts.boxes import Box, Layout
from manyhands.facts.moves import Move, adjoint, moves
from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.facts.plan import EVERYWHERE, ByChannels, Codec, Plan
from manyhands.schedule.actions import Action, Backward, Forward, Kind, Message, Part, Receive, Reduce, Send, Step
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.reduction import completed_at

HEADER_BYTES = 8
"""A packed tensor carries its range (two floats) beside its bits."""


@dataclass
class DeviceWork:
    """The templates of one device. Micro-batch numbers are filled in by its methods."""

    device: str
    stage: int
    geometry: StageGeometry | None
    before: list[Action] = field(default_factory=list)
    """Inputs this device has and others read."""
    forward_actions: list[Action] = field(default_factory=list)
    backward_actions: list[Action] = field(default_factory=list)
    last_backward_actions: list[Action] = field(default_factory=list)
    """The backward pass of the round's last micro-batch, with gradient reductions in between."""
    end: list[Action] = field(default_factory=list)

    def inputs(self, micro_batch: int) -> list[Action]:
        """Sending the inputs that others read."""
        return [_numbered(action, micro_batch) for action in self.before]

    def forward(self, micro_batch: int) -> list[Action]:
        return [_numbered(action, micro_batch) for action in self.forward_actions]

    def backward(self, micro_batch: int, *, is_last: bool) -> list[Action]:
        chosen = self.last_backward_actions if is_last else self.backward_actions
        return [_numbered(action, micro_batch) for action in chosen]

    def finish(self) -> list[Action]:
        return list(self.end)


def _numbered(action: Action, micro_batch: int) -> Action:
    if isinstance(action, (Send, Receive)):
        old = action.message
        message = Message(old.kind, micro_batch, old.parts, old.bytes)
        return Send(action.to, message) if isinstance(action, Send) else Receive(action.source, message)
    if isinstance(action, Forward):
        return Forward(action.stage, micro_batch, action.first, action.last)
    if isinstance(action, Backward):
        return Backward(action.stage, micro_batch, action.first, action.last)
    if isinstance(action, Reduce) and action.what == "statistics":
        return msgspec.structs.replace(action, micro_batch=micro_batch)
    return action


def entering_input(geometry: StageGeometry, tensor: str) -> Layout | None:
    """What a stage's devices need of a graph input: to read it, or to hand it to the loss as it is."""
    network = geometry.network
    if any(tensor in op.inputs for op in network.ops[geometry.first : geometry.last]):
        return geometry.entering(tensor)
    if tensor in network.outputs and geometry.last == len(network.ops):
        return geometry.owned(tensor)
    return None


class Lowering:
    """A resolved plan turned into work, stage by stage."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self.plan, self.network = plan, network
        self.geometries = [StageGeometry(plan, index, network) for index in range(len(plan.stages))]
        self.work = {
            device: DeviceWork(device, index, geometry)
            for index, geometry in enumerate(self.geometries)
            for device in geometry.devices
        }
        for device in plan.devices:  # a device that only has inputs
            self.work.setdefault(device, DeviceWork(device, -1, None))
        self.incoming: dict[str, list[tuple[str, Message]]] = defaultdict(list)
        self.outgoing: dict[str, list[tuple[str, Message]]] = defaultdict(list)
        self._connect_stages()
        self._connect_inputs()
        for index, geometry in enumerate(self.geometries):
            self._lower_forward(index, geometry)
            if plan.is_training:
                self._lower_backward(index, geometry)
                self._lower_end(index, geometry)

    def _bytes(self, tensor: str, boxes: Iterable[Box], codec: Codec | None) -> int:
        elements = [box.volume for box in boxes]
        dtype = self.network.tensors[tensor].dtype if tensor in self.network.tensors else "float32"
        packed = codec is not None and codec.bits < min(32, 8 * DTYPE_BYTES[dtype])  # 32: as they are, float64 too
        if codec is not None and packed and dtype.startswith(("float", "bfloat")):
            return sum(-(-count * codec.bits // 8) + HEADER_BYTES for count in elements)
        return sum(elements) * DTYPE_BYTES[dtype]

    def _packed(
        self, found: dict[str, tuple[Move, ...]], kind: Kind, codec: Codec | None
    ) -> dict[tuple[str, str], Message]:
        """One message per pair of devices."""
        parts: dict[tuple[str, str], list[Part]] = defaultdict(list)
        sizes: dict[tuple[str, str], int] = defaultdict(int)
        for tensor, own in found.items():
            for move in own:
                if not move.is_local and not move.box.is_empty:
                    pair = (move.source, move.target)
                    parts[pair].append(Part(tensor, move.box))
                    sizes[pair] += self._bytes(tensor, [move.box], codec)
        return {pair: Message(kind, 0, tuple(own), sizes[pair]) for pair, own in parts.items()}

    def _connect_stages(self) -> None:
        """Every tensor goes straight from the stage that makes it to each stage that reads it.

        The last stage reads what the network returns: it computes the loss.
        """
        self.between: list[tuple[int, int, dict[str, tuple[Move, ...]]]] = []
        for consumer, geometry in enumerate(self.geometries):
            reads = dict.fromkeys(n for op in self.network.ops[geometry.first : geometry.last] for n in op.inputs)
            if geometry.last == len(self.network.ops):
                reads.update(dict.fromkeys(self.network.outputs))
            by_producer: dict[int, dict[str, tuple[Move, ...]]] = defaultdict(dict)
            for tensor in reads:
                made = self.network.producer.get(tensor)
                if made is not None and made < geometry.first:
                    producer = next(i for i, g in enumerate(self.geometries) if g.first <= made < g.last)
                    made_as = self.geometries[producer].owned(tensor)
                    is_read = any(geometry.first <= reader for reader in self.network.readers.get(tensor, ()))
                    wanted = geometry.entering(tensor) if is_read else geometry.owned(tensor)
                    by_producer[producer][tensor] = moves(made_as, wanted)
            self.between.extend((producer, consumer, found) for producer, found in by_producer.items())
        for _, consumer, found in self.between:
            for (source, target), message in self._packed(found, "value", self.plan.stages[consumer].codec).items():
                self.outgoing[source].append((target, message))
                self.incoming[target].append((source, message))

    def _connect_inputs(self) -> None:
        """Inputs with a home are sent from there to whoever reads them."""
        for tensor, home in self.plan.homes.items():
            if home == EVERYWHERE:
                continue
            whole = Box.whole(self.network.tensors[tensor].shape_for(self.plan.micro_batch_size))
            for geometry in self.geometries:
                layout = entering_input(geometry, tensor)
                if layout is None:
                    continue
                found = [
                    Move(home, device, box.intersect(whole))
                    for device in geometry.devices
                    for box in layout.boxes(device)
                ]
                for (source, target), message in self._packed({tensor: tuple(found)}, "input", None).items():
                    self.work[source].before.append(Send(target, message))
                    self.incoming[target].insert(0, (source, message))

    def _statistics(self, first: int, last: int) -> list[int]:
        """Operators in a range at which a shared stage must add up batch statistics."""
        if self.plan.batch_norm == "local" or not self.plan.is_training:
            return []
        return [i for i in range(first, last) if self.network.ops[i].statistics]

    def _statistics_bytes(self, op: int, *, backward: bool = False) -> int:
        """Forward: the count, and mean and variance per channel. Backward: two sums per channel."""
        spec = self.network.tensors[self.network.ops[op].inputs[0]]
        return (2 * self.network.ops[op].statistics + (0 if backward else 1)) * DTYPE_BYTES[spec.dtype]

    def _shares_statistics(self, geometry: StageGeometry) -> bool:
        return len(geometry.devices) > 1 and not isinstance(geometry.stage.share, ByChannels)

    def _lower_forward(self, index: int, geometry: StageGeometry) -> None:
        for device in geometry.devices:
            out = self.work[device].forward_actions
            out.extend(Receive(source, message) for source, message in self.incoming[device])
        for group in geometry.groups:
            halos = self._packed(group.fetches, "halo", None)
            for device in geometry.devices:
                out = self.work[device].forward_actions
                out.extend(Send(target, m) for (source, target), m in halos.items() if source == device)
                out.extend(Receive(source, m) for (source, target), m in halos.items() if target == device)
                start = group.first
                if self._shares_statistics(geometry):
                    for op in self._statistics(group.first, group.last):
                        if op > start:
                            out.append(Forward(index, 0, start, op))
                        out.append(
                            Reduce(index, "statistics", op, op + 1, geometry.devices, self._statistics_bytes(op), 0)
                        )
                        start = op
                out.append(Forward(index, 0, start, group.last))
        for device in geometry.devices:
            sends = (Send(target, message) for target, message in self.outgoing[device])
            self.work[device].forward_actions.extend(sends)

    def _backward_messages(self, index: int) -> tuple[dict[tuple[str, str], Message], dict[tuple[str, str], Message]]:
        """Gradients this stage receives (from later stages) and sends (to earlier ones)."""
        receives: dict[tuple[str, str], Message] = {}
        sends: dict[tuple[str, str], Message] = {}
        for producer, consumer, found in self.between:
            if index not in (producer, consumer):
                continue
            back = {
                t: self._way_back(t, producer, consumer, own)
                for t, own in found.items()
                if self.network.tensors[t].differentiable
            }
            codec = self.plan.stages[consumer].codec
            packed = self._packed(back, "gradient", codec if codec.gradients else None)
            (receives if index == producer else sends).update(packed)
        return receives, sends

    def _way_back(self, tensor: str, producer: int, consumer: int, there: tuple[Move, ...]) -> tuple[Move, ...]:
        """Gradients return as values came, sums of what overlaps; a stage with backward groups has them complete."""
        geometry = self.geometries[consumer]
        if geometry.backward_groups is None:
            return adjoint(there)
        return moves(geometry.owned(tensor), self.geometries[producer].owned(tensor))

    def _lower_backward(self, index: int, geometry: StageGeometry) -> None:
        receives, sends = self._backward_messages(index)
        buckets = self._buckets(geometry)
        for device in geometry.devices:
            for actions, ends in (
                (self.work[device].backward_actions, {}),
                (self.work[device].last_backward_actions, buckets),
            ):
                actions.extend(Receive(source, m) for (source, target), m in receives.items() if target == device)
                self._backward_groups(index, geometry, device, actions, ends)
                # The stage before waits for these; the last bucket's reduction is only waited for by the step.
                last = [actions.pop()] if isinstance(actions[-1], Reduce) else []
                actions.extend(Send(target, m) for (source, target), m in sends.items() if source == device)
                actions.extend(last)

    def _backward_groups(
        self, index: int, geometry: StageGeometry, device: str, actions: list[Action], ends: dict[int, Reduce]
    ) -> None:
        own = geometry.backward_groups
        if own is not None:
            for group in own:
                deltas = self._packed(group.deltas, "halo-gradient", None)
                values = self._packed(group.values, "halo", None)
                for messages in (deltas, values):
                    actions.extend(Send(target, m) for (source, target), m in messages.items() if source == device)
                    actions.extend(Receive(source, m) for (source, target), m in messages.items() if target == device)
                self._backward_run(index, geometry, group.first, group.last, actions, ends)
            return
        for forward_group in reversed(geometry.groups):
            self._backward_run(index, geometry, forward_group.first, forward_group.last, actions, ends)
            back = {
                t: adjoint(found)
                for t, found in forward_group.fetches.items()
                if self.network.tensors[t].differentiable
            }
            halos = self._packed(back, "halo-gradient", None)
            actions.extend(Send(target, m) for (source, target), m in halos.items() if source == device)
            actions.extend(Receive(source, m) for (source, target), m in halos.items() if target == device)

    def _backward_run(
        self, index: int, geometry: StageGeometry, first: int, last: int, actions: list[Action], ends: dict[int, Reduce]
    ) -> None:
        """Backward over operators [first, last), stopping at batch statistics and at the ends of gradient buckets."""
        statistics = set(self._statistics(first, last)) if self._shares_statistics(geometry) else set()
        high = last
        for op in range(last - 1, first - 1, -1):
            if op in statistics:
                if op + 1 < high:
                    actions.append(Backward(index, 0, op + 1, high))
                size = self._statistics_bytes(op, backward=True)
                actions.append(Reduce(index, "statistics", op, op + 1, geometry.devices, size, 0, backward=True))
                high = op + 1
            if op in ends:
                actions.append(Backward(index, 0, op, high))
                actions.append(ends[op])
                high = op
        if high > first:
            actions.append(Backward(index, 0, first, high))

    def _buckets(self, geometry: StageGeometry) -> dict[int, Reduce]:
        """Operator at which a bucket of gradients is complete in backward -> its reduction."""
        if len(geometry.devices) == 1 or isinstance(geometry.stage.share, ByChannels):
            return {}
        if geometry.stage.reduce == "gateway":
            return {}
        found: dict[int, Reduce] = {}
        pending, high = 0, geometry.last
        completed = completed_at(self.network, geometry.first, geometry.last)
        for op in range(geometry.last - 1, geometry.first - 1, -1):
            pending += sum(self.network.weights[name].bytes for name in completed.get(op, ()))
            if pending >= self.plan.bucket_bytes or (op == geometry.first and pending):
                found[op] = Reduce(geometry.index, "gradients", op, high, geometry.devices, pending)
                pending, high = 0, op
        return found

    def _lower_end(self, index: int, geometry: StageGeometry) -> None:
        step = Step(index)
        gateway, *others = geometry.devices
        names = [n for n in self.network.weights_of(geometry.first, geometry.last) if self.network.weights[n].trainable]
        if geometry.stage.reduce != "gateway" or not others or not names:
            for device in geometry.devices:
                self.work[device].end.append(step)
            return
        # TILE Algorithm 1: partial sums go to the gateway, updated weights come back.
        parts = tuple(Part(name, Box.whole(self.network.weights[name].shape)) for name in names)
        size = sum(self.network.weights[name].bytes for name in names)
        partial = Message("weight-gradient", 0, parts, size)
        updated = Message("weights", 0, parts, size)
        end = self.work[gateway].end
        end.extend(Receive(other, partial) for other in others)
        end.append(step)
        end.extend(Send(other, updated) for other in others)
        for other in others:
            self.work[other].end.extend([Send(gateway, partial), Receive(gateway, updated)])
