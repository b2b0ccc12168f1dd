"""Plans outside the corners of the space: tiles, then samples, then one device, on the same devices or on others.

There are two searches, both by the arrays of steps.py and tile_steps.py.

    pipelined    hybrid.py's search over disjoint groups of devices, with tiles as one more way to share a stage
    repeating    devices may work in several stages, one after another (one micro-batch, or order sequential):

                     f(l, c) = min over e, c'  of  stage(c; l, e) + move(e; c -> c') + f(e, c')

                 over the layer l a stage starts at and its option c: which devices, shared how. A device is not sent
                 what it already has. Weight gradients are added up while earlier stages run backward.

Both rank plans by a model; the caller then simulates the best few of every shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Literal

import msgspec
import numpy

from manyhands.facts.errors import ManyhandsError
from manyhands.facts.plan import BUCKET_BYTES, ByTiles, Plan, Stage
from manyhands.facts.plan_check import layer_range
from manyhands.planner.context import Batch, DevicePairs, PlanningContext, sizes
from manyhands.planner.hybrid import coarse_cuts, pipelines
from manyhands.planner.pipeline_stages import planned_stage
from manyhands.planner.pricing import alike
from manyhands.planner.shares import Counts, Numbers
from manyhands.planner.steps import StageTable
from manyhands.planner.task import Task
from manyhands.planner.tile_steps import TileSteps, Tiling
from manyhands.schedule.tileable import tileable_layers

Kind = Literal["single", "samples", "tiles"]
MOST_POSITIONS = 72
"""The most cuts that the repeating search considers; in longer networks the promising ones."""
MOST_STAGES = 4
MOST_OF_A_KIND = 2
"""The most devices of one kind that may each be alone in a stage: more would only repeat the same plans."""
MOST_STARTS = 2
"""Plans kept for each number of stages and each set of shares."""
MOST_PIPELINED = 4
MOST_REPEATING = 6
"""Plans of each search that are worth a simulation."""
MOST_LINES = 300_000
"""The most stages that a full search of pipelines with tiles considers; beyond, only promising cuts are considered."""
FEWER_TILES = 1
"""The number of smaller sets of the fastest devices that are tried for tiles besides all devices."""


def is_mixed(plan: Plan, layers_tiled: int) -> bool:
    """Return whether a resolved plan is outside the corners: one stage, a pipeline of groups of devices, or tiles as
    far as they go (`layers_tiled`) with the rest on one device."""
    stages = plan.stages
    if len(stages) == 1 or all(len(stage.devices) == 1 for stage in stages):
        return False
    by_tiles = [isinstance(stage.share, ByTiles) and len(stage.devices) > 1 for stage in stages]
    names = [name for stage in stages for name in stage.devices]
    if not any(by_tiles):
        return len(names) != len(set(names))
    is_corner = len(stages) == 2 and by_tiles[0] and len(stages[1].devices) == 1
    return not (is_corner and layer_range(stages[0])[1] == layers_tiled)


@dataclass(frozen=True)
class StageOption:
    """Devices that may share a stage, and how they share it."""

    kind: Kind
    devices: tuple[str, ...]

    @property
    def bit(self) -> int:
        """A bit mask with one bit set: tiles, or any other share."""
        return 2 if self.kind == "tiles" else 1


def stage_options(task: Task, network_tiles: bool, samples: int) -> list[StageOption]:
    """Return the stage options: devices alone, the fastest of each kind; and the fastest two, three and so on
    together."""
    names = sorted(task.cluster.names, key=lambda name: task.step_seconds(name, max(1, samples)))
    kinds: dict[tuple[object, ...], int] = {}
    options = []
    for name in names:
        device = task.cluster.device(name)
        kind = (device.kind, device.gflops, device.memory_bytes, device.up_bytes_per_second)
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= MOST_OF_A_KIND:
            options.append(StageOption("single", (name,)))
    for size in sizes(len(names)):
        if size <= samples:
            options.append(StageOption("samples", tuple(names[:size])))
        if network_tiles:
            options.append(StageOption("tiles", tuple(names[:size])))
    return options


class Repeating:
    """The repeating search, for one way of cutting the mini-batch."""

    def __init__(self, task: Task, batch: Batch, tiling: Tiling) -> None:
        self.task, self.batch, self.tiling = task, batch, tiling
        self.network, self.cluster = task.network, task.cluster
        self.layers = len(self.network.layers)
        self.context = PlanningContext(
            self.network, self.cluster, task.profile, batch.samples, batch.optimizer_slots, self.cluster.names
        )
        self.options = stage_options(task, bool((tiling.end > numpy.arange(self.layers + 1)).any()), batch.samples)
        self.positions = self._positions()

    def _positions(self) -> list[int]:
        """Return the layers at which stages may start or end."""
        tried = set(range(self.layers + 1))
        if self.layers >= MOST_POSITIONS:
            ends = {int(end) for end in self.tiling.end[:1]}
            tried = {0, self.layers, *ends, *coarse_cuts(self.network, MOST_POSITIONS - 4)}
        return sorted(cut for cut in tried if self.network.may_cut[cut])

    # The cost of stages

    @cached_property
    def tables(self) -> list[tuple[TileSteps, StageTable]]:
        """For each option, the stages that it can take."""
        positions = numpy.array(self.positions)
        first, last = (positions[indices] for indices in numpy.triu_indices(len(positions), 1))
        tables = []
        for option in self.options:
            steps = TileSteps(self.context.only(option.devices), self.batch, self.tiling, [(0, len(option.devices))])
            group = numpy.zeros(len(first), numpy.int64)
            table = steps.tiled(first, last, group) if option.kind == "tiles" else steps.shared(first, last, group)
            tables.append((steps, steps.within_memory(table, 1)))
        return tables

    @cached_property
    def _prices(self) -> _Prices:
        places = numpy.full(self.layers + 1, -1)
        places[self.positions] = numpy.arange(len(self.positions))
        shape = (len(self.options), len(self.positions), len(self.positions))
        zeros = [numpy.zeros(shape) for _ in range(3)]
        prices = _Prices(numpy.full(shape, inf), zeros[0], zeros[1], zeros[2], numpy.full(shape, -1))
        for option, (_, table) in enumerate(self.tables):
            at = (option, places[table.first], places[table.last])
            weights = self.context.bytes.summed(table.first, table.last)
            last_bucket = numpy.minimum(1.0, BUCKET_BYTES / numpy.maximum(weights, 1.0))
            prices.own[at] = self.batch.count * (table.forward + table.backward)
            prices.backward[at] = table.backward
            prices.reduce[at], prices.tail[at] = table.reduce, table.reduce * last_bucket
            prices.line[at] = numpy.arange(len(table))
        return prices

    @cached_property
    def _parts(self) -> Numbers:
        """[option, device] -> the part of a stage's tensors that a device has, by its speed."""
        names = self.cluster.names
        speeds = {name: 1 / max(self.task.step_seconds(name, self.batch.samples), 1e-30) for name in names}
        parts = numpy.zeros((len(self.options), len(names)))
        for place, option in enumerate(self.options):
            whole = sum(speeds[name] for name in option.devices)
            for name in option.devices:
                parts[place, names.index(name)] = speeds[name] / whole
        return parts

    @cached_property
    def _moves(self) -> Numbers:
        """[place, option, next option] -> seconds that the cut there takes, both ways together; infinite between equal
        options, which would be one stage."""
        devices, count = self.cluster.devices, len(self.options)
        ups = numpy.array([device.up_bytes_per_second for device in devices])
        downs = numpy.array([device.down_bytes_per_second for device in devices])
        pairs = DevicePairs.of(self.cluster, self.cluster.names)
        byte_seconds, delay = numpy.zeros((count, count)), numpy.zeros((count, count))
        for a in range(count):
            for b in range(count):
                moved = self._moved(a, b)
                numpy.fill_diagonal(moved, 0.0)
                out, into = moved.sum(1), moved.sum(0)
                byte_seconds[a, b] = max((out / ups).max(), (into / downs).max(), (moved / pairs.rates).max())
                delay[a, b] = pairs.delays[moved > 0].max(initial=0.0)
        samples, rounds = self.batch.samples, self.batch.count
        crossing, returning = (
            sizes_by_layer[self.positions][:, None, None] * samples
            for sizes_by_layer in (self.context.bytes.crossing, self.context.bytes.returning)
        )
        seconds: Numbers = crossing * byte_seconds + delay + returning * byte_seconds + delay * (returning > 0)
        seconds *= rounds
        seconds[:, numpy.arange(count), numpy.arange(count)] = inf
        return seconds

    def _moved(self, a: int, b: int) -> Numbers:
        """[from, to] -> the part of all that crosses from one option to the next that a device hands to another."""
        sent, received = self._parts[a], self._parts[b]
        if self.options[a].kind != self.options[b].kind:  # rows against samples: every device has a part of everything
            return numpy.outer(sent, received)
        ends, after = sent.cumsum(), received.cumsum()
        low = numpy.maximum((ends - sent)[:, None], (after - received)[None, :])
        overlap: Numbers = numpy.maximum(0.0, numpy.minimum(ends[:, None], after[None, :]) - low)
        return overlap

    # The search

    def plans(self) -> list[tuple[float, Plan]]:
        """Return the best plans of each number of stages and each set of shares, the fastest by the model first."""
        prices, end = self._prices, len(self.positions) - 1
        behind = _Front.at_the_end(end, len(self.options))
        fronts: list[_Front] = []
        ranked: list[tuple[float, Plan]] = []
        for number in range(min(MOST_STAGES, end)):
            front = _Front.empty(end, len(self.options))
            for used in (0,) if number == 0 else (1, 2, 3):
                longest, ending, option = behind.joined(used, self._moves) if number else behind.last(used)
                total = prices.own + longest.T[:, None, :]
                after = numpy.maximum(prices.tail, ending.T[:, None, :] + prices.reduce - prices.backward)
                for place, stage_option in enumerate(self.options):
                    front.take(used | stage_option.bit, place, used, total[place], after[place], option[:, place])
            fronts.append(front)
            whole = front.longest[:, 0, :] + front.ending[:, 0, :]
            for used in (1, 2, 3):
                for place in numpy.argsort(whole[used])[:MOST_STARTS]:
                    if whole[used, place] < inf:
                        ranked.append((float(whole[used, place]), self._read(fronts, used, int(place))))
            behind = front
        return sorted(ranked, key=lambda entry: entry[0])

    def _read(self, fronts: list[_Front], used: int, option: int) -> Plan:
        """Return a plan, read from its first stage to its last."""
        stages, place = [], 0
        for front in reversed(fronts):
            following = int(front.end[used, place, option])
            steps, table = self.tables[option]
            planned = planned_stage(steps, table, int(self._prices.line[option, place, following]))
            stages.append(Stage((planned.first, planned.last), planned.devices, planned.share))
            at = (used, place, option)
            used, option, place = int(front.used[at]), int(front.option[at]), following
        plan = self.task.plan(stages, self.batch.count)
        return plan if plan.may_repeat_devices else msgspec.structs.replace(plan, order="gpipe")


@dataclass(frozen=True)
class _Prices:
    """[option, place, place] -> a stage of the layers between two places."""

    own: Numbers
    """Forward and backward of all micro-batches."""
    backward: Numbers
    reduce: Numbers
    tail: Numbers
    """The part of adding up weight gradients that cannot begin before the stage's own backward pass is done."""
    line: Counts


@dataclass
class _Front:
    """[shares used, place, option] -> the best continuation from a place with this option first."""

    longest: Numbers
    ending: Numbers
    """The seconds that adding up weight gradients takes beyond that."""
    end: Counts
    used: Counts
    option: Counts
    """The end of its first stage, and the shares and the option that follow it."""

    @staticmethod
    def empty(end: int, options: int) -> _Front:
        shape = (4, end + 1, options)
        return _Front(numpy.full(shape, inf), numpy.zeros(shape), *(numpy.full(shape, -1) for _ in range(3)))

    @staticmethod
    def at_the_end(end: int, options: int) -> _Front:
        front = _Front.empty(end, options)
        front.longest[0, end] = 0.0
        return front

    def last(self, used: int) -> tuple[Numbers, Numbers, Counts]:
        """Return what follows a last stage: nothing, at no cost."""
        return self.longest[used], self.ending[used], self.option[used]

    def joined(self, used: int, moves: Numbers) -> tuple[Numbers, Numbers, Counts]:
        """Return [place, option] -> the best continuation, the cut there included, and the option that follows."""
        longest = moves + self.longest[used][:, None, :]
        option = (longest + self.ending[used][:, None, :]).argmin(2)
        return (
            numpy.take_along_axis(longest, option[:, :, None], 2)[:, :, 0],
            numpy.take_along_axis(self.ending[used], option, 1),
            option,
        )

    def take(
        self, used: int, option: int, before: int, total: Numbers, after: Numbers, following: Counts
    ) -> None:  # fmt: skip
        """Put stages of one option in front of what follows: the best end for every start, where it is better."""
        end = (total + after).argmin(1)
        rows = numpy.arange(len(end))
        longest, ending = total[rows, end], after[rows, end]
        better = longest + ending < self.longest[used, :, option] + self.ending[used, :, option]
        at = (used, numpy.flatnonzero(better), option)
        self.longest[at], self.ending[at] = longest[better], ending[better]
        self.end[at], self.used[at], self.option[at] = end[better], before, following[end[better]]


def mixed_plans(task: Task) -> list[Plan]:
    """Return the plans outside the corners that both searches rank best by the model."""
    tiling = Tiling.of(task.network)
    layers_tiled, _ = tileable_layers(task.network)
    like = Batch(1, 1, task.optimizer_slots, task.batch_norm == "synchronised", task.warm_up)
    ranked: list[tuple[float, Plan]] = []
    for count in [task.micro_batches] if task.micro_batches else _counts(task):
        way = replace(like, samples=task.batch_size // count, count=count)
        ranked += [entry for entry in Repeating(task, way, tiling).plans() if is_mixed(entry[1], layers_tiled)]
    repeating = _shapes([plan for _, plan in sorted(ranked, key=lambda entry: entry[0])], MOST_REPEATING, task)
    try:
        piped = pipelines(
            task.network, task.cluster, task.profile, task.batch_size, micro_batches=task.micro_batches, like=like,
            may_be_alone=False, pricing=lambda context, way: TileSteps(context, way, tiling), most_lines=MOST_LINES,
        )  # fmt: skip
    except ManyhandsError:
        if repeating or len(task.cluster.devices) == 1:
            return repeating
        raise  # this error is the cause, memory as a rule
    plans = [pipeline.plan(task.network) for pipeline in piped]
    return repeating + _shapes([plan for plan in plans if is_mixed(plan, layers_tiled)], MOST_PIPELINED, task)


def _counts(task: Task) -> list[int]:
    """Return the numbers of micro-batches for the repeating search: one; and a few more where there are no batch
    statistics to change, so that one is computed while another travels."""
    if any(op.statistics for op in task.network.ops):
        return [1]
    return [count for count in (1, 2, 4) if task.batch_size % count == 0]


def promising_tiles(task: Task, names: Sequence[str]) -> list[int]:
    """Return how many of these devices, the first ones, are worth simulating tiles on: all, and the best few by
    price."""
    tiling, count = Tiling.of(task.network), len(names)
    like = Batch(task.batch_size, 1, task.optimizer_slots, task.batch_norm == "synchronised")
    end = tileable_layers(task.network)[0]
    if not end:
        return [count]
    context = PlanningContext(
        task.network, task.cluster, task.profile, task.batch_size, task.optimizer_slots, tuple(names)
    )  # fmt: skip
    steps = TileSteps(context, like, tiling, [(0, size) for size in sizes(count)])
    group = numpy.arange(len(steps.groups))
    table = steps.tiled(numpy.zeros(len(group), int), numpy.full(len(group), end), group)
    seconds = table.forward + table.backward + table.reduce
    best = [int(steps.ends[table.group[line]]) for line in numpy.argsort(seconds)[:FEWER_TILES]]
    return list(dict.fromkeys([count, *best]))


def _shapes(plans: list[Plan], most: int, task: Task) -> list[Plan]:
    """Return the first plans, one of each shape: devices of one kind are interchangeable."""
    by_shape: dict[tuple[object, ...], Plan] = {}
    kinds = alike(task)
    for plan in plans:
        options = (
            (type(stage.share), stage.layers, sorted(kinds[name] for name in stage.devices)) for stage in plan.stages
        )
        by_shape.setdefault((plan.micro_batches, *map(str, options)), plan)
    return list(by_shape.values())[:most]
