"""Plan -> work: for every device, the actions of one forward pass, one backward pass, and the end of a round.

Messages and boxes are the same for every micro-batch, so they are computed once and numbered per micro-batch. An order
(orders.py) or a policy (policy.py) then decides which pass comes next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from manyhands.facts.boxes import Box, Layout
from manyhands.facts.moves import Move, adjoint, moves
from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.facts.plan import EVERYWHERE, ByChannels, ByTiles, Codec, Plan
from manyhands.schedule.actions import (
    Action,
    Await,
    Backward,
    Forward,
    Kind,
    Loss,
    Message,
    Part,
    Receive,
    Reduce,
    Send,
    Step,
)
from manyhands.schedule.channels import ChannelGeometry
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.reduction import completed_at
from manyhands.schedule.tiles import TileGeometry

Moves = dict[str, tuple[Move, ...]]
"""Tensor -> who sends what of it to whom."""

HEADER_BYTES = 16
"""A packed box carries its range (two doubles, so that any float's is exact) beside its bits."""
LAST_BUCKET_PART = 16
"""Where backward goes operator by operator, the last bucket of gradients has at most this part of the others' size: all
wait for it when nothing is left to compute."""


def packed_bits(codec: Codec | None, dtype: str) -> int:
    """In how many bits a codec packs a number of a type; 0: it goes as it is, as whole numbers do, and 32 bits."""
    if codec is None or not dtype.startswith(("float", "bfloat")):
        return 0
    return codec.bits if codec.bits < min(32, 8 * DTYPE_BYTES[dtype]) else 0


def packed_bytes(elements: int, bits: int) -> int:
    """What a packed box takes on the wire."""
    return -(-elements * bits // 8) + HEADER_BYTES


@dataclass
class DeviceWork:
    """The templates of one device. Micro-batch numbers are filled in by its methods."""

    device: str
    geometries: list[StageGeometry] = field(default_factory=list)
    """Of the stages it works in, in order; none: it only has inputs."""
    before: list[Action] = field(default_factory=list)
    """Inputs this device has and others read."""
    forward_actions: list[Action] = field(default_factory=list)
    backward_actions: list[Action] = field(default_factory=list)
    last_backward_actions: list[Action] = field(default_factory=list)
    """The backward pass of the round's last micro-batch, with gradient reductions in between."""
    end: list[Action] = field(default_factory=list)

    @property
    def stage(self) -> int:
        """The first stage it works in; -1: none."""
        return self.geometries[0].index if self.geometries else -1

    def geometry(self, stage: int) -> StageGeometry:
        return next(geometry for geometry in self.geometries if geometry.index == stage)

    def weights(self) -> tuple[str, ...]:
        """The weights it needs, each once."""
        found = (name for g in self.geometries for name in g.network.weights_of(g.first, g.last))
        return tuple(dict.fromkeys(found))

    def weight_box(self, name: str) -> Box | None:
        """The part of a weight that it needs; None: all of it."""
        readers = (g for g in self.geometries if name in g.network.weights_of(g.first, g.last))
        boxes = {g.weight_box(self.device, name) for g in readers}
        return boxes.pop() if len(boxes) == 1 else None

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

    def again(self, micro_batch: int) -> list[Action]:
        """Its forward pass once more, for its own backward pass: nothing is sent."""
        passes = [action for action in self.forward(micro_batch) if isinstance(action, Forward)]
        return [msgspec.structs.replace(action, part="again") for action in passes]

    def ahead(self, micro_batch: int) -> list[Action]:
        """Its forward pass without what a backward pass needs."""
        return [
            msgspec.structs.replace(action, part="ahead") if isinstance(action, Forward) else action
            for action in self.forward(micro_batch)
        ]

    def steps(self, micro_batch: int) -> list[Action]:
        """The optimiser's update after a micro-batch that is a mini-batch of its own."""
        return [_numbered(action, micro_batch) for action in self.end]


def _numbered(action: Action, micro_batch: int) -> Action:
    if isinstance(action, Forward):
        return Forward(action.stage, micro_batch, action.first, action.last, action.part)
    if isinstance(action, Backward):
        return Backward(action.stage, micro_batch, action.first, action.last, action.part)
    if isinstance(action, (Send, Receive)):
        own = action.message
        message = Message(own.kind, own.stage, micro_batch, own.parts, own.bytes)
        return Send(action.to, message) if isinstance(action, Send) else Receive(action.source, message)
    is_sum = isinstance(action, Reduce) and action.what == "statistics"
    if is_sum or isinstance(action, (Loss, Step, Await)):
        return msgspec.structs.replace(action, micro_batch=micro_batch)
    return action


def entering_input(geometry: StageGeometry, tensor: str) -> Layout | None:
    """What a stage's devices need of a graph input: to read it, or to hand it to the loss as it is."""
    network = geometry.network
    if any(tensor in op.inputs for op in geometry.ops):
        return geometry.entering(tensor)
    if tensor in network.outputs and geometry.is_last:
        return geometry.passing(tensor)
    return None


def geometry_of(plan: Plan, index: int, network: Network) -> StageGeometry:
    stage = plan.stages[index]
    if isinstance(stage.share, ByTiles) and len(stage.devices) > 1:
        return TileGeometry(plan, index, network)
    if isinstance(stage.share, ByChannels) and len(stage.devices) > 1:
        return ChannelGeometry(plan, index, network)
    return StageGeometry(plan, index, network)


class Handed(NamedTuple):
    """A box of a tensor that two stages on one device share."""

    producer: int
    consumer: int
    tensor: str
    box: Box


Packed = list[tuple[str, str, Message]]
"""(source, target, what goes from one to the other at once)."""


class Mail:
    """Messages by who sends and who receives them, so that no device looks through those of all others."""

    def __init__(self, *packed: Packed) -> None:
        self._sends: dict[str, list[Action]] = defaultdict(list)
        self._receives: dict[str, list[Action]] = defaultdict(list)
        for source, target, message in (one for several in packed for one in several):
            self._sends[source].append(Send(target, message))
            self._receives[target].append(Receive(source, message))

    @property
    def is_empty(self) -> bool:
        return not self._sends

    def sends(self, device: str) -> list[Action]:
        return self._sends.get(device, [])

    def receives(self, device: str) -> list[Action]:
        return self._receives.get(device, [])


def _continued(actions: list[Action], stage: int, first: int) -> int:
    """Where computing that goes on at an operator begins: an action that ends there is taken back, and made longer."""
    last = actions[-1] if actions else None
    if not isinstance(last, Forward) or last.part or (last.stage, last.last) != (stage, first):
        return first
    actions.pop()
    return last.first


class Lowering:
    """A resolved plan turned into work, stage by stage."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self.plan, self.network = plan, network
        self.geometries = [geometry_of(plan, index, network) for index in range(len(plan.stages))]
        self.work = {device: DeviceWork(device) for device in plan.devices}
        for geometry in self.geometries:
            for device in geometry.devices:
                self.work[device].geometries.append(geometry)
        self.incoming: dict[tuple[int, str], list[tuple[str, Message]]] = defaultdict(list)
        """(stage, device) -> from whom it gets what before it starts."""
        self.outgoing: dict[tuple[int, str], list[tuple[str, Message]]] = defaultdict(list)
        self._connect_stages()
        self._connect_inputs()
        for geometry in self.geometries:
            self._lower_forward(geometry)
        if plan.is_training:
            for geometry in reversed(self.geometries):
                self._lower_backward(geometry)
            self._lower_end()

    def _bytes(self, tensor: str, boxes: Iterable[Box], codec: Codec | None) -> int:
        elements = [box.volume for box in boxes]
        dtype = self.network.tensors[tensor].dtype if tensor in self.network.tensors else "float32"
        if bits := packed_bits(codec, dtype):
            return sum(packed_bytes(count, bits) for count in elements)
        return sum(elements) * DTYPE_BYTES[dtype]

    def _packed(
        self, found: Moves, kind: Kind, stage: int, codec: Codec | None = None, values: Moves | None = None
    ) -> Packed:
        """One message per pair of devices; `values`: of the forward pass, among gradients."""
        parts: dict[tuple[str, str], list[Part]] = defaultdict(list)
        sizes: dict[tuple[str, str], int] = defaultdict(int)
        for own, is_value in ((found, False), (values or {}, True)):
            for tensor, move in ((tensor, move) for tensor, several in own.items() for move in several):
                if not move.is_local and not move.box.is_empty:
                    pair = (move.source, move.target)
                    parts[pair].append(Part(tensor, move.box, is_value))
                    sizes[pair] += self._bytes(tensor, [move.box], codec)
        return [(*pair, Message(kind, stage, 0, tuple(own), sizes[pair])) for pair, own in parts.items()]

    def _connect_stages(self) -> None:
        """Every tensor goes straight from the stage that makes it to each stage that reads it.

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
                    wanted = geometry.entering(tensor) if is_read else geometry.passing(tensor)
                    by_producer[producer][tensor] = moves(made_as, wanted)
            self.between.extend((producer, consumer, found) for producer, found in by_producer.items())
        for producer, consumer, found in self.between:
            codec = self.plan.stages[consumer].codec
            for source, target, message in self._packed(found, "value", consumer, codec):
                self.outgoing[producer, source].append((target, message))
                self.incoming[consumer, target].append((source, message))

    def handed_over(self, device: str) -> list[Handed]:
        """What one stage hands to a later one on the same device: no message."""
        return [
            Handed(producer, consumer, tensor, move.box)
            for producer, consumer, found in self.between
            for tensor, own in found.items()
            for move in own
            if move.is_local and move.source == device and not move.box.is_empty
        ]

    def handed_back(self, device: str) -> list[Handed]:
        """The gradients that come back the same way."""
        return [
            Handed(producer, consumer, tensor, move.box)
            for producer, consumer, found in self.between
            for tensor, own in found.items()
            if self.network.tensors[tensor].differentiable
            for move in self._way_back(tensor, producer, consumer, own)
            if move.is_local and move.source == device and not move.box.is_empty
        ]

    def _connect_inputs(self) -> None:
        """Inputs with a home are sent from there to whoever reads them."""
        for tensor, home in self.plan.homes.items():
            if home == EVERYWHERE:
                continue
            whole = Box.whole(self.network.tensors[tensor].shape_for(self.plan.micro_batch_size))
            for stage, geometry in enumerate(self.geometries):
                layout = entering_input(geometry, tensor)
                if layout is None:
                    continue
                found = [
                    Move(home, device, box.intersect(whole))
                    for device in geometry.devices
                    for box in layout.boxes(device)
                ]
                for source, target, message in self._packed({tensor: tuple(found)}, "input", stage):
                    self.work[source].before.append(Send(target, message))
                    self.incoming[stage, target].insert(0, (source, message))

    def _statistics(self, geometry: StageGeometry, first: int, last: int) -> list[int]:
        """Operators in a range at which the devices of a stage must add up."""
        if len(geometry.devices) == 1 or isinstance(geometry, ChannelGeometry):
            return []
        if isinstance(geometry, TileGeometry):
            return [i for i in range(first, last) if geometry.adds_up(self.network.ops[i])]
        if self.plan.batch_norm == "local" or not self.plan.is_training:
            return []
        return [i for i in range(first, last) if self.network.ops[i].statistics]

    def _sum(self, geometry: StageGeometry, index: int, *, backward: bool = False, later: bool = False) -> Reduce:
        """Batch norm, forward: the count, and mean and variance per channel; backward: two sums per channel.

        Other operators of a tiled stage add up some numbers per sample, each way.
        """
        op = self.network.ops[index]
        count = 2 * op.statistics + (0 if backward else 1) if op.statistics else op.tile_sums * geometry.samples
        size = count * DTYPE_BYTES[self.network.tensors[op.inputs[0]].dtype]
        return Reduce(geometry.index, "statistics", index, index + 1, geometry.devices, size, 0, backward, later)

    def _lower_forward(self, geometry: StageGeometry) -> None:
        stage = geometry.index
        for device in geometry.devices:
            out = self.work[device].forward_actions
            out.extend(Receive(source, message) for source, message in self.incoming[stage, device])
        halos = {group.first: Mail(self._packed(group.fetches, "halo", stage)) for group in geometry.groups}
        leaving: dict[int, list[Mail]] = defaultdict(list)
        for group in geometry.groups:
            leaving[geometry.ready_at(group)].append(halos[group.first])
        for group in geometry.groups:
            sums = Mail(self._packed(group.sums, "partial", stage))
            for device in geometry.devices:
                out = self.work[device].forward_actions
                out += [send for mail in leaving[group.first] for send in mail.sends(device)]
                start = group.first
                adds_up = self._statistics(geometry, group.first, group.last)
                if isinstance(geometry, TileGeometry) and start in geometry.interior_first:
                    out.append(Forward(stage, 0, start, start + 1, "interior"))
                    out += [*halos[start].receives(device), Forward(stage, 0, start, start + 1, "rim")]
                    start += 1
                elif start in adds_up:  # one wait for both: what is fetched travels beside the sums
                    out += [self._sum(geometry, start), *halos[start].receives(device)]
                    adds_up.remove(start)
                else:
                    out += halos[start].receives(device)
                if group.sums:
                    out += [Forward(stage, 0, start, group.last, "partial"), *sums.sends(device)]
                    out += [*sums.receives(device), Forward(stage, 0, start, group.last, "sum")]
                    continue
                for op in adds_up:
                    if op > start:
                        out.append(Forward(stage, 0, start, op))
                    out.append(self._sum(geometry, op))
                    start = op
                if isinstance(geometry, ChannelGeometry) and not group.fetches:
                    start = _continued(out, stage, start)
                for op in sorted(op for op in leaving if start < op < group.last):
                    sends = [send for mail in leaving[op] for send in mail.sends(device)]
                    if sends:
                        out += [Forward(stage, 0, start, op), *sends]
                        start = op
                if start < group.last:
                    out.append(Forward(stage, 0, start, group.last))
        gathered = Mail(self._packed(self._outputs(geometry), "output", stage) if self.plan.is_training else [])
        for device in geometry.devices:
            out = self.work[device].forward_actions
            out.extend(Send(target, message) for target, message in self.outgoing[stage, device])
            out += gathered.sends(device) + gathered.receives(device)
            if geometry.is_last and self.plan.is_training and device in geometry.loss_devices:
                out.append(Loss(stage, 0))

    def _outputs(self, geometry: StageGeometry) -> Moves:
        """What the network returns, to the device of a tiled stage that computes the loss."""
        if not isinstance(geometry, TileGeometry) or not geometry.is_last:
            return {}
        target = {t: geometry.passing(t) for t in self.network.outputs if t in geometry.maps}
        return {t: moves(geometry.owned(t), layout) for t, layout in target.items()}

    def _backward_messages(self, geometry: StageGeometry) -> tuple[Packed, Packed, Packed]:
        """Gradients from later stages, to earlier ones, and from the device of this stage that computes the loss."""
        receives: Packed = []
        sends: Packed = []
        for producer, consumer, found in self.between:
            if geometry.index in (producer, consumer):
                back = {
                    t: self._way_back(t, producer, consumer, own)
                    for t, own in found.items()
                    if self.network.tensors[t].differentiable
                }
                codec = self.plan.stages[consumer].codec
                packed = self._packed(back, "gradient", consumer, codec if codec.gradients else None)
                (receives if geometry.index == producer else sends).extend(packed)
        returned = {
            t: adjoint(own) for t, own in self._outputs(geometry).items() if self.network.tensors[t].differentiable
        }
        return receives, sends, self._packed(returned, "output-gradient", geometry.index)

    def _way_back(self, tensor: str, producer: int, consumer: int, there: tuple[Move, ...]) -> tuple[Move, ...]:
        """Gradients return as values came, sums of what overlaps; a stage with backward groups has them complete."""
        geometry = self.geometries[consumer]
        if not isinstance(geometry, TileGeometry) or geometry.backward_groups is None or tensor not in geometry.maps:
            return adjoint(there)
        return moves(geometry.owned(tensor), self.geometries[producer].owned(tensor))

    def _lower_backward(self, geometry: StageGeometry) -> None:
        receives, sends, returned = self._backward_messages(geometry)
        runs, exchanges = self._backward_runs(geometry)
        buckets = self._buckets(geometry)
        arriving, turning, first_exchange = Mail(receives), Mail(returned), Mail(exchanges[0])
        between = [
            (span, Mail(exchange), Mail(exchange, sends) if span[0] == geometry.first else Mail(exchange))
            for span, exchange in zip(runs, exchanges[1:])
        ]
        for is_last, ends in ((False, dict[int, Reduce]()), (True, buckets)):
            computed = [
                self._backward_run(geometry, *span, ends, leaves=not leaving.is_empty) for span, _, leaving in between
            ]
            for device in geometry.devices:
                work = self.work[device]
                actions = work.last_backward_actions if is_last else work.backward_actions
                actions += arriving.receives(device)
                actions += turning.sends(device) + turning.receives(device)
                actions += first_exchange.sends(device) + first_exchange.receives(device)
                for (_, exchange, leaving), (body, later) in zip(between, computed):
                    # Others wait for what is sent; the weights' gradients are only waited for by the step.
                    actions += body + leaving.sends(device) + later + exchange.receives(device)

    def _backward_runs(self, geometry: StageGeometry) -> tuple[list[tuple[int, int]], list[Packed]]:
        """Operators [first, last) that are differentiated without communication, in the order of the backward pass, and
        what is exchanged before the first, between them, and after the last."""
        stage = geometry.index
        own = geometry.backward_groups if isinstance(geometry, TileGeometry) else None
        if own is not None:
            before = [self._packed(group.deltas, "halo-gradient", stage, values=group.values) for group in own]
            return [(group.first, group.last) for group in own], [*before, []]
        runs: list[tuple[int, int]] = []
        exchanges: list[Packed] = [[]]
        for group in reversed(geometry.groups):
            back = {t: adjoint(ms) for t, ms in group.fetches.items() if self.network.tensors[t].differentiable}
            runs.append((group.first, group.last))
            exchanges.append(self._packed(back, "halo-gradient", stage))
        return runs, exchanges

    def _backward_run(
        self, geometry: StageGeometry, first: int, last: int, ends: dict[int, Reduce], *, leaves: bool
    ) -> tuple[list[Action], list[Action]]:
        """Backward over operators [first, last), stopping at statistics and at the ends of gradient buckets.

        The second list is what follows where something `leaves` after the first. Nobody waits for weight gradients:
        those of tiles are computed while sums travel, or what leaves.
        """
        stage, high = geometry.index, last
        statistics = {
            op for op in self._statistics(geometry, first, last)
            if self.network.tensors[self.network.ops[op].outputs[0]].differentiable
        }  # fmt: skip
        actions: list[Action] = []
        waiting: list[Action] = []
        """Weight gradients, and buckets that end with them."""
        for op in range(last - 1, first - 1, -1):
            travels_next = leaves if op == first else any(below < op for below in statistics)
            if travels_next and self._may_split(geometry, op):
                if op + 1 < high:
                    actions.append(Backward(stage, 0, op + 1, high))
                actions.append(Backward(stage, 0, op, op + 1, "inputs"))
                waiting.append(Backward(stage, 0, op, op + 1, "weights"))
                waiting += [ends[op]] if op in ends else []
                high = op
                continue
            if op in statistics:
                if op + 1 < high:
                    actions.append(Backward(stage, 0, op + 1, high))
                high = op + 1
                rim_first = leaves and isinstance(geometry, TileGeometry) and op in geometry.rim_first
                if not waiting and not rim_first:
                    actions.append(self._sum(geometry, op, backward=True))
                else:
                    actions.append(self._sum(geometry, op, backward=True, later=True))
                    follow = [*waiting, Await(stage, op, op + 1, 0, backward=True)]
                    waiting = []
                    if rim_first:
                        actions.append(Backward(stage, 0, op, op + 1, "rim"))
                        return actions, [*follow, Backward(stage, 0, op, op + 1), *([ends[op]] if op in ends else [])]
                    actions += follow
            if op in ends:
                actions += [Backward(stage, 0, op, high), *waiting, ends[op]]
                high, waiting = op, []
        if high > first:
            actions.append(Backward(stage, 0, first, high))
        if actions and isinstance(actions[-1], Reduce):
            return actions[:-1], [*waiting, actions[-1]]
        return actions, waiting

    def _may_split(self, geometry: StageGeometry, index: int) -> bool:
        """Whether the weight gradients of an operator on maps are worth computing apart from those of its inputs."""
        op = self.network.ops[index]
        trains = any(self.network.weights[name].trainable for name in op.weights)
        if not isinstance(geometry, TileGeometry) or not op.macs or not trains:
            return False
        return any(name in geometry.maps and self.network.tensors[name].differentiable for name in op.inputs)

    def _buckets(self, geometry: StageGeometry) -> dict[int, Reduce]:
        """Operator at which a bucket of gradients is complete in backward -> its reduction."""
        if len(geometry.devices) == 1 or isinstance(geometry, ChannelGeometry):
            return {}
        if geometry.stage.reduce == "gateway":
            return {}
        completed = completed_at(self.network, geometry.first, geometry.last)
        sizes = {op: sum(self.network.weights[name].bytes for name in names) for op, names in completed.items()}
        found: dict[int, Reduce] = {}
        pending, high, to_come = 0, geometry.last, sum(sizes.values())
        rest = 0  # of samples, every bucket is a cut through what autograd recorded
        if isinstance(geometry, TileGeometry) and to_come > self.plan.bucket_bytes:
            rest = self.plan.bucket_bytes // LAST_BUCKET_PART
        for op in range(geometry.last - 1, geometry.first - 1, -1):
            size = sizes.get(op, 0)
            pending, to_come = pending + size, to_come - size
            is_last_but_one = 0 < to_come <= rest <= pending and size > 0
            if pending >= self.plan.bucket_bytes or is_last_but_one or (op == geometry.first and pending):
                found[op] = Reduce(geometry.index, "gradients", op, high, geometry.devices, pending)
                pending, high = 0, op
        return found

    def _lower_end(self) -> None:
        """The optimiser's step. Where a stage has a gateway (TILE Algorithm 1), partial sums go to it before, and
        updated weights come back after."""
        partial = {g.index: message for g in self.geometries if (message := self._weights_of(g, "weight-gradient"))}
        updated = {g.index: message for g in self.geometries if (message := self._weights_of(g, "weights"))}
        for device, work in self.work.items():
            mine = [g for g in work.geometries if g.index in partial and g.devices[0] == device]
            others = [g for g in work.geometries if g.index in partial and g.devices[0] != device]
            work.end.extend(Send(g.devices[0], partial[g.index]) for g in others)
            work.end.extend(Receive(other, partial[g.index]) for g in mine for other in g.devices[1:])
            work.end.extend(Step(g.index) for g in work.geometries if g not in others)
            work.end.extend(Send(other, updated[g.index]) for g in mine for other in g.devices[1:])
            work.end.extend(Receive(g.devices[0], updated[g.index]) for g in others)

    def _weights_of(self, geometry: StageGeometry, kind: Kind) -> Message | None:
        """All trained weights of a stage that has a gateway, or their gradients, as one message."""
        weights = self.network.weights
        names = [n for n in self.network.weights_of(geometry.first, geometry.last) if weights[n].trainable]
        if geometry.stage.reduce != "gateway" or len(geometry.devices) == 1 or not names:
            return None
        parts = tuple(Part(name, Box.whole(weights[name].shape)) for name in names)
        return Message(kind, geometry.index, 0, parts, sum(weights[name].bytes for name in names))
