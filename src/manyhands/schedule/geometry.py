"""Where a stage's tensors live, and what its devices must exchange: the walk over boxes that serves every share.

For each tensor of a stage and each device there is an owned box. Operators are run in groups; walking a group backwards
through the operators' read rules gives the box each device must have of every tensor:

    group input   ──exchange──▶  needed = owned + halo
    inside        computed over the needed box, redundantly, no communication
    group output  owned

By samples nothing is ever missing; by tiles halos are; by channels whatever a dense operator reads of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from math import prod

from manyhands.facts.boxes import Box, Layout, cut_points, first_come, without
from manyhands.facts.errors import BadPlan
from manyhands.facts.moves import Move, moves
from manyhands.facts.network import Network
from manyhands.facts.plan import EVERYWHERE, ByChannels, BySamples, ByTiles, Plan, Single, Stage
from manyhands.facts.plan_check import layer_range, op_range

# Operators whose derivative does not read their input's values: a larger backward group fetches none for them.
_LINEAR = frozenset({
    "conv2d", "conv_transpose2d", "add", "sub", "cat", "concat", "avg_pool2d", "adaptive_avg_pool2d",
    "upsample_nearest2d", "upsample_bilinear2d", "mean", "sum", "neg", "clone", "contiguous",
})  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Operators [first, last) run without communication, after `fetches`: moves of each tensor that it reads."""

    first: int
    last: int
    fetches: dict[str, tuple[Move, ...]]


@dataclass(frozen=True)
class _Walk:
    """What a walk through operators [first, last) found for each device."""

    first: int
    last: int
    computed: dict[str, dict[str, Box]]
    """Device -> tensor made by the group -> the box of it that the device computes."""
    read: dict[str, dict[str, Box]]
    """Tensor read from outside the group -> device -> the box it wants."""


@dataclass(frozen=True)
class BackwardGroup:
    """Operators [first, last) whose gradients are computed without communication.

    `regions`: tensor -> device -> the box of its gradient that the device computes with (R in TILING.md).
    `deltas`: moves of gradients, and `values`: of forward values its derivatives need, both before it starts.
    """

    first: int
    last: int
    regions: dict[str, dict[str, Box]]
    deltas: dict[str, tuple[Move, ...]]
    values: dict[str, tuple[Move, ...]]


class StageGeometry:
    """The boxes of one stage, for one micro-batch."""

    def __init__(self, plan: Plan, index: int, network: Network) -> None:
        self.plan, self.index, self.network = plan, index, network
        self.stage: Stage = plan.stages[index]
        self.devices = self.stage.devices
        self.first, self.last = op_range(self.stage, network)
        self.samples = plan.micro_batch_size

    @cached_property
    def is_split_inside(self) -> bool:
        """Whether devices of this stage exchange activations among themselves."""
        return isinstance(self.stage.share, (ByTiles, ByChannels)) and len(self.devices) > 1

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self.network.tensors[tensor].shape_for(self.samples)

    def owned(self, tensor: str) -> Layout:
        """What each device holds of a tensor once it is made (or, for a tensor that enters, its share of it)."""
        found = self._owned.get(tensor)
        if found is None:
            found = self._owned[tensor] = self._owned_layout(tensor)
        return found

    @cached_property
    def _owned(self) -> dict[str, Layout]:
        return {}

    def _owned_layout(self, tensor: str) -> Layout:
        spec, share, shape = self.network.tensors[tensor], self.stage.share, self.shape(tensor)
        if isinstance(share, Single) or len(self.devices) == 1:
            return Layout.whole(shape, self.devices)
        if isinstance(share, BySamples):
            if spec.batch_axis is None:
                return Layout.whole(shape, self.devices)
            rows = {d: n * spec.rows_per_sample for d, n in zip(self.devices, share.samples)}
            return Layout.split_counts(shape, spec.batch_axis, rows)
        if isinstance(share, ByTiles):
            if len(shape) != 4:
                raise self._untileable(tensor)
            return Layout.grid(shape, 2, 3, share.rows, share.columns, self.devices)
        if len(shape) < 2:
            return Layout.whole(shape, self.devices)
        points = cut_points(shape[1], share.groups)
        return Layout.split(shape, 1, {d: (points[i], points[i + 1]) for i, d in enumerate(self.devices)})

    def _untileable(self, tensor: str) -> BadPlan:
        index = self.network.producer.get(tensor, self.first)
        op = self.network.ops[index]
        layer = self.network.layers[self.network.layer_of_op[index]]
        return BadPlan(
            f"stages[{self.index}] is shared by tiles, but layer {layer.name} makes {tensor} by {op.target}, "
            f"shape {self.network.tensors[tensor].shape}: not a map with rows and columns.",
            hint=f"End the tiled stage before layer {layer.name} and continue with another share.",
        )

    @cached_property
    def group_starts(self) -> tuple[int, ...]:
        """Operators at which a forward group starts."""
        share = self.stage.share
        first, last = layer_range(self.stage)
        if isinstance(share, ByTiles) and self.is_split_inside:
            starts = share.forward_groups if share.forward_groups is not None else tuple(range(first, last))
            return tuple(self.network.layers[g].first for g in starts if isinstance(g, int))
        if isinstance(share, ByChannels) and self.is_split_inside:
            return tuple(range(self.first, self.last))
        return (self.first,)

    @cached_property
    def computed(self) -> dict[str, dict[str, Box]]:
        """Device -> tensor made here -> the box of it that the device computes."""
        return {d: {name: box for walk in self._walks for name, box in walk.computed[d].items()} for d in self.devices}

    @cached_property
    def _walks(self) -> tuple[_Walk, ...]:
        """Every forward group, walked backwards."""
        return tuple(self._walk(first, last) for first, last in pairwise((*self.group_starts, self.last)))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Forward groups with what must be fetched before each."""
        if not self.is_split_inside:
            return (Group(self.first, self.last, {}),)
        found = []
        for walk in self._walks:
            inside = {
                tensor: moves(self.owned(tensor), Layout.of({d: [box] for d, box in boxes.items()}))
                for tensor, boxes in walk.read.items()
                if self._is_made_here(tensor)
            }
            crossing = {t: tuple(m for m in ms if not m.is_local) for t, ms in inside.items()}
            found.append(Group(walk.first, walk.last, {t: ms for t, ms in crossing.items() if ms}))
        return tuple(found)

    def _is_made_here(self, tensor: str) -> bool:
        return self.first <= self.network.producer.get(tensor, -1) < self.last

    def _walk(self, first: int, last: int) -> _Walk:
        """The boxes of a group's tensors, from what must leave it back to what it reads."""
        found = _Walk(first, last, {device: {} for device in self.devices}, {})
        made = {name for op in self.network.ops[first:last] for name in op.outputs}
        for device in self.devices:
            need: dict[str, Box] = {}
            for index in range(last - 1, first - 1, -1):
                op = self.network.ops[index]
                for name in op.outputs:
                    read_later = any(reader >= last for reader in self.network.readers.get(name, ()))
                    if read_later or name in self.network.outputs:
                        own = self.owned(name).hull(device)
                        need[name] = need[name].hull(own) if name in need else own
                for name in op.outputs:
                    for read in op.reads if name in need else ():
                        wanted = read.demand(need[name], self.shape(read.tensor))
                        need[read.tensor] = need[read.tensor].hull(wanted) if read.tensor in need else wanted
            for name, box in need.items():
                if name in made:
                    found.computed[device][name] = box
                else:
                    found.read.setdefault(name, {})[device] = box
        return found

    def held(self, device: str, tensor: str) -> tuple[Box, ...]:
        """What a device has of a tensor by the end of its forward pass, computed or fetched; the boxes may overlap."""
        own = [self.computed[device][tensor]] if tensor in self.computed[device] else []
        read = [walk.read[tensor][device] for walk in self._walks if device in walk.read.get(tensor, ())]
        return (*own, *read)

    def entering(self, tensor: str) -> Layout:
        """What each device needs of a tensor made before this stage."""
        if not self.is_split_inside:
            return self.owned(tensor)
        empty = Box(tuple((0, 0) for _ in self.shape(tensor)))
        return Layout.of({d: [reduce(Box.hull, self.held(d, tensor), empty)] for d in self.devices})

    def fractions(self, device: str) -> tuple[float, ...]:
        """How much of each operator this device computes, as a part of the whole micro-batch."""
        if not self.is_split_inside:
            share = self.stage.share
            own = share.samples[self.devices.index(device)] if isinstance(share, BySamples) else self.samples
            return (own / self.samples,) * (self.last - self.first)
        boxes = self.computed[device]
        return tuple(
            max((boxes[name].volume / prod(self.shape(name)) for name in op.outputs if name in boxes), default=0.0)
            for op in self.network.ops[self.first : self.last]
        )

    def backward_fractions(self, device: str) -> tuple[float, ...]:
        """How much of each operator's gradient this device computes: what it computed, or its backward regions."""
        if self.backward_groups is None:
            return self.fractions(device)
        boxes = {t: by_device[device] for group in self.backward_groups for t, by_device in group.regions.items()}
        return tuple(
            boxes[op.outputs[0]].volume / prod(self.shape(op.outputs[0])) if op.outputs else 0.0
            for op in self.network.ops[self.first : self.last]
        )

    @cached_property
    def backward_groups(self) -> tuple[BackwardGroup, ...] | None:
        """TILE's backward groups, last first; None where backward is the adjoint of forward."""
        share = self.stage.share
        if not isinstance(share, ByTiles) or share.backward_groups is None or not self.is_split_inside:
            return None
        starts = [self.network.layers[g].first for g in share.backward_groups if isinstance(g, int)]
        bounds = pairwise((*starts, self.last))
        return tuple(self._backward_group(first, last) for first, last in reversed(list(bounds)))

    def _backward_group(self, first: int, last: int) -> BackwardGroup:
        """Grown delta regions R and fetched values B (TILING.md, "Backward groups")."""
        grown: dict[str, dict[str, Box]] = {}
        values: dict[str, dict[str, Box]] = {}
        for device in self.devices:
            for op in self.network.ops[first:last]:
                if not op.outputs:
                    continue
                region = own = self.owned(op.outputs[0]).hull(device)
                for read in op.reads:
                    if self.network.tensors[read.tensor].differentiable and len(self.shape(read.tensor)) == 4:
                        of_input = grown.get(read.tensor, {}).get(device) or self.owned(read.tensor).hull(device)
                        region = region.hull(read.touched(of_input, self.shape(op.outputs[0])))
                grown.setdefault(op.outputs[0], {})[device] = region
                is_linear = op.target.split(".")[1] in _LINEAR
                if is_linear and not any(self.network.weights[name].trainable for name in op.weights):
                    continue
                for read in op.reads:  # a linear operator's weight gradient reads what made its owned output
                    wanted = read.demand(own if is_linear else region, self.shape(read.tensor))
                    known = values.setdefault(read.tensor, {}).get(device)
                    values[read.tensor][device] = known.hull(wanted) if known else wanted
        deltas: dict[str, tuple[Move, ...]] = {}
        for tensor, boxes in grown.items():
            leaves = any(not first <= reader < last for reader in self.network.readers.get(tensor, ()))
            if (leaves or tensor in self.network.outputs) and self.network.tensors[tensor].differentiable:
                target = Layout.of({d: [box] for d, box in boxes.items()})
                deltas[tensor] = tuple(m for m in moves(self.owned(tensor), target) if not m.is_local)
        fetched = {tensor: self._missing_values(tensor, boxes) for tensor, boxes in values.items()}
        return BackwardGroup(
            first, last, grown, {t: ms for t, ms in deltas.items() if ms}, {t: ms for t, ms in fetched.items() if ms}
        )

    def _missing_values(self, tensor: str, wanted: dict[str, Box]) -> tuple[Move, ...]:
        """From whoever has them, the forward values each device wants and lacks.

        What nobody has, nobody needed: its gradient is zero, and any value will do.
        """
        if tensor in self.network.inputs and self.plan.homes.get(tensor, EVERYWHERE) == EVERYWHERE:
            return ()
        held = {d: first_come((d, box) for box in self.held(d, tensor)) for d in self.devices}
        missing = {}
        for device, box in wanted.items():
            offered = first_come((device, box.intersect(piece)) for own in held.values() for _, piece in own)
            missing[device] = [part for _, piece in offered for part in without([piece], *self.held(device, tensor))]
        source = Layout.of({d: [piece for _, piece in own] for d, own in held.items()})
        return moves(source, Layout.of(missing))
