"""The boxes of a tiled stage's forward pass (TILE §4): which device owns, computes and fetches what.

    map          (sample, channel, row, column), in any order of axes, or with a depth: each device owns one box of the
                 grid, cut along the spatial axes (facts/spatial_axes.py)
    replicated   what was made by adding up over a whole map (global pooling, squeeze-excitation), and what is made from
                 such tensors alone: every device has all of it, and of its gradient its own part of a sum

A group fetches what it reads beyond what a device has, then computes without communication: redundantly where tiles
overlap. Only sums over a whole map (batch norm, pooling) travel inside a group. The way back: tiles.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, reduce
from math import prod

from manyhands.facts.boxes import Box, Layout, without
from manyhands.facts.errors import BadPlan
from manyhands.facts.moves import Moves, moves
from manyhands.facts.network import Network, Op
from manyhands.facts.plan import ByTiles, LayerName, Plan
from manyhands.facts.plan_check import group_ops
from manyhands.facts.reads import Window
from manyhands.schedule.geometry import Group, StageGeometry
from manyhands.schedule.tileable import maps_of


class TileForwardGeometry(StageGeometry):
    """The boxes of a tiled stage's forward pass: which device owns, computes and fetches what."""

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
        tensors, obstacle = maps_of(self.network, self.first, self.last)
        if obstacle is not None:
            raise self._cannot(self.network.ops[obstacle])
        self._check_depth(tensors)
        return tensors

    def _check_depth(self, maps: frozenset[str]) -> None:
        flat = next((name for name in sorted(maps) if len(self.network.spatial[name]) == 2), None)
        if flat is not None and len(self.share.cuts[0]) > 1:
            raise BadPlan(
                f"stages[{self.index}].share.depths is {list(self.share.depths)}, but {flat} of shape "
                f"{self.network.tensors[flat].shape} has rows and columns only.",
                hint="Leave depths out: they are for volumes and video, (sample, channel, depth, row, column).",
            )

    @cached_property
    def cuts(self) -> tuple[tuple[float, ...], ...]:
        """The relative sizes of tiles along each spatial axis of this stage's maps."""
        return self.share.cuts[-max((len(self.network.spatial[name]) for name in self.maps), default=2) :]

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
        """Return whether an operator needs sums over the whole map, which travel inside a group."""
        if not op.inputs or op.inputs[0] not in self.maps:
            return False
        if op.statistics:  # in a stream a batch norm uses its running statistics, if it keeps any
            return self.plan.is_training or not any(self.network.weights[name].buffer for name in op.weights)
        return op.tile_sums > 0

    def reads_beyond(self, op: Op) -> bool:
        """Return whether an operator reads more of a map than the place that it makes."""
        if op.tiling == "pool":
            return False
        spatial = self.network.spatial
        return any(
            read.rules[axis] != Window(made) for read in op.reads if read.tensor in self.maps
            for axis, made in zip(spatial[read.tensor], spatial[op.outputs[0]], strict=True)
        )  # fmt: skip

    # Forward

    def _owned_layout(self, tensor: str) -> Layout:
        shape = self.shape(tensor)
        if tensor not in self.maps:
            return Layout.whole(shape, self.devices)
        return Layout.grid(shape, self.network.spatial[tensor], self.cuts, self.devices)

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
        """Return where to exchange so that boundary data travels beside the sums of normalisations, not after them.

        That is before the normalisation that an operator's input comes from, if nothing else reads what lies between.

        What is exchanged there is not pooled yet: `through_windows` says whether to go back through pools, too.
        """
        places = {self.first}
        for start in self.places_to_exchange[1:]:
            places.add(self._norm_before(start, through_windows) or start)
        return tuple(sorted(places))

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
        """Return operators as a plan names them: by the layer's number where that starts there."""
        layers, of_op = self.network.layers, self.network.layer_of_op
        return tuple(of_op[op] if layers[of_op[op]].first == op else self.network.ops[op].name for op in starts)

    def _is_made_by_all(self, op: Op) -> bool:
        """Return whether what an operator makes is replicated, or it takes part in sums over the map."""
        return self.adds_up(op) or any(name not in self.maps for name in op.outputs)

    def _needs(self, device: str, op: Op, made: dict[str, Box]) -> dict[str, Box]:
        """Return what a device reads of each input to make some boxes of an operator's outputs."""
        needed: dict[str, Box] = {}
        for name in op.outputs:
            for read in op.reads if name in made else ():
                if op.tiling == "pool" and read.tensor in self.maps:
                    box = self.own(device, read.tensor)
                else:
                    box = read.demand(made[name], self.shape(read.tensor))
                    if self.adds_up(op):
                        box = box.hull(self.own(device, read.tensor))
                needed[read.tensor] = needed[read.tensor].hull(box) if read.tensor in needed else box
        return needed

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The forward groups with what each fetches: what it reads of tensors made here that a device does not have."""
        groups = []
        have: dict[str, dict[str, list[Box]]] = {d: {} for d in self.devices}
        for walk in self._walks:
            fetches: Moves = {}
            for tensor, boxes in walk.read.items():
                missing = {d: without([box], *have[d].get(tensor, ())) for d, box in boxes.items()}
                for device, box in boxes.items():
                    have[device].setdefault(tensor, []).append(box)
                if tensor in self.maps and self.is_made_here(tensor):
                    lacking = {d: [box for box in pieces if not box.is_empty] for d, pieces in missing.items()}
                    fetches[tensor] = moves(
                        self.owned(tensor), Layout.of({d: pieces for d, pieces in lacking.items() if pieces})
                    )
            for device, made in walk.computed.items():
                for tensor, box in made.items():
                    have[device].setdefault(tensor, []).append(box)
            groups.append(Group(walk.first, walk.last, {t: ms for t, ms in fetches.items() if ms}))
        return tuple(groups)

    @cached_property
    def interior_first(self) -> frozenset[int]:
        """Operators that start a group and are computed inside the tile before its boundary data has come."""
        return frozenset(op for op in group_ops(self.share.interior_first, self.network) if self._may_be_split(op))

    def _may_be_split(self, index: int) -> bool:
        op = self.network.ops[index]
        fetches = any(group.fetches for group in self.groups if group.first == index)
        return bool(op.macs) and op.tiling == "local" and op.outputs[0] in self.maps and fetches

    def interior(self, device: str, index: int) -> Box:
        """Return the box, of what a device computes of a group's first operator, that reads nothing it must fetch."""
        op = self.network.ops[index]
        out = self.computed[device].get(op.outputs[0]) or self.own(device, op.outputs[0])
        intervals = list(out.intervals)
        for read in op.reads:
            if read.tensor not in self.maps or not self.is_made_here(read.tensor):
                continue
            have = self.computed[device].get(read.tensor) or self.own(device, read.tensor)
            spatial = self.network.spatial
            for axis, made in zip(spatial[read.tensor], spatial[op.outputs[0]], strict=True):
                rule, extent, (low, high) = read.rules[axis], self.shape(read.tensor)[axis], have.intervals[axis]
                first, last = intervals[made]
                while first < last and rule.demand((first, first + 1), extent)[0] < low:
                    first += 1
                while first < last and rule.demand((last - 1, last), extent)[1] > high:
                    last -= 1
                intervals[made] = (first, last)
        return Box(tuple(intervals))

    def passing(self, tensor: str) -> Layout:
        return Layout.whole(self.shape(tensor), [self.gateway])

    def returning(self, tensor: str) -> Layout:
        return self.owned(tensor) if tensor in self.maps else self.passing(tensor)

    def _forward_hull(self, device: str, tensor: str) -> Box:
        box = reduce(Box.hull, self.held(device, tensor), Box(tuple((0, 0) for _ in self.shape(tensor))))
        leaves = tensor in self.network.outputs and self.is_last and not self.is_made_here(tensor)
        return box.hull(self.own(device, tensor)) if leaves else box

    def fractions(self, device: str) -> tuple[float, ...]:
        return self._fractions(self.computed[device])

    def _fractions(self, boxes: dict[str, Box]) -> tuple[float, ...]:
        return tuple(
            max((boxes[name].volume / prod(self.shape(name)) for name in op.outputs if name in boxes), default=0.0)
            for op in self.ops
        )

    def forward_part(self, device: str, index: int, part: str) -> float:
        """Return the fraction of the interior of a tile, or of its rim; all of an operator that is not split."""
        if not part:
            return 1.0
        whole = self.computed[device][self.network.ops[index].outputs[0]].volume
        inside = self.interior(device, index).volume / whole if whole else 0.0
        return inside if part == "interior" else 1.0 - inside

    @property
    def gathered_outputs(self) -> Moves:
        if not self.is_last:
            return {}
        target = {tensor: self.passing(tensor) for tensor in self.network.outputs if tensor in self.maps}
        return {tensor: moves(self.owned(tensor), layout) for tensor, layout in target.items()}
