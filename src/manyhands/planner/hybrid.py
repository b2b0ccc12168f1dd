"""The best pipeline of replicated stages (ASTEROID Algorithm 2), exactly, and fast.

Devices in order of memory (`pipelines` tries them by speed too); every stage takes layers [first, last) and an interval
of the devices; devices may be left out between stages. Built from the last stage to the first: with a new first stage
in front of a sub-pipeline,

    A = max(M·E_stage,  M·E_cut + E_stage,  A' + E_stage + E_cut)          the longest step, aligned (Eq. 11)
    D = max(T_a,  D' - E_b of the stage and the cut)                       what the all-reduces add at the end
    round = A + D

Algorithm 2 keeps one sub-pipeline for each place, the one with the least A' + D'. That can miss the optimum: a little
more A' may be worth a smaller D'. So the pairs that no other beats in both are kept (a Pareto front), which is enough,
as A and D never fall when A' or D' rise. All extensions by one stage are priced at once. What cannot become better than
a plan that is known is dropped; the first one is found among a few good cuts, by the same search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import inf, isqrt

import numpy
from numpy.typing import NDArray

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import OutOfMemory
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Plan, Share, Single, Stage
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.facts.units import format_bytes
from manyhands.planner.ground import MOST_WITH_GAPS, Batch, Ground, carried, orders
from manyhands.planner.shares import Counts, Numbers
from manyhands.planner.steps import StageTable, Steps
from manyhands.schedule.shortage import LESS_STATE, MORE_MEMORY

USUAL = Batch(1, 1)
FIRST_CUTS = 6
COARSE_CUTS = 24
"""Cuts among which the first plan is looked for, and the first good one."""
MOST_STAGES = 24
MOST_MICRO_BATCHES = 512
USUAL_MICRO_BATCHES = 16
"""The first way of cutting a mini-batch that is tried: a good one soon spares the search of others."""
WORTH_A_SEARCH = 1.2
"""Micro-batch sizes whose coarse plan is within this of the best are searched in full; plans within it are kept, as a
simulation may order them otherwise."""
MOST_LINES = 1_700_000
"""Stages, of any layers on any group, that full searches may look at, all together: a few seconds. Beyond, cuts are
only the promising ones, and those near the best of them."""
COARSE_LINES = 80_000
NEAR_LINES = 160_000
"""Stages that are looked at with promising cuts, and with cuts near the best."""
_PAIRS_AT_ONCE = 2_000_000
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a pipeline."""

    first: int
    last: int
    devices: tuple[str, ...]
    samples: tuple[int, ...]
    rows: tuple[float, ...] = ()
    """Relative heights of tiles; none: by samples."""
    columns: int = 1

    @property
    def share(self) -> Share:
        if self.rows:
            return ByTiles(self.rows, (1,) * self.columns)
        return BySamples(self.samples) if len(self.devices) > 1 else Single()


@dataclass(frozen=True)
class Pipeline:
    """A pipeline with what a round of it takes, by Eq. 4-6."""

    batch: Batch
    stages: tuple[PlannedStage, ...]
    seconds: float

    def plan(self, network: Network) -> Plan:
        stages = tuple(Stage((one.first, one.last), one.devices, one.share) for one in self.stages)
        batch = self.batch
        return Plan(
            network=network.name,
            batch_size=batch.samples * batch.count,
            stages=stages,
            micro_batches=batch.count,
            order="1f1b",
            warm_up=batch.warm_up,
            batch_norm="synchronised" if batch.is_synchronised else "local",
            optimizer_slots=batch.optimizer_slots,
        )


@dataclass
class _Front:
    """Sub-pipelines of one number of stages that nothing beats, in the order of `key`."""

    key: Counts
    """Where it starts: layer x devices + first device."""
    layer: Counts
    group: Counts
    longest: Numbers
    ending: Numbers
    stage: Counts
    """The line of the stage table that is its first stage."""
    following: Counts
    """The sub-pipeline behind that."""

    def __len__(self) -> int:
        return len(self.key)


class Search:
    """Algorithm 2 over one way of cutting the mini-batch."""

    def __init__(self, steps: Steps, *, may_be_alone: bool = True, keep_fronts: bool = True) -> None:
        """`may_be_alone`: one device may do it all. `keep_fronts`: False for the paper's own recurrence, as with many
        devices."""
        self.steps, self.may_be_alone = steps, may_be_alone
        self.count = steps.batch.count
        self.devices = len(steps.names)
        self.has_gaps = self.devices <= MOST_WITH_GAPS
        self.keep_fronts = keep_fronts and self.has_gaps
        self.lines = steps.layers * (steps.layers + 1) // 2 * len(steps.groups)
        self.coarse = min(COARSE_CUTS, isqrt(2 * COARSE_LINES // len(steps.groups)))

    def near(self, found: list[Pipeline]) -> list[int]:
        """The cuts of the best pipeline so far, and those nearest to them: as many as can be looked at."""
        best = min(found, key=lambda one: one.seconds)
        ends = [stage.first for stage in best.stages[1:]]
        moved = sorted(range(1, self.steps.layers), key=lambda cut: min(abs(cut - end) for end in ends or [0]))
        most = isqrt(2 * NEAR_LINES // len(self.steps.groups))
        return sorted({*ends, *moved[:most]})

    def best(self, cuts: Sequence[int] | None = None, bound: float = inf) -> Pipeline | None:
        """The fastest pipeline with its cuts among these (by default all), if it is faster than `bound`."""
        return min(self.by_stages(cuts, bound), key=lambda one: one.seconds, default=None)

    def by_stages(self, cuts: Sequence[int] | None = None, bound: float = inf, keeping: float = 1.0) -> list[Pipeline]:
        """The fastest pipelines of one stage, of two, and so on: those within the bound and within `keeping` times
        the best of those with fewer stages."""
        layers = self.steps.layers
        positions = numpy.array(sorted({0, layers, *(range(layers) if cuts is None else cuts)}))
        free = self.steps.stages(*self._promising(positions, bound))
        tables: list[StageTable] = []
        fronts: list[_Front] = []
        found: list[Pipeline] = []
        for from_end in range(1, min(self.devices, len(positions) - 1, MOST_STAGES) + 1):
            table = self.steps.within_memory(free, self.steps.batch.ahead(from_end))
            front = self._alone(table, bound) if from_end == 1 else self._extended(table, fronts[-1], bound)
            tables.append(table)
            fronts.append(front)
            if not len(front):
                break
            whole = numpy.flatnonzero(front.layer == 0)
            if not len(whole):
                continue
            total = front.longest[whole] + front.ending[whole]
            place = int(total.argmin())
            if total[place] < bound:
                seconds = float(total[place])
                found.append(Pipeline(self.steps.batch, self._stages(tables, fronts, int(whole[place])), seconds))
                bound = min(bound, keeping * seconds)
        return found

    def _promising(self, positions: Counts, bound: float) -> tuple[Counts, Counts, Counts]:
        """Stages between these cuts that a plan within the bound may have: they, what comes before and what comes
        after, fit in."""
        steps, layers, starts, ends = self.steps, self.steps.layers, self.steps.starts, self.steps.ends
        limit = bound * _SLACK / self.count
        begins = (positions == 0)[:, None] | (starts > 0)  # [cut, group]
        stops = (positions == layers)[:, None] | (ends < self.devices)
        if bound < inf:
            head, tail = self._least_around
            arriving, leaving = steps.least_cut_seconds
            begins &= (head[positions][:, starts] <= limit) & (arriving[positions] <= limit)
            stops &= (tail[positions][:, ends] <= limit) & (leaving[positions] <= limit)
        low, high = numpy.triu_indices(len(positions), 1)
        pair, group = numpy.nonzero(begins[low] & stops[high])
        first, last = positions[low[pair]], positions[high[pair]]
        keep = numpy.ones(len(group), bool)
        if not self.may_be_alone and self.devices > 1:
            keep &= (first > 0) | (last < layers) | (ends[group] - starts[group] > 1)
        if bound < inf:
            keep &= steps.least_seconds(first, last, group) <= limit
        return first[keep], last[keep], group[keep]

    @cached_property
    def _least_around(self) -> tuple[Numbers, Numbers]:
        """[layer, device] -> the least that all devices before it take for all layers before it; and from it on."""
        best = numpy.stack([self.steps.best[kind] for kind in self.steps.kinds], axis=1)
        samples = self.steps.batch.samples
        speeds = 1 / numpy.maximum(best, 1e-30)
        rest = 1 / numpy.maximum(best[-1:] - best, 1e-30)
        none = numpy.zeros((len(best), 1))
        before = numpy.concatenate([none, speeds.cumsum(1)], axis=1)
        after = numpy.concatenate([rest[:, ::-1].cumsum(1)[:, ::-1], none], axis=1)
        with numpy.errstate(divide="ignore"):
            head, tail = samples / before, samples / after
        head[0], tail[-1] = 0.0, 0.0
        return head, tail

    def _alone(self, table: StageTable, bound: float) -> _Front:
        """Every stage that can be the last one."""
        ends = numpy.flatnonzero(table.last == self.steps.layers)
        longest = self.count * (table.forward[ends] + table.backward[ends])
        nothing = numpy.full(len(ends), -1)
        return self._kept(table, ends, nothing, longest, table.reduce[ends], bound)

    def _extended(self, table: StageTable, behind: _Front, bound: float) -> _Front:
        """Every sub-pipeline with one more stage in front."""
        width = self.devices + 1
        joint = table.last * width
        low = numpy.searchsorted(behind.key, joint + self.steps.ends[table.group])
        high = numpy.searchsorted(
            behind.key, joint + (self.devices if self.has_gaps else self.steps.ends[table.group]) + 1
        )
        high = numpy.maximum(low, high)
        none, nowhere = numpy.zeros(0), numpy.zeros(0, numpy.int64)
        parts = [_Front(nowhere, nowhere, nowhere, none, none, nowhere, nowhere)]
        for lines in _blocks(high - low):
            stage = numpy.repeat(lines, high[lines] - low[lines])
            skipped = numpy.cumsum(high[lines] - low[lines]) - (high[lines] - low[lines])
            sub = numpy.arange(len(stage)) - numpy.repeat(skipped, high[lines] - low[lines]) + low[stage]
            ahead, back = self.steps.cut_seconds(table.last[stage], table.group[stage], behind.group[sub])
            forward, backward = table.forward[stage], table.backward[stage]
            own, cut = forward + backward, ahead + back
            longest = numpy.maximum(self.count * own, self.count * cut + own)
            longest = numpy.maximum(longest, behind.longest[sub] + own + cut)
            ending = numpy.maximum(table.reduce[stage], behind.ending[sub] - backward - back)
            parts.append(self._kept(table, stage, sub, longest, ending, bound))
        names = ("layer", "group", "longest", "ending", "stage", "following")
        joined = {name: numpy.concatenate([getattr(part, name) for part in parts]) for name in names}
        return self._unbeaten(**joined)

    def _kept(
        self, table: StageTable, stage: Counts, sub: Counts, longest: Numbers, ending: Numbers, bound: float
    ) -> _Front:
        """Of so many sub-pipelines, those that may become better than the bound and that nothing beats."""
        if bound < inf:
            head, _ = self._least_around
            layer, start = table.first[stage], self.steps.starts[table.group[stage]]
            least = longest + head[layer, start] + numpy.where(layer == 0, ending, 0.0)
            keep = numpy.flatnonzero(least < bound * _SLACK)
            stage, sub, longest, ending = stage[keep], sub[keep], longest[keep], ending[keep]
        return self._unbeaten(table.first[stage], table.group[stage], longest, ending, stage, sub)

    def _unbeaten(
        self, layer: Counts, group: Counts, longest: Numbers, ending: Numbers, stage: Counts, following: Counts
    ) -> _Front:
        """The Pareto front of every place (a layer and a group); or, as in the paper, the best one of each."""
        if not len(layer):
            return _Front(layer, layer, group, longest, ending, stage, following)
        key = layer * (self.devices + 1) + self.steps.starts[group]
        if self.keep_fronts:
            place = layer * len(self.steps.groups) + group
            order = numpy.lexsort((ending, longest, place))
            ranks = numpy.unique(ending, return_inverse=True)[1].reshape(-1)[order]
            segment = numpy.concatenate([[0], numpy.diff(place[order]) != 0]).cumsum()
            least = numpy.minimum.accumulate(ranks - segment * (len(ranks) + 1))  # starts anew in every segment
            is_new = numpy.concatenate([[True], least[1:] < least[:-1]])
        else:
            order = numpy.lexsort((longest + ending, key))
            is_new = numpy.concatenate([[True], key[order][1:] != key[order][:-1]])
        kept = order[is_new]
        kept = kept[numpy.argsort(key[kept], kind="stable")]
        return _Front(key[kept], layer[kept], group[kept], longest[kept], ending[kept], stage[kept], following[kept])

    def _stages(self, tables: list[StageTable], fronts: list[_Front], place: int) -> tuple[PlannedStage, ...]:
        """Read a pipeline back, from its first stage to its last."""
        found = []
        for table, front in zip(reversed(tables), reversed(fronts)):
            line = int(front.stage[place])
            found.append(planned_stage(self.steps, table, line))
            place = int(front.following[place])
        return tuple(found)


def planned_stage(steps: Steps, table: StageTable, line: int) -> PlannedStage:
    """A line of a table, device by device."""
    number, columns = int(table.group[line]), int(table.columns[line])
    a, b = steps.groups[number]
    first, last, names = int(table.first[line]), int(table.last[line]), steps.names[a:b]
    if columns:
        parts = [float(table.parts[line, steps.kinds[device]]) for device in range(a, b)]
        rows = (1.0,) * (len(names) // columns) if columns > 1 else tuple(round(p / max(parts), 3) for p in parts)
        return PlannedStage(first, last, names, (), rows, columns)
    left = table.shares.of(line, [int(one) for one in steps.counts[number]])
    return PlannedStage(first, last, names, tuple(left[steps.kinds[device]].pop(0) for device in range(a, b)))


def _blocks(sizes: Counts) -> Iterator[Counts]:
    """Lines in runs that make about so many pairs."""
    lines = numpy.flatnonzero(sizes)
    if not len(lines):
        return
    number = (numpy.cumsum(sizes[lines]) - 1) // _PAIRS_AT_ONCE
    for block in range(int(number[-1]) + 1):
        own: NDArray[numpy.int64] = lines[number == block]
        if len(own):
            yield own


def coarse_cuts(network: Network, count: int = COARSE_CUTS) -> list[int]:
    """Cuts with little to carry, spread over the network's work."""
    work = numpy.cumsum([layer.macs + 1 for layer in network.layers])
    parts = (work[:-1] / work[-1] * count).astype(numpy.int64)
    sizes, _ = carried(network)
    found = []
    for part in range(count):
        inside = 1 + numpy.flatnonzero(parts == part)
        if len(inside):
            found.append(int(inside[sizes[inside].argmin()]))
    return found


def batches(network: Network, batch_size: int, like: Batch, micro_batches: int | None = None) -> list[Batch]:
    """The ways to cut a mini-batch into equal micro-batches that are looked at."""
    least = 2 if any(op.statistics for op in network.ops) and batch_size > 1 else 1  # statistics of one sample are none
    counts = [micro_batches] if micro_batches else [
        count for count in range(1, min(batch_size, MOST_MICRO_BATCHES) + 1)
        if batch_size % count == 0 and batch_size // count >= least
    ]  # fmt: skip
    return [replace(like, samples=batch_size // count, count=count) for count in counts]


def pipelines(
    network: Network,
    cluster: Cluster,
    profile: Profile,
    batch_size: int,
    *,
    micro_batches: int | None = None,
    like: Batch = USUAL,
    may_be_alone: bool = True,
    pricing: Callable[[Ground, Batch], Steps] = Steps,
    most_lines: int = MOST_LINES,
) -> list[Pipeline]:
    """The best pipelines of each promising way to cut the mini-batch, the fastest first.

    `like`: what else a round is like. `may_be_alone`: whether one device may do it all, if that is faster. `pricing`:
    what stages may be shared by, and their prices. `most_lines`: how much is searched beyond the promising cuts.
    """
    ways = batches(network, batch_size, like, micro_batches)
    most = max(way.samples for way in ways)
    grounds = [Ground(network, cluster, profile, most, like.optimizer_slots)]
    if len(cluster.devices) <= MOST_WITH_GAPS:
        grounds += [grounds[0].ordered(names) for names in orders(cluster)[1:]]
    good_cuts = cache(partial(coarse_cuts, network))
    found: list[Pipeline] = []
    rough: list[tuple[float, Search]] = []
    least = inf
    for way in sorted(ways, key=lambda one: abs(one.count - USUAL_MICRO_BATCHES)):
        for ground in grounds:
            search = Search(pricing(ground, way), may_be_alone=may_be_alone)
            if not found:  # a first plan, soon: what cannot be better is not looked at
                found += search.by_stages(good_cuts(FIRST_CUTS))
                least = min((one.seconds for one in found), default=inf)
            coarse = search.by_stages(good_cuts(search.coarse), WORTH_A_SEARCH * least, keeping=WORTH_A_SEARCH)
            if coarse:
                found += coarse
                rough.append((min(one.seconds for one in coarse), search))
                least = min(least, rough[-1][0])
    if not rough:  # no luck with these cuts
        rough = [(inf, Search(pricing(grounds[0], way), may_be_alone=may_be_alone)) for way in ways]
    for seconds, search in sorted(rough, key=lambda one: one[0]):
        if seconds > WORTH_A_SEARCH * least and found:
            break
        most_lines -= search.lines
        best = search.best(None if most_lines >= 0 or not found else search.near(found), least * _SLACK)
        if best is not None:
            found.append(best)
            least = min(least, best.seconds)
    if not found:
        raise _shortage(network, cluster, like)
    kept = {one.stages: one for one in found if one.seconds <= WORTH_A_SEARCH * least}
    return sorted(kept.values(), key=lambda one: one.seconds)


def _shortage(network: Network, cluster: Cluster, like: Batch) -> OutOfMemory:
    """Why nothing fits: the layer at which the devices' memory is used up, one sample at a time; and what would help.
    Layers are not divided: of one that is larger than every device, more devices are of no use."""
    ground = Ground(network, cluster, estimate_cluster(network, cluster), 1, like.optimizer_slots)
    steps = Steps(ground, replace(like, samples=1, count=1))
    sizes = [cluster.device(name).memory_bytes for name in steps.names]
    first, device = 0, 0
    for last in range(1, steps.layers + 1):
        if _needed(steps, first, last)[1] <= sizes[device]:
            continue
        if last - first > 1:  # it begins the next device's stage
            first, device = last - 1, device + 1
        fixed, needed = _needed(steps, first, last)
        if device < len(sizes) and needed <= sizes[device]:
            continue
        layer = network.layers[first]
        is_full = device == len(sizes)
        have = 0 if is_full else sizes[device]
        where = "all devices are full by then" if is_full else f"{steps.names[device]} has {format_bytes(have)}"
        return OutOfMemory(
            f"No pipeline of {network.name} fits cluster {cluster.name}: layer {first} ({layer.name}) needs "
            f"{format_bytes(needed)} with one sample; {where}: {format_bytes(needed - have)} are missing.",
            hint=_way_out(needed, fixed, max(sizes)),
        )
    return OutOfMemory(
        f"No pipeline of {network.name} fits cluster {cluster.name} with micro-batches of this size.",
        hint="Use more micro-batches (--micro-batches), or a smaller batch (--batch-size).",
    )


def _way_out(needed: float, fixed: float, most: float) -> str:
    """What helps where a layer needs so much, of which `fixed` is there without samples, and a device has at `most`."""
    if needed <= most:
        return f"Use more devices, {MORE_MEMORY}, smaller inputs (--input), or {LESS_STATE}."
    if fixed <= most:
        return (
            f"More devices are of no use: a pipeline divides no layer. Use {MORE_MEMORY}, or smaller inputs (--input)."
        )
    return f"No batch size and no more devices help: a pipeline divides no layer. Use {MORE_MEMORY}."


def _needed(steps: Steps, first: int, last: int) -> tuple[float, float]:
    """Bytes of a stage of these layers: without samples, and with one."""
    fixed, each = steps.memory(numpy.array([first]), numpy.array([last]), 1)
    return float(fixed[0]), float(fixed[0] + each[0])
