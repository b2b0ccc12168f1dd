"""The boxes of a stage shared by channels (DECNN §3.2): inference only.

    split    each device has its own channels (axis 1) of every sample, in proportion to the groups it takes
    whole    every device has all of it: pictures, what no device can have a part of, sums that all devices get

Between two shuffles a decoupled network needs nothing from other devices. Where an operator reads channels that a
device does not have, they are fetched: that begins a group. A dense operator may instead be *input-based*: each device
reads its own channels and makes partial sums, which go to the devices that own the output.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from math import prod

from manyhands.facts.boxes import Box, Interval, Layout, cut_points
from manyhands.facts.moves import Move, moves
from manyhands.facts.network import Network, Op
from manyhands.facts.plan import ByChannels, Plan
from manyhands.facts.plan_check import group_ops
from manyhands.facts.reads import Blocks, Dealt
from manyhands.schedule.geometry import Group, StageGeometry

CHANNELS = 1
"""The axis of the channels."""

Boxes = tuple[Box, ...]
"""Parts of a tensor that are held as one tensor, one after another along the channels."""


class ChannelGeometry(StageGeometry):
    """The boxes of one stage shared by channels, for one micro-batch."""

    is_split_inside = True

    def __init__(self, plan: Plan, index: int, network: Network) -> None:
        super().__init__(plan, index, network)
        assert isinstance(self.stage.share, ByChannels)
        self.share = self.stage.share
        self._everywhere = frozenset(self._named(self.share.everywhere))
        self.split, self.input_based = self._decided()

    def _named(self, layers: tuple[int | str, ...]) -> set[int]:
        """Return the dense operators of layers, or operators, named in a plan."""
        dense: set[int] = set()
        for first in group_ops(layers, self.network):
            layer = self.network.layers[self.network.layer_of_op[first]] if first < self.last else None
            ops = range(first, layer.last) if layer is not None and layer.first == first else (first,)
            dense.update(op for op in ops if op < self.last and self.network.ops[op].channels == "dense")
        return dense

    # What each device has

    def _decided(self) -> tuple[frozenset[str], frozenset[int]]:
        """Return the tensors of which each device has its own channels, and the operators that make partial sums."""
        split = {name for name in self._entering_tensors if self._may_split(name)}
        sums: set[int] = set()
        chosen = None if self.share.input_based is None else self._named(self.share.input_based)
        used = [name for op in self.ops for name in dict.fromkeys(op.weights)]
        shared = {name for name in used if used.count(name) > 1}
        for index in range(self.first, self.last):
            op = self.network.ops[index]
            if not op.channels or shared.intersection(op.weights):
                continue
            name, reads_split = op.outputs[0], [tensor for tensor in op.inputs if tensor in split]
            if op.channels == "dense" and reads_split and len(op.inputs) == 1:
                based = self._sends_less(op) if chosen is None else index in chosen
                if based or not self._may_split(name):
                    sums.add(index)
            is_whole = index in sums and index in self._everywhere
            makes_own = op.channels in ("dense", "grouped") or bool(reads_split)
            if makes_own and not is_whole and self._may_split(name) and (index in sums or self._is_exact(op)):
                split.add(name)
        return frozenset(split), frozenset(sums)

    @property
    def _entering_tensors(self) -> list[str]:
        """The tensors that earlier stages made; every device has the network's inputs whole."""
        read = dict.fromkeys(name for op in self.ops for name in op.inputs)
        return [name for name in read if not self.is_made_here(name) and name not in self.network.inputs]

    def _sends_less(self, op: Op) -> bool:
        """Return whether partial sums of the output are fewer numbers than the input (§3.2.2)."""
        return prod(self.shape(op.outputs[0])) <= prod(self.shape(op.inputs[0]))

    def _may_split(self, tensor: str) -> bool:
        """Return whether a tensor has channels for every device."""
        spec = self.network.tensors[tensor]
        if spec.batch_axis != 0 or len(spec.shape) < 2 or spec.pairs_samples:
            return False
        return all(a < b for a, b in pairwise(cut_points(spec.shape[CHANNELS], self.share.groups)))

    def _channels_of(self, device: str, tensor: str) -> Interval:
        points = cut_points(self.shape(tensor)[CHANNELS], self.share.groups)
        place = self.devices.index(device)
        return points[place], points[place + 1]

    def _is_exact(self, op: Op) -> bool:
        """Return whether an operator, run on what some channels read, makes these channels and no more."""
        blocks = [
            rule for read in op.reads for rule in read.rules if isinstance(rule, Blocks) and rule.axis == CHANNELS
        ]
        shuffles = [rule for read in op.reads for rule in read.rules if isinstance(rule, Dealt)]
        for device in self.devices:
            first, last = self._channels_of(device, op.outputs[0])
            for shuffle in shuffles:
                if first % shuffle.groups or last % shuffle.groups:
                    return False
            for rule in blocks:
                inside = op.channels == "grouped" and first // rule.outputs == (last - 1) // rule.outputs
                if (first % rule.outputs or last % rule.outputs) and not inside:
                    return False
        return True

    def _owned_layout(self, tensor: str) -> Layout:
        shape = self.shape(tensor)
        if tensor not in self.split:
            return Layout.whole(shape, self.devices)
        return Layout.split(shape, CHANNELS, {d: self._channels_of(d, tensor) for d in self.devices})

    def own(self, device: str, tensor: str) -> Box:
        return self.owned(tensor).hull(device)

    def returning(self, tensor: str) -> Layout:
        return self.owned(tensor) if tensor in self.split else Layout.whole(self.shape(tensor), self.devices[:1])

    def weight_box(self, device: str, name: str) -> Box | None:
        """Return the part of a weight that a device has; None: all of it."""
        return self._weight_boxes[device].get(name)

    @cached_property
    def _weight_boxes(self) -> dict[str, dict[str, Box]]:
        boxes: dict[str, dict[str, Box]] = {device: {} for device in self.devices}
        for index in range(self.first, self.last):
            op = self.network.ops[index]
            is_sum = index in self.input_based
            if not is_sum and not any(name in self.split for name in op.outputs):
                continue
            for device, weight_boxes in boxes.items():
                made = self.own(device, op.outputs[0])
                read = self._needs(device, op, {op.outputs[0]: made})[op.inputs[0]]
                for weight in op.channel_weights:
                    box = Box.whole(self.network.weights[weight.name].shape)
                    if weight.reads is not None and (is_sum or weight.makes is None):
                        box = box.replace(weight.reads, read.intervals[CHANNELS])
                    elif weight.makes is not None:
                        box = box.replace(weight.makes, made.intervals[CHANNELS])
                    weight_boxes[weight.name] = box
        return boxes

    # What each device needs

    def _needs(self, device: str, op: Op, made: dict[str, Box]) -> dict[str, Box]:
        if self.network.op_index[op.name] in self.input_based:
            return {op.inputs[0]: self.own(device, op.inputs[0])}
        needed = super()._needs(device, op, made)
        if any(name in self.split for name in op.outputs):
            return needed
        # What is made whole runs with its own arguments, and these (where a slice begins) count all channels.
        return {name: box.replace(CHANNELS, (0, self.shape(name)[CHANNELS])) if len(box.intervals) > CHANNELS else box
                for name, box in needed.items()}  # fmt: skip

    def needs(self, device: str, index: int) -> dict[str, Box]:
        """Return what a device reads of each input of an operator to make its own part of the output."""
        op = self.network.ops[index]
        return self._needs(device, op, {name: self.own(device, name) for name in op.outputs})

    @cached_property
    def group_starts(self) -> tuple[int, ...]:
        starts = {self.first}
        for index in range(self.first, self.last):
            if index in self.input_based or self.shuffles(index):
                starts |= {index, index + 1}
            elif any(
                self.is_made_here(name) and not self.own(device, name).contains(box)
                for device in self.devices
                for name, box in self.needs(device, index).items()
            ):
                starts.add(index)
        return tuple(sorted(starts - {self.last}))

    def shuffles(self, index: int) -> bool:
        """Return whether an operator takes parts of every group."""
        op = self.network.ops[index]
        return op.channels == "shuffle" and op.outputs[0] in self.split

    def _is_made_by_all(self, op: Op) -> bool:
        return True

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        groups = []
        for walk, boxes in zip(self._walks, self.reading):
            fetches: dict[str, tuple[Move, ...]] = {}
            for tensor in walk.read:
                fetched = {
                    d: read[tensor]
                    for d, read in boxes.items()
                    if tensor in read and (d, tensor) in self._fetched[walk.first]
                }
                if fetched:
                    between = moves(self.owned(tensor), Layout.of(fetched))
                    fetches[tensor] = tuple(move for move in between if not move.is_local)
            sums = {}
            if walk.first in self.input_based:
                name = self.network.ops[walk.first].outputs[0]
                sums[name] = tuple(
                    Move(source, target, self.own(target, name))
                    for target in self.devices
                    for source in self.devices
                    if source != target
                )
            groups.append(Group(walk.first, walk.last, {t: ms for t, ms in fetches.items() if ms}, sums))
        return tuple(groups)

    def ready_at(self, group: Group) -> int:
        """Return the operator before which a group's fetches leave.

        That is as soon as all of them are made: what is computed before the group itself hides the time they take.
        """
        made = [self.network.producer[tensor] + 1 for tensor in group.fetches]
        return max(made, default=group.first)

    @cached_property
    def reading(self) -> tuple[dict[str, dict[str, Boxes]], ...]:
        """For each group: device -> tensor made before it -> the boxes, held as one, from which the group reads it."""
        return tuple(boxes for boxes, _ in self._read)

    @cached_property
    def _fetched(self) -> dict[int, set[tuple[str, str]]]:
        """First operator of a group -> (device, tensor) that it fetches."""
        return {walk.first: fetched for walk, (_, fetched) in zip(self._walks, self._read)}

    @cached_property
    def _read(self) -> tuple[tuple[dict[str, dict[str, Boxes]], set[tuple[str, str]]], ...]:
        have: dict[tuple[str, str], list[Box]] = {}
        per_group = []
        for walk in self._walks:
            boxes: dict[str, dict[str, Boxes]] = {device: {} for device in self.devices}
            fetched: set[tuple[str, str]] = set()
            for tensor, by_device in walk.read.items():
                for device, box in by_device.items():
                    if self.shuffles(walk.first):
                        boxes[device][tensor] = self._dealt(device, walk.first, tensor)
                        fetched |= {(device, tensor)} if self.is_made_here(tensor) else set()
                    elif self.is_made_here(tensor):
                        held = have.setdefault((device, tensor), [self.own(device, tensor)])
                        at_hand = next((candidate for candidate in held if candidate.contains(box)), None)
                        if at_hand is None:
                            at_hand = box
                            held.append(box)
                            fetched.add((device, tensor))
                        boxes[device][tensor] = (at_hand,)
            per_group.append((boxes, fetched))
        return tuple(per_group)

    def _dealt(self, device: str, index: int, tensor: str) -> Boxes:
        """Return the part of every group that makes a device's channels of a shuffled tensor."""
        op = self.network.ops[index]
        rule = op.reads[0].rules[CHANNELS]
        assert isinstance(rule, Dealt)
        whole = Box.whole(self.shape(tensor))
        intervals = rule.pieces(self._channels_of(device, op.outputs[0]), self.shape(tensor)[CHANNELS])
        return tuple(whole.replace(CHANNELS, interval) for interval in intervals)

    def fractions(self, device: str) -> tuple[float, ...]:
        fractions = []
        for index in range(self.first, self.last):
            op = self.network.ops[index]
            name = op.inputs[0] if index in self.input_based else op.outputs[0] if op.outputs else ""
            fractions.append(self.own(device, name).volume / prod(self.shape(name)) if name else 0.0)
        return tuple(fractions)

    def continues(self, group: Group) -> bool:
        """Return whether a group fetches nothing.

        Such a group begins where a shuffle or a partial sum ended, on this device alone.
        """
        return not group.fetches

    @property
    def sums_gradients(self) -> bool:
        return False
