"""The boxes of a stage shared by tiles (TILE §4): who owns, computes, fetches and differentiates what.

    map          (sample, channel, row, column): each device owns one box of the grid. Channels may be two axes, group
                 and channel of it: rows and columns are the last two
    replicated   what was made by adding up over a whole map (global pooling, squeeze-excitation), and what is made from
                 such tensors alone: every device has all of it, and of its gradient its own part of a sum

Forward, a group fetches what it reads beyond what a device has, then computes without communication: redundantly where
tiles overlap. Only sums over a whole map (batch norm, pooling) travel inside a group.

Backward there are two ways:

    adjoint      each device differentiates what it computed and sends to the owners what it adds to their tiles
    groups       complete gradients over grown boxes: exchanged at a group's start, computed redundantly inside it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from math import prod

from manyhands.facts.boxes import Box, Layout, first_come, without
from manyhands.facts.errors import BadPlan
from manyhands.facts.moves import Move, moves
from manyhands.facts.network import Network, Op
from manyhands.facts.plan import ByTiles, LayerName, Plan
from manyhands.facts.plan_check import group_ops
from manyhands.facts.reads import Window
from manyhands.schedule.geometry import Group, StageGeometry

Boxes = dict[str, dict[str, Box]]
"""Tensor -> device -> box."""
MAP_AXES = (4, 5)


@dataclass(frozen=True)
class BackwardGroup:
    """Operators [first, last) whose gradients are computed without communication.

    `deltas`: moves of gradients, and `values`: of forward values its derivatives read, both before it starts.
    """

    first: int
    last: int
    deltas: dict[str, tuple[Move, ...]]
    values: dict[str, tuple[Move, ...]]


def maps_of(network: Network, first: int, last: int) -> tuple[frozenset[str], int | None]:
    """Tensors of operators [first, last) that can be cut into tiles, and the first operator that stands in the way."""
    made = {name for op in network.ops[first:last] for name in op.outputs}
    found: set[str] = set()
    for index in range(first, last):
        op = network.ops[index]
        found.update(name for name in op.inputs if name not in made and _is_map(network, name, least=2))
        if not op.outputs or not any(name in found for name in op.inputs):
            continue
        if op.tiling in ("local", "norm") and all(_is_map(network, name, least=1) for name in op.outputs):
            found.update(op.outputs)
        elif op.tiling != "pool":
            return frozenset(found), index
    return frozenset(found), None if found else first


def _is_map(network: Network, tensor: str, least: int) -> bool:
    spec = network.tensors[tensor]
    return len(spec.shape) in MAP_AXES and spec.batch_axis == 0 and prod(spec.shape[-2:]) >= least


def tileable_layers(network: Network) -> tuple[int, Op | None]:
    """How many leading layers can be cut into tiles, up to global pooling, and the operator that ends them, if any."""
    maps, obstacle = maps_of(network, 0, len(network.ops))
    end = len(network.layers) if obstacle is None else network.layer_of_op[obstacle]
    if obstacle is not None:  # what is read there again must have been a map all along
        maps, _ = maps_of(network, 0, network.layers[end - 1].last if end else 0)
    while end and not any(name in maps for op in _ops(network, end - 1) for name in op.outputs):
        end -= 1
    return end, network.ops[obstacle] if obstacle is not None else None


def _ops(network: Network, layer: int) -> tuple[Op, ...]:
    return network.ops[network.layers[layer].first : network.layers[layer].last]


class TileGeometry(StageGeometry):
    """The boxes of one tiled stage, for one micro-batch."""

    is_split_inside = True

    def __init__(self, plan: Plan, index: int, network: Network) -> None:
        super().__init__(plan, index, network)
        assert isinstance(self.stage.share, ByTiles)
        self.share = self.stage.share

    @property
    def gateway(self) -> str:
        """The device that gathers what leaves the network, and computes the loss."""
        return self.devices[0]

    @property
    def loss_devices(self) -> tuple[str, ...]:
        return (self.gateway,)

    # What a tensor is

    @cached_property
    def maps(self) -> frozenset[str]:
        """Tensors of this stage that are cut into tiles; the others are replicated."""
        found, obstacle = maps_of(self.network, self.first, self.last)
        if obstacle is not None:
            raise self._cannot(self.network.ops[obstacle])
        return found

    def _cannot(self, op: Op) -> BadPlan:
        layer = self.network.layers[self.network.layer_of_op[self.network.op_index[op.name]]]
        made = "".join(f", which makes {name} of shape {self.network.tensors[name].shape}" for name in op.outputs[:1])
        where = f" ({op.where})" if op.where else ""
        return BadPlan(
            f"stages[{self.index}] is shared by tiles, but layer {layer.name} has the operator {op.name} "
            f"({op.target}){where}{made}: it cannot be cut into rows and columns.",
            hint=f"End the tiled stage before layer {layer.name} and continue with another share "
            "(strategy 'tiles', --share tiles, does so by itself).",
        )

    def adds_up(self, op: Op) -> bool:
        """Whether an operator needs sums over the whole map, which travel inside a group."""
        if not op.inputs or op.inputs[0] not in self.maps:
            return False
        if op.statistics:  # in a stream a batch norm goes by its running statistics, if it keeps any
            return self.plan.is_training or not any(self.network.weights[name].buffer for name in op.weights)
        return op.tile_sums > 0

    def reads_beyond(self, op: Op) -> bool:
        """Whether an operator reads more of a map than the place it makes."""
        if op.tiling == "pool":
            return False
        rank = len(self.network.tensors[op.outputs[0]].shape) if op.outputs else 0
        return any(
            rule != Window(axis) for read in op.reads if read.tensor in self.maps
            for axis, rule in enumerate(read.rules[-2:], rank - 2)
        )  # fmt: skip

    # Forward

    def _owned_layout(self, tensor: str) -> Layout:
        shape = self.shape(tensor)
        if tensor not in self.maps:
            return Layout.whole(shape, self.devices)
        return Layout.grid(shape, len(shape) - 2, len(shape) - 1, self.share.rows, self.share.columns, self.devices)

    def own(self, device: str, tensor: str) -> Box:
        return self.owned(tensor).hull(device)

    @cached_property
    def group_starts(self) -> tuple[int, ...]:
        if self.share.forward_groups is not None:
            return group_ops(self.share.forward_groups, self.network)
        return self.places_to_exchange

    @cached_property
    def places_to_exchange(self) -> tuple[int, ...]:
        """The stage's first operator, and every one that reads beyond its own tile."""
        inside = range(self.first + 1, self.last)
        return (self.first, *(op for op in inside if self.reads_beyond(self.network.ops[op])))

    def beside_sums(self, *, through_windows: bool) -> tuple[int, ...]:
        """Where to exchange so that boundary data travels beside the sums of normalisations, in place of after them:
        before the normalisation that an operator's input comes from, where nothing else reads what lies between.

        What is exchanged there is not pooled yet: `through_windows` says whether to go back through pools, too.
        """
        found = {self.first}
        for start in self.places_to_exchange[1:]:
            found.add(self._norm_before(start, through_windows) or start)
        return tuple(sorted(found))

    def _norm_before(self, start: int, through_windows: bool) -> int | None:
        index = start
        while True:
            names = [name for name in self.network.ops[index].inputs if name in self.maps]
            made = self.network.producer.get(names[0]) if len(names) == 1 else None
            if made is None or made <= self.first or self.network.readers[names[0]] != (index,):
                return None
            op = self.network.ops[made]
            if op.tiling == "norm" and self.adds_up(op):
                return made
            if op.macs or op.tiling != "local" or (self.reads_beyond(op) and not through_windows):
                return None
            index = made

    def start_names(self, starts: Iterable[int]) -> tuple[LayerName, ...]:
        """Operators as a plan names them: by the layer's number where that starts there."""
        layers, of_op = self.network.layers, self.network.layer_of_op
        return tuple(of_op[op] if layers[of_op[op]].first == op else self.network.ops[op].name for op in starts)

    def _is_made_by_all(self, op: Op) -> bool:
        """What is replicated, and what takes part in sums over the map."""
        return self.adds_up(op) or any(name not in self.maps for name in op.outputs)

    def _needs(self, device: str, op: Op, made: dict[str, Box]) -> dict[str, Box]:
        """What a device reads of each input to make some boxes of an operator's outputs."""
        found: dict[str, Box] = {}
        for name in op.outputs:
            for read in op.reads if name in made else ():
                if op.tiling == "pool" and read.tensor in self.maps:
                    wanted = self.own(device, read.tensor)
                else:
                    wanted = read.demand(made[name], self.shape(read.tensor))
                    if self.adds_up(op):
                        wanted = wanted.hull(self.own(device, read.tensor))
                found[read.tensor] = found[read.tensor].hull(wanted) if read.tensor in found else wanted
        return found

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Forward groups with what each fetches: what it reads of the stage's own tensors and a device has not got."""
        found = []
        have: dict[str, dict[str, list[Box]]] = {d: {} for d in self.devices}
        for walk in self._walks:
            fetches: dict[str, tuple[Move, ...]] = {}
            for tensor, boxes in walk.read.items():
                missing = {d: without([box], *have[d].get(tensor, ())) for d, box in boxes.items()}
                for device, box in boxes.items():
                    have[device].setdefault(tensor, []).append(box)
                if tensor in self.maps and self.is_made_here(tensor):
                    wanted = {d: [box for box in own if not box.is_empty] for d, own in missing.items()}
                    fetches[tensor] = moves(self.owned(tensor), Layout.of({d: own for d, own in wanted.items() if own}))
            for device, made in walk.computed.items():
                for tensor, box in made.items():
                    have[device].setdefault(tensor, []).append(box)
            found.append(Group(walk.first, walk.last, {t: ms for t, ms in fetches.items() if ms}))
        return tuple(found)

    @cached_property
    def rim_first(self) -> frozenset[int]:
        """Normalisations that start a group and alone read what it fetches: the gradients that go back to others' tiles
        need no sums, so both travel at once."""
        if self.share.backward_groups is not None or not self.plan.is_training:
            return frozenset()
        return frozenset(group.first for group in self.groups if self._alone_fetches(group))

    def _alone_fetches(self, group: Group) -> bool:
        op = self.network.ops[group.first]
        if group.first == self.first or op.tiling != "norm" or not self.adds_up(op):
            return False
        read = op.inputs[0]
        is_alone = self.network.readers[read] == (group.first,) and read not in self.network.outputs
        return (
            is_alone
            and read in group.fetches
            and self.network.tensors[op.outputs[0]].differentiable
            and all(self.computed[d].get(read, self.own(d, read)) == self.own(d, read) for d in self.devices)
        )

    @cached_property
    def interior_first(self) -> frozenset[int]:
        """Operators that start a group and are computed inside the tile before its boundary data has come."""
        return frozenset(op for op in group_ops(self.share.interior_first, self.network) if self._may_be_split(op))

    def _may_be_split(self, index: int) -> bool:
        op = self.network.ops[index]
        fetches = any(group.fetches for group in self.groups if group.first == index)
        return bool(op.macs) and op.tiling == "local" and op.outputs[0] in self.maps and fetches

    def interior(self, device: str, index: int) -> Box:
        """Of what a device computes of the first operator of a group, the box that reads nothing it must fetch."""
        op = self.network.ops[index]
        out = self.computed[device].get(op.outputs[0]) or self.own(device, op.outputs[0])
        intervals = list(out.intervals)
        for read in op.reads:
            if read.tensor not in self.maps or not self.is_made_here(read.tensor):
                continue
            have = self.computed[device].get(read.tensor) or self.own(device, read.tensor)
            for axis in (2, 3):
                rule, extent, (low, high) = read.rules[axis], self.shape(read.tensor)[axis], have.intervals[axis]
                first, last = intervals[axis]
                while first < last and rule.demand((first, first + 1), extent)[0] < low:
                    first += 1
                while first < last and rule.demand((last - 1, last), extent)[1] > high:
                    last -= 1
                intervals[axis] = (first, last)
        return Box(tuple(intervals))

    def entering(self, tensor: str) -> Layout:
        """What each device needs of a tensor made before this stage."""
        if tensor not in self.maps:
            return Layout.whole(self.shape(tensor), self.devices)
        found = self.buffer if tensor in self.network.inputs else self._forward_hull
        return Layout.of({d: [found(d, tensor)] for d in self.devices})

    def passing(self, tensor: str) -> Layout:
        return Layout.whole(self.shape(tensor), [self.gateway])

    def returning(self, tensor: str) -> Layout:
        return self.owned(tensor) if tensor in self.maps else self.passing(tensor)

    def _forward_hull(self, device: str, tensor: str) -> Box:
        box = reduce(Box.hull, self.held(device, tensor), Box(tuple((0, 0) for _ in self.shape(tensor))))
        leaves = tensor in self.network.outputs and self.is_last and not self.is_made_here(tensor)
        return box.hull(self.own(device, tensor)) if leaves else box

    def buffer(self, device: str, tensor: str) -> Box:
        """The box around everything a device ever has of a tensor's values, forward and backward."""
        box = self._forward_hull(device, tensor)
        wanted = self._wanted_values.get(tensor, {}).get(device) if self.plan.is_training else None
        return box.hull(wanted) if wanted is not None else box

    def fractions(self, device: str) -> tuple[float, ...]:
        return self._fractions(self.computed[device])

    def _fractions(self, boxes: dict[str, Box]) -> tuple[float, ...]:
        return tuple(
            max((boxes[name].volume / prod(self.shape(name)) for name in op.outputs if name in boxes), default=0.0)
            for op in self.ops
        )

    # Backward by groups

    @cached_property
    def _backward_bounds(self) -> tuple[tuple[int, int], ...]:
        """Operators of each backward group, the last group first."""
        assert self.share.backward_groups is not None
        starts = group_ops(self.share.backward_groups, self.network)
        return tuple(pairwise((*starts, self.last)))[::-1]

    @cached_property
    def regions(self) -> Boxes:
        """Tensor -> device -> the box of its gradient that the device has complete."""
        found: Boxes = {}
        for first, last in self._backward_bounds:
            grown: Boxes = {}
            for op in self.network.ops[first:last]:
                for name in op.outputs:
                    grown[name] = {d: self._region(d, op, name, grown) for d in self.devices}
            found |= grown
        return found

    def _region(self, device: str, op: Op, name: str, grown: Boxes) -> Box:
        region = self.own(device, name)
        for read in op.reads if name in self.maps else ():
            if read.tensor in self.maps and self.network.tensors[read.tensor].differentiable:
                of_input = grown[read.tensor][device] if read.tensor in grown else self.own(device, read.tensor)
                region = region.hull(read.touched(of_input, self.shape(name)))
        return region

    def gradient_box(self, device: str, tensor: str) -> Box:
        """The box of a tensor's gradient that a device collects."""
        if tensor not in self.maps:
            return Box.whole(self.shape(tensor))
        if self.share.backward_groups is None:
            return self._forward_hull(device, tensor)
        return self.regions[tensor][device] if tensor in self.regions else self.own(device, tensor)

    @cached_property
    def _wanted_of_group(self) -> tuple[Boxes, ...]:
        """For each backward group the forward values that its derivatives read."""
        if self.share.backward_groups is None:
            return ()
        return tuple(self._wanted(first, last) for first, last in self._backward_bounds)

    @cached_property
    def _wanted_values(self) -> Boxes:
        found: Boxes = {}
        for wanted in self._wanted_of_group:
            for tensor, boxes in wanted.items():
                known = found.setdefault(tensor, {})
                for device, box in boxes.items():
                    known[device] = known[device].hull(box) if device in known else box
        return found

    def _wanted(self, first: int, last: int) -> Boxes:
        found: Boxes = {}

        def want(tensor: str, device: str, box: Box) -> None:
            known = found.setdefault(tensor, {})
            known[device] = known[device].hull(box) if device in known else box

        for op in self.network.ops[first:last]:
            if not op.outputs or op.outputs[0] not in self.maps:
                continue
            name = op.outputs[0]
            if not self.network.tensors[name].differentiable:
                continue
            trains = any(self.network.weights[weight].trainable for weight in op.weights)
            for device in self.devices:
                region, own = self.regions[name][device], self.own(device, name)
                if name in op.derives_from:
                    want(name, device, region)
                for read in op.reads:
                    if read.tensor not in self.maps:
                        continue
                    if read.tensor in op.derives_from:
                        want(read.tensor, device, read.demand(region, self.shape(read.tensor)))
                    if trains:
                        want(read.tensor, device, read.demand(own, self.shape(read.tensor)))
        return found

    @cached_property
    def backward_groups(self) -> tuple[BackwardGroup, ...] | None:
        """TILE's backward groups, last first; None where backward is the adjoint of forward."""
        if self.share.backward_groups is None or not self.plan.is_training:
            return None
        found = []
        fetched: dict[tuple[str, str], list[Box]] = {}
        for (first, last), wanted in zip(self._backward_bounds, self._wanted_of_group):
            deltas: dict[str, tuple[Move, ...]] = {}
            for tensor in (name for op in self.network.ops[first:last] for name in op.outputs):
                leaves = any(not first <= reader < last for reader in self.network.readers.get(tensor, ()))
                leaves = leaves or tensor in self.network.outputs
                if leaves and tensor in self.maps and self.network.tensors[tensor].differentiable:
                    target = Layout.of({d: [self.regions[tensor][d]] for d in self.devices})
                    deltas[tensor] = tuple(m for m in moves(self.owned(tensor), target) if not m.is_local)
            values = {tensor: self._missing_values(tensor, boxes, fetched) for tensor, boxes in wanted.items()}
            found.append(
                BackwardGroup(
                    first, last, {t: ms for t, ms in deltas.items() if ms}, {t: ms for t, ms in values.items() if ms}
                )
            )
        return tuple(found)

    def _missing_values(
        self, tensor: str, wanted: dict[str, Box], fetched: dict[tuple[str, str], list[Box]]
    ) -> tuple[Move, ...]:
        """From whoever has them, the forward values each device wants and lacks.

        What nobody has, nobody needed: its gradient is zero, and any value will do.
        """
        if tensor in self.network.inputs:  # fed with all of it
            return ()
        held = {d: first_come((d, box) for box in self.held(d, tensor)) for d in self.devices}
        missing = {}
        for device, box in wanted.items():
            known = fetched.setdefault((device, tensor), list(self.held(device, tensor)))
            offered = first_come((device, box.intersect(piece)) for own in held.values() for _, piece in own)
            missing[device] = [part for _, piece in offered for part in without([piece], *known)]
            known.extend(missing[device])
        source = Layout.of({d: [piece for _, piece in own] for d, own in held.items()})
        return moves(source, Layout.of(missing))

    def backward_fractions(self, device: str) -> tuple[float, ...]:
        if self.share.backward_groups is None:
            return self.fractions(device)
        grown = self._fractions({t: boxes[device] for t, boxes in self.regions.items()})
        own = self._fractions({t: self.own(device, t) for t in self.regions})
        return tuple(
            (region + owned) / 2 if self.network.backward_passes(op) == 2 else region
            for op, region, owned in zip(self.ops, grown, own)
        )
