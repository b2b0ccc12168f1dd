"""Reports the bytes sent in a step, by use, and draws the tiles of a plan.

    input_output   samples and targets to the devices, tensors between stages, outputs, and their gradients
    boundary       halos among the tiles of a stage, their gradients, and sums over a whole map or batch (batch norm)
    weights        weight gradients and updated weights

(TILE Fig. 5.2c.) The bytes are the plan's own, message by message; a run's logs must show the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import numpy

from manyhands.executor.log import DeviceLog
from manyhands.executor.messages import COORDINATOR, everything_fed, feed_parts
from manyhands.facts.boxes import Box, Layout
from manyhands.facts.moves import Move, adjoint
from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.facts.plan import ByTiles, Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.units import format_bytes
from manyhands.graph.graph import Graph
from manyhands.graph.lengths import LengthGraphs
from manyhands.observe.tile_map import HANDED, GroupMap, draw_tiles
from manyhands.schedule.actions import KINDS, Reduce, Send
from manyhands.schedule.feeding import fed_inputs
from manyhands.schedule.policy import Schedule
from manyhands.schedule.reduction import pair_bytes
from manyhands.schedule.tiles import TileGeometry

USES = ("input_output", "boundary", "weights")
FEED, RESULT, SUMS, REDUCTION, NORM = "feed", "result", "statistics", "gradients", "norm"
"""Bytes besides messages: from the coordinator, back to it, and in the three kinds of reductions."""
USE_OF_KIND = {
    **dict.fromkeys((FEED, RESULT, "input", "output", "output-gradient", "value", "gradient"), "input_output"),
    **dict.fromkeys(("halo", "halo-gradient", "partial", SUMS), "boundary"),
    **dict.fromkeys(("weights", "weight-gradient", REDUCTION, NORM), "weights"),
}


@dataclass
class Traffic:
    """Payload bytes that travel in one step of a plan."""

    sent: dict[str, Counter[str]] = field(default_factory=dict)
    """Sender, which may be the coordinator -> kind of message -> bytes."""
    fed: dict[str, int] = field(default_factory=dict)
    """Device -> bytes that it receives from the coordinator."""

    @property
    def by_use(self) -> dict[str, int]:
        """Bytes by use, of all senders together."""
        return _by_use(self.sent.values())

    @property
    def by_device(self) -> dict[str, dict[str, int]]:
        """Sender -> use -> bytes."""
        return {sender: _by_use([kinds]) for sender, kinds in self.sent.items()}

    def add(self, other: Traffic, rounds: int) -> None:
        """Add what travels in so many rounds of another kind."""
        for device, counts in other.sent.items():
            self.sent.setdefault(device, Counter()).update({kind: rounds * size for kind, size in counts.items()})
        for device, size in other.fed.items():
            self.fed[device] = self.fed.get(device, 0) + rounds * size

    def differences(self, logs: Mapping[str, DeviceLog], plan: Plan, *, is_of_all_rounds: bool = False) -> list[str]:
        """Return one sentence for each difference between the bytes that a run's devices sent and the plan's.

        `is_of_all_rounds`: this is the traffic of the whole run, whose rounds differ; else that of each round.
        """
        differences = []
        for device, log in logs.items():
            rounds = Fraction(1 if is_of_all_rounds else log.rounds)
            if plan.order == "replay" and log.samples:  # the last round may have been shorter
                rounds = Fraction(log.samples, plan.batch_size)
            counted, over = (log.rounds, "in all") if is_of_all_rounds else (f"{float(rounds):g}", "a round")
            planned, kinds = self.sent.get(device, Counter()), log.sent_kinds
            to_others = sum(size for to, size in log.sent_bytes.items() if to != COORDINATOR)
            pairs = [(f"as '{kind}'", planned[kind], kinds.get(kind, 0)) for kind in KINDS]
            if not log.group_sums:  # else PyTorch carried some, and counts nothing
                reduced = planned[SUMS] + planned[REDUCTION] + planned[NORM]
                pairs.append(("in reductions", reduced, to_others - sum(kinds.values())))
            differences += [
                f"{device} sent {measured} bytes {how} in {counted} rounds; planned were {expected} {over}."
                for how, expected, measured in pairs
                if measured != expected * rounds
            ]
        return differences

    def to_dict(self) -> dict[str, Any]:
        return {"total": self.by_use, "senders": self.by_device}


def _by_use(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    by_use = dict.fromkeys(USES, 0)
    for kinds in counts:
        for kind, size in kinds.items():
            by_use[USE_OF_KIND[kind]] += size
    return by_use


def planned_traffic(schedule: Schedule, graph: Graph | None = None, *, is_preloaded: bool = False) -> Traffic:
    """Return what a plan sends in one step. Targets are counted if the graph, which has the loss, is given.
    `is_preloaded`: the dataset is resident on the devices, and only sample numbers travel."""
    traffic = Traffic()
    for device in schedule.lowering.work:
        sent: Counter[str] = Counter()
        for action in schedule.every_action(device):
            if isinstance(action, Send):
                sent[action.message.kind] += action.message.bytes
            elif isinstance(action, Reduce):
                sizes = pair_bytes(action, schedule.network)
                sent[action.what] += sum(size for (source, _), size in sizes.items() if source == device)
        traffic.sent[device] = sent
    _count_the_coordinators(traffic, schedule, graph, is_preloaded)
    return traffic


def traffic_of_all(lengths: LengthGraphs, plan: Plan, logs: Mapping[str, DeviceLog]) -> Traffic:
    """Return the planned traffic of all rounds by a plan, whose batches have several lengths; they are the last ones
    of the run."""
    rounds = max((log.rounds for log in logs.values()), default=0)
    total = Traffic()
    for length, count in Counter(lengths.steps[len(lengths.steps) - rounds :]).items():
        graph = lengths.graphs[length]
        total.add(planned_traffic(Schedule(plan, graph.network), graph), count)
    return total


def _count_the_coordinators(traffic: Traffic, schedule: Schedule, graph: Graph | None, is_preloaded: bool) -> None:
    """Add what the coordinator sends and receives: inputs and targets of every micro-batch, and the outputs of a
    stream."""
    plan, network, lowering = schedule.plan, schedule.network, schedule.lowering
    for device in plan.devices:
        if graph is not None:
            names = everything_fed(graph) if is_preloaded else ()
            parts = feed_parts(graph, lowering, device, targets=plan.is_training, local=names)
            size = sum(part.bytes for part in parts)
        else:
            inputs = fed_inputs(lowering).get(device, ())
            size = sum(part.box.volume * DTYPE_BYTES[network.tensors[part.tensor].dtype] for _, part in inputs)
        if size:
            traffic.fed[device] = size * plan.micro_batches
    traffic.sent[COORDINATOR] = Counter({FEED: sum(traffic.fed.values())})
    for name in network.outputs if not plan.is_training else ():
        for device, box in lowering.geometries[-1].returning(name).pieces():
            traffic.sent[device][RESULT] += box.volume * DTYPE_BYTES[network.tensors[name].dtype] * plan.micro_batches


def traffic_text(by_use: Mapping[str, int]) -> str:
    """Return the bytes by use as one line."""
    parts = ", ".join(f"{format_bytes(by_use[use])} {use.replace('_', '/')}" for use in USES)
    return f"Bytes a step: {parts}"


def is_tiled(plan: Plan) -> bool:
    """Return whether a plan has a stage that is shared by tiles."""
    return any(isinstance(stage.share, ByTiles) and len(stage.devices) > 1 for stage in plan.stages)


def tiled_schedule(plan: Plan, network: Network) -> Schedule | None:
    """Return a plan's schedule if it has a tiled stage, else None."""
    return Schedule(resolve(plan, network), network) if is_tiled(plan) else None


# The picture


def write_tile_map(schedule: Schedule, path: Path, *, title: str) -> Path:
    """Draw the tiles of a plan with their halos, group by group."""
    grids = [f"{geometry.share.grid_text} tiles" for geometry in _tiled_stages(schedule)]
    plan = schedule.plan
    batch = f"batch {plan.batch_size}" + (f" in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else "")
    return draw_tiles(group_maps(schedule), path, title=f"{title}: {', '.join(grids)}, {batch}; bytes are of one step")


def group_maps(schedule: Schedule) -> list[GroupMap]:
    """Return the forward groups in the order they are computed, then the backward groups in theirs."""
    stages = _tiled_stages(schedule)
    maps = [each for geometry in stages for each in _Maps(schedule, geometry).forward()]
    maps += [each for geometry in reversed(stages) for each in _Maps(schedule, geometry).backward()]
    return [
        GroupMap(each.way, 1 + sum(other.way == each.way for other in maps[:place]), each.layers, each.size, each.owned,
                 each.halos, each.exchanged_bytes, each.notes, each.axes)
        for place, each in enumerate(maps)
    ]  # fmt: skip


def _tiled_stages(schedule: Schedule) -> list[TileGeometry]:
    return [geometry for geometry in schedule.lowering.geometries if isinstance(geometry, TileGeometry)]


Fetches = Mapping[str, tuple[Move, ...]]


class _Maps:
    """The groups of one tiled stage."""

    def __init__(self, schedule: Schedule, geometry: TileGeometry) -> None:
        self.schedule, self.geometry, self.network = schedule, geometry, schedule.network
        counts = [len(sizes) for sizes in geometry.cuts]
        self.plane = sorted(sorted(range(len(counts)), key=lambda axis: (-counts[axis], -axis))[:2])
        """The two directions that are drawn: those that are cut most often."""
        cells = numpy.unravel_index(range(len(geometry.devices)), counts)
        hidden = [cells[axis] for axis in range(len(counts)) if axis not in self.plane]
        self.layers = counts[next(a for a in range(len(counts)) if a not in self.plane)] if hidden else 1
        self.shown = [d for place, d in enumerate(geometry.devices) if not any(cell[place] for cell in hidden)]
        """The devices that are drawn: of several layers of tiles the first."""

    def forward(self) -> list[GroupMap]:
        geometry = self.geometry
        is_adjoint = self.schedule.plan.is_training and geometry.backward_groups is None
        maps = []
        for group in geometry.groups:
            read = dict.fromkeys(n for op in self.network.ops[group.first : group.last] for n in op.inputs)
            outside = [n for n in read if n in geometry.maps and not self._is_made(n, group.first, group.last)]
            tensor = self._most(group.fetches, outside)
            notes = self._notes(group.fetches, self._sums(group.first, group.last, backward=False))
            if is_adjoint:
                back = {
                    t: adjoint(moves) for t, moves in group.fetches.items() if self.network.tensors[t].differentiable
                }
                sums = self._sums(group.first, group.last, backward=True)
                size = self._bytes(back)
                returned = [format_bytes(size)] * bool(size) + [f"{format_bytes(sums)} of sums"] * bool(sums)
                notes += [f"back: {' and '.join(returned)}"] if returned else []
            halos = self._fetched(group.fetches.get(tensor, ()), tensor)
            if not geometry.is_made_here(tensor):
                halos = self._handed(tensor, geometry.entering(tensor))
            maps.append(self._map("forward", group.first, group.last, tensor, halos, group.fetches, notes))
        return maps

    def backward(self) -> list[GroupMap]:
        geometry = self.geometry
        maps = []
        for group in geometry.backward_groups or ():
            made = [n for op in self.network.ops[group.first : group.last] for n in op.outputs if n in geometry.maps]
            tensor = self._most(group.deltas, made[::-1])
            notes = self._notes(group.deltas, self._sums(group.first, group.last, backward=True))
            if group.values:
                notes.insert(0, f"{format_bytes(self._bytes(group.values))} of it forward values")
            halos = self._fetched(group.deltas.get(tensor, ()), tensor)
            moves_back: dict[str, tuple[Move, ...]] = dict(group.deltas)
            for name, moves in group.values.items():
                moves_back[name] = moves_back.get(name, ()) + moves
            maps.append(self._map("backward", group.first, group.last, tensor, halos, moves_back, notes))
        return maps

    def _is_made(self, tensor: str, first: int, last: int) -> bool:
        return first <= self.network.producer.get(tensor, -1) < last

    def _most(self, fetches: Fetches, others: list[str]) -> str:
        """Return the map drawn for a group: the one that sends the most bytes, or else the first of the others."""
        if fetches:
            return max(fetches, key=lambda tensor: self._bytes({tensor: fetches[tensor]}))
        return next(iter(others), next(iter(sorted(self.geometry.maps))))

    def _bytes(self, fetches: Fetches) -> int:
        """Return the bytes of these moves in a step, between devices."""
        elements = {t: sum(m.box.volume for m in moves if not m.is_local) for t, moves in fetches.items()}
        size = sum(count * DTYPE_BYTES[self.network.tensors[t].dtype] for t, count in elements.items())
        return size * self.schedule.plan.micro_batches

    def _sums(self, first: int, last: int, *, backward: bool) -> int:
        """Return the bytes of the sums over whole maps inside a group."""
        actions = self.schedule.every_action(self.geometry.devices[0])
        return sum(
            sum(pair_bytes(action, self.network).values())
            for action in actions
            if isinstance(action, Reduce) and action.what == "statistics" and action.backward == backward
            and action.stage == self.geometry.index and first <= action.first < last
        )  # fmt: skip

    def _notes(self, fetches: Fetches, sums: int) -> list[str]:
        notes = [f"{len(fetches)} maps, of one shown"] if len(fetches) > 1 else []
        return notes + ([f"{format_bytes(sums)} of sums inside"] if sums else [])

    def _fetched(self, moves: Iterable[Move], tensor: str) -> dict[str, list[tuple[str, Box]]]:
        by_device: dict[str, list[tuple[str, Box]]] = {}
        for move in moves:
            if not move.is_local and not move.box.is_empty:
                by_device.setdefault(move.target, []).append((move.source, self._plane(move.box, tensor)))
        return {device: by_device[device] for device in self.shown if device in by_device}

    def _plane(self, box: Box, tensor: str) -> Box:
        """Return the part of a box that is drawn."""
        spatial = self.network.spatial[tensor]
        return Box(tuple(box.intervals[spatial[axis]] for axis in self.plane))

    def _handed(self, tensor: str, layout: Layout) -> dict[str, list[tuple[str, Box]]]:
        """Return what a device receives of a tensor made before the stage, beyond its tile."""
        return {
            device: [
                (HANDED, piece)
                for box in layout.boxes(device)
                for piece in self._plane(box, tensor).subtract(self._plane(self.geometry.own(device, tensor), tensor))
            ]
            for device in self.shown
        }

    def _map(
        self, way: str, first: int, last: int, tensor: str, halos: Mapping[str, list[tuple[str, Box]]],
        fetches: Fetches, notes: list[str],
    ) -> GroupMap:  # fmt: skip
        geometry = self.geometry
        owned = {device: self._plane(geometry.own(device, tensor), tensor) for device in self.shown}
        idle = sum(geometry.own(device, tensor).is_empty for device in geometry.devices)
        if self.layers > 1:
            notes.append(f"of {self.layers} layers of tiles one is shown")
        if idle:
            notes.append(f"{idle} device(s) own nothing of it")
        start, end = self._name(first, is_start=True), self._name(last - 1, is_start=False)
        layers = f"layer {start}" if start == end else f"layers {start} .. {end}"
        extents = self.network.extents(tensor)
        size = (self.network.tensors[tensor].elements // prod(extents), *extents)
        names = ("depth", "row", "column")[-len(extents) :]
        axes = (names[self.plane[0]], names[self.plane[1]])
        return GroupMap(way, 0, layers, size, owned, halos, self._bytes(fetches), tuple(notes), axes)

    def _name(self, op: int, *, is_start: bool) -> str:
        """Return the name of a layer, with the operator if a group starts or ends inside the layer."""
        layer = self.network.layers[self.network.layer_of_op[op]]
        is_whole = op == (layer.first if is_start else layer.last - 1)
        return layer.name if is_whole else f"{layer.name} {self.network.ops[op].name}"
