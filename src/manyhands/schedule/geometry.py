"""The geometry of a stage: where its tensors live and what its devices exchange, by a walk over boxes for every share.

For each tensor of a stage and each device there is an owned box. Operators are run in groups; walking a group backwards
through the operators' read rules gives the box each device must have of every tensor:

    group input   ──exchange──▶  needed = owned + halo
    inside        computed over the needed box, redundantly, no communication
    group output  owned

By samples nothing is ever missing (samples.py); by tiles halos are (tiles.py); by channels whatever an operator reads
of the others (channels.py).

A geometry also lowers its stage: it says at which operators the devices add up, in which runs the passes are computed,
what is exchanged between these, and where gradients are added up. The lowering (lowering.py) uses this, and never
looks at how a stage is shared. The defaults here are those of a stage that one device computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import pairwise

from manyhands.facts.boxes import Box, Interval, Layout
from manyhands.facts.moves import Move, Moves, adjoint
from manyhands.facts.network import Network, Op
from manyhands.facts.plan import Plan, Stage
from manyhands.facts.plan_check import op_range


@dataclass(frozen=True)
class Group:
    """Operators [first, last) run without communication, after `fetches`: moves of each tensor that it reads.

    `sums`: what its operator made are partial sums, which go to the devices that own the result.
    """

    first: int
    last: int
    fetches: Moves
    sums: Moves = field(default_factory=dict)


@dataclass(frozen=True)
class Exchange:
    """The moves between the devices of a stage at one place of the backward pass."""

    gradients: Moves = field(default_factory=dict)
    values: Moves = field(default_factory=dict)
    """Values of the forward pass that derivatives read."""


@dataclass(frozen=True)
class BackwardRuns:
    """Operators [first, last) that are differentiated without communication, in the order of the backward pass.

    `exchanges` come before the first run, between two, and after the last: there is one more than there are runs.
    """

    runs: tuple[tuple[int, int], ...]
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True)
class Walk:
    """The boxes that a walk through operators [first, last) found for each device."""

    first: int
    last: int
    computed: dict[str, dict[str, Box]]
    """Device -> tensor made by the group -> the box of it that the device computes."""
    read: dict[str, dict[str, Box]]
    """Tensor read from outside the group -> device -> the box that it needs."""


class StageGeometry:
    """The boxes of one stage, for one micro-batch: in this class, of one that a single device computes.

    A way of sharing is a subclass, registered in sharing.py with the struct by which plans name it.
    """

    is_split_inside = False
    """Whether devices of this stage exchange activations among themselves."""

    def __init__(self, plan: Plan, index: int, network: Network) -> None:
        self.plan, self.index, self.network = plan, index, network
        self.stage: Stage = plan.stages[index]
        self.devices = self.stage.devices
        self.first, self.last = op_range(self.stage, network)
        self.samples = plan.micro_batch_size
        self.sharing = self.stage.share.by if len(self.devices) > 1 else "single"
        """The name of the way in which this stage is shared: the executor has a runner for each."""
        self.places = plan.places_of(self.devices)
        """Where the devices are, for sums among them: once for all sums, of which each device has a list."""

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.network.ops[self.first : self.last]

    @property
    def is_last(self) -> bool:
        """Whether this stage makes the network's last tensors."""
        return self.last == len(self.network.ops)

    @cached_property
    def backward_first(self) -> int:
        """The first operator of the backward pass: below it nothing is trained and no gradient goes on. Where it is
        `last`, this stage has no backward pass."""
        tensors, weights = self.network.tensors, self.network.weights
        read = {name for op in self.ops for name in op.inputs} | set(self.network.outputs if self.is_last else ())
        if any(tensors[name].differentiable and not self.is_made_here(name) for name in read):
            return self.first
        return next(
            (
                index
                for index in range(self.first, self.last)
                if any(tensors[name].differentiable for name in self.network.ops[index].outputs)
                or any(weights[name].trainable for name in self.network.ops[index].weights)
            ),
            self.last,
        )

    @property
    def runs_backward(self) -> bool:
        """Whether a backward pass follows this stage's forward pass."""
        return self.plan.is_training and self.backward_first < self.last

    @property
    def loss_devices(self) -> tuple[str, ...]:
        """The devices that compute the loss of this stage's outputs."""
        return self.devices

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self.network.tensors[tensor].shape_for(self.samples)

    def owned(self, tensor: str) -> Layout:
        """Return what each device holds of a tensor once it is made (or, for a tensor that enters, its share of it)."""
        layout = self._owned.get(tensor)
        if layout is None:
            layout = self._owned[tensor] = self._owned_layout(tensor)
        return layout

    @cached_property
    def _owned(self) -> dict[str, Layout]:
        return {}

    def _owned_layout(self, tensor: str) -> Layout:
        spec, shape = self.network.tensors[tensor], self.shape(tensor)
        if len(self.devices) == 1 or spec.batch_axis is None:
            return Layout.whole(shape, self.devices)
        each = spec.rows_per_sample
        rows = {
            device: [(first * each, last * each) for first, last in self.sample_intervals(device)]
            for device in self.devices
        }
        return Layout.channels(shape, spec.batch_axis, rows)

    def sample_intervals(self, device: str) -> tuple[Interval, ...]:
        """Return which samples of a micro-batch a device computes, in the order in which it holds them."""
        return ((0, self.samples),)

    def sample_count(self, device: str) -> int:
        """Return how many samples of a micro-batch a device computes, even if only a part of each."""
        return sum(last - first for first, last in self.sample_intervals(device))

    def weight_box(self, device: str, name: str) -> Box | None:
        """Return the part of a weight that a device has; None: all of it."""
        return None

    @cached_property
    def group_starts(self) -> tuple[int, ...]:
        """Operators at which a forward group starts."""
        return (self.first,)

    @cached_property
    def computed(self) -> dict[str, dict[str, Box]]:
        """Device -> tensor made here -> the box of it that the device computes."""
        return {d: {name: box for walk in self._walks for name, box in walk.computed[d].items()} for d in self.devices}

    @cached_property
    def _walks(self) -> tuple[Walk, ...]:
        """Every forward group, walked backwards."""
        return tuple(self._walk(first, last) for first, last in pairwise((*self.group_starts, self.last)))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The forward groups, with what must be fetched before each."""
        return (Group(self.first, self.last, {}),)

    def ready_at(self, group: Group) -> int:
        """Return the operator before which a group's fetches leave: its own first, or an earlier one."""
        return group.first

    def is_made_here(self, tensor: str) -> bool:
        return self.first <= self.network.producer.get(tensor, -1) < self.last

    def _walk(self, first: int, last: int) -> Walk:
        """Return the boxes of a group's tensors, from what must leave it back to what it reads."""
        walk = Walk(first, last, {device: {} for device in self.devices}, {})
        made = {name for op in self.network.ops[first:last] for name in op.outputs}
        for device in self.devices:
            need: dict[str, Box] = {}
            for index in range(last - 1, first - 1, -1):
                op = self.network.ops[index]
                for name in op.outputs:
                    read_later = any(reader >= last for reader in self.network.readers.get(name, ()))
                    if read_later or name in self.network.outputs or self._is_made_by_all(op):
                        owned = self.owned(name).hull(device)
                        need[name] = need[name].hull(owned) if name in need else owned
                for name, input_box in self._needs(device, op, need).items():
                    need[name] = need[name].hull(input_box) if name in need else input_box
            for name, box in need.items():
                if name in made:
                    walk.computed[device][name] = box
                else:
                    walk.read.setdefault(name, {})[device] = box
        return walk

    def _is_made_by_all(self, op: Op) -> bool:
        """Return whether every device computes its part of an operator, even if nothing else that it makes reads it."""
        return False

    def _needs(self, device: str, op: Op, made: dict[str, Box]) -> dict[str, Box]:
        """Return what a device reads of each input to make some boxes of an operator's outputs."""
        needed: dict[str, Box] = {}
        for name in op.outputs:
            for read in op.reads if name in made else ():
                box = read.demand(made[name], self.shape(read.tensor))
                needed[read.tensor] = needed[read.tensor].hull(box) if read.tensor in needed else box
        return needed

    def held(self, device: str, tensor: str) -> tuple[Box, ...]:
        """Return what a device has of a tensor after its forward pass, computed or fetched; the boxes may overlap."""
        computed = [self.computed[device][tensor]] if tensor in self.computed[device] else []
        read = [walk.read[tensor][device] for walk in self._walks if device in walk.read.get(tensor, ())]
        return (*computed, *read)

    def entering(self, tensor: str) -> Layout:
        """Return what each device needs of a tensor made before this stage."""
        if not self.is_split_inside:
            return self.owned(tensor)
        empty = Box(tuple((0, 0) for _ in self.shape(tensor)))
        return Layout.of({d: [reduce(Box.hull, self.held(d, tensor), empty)] for d in self.devices})

    def passing(self, tensor: str) -> Layout:
        """Return which devices get a tensor made before this stage that it only hands to the loss."""
        return self.owned(tensor)

    def returning(self, tensor: str) -> Layout:
        """Return which device hands which part of an output to the process that started a stream."""
        return self.owned(tensor)

    def fractions(self, device: str) -> tuple[float, ...]:
        """Return how much of each operator this device computes, as a fraction of the whole micro-batch."""
        return (self.sample_count(device) / self.samples,) * (self.last - self.first)

    def backward_fractions(self, device: str) -> tuple[float, ...]:
        """Return how much of each operator's gradient this device computes: what it computed, unless overridden."""
        return self.fractions(device)

    def forward_part(self, device: str, index: int, part: str) -> float:
        """Return how much of an operator's forward time a part of it takes; `part` is that of a `Forward` action.

        Adding up partial sums is next to nothing.
        """
        return 0.0 if part == "sum" else 1.0

    # Lowering: how the passes of this stage become actions

    def adds_up(self, op: Op) -> bool:
        """Return whether the devices of this stage add up statistics before they compute an operator."""
        return False

    @cached_property
    def interior_first(self) -> frozenset[int]:
        """Operators that start a group, and are computed where nothing is missing while its fetches travel."""
        return frozenset()

    @cached_property
    def rim_first(self) -> frozenset[int]:
        """Operators whose gradients for other devices are sent before the sums that they add up have come."""
        return frozenset()

    def continues(self, group: Group) -> bool:
        """Return whether a group is computed in one go with what was computed before it, where nothing lies between."""
        return False

    @property
    def gathered_outputs(self) -> Moves:
        """The moves of what the network returns to the one device of this stage that computes the loss."""
        return {}

    def returned_gradients(self, tensor: str, arrived: tuple[Move, ...], producer: StageGeometry) -> tuple[Move, ...]:
        """Return how the gradient of a tensor goes back to the stage that made it.

        By default the way its values came; what overlaps is added up there.
        """
        return adjoint(arrived)

    @cached_property
    def backward_runs(self) -> BackwardRuns:
        """The parts of the backward pass: by default the mirror image of the forward groups, each of which hands back
        the gradients of what it fetched."""
        differentiable = {name for name, spec in self.network.tensors.items() if spec.differentiable}
        groups = self.groups[::-1]
        handed_back = [
            Exchange({name: adjoint(moved) for name, moved in group.fetches.items() if name in differentiable})
            for group in groups
        ]
        return BackwardRuns(tuple((group.first, group.last) for group in groups), (Exchange(), *handed_back))

    def splits_backward(self, index: int) -> bool:
        """Return whether the gradients of an operator's weights are worth computing apart from those of its inputs.

        Nothing but the optimiser waits for them.
        """
        return False

    @property
    def sums_gradients(self) -> bool:
        """Whether the devices add up their weight gradients among themselves, in buckets, during the last backward
        pass; else each has what it needs, or one of them adds up all."""
        return len(self.devices) > 1 and self.stage.reduce == "allreduce"

    def last_bucket_bytes(self, gradient_bytes: int) -> int:
        """Return the most that the last bucket of so many bytes of gradients may hold; 0: no limit of its own.

        All wait for that bucket when nothing is left to compute, but every bucket is a cut through what autograd
        recorded.
        """
        return 0
