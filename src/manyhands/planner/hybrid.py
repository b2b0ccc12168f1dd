"""The best pipeline of replicated stages (ASTEROID Algorithm 2), exactly, and fast.

Devices are in order of memory (`pipelines` tries them by speed too); every stage takes layers [first, last) and an
interval of the devices; devices may be left out between stages. A pipeline is built from the last stage to the first:
with a new first stage in front of a sub-pipeline,

    A = max(M·E_stage,  M·E_cut + E_stage,  A' + E_stage + E_cut)          the longest step, aligned (Eq. 11)
    D = max(T_a,  D' - E_b of the stage and the cut)                       what the all-reduces add at the end
    round = A + D

Algorithm 2 keeps one sub-pipeline for each place, the one with the least A' + D'. That can miss the optimum: a little
more A' may be worth a smaller D'. So the pairs that no other beats in both are kept (a Pareto front), which is enough,
as A and D never fall when A' or D' rise. All extensions by one stage are priced at once. Sub-pipelines that cannot
become better than a known plan are dropped; the first plan comes from a few good cuts, by the same search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import inf, isqrt

import numpy
from numpy.typing import NDArray

from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.profile import Profile
from manyhands.planner.context import MOST_WITH_GAPS, Batch, PlanningContext, carried, orders
from manyhands.planner.pipeline_shortage import pipeline_shortage
from manyhands.planner.pipeline_stages import Pipeline, PlannedStage, planned_stage
from manyhands.planner.shares import Counts, Numbers
from manyhands.planner.steps import StageTable, Steps

USUAL = Batch(1, 1)
FIRST_CUTS = 6
COARSE_CUTS = 24
"""Cuts tried for the first plan, and for the first good one."""
MOST_STAGES = 24
MOST_MICRO_BATCHES = 512
USUAL_MICRO_BATCHES = 16
"""The number of micro-batches tried first: a good plan early prunes the search for the others."""
WORTH_A_SEARCH = 1.2
"""Micro-batch sizes whose coarse plan is within this of the best are searched in full; plans within it are kept, as a
simulation may order them otherwise."""
MOST_LINES = 1_700_000
"""The most stages, of any layers on any group, that full searches consider in all: a few seconds. Beyond, only
promising cuts are considered, and those near the best of them."""
COARSE_LINES = 80_000
NEAR_LINES = 160_000
"""Stages considered with promising cuts, and with cuts near the best."""
_PAIRS_AT_ONCE = 2_000_000
_SLACK = 1 + 1e-9


@dataclass
class _Front:
    """Sub-pipelines of one number of stages that nothing beats, in the order of `key`."""

    key: Counts
    """Its start: layer x devices + first device."""
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

    def __init__(
        self, steps: Steps, *, may_be_alone: bool = True, keep_fronts: bool = True, may_leave_out: bool = True
    ) -> None:
        """Set up the search. `may_be_alone`: one device may do it all. `keep_fronts`: False for the paper's own
        recurrence, as with many devices. `may_leave_out`: False where every device must take part."""
        self.steps, self.may_be_alone = steps, may_be_alone
        self.count = steps.batch.count
        self.devices = len(steps.names)
        self.may_leave_out = may_leave_out
        self.has_gaps = may_leave_out and self.devices <= MOST_WITH_GAPS
        self.keep_fronts = keep_fronts and self.has_gaps
        self.lines = steps.layers * (steps.layers + 1) // 2 * len(steps.groups)
        self.coarse = min(COARSE_CUTS, isqrt(2 * COARSE_LINES // len(steps.groups)))

    def near(self, pipelines: list[Pipeline]) -> list[int]:
        """Return the cuts of the best pipeline so far and the nearest to them, as many as the search can consider."""
        best = min(pipelines, key=lambda pipeline: pipeline.seconds)
        ends = [stage.first for stage in best.stages[1:]]
        nearest = sorted(range(1, self.steps.layers), key=lambda cut: min(abs(cut - end) for end in ends or [0]))
        most = isqrt(2 * NEAR_LINES // len(self.steps.groups))
        return sorted({*ends, *nearest[:most]})

    def best(self, cuts: Sequence[int] | None = None, bound: float = inf) -> Pipeline | None:
        """Return the fastest pipeline with its cuts among `cuts` (by default all), if it is faster than `bound`."""
        return min(self.by_stages(cuts, bound), key=lambda pipeline: pipeline.seconds, default=None)

    def by_stages(self, cuts: Sequence[int] | None = None, bound: float = inf, keeping: float = 1.0) -> list[Pipeline]:
        """Return the fastest pipelines of one stage, two stages and so on: those within the bound and within `keeping`
        times the best of those with fewer stages."""
        layers = self.steps.layers
        tried = {0, layers, *(range(layers) if cuts is None else cuts)}
        positions = numpy.array(sorted(cut for cut in tried if self.steps.may_cut[cut]))
        free = self.steps.stages(*self._promising(positions, bound))
        tables: list[StageTable] = []
        fronts: list[_Front] = []
        pipelines: list[Pipeline] = []
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
                pipelines.append(Pipeline(self.steps.batch, self._stages(tables, fronts, int(whole[place])), seconds))
                bound = min(bound, keeping * seconds)
        return pipelines

    def _promising(self, positions: Counts, bound: float) -> tuple[Counts, Counts, Counts]:
        """Return the stages between these cuts that a plan within the bound may have: those for which the stage, the
        layers before it and the layers after it each take less."""
        steps, layers, starts, ends = self.steps, self.steps.layers, self.steps.starts, self.steps.ends
        limit = bound * _SLACK / self.count
        begins = (positions == 0)[:, None] | (starts > 0)  # [cut, group]
        stops = (positions == layers)[:, None] | (ends < self.devices)
        if not self.may_leave_out:
            begins &= (positions > 0)[:, None] | (starts == 0)
            stops &= (positions < layers)[:, None] | (ends == self.devices)
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
        remaining = 1 / numpy.maximum(best[-1:] - best, 1e-30)
        none = numpy.zeros((len(best), 1))
        before = numpy.concatenate([none, speeds.cumsum(1)], axis=1)
        after = numpy.concatenate([remaining[:, ::-1].cumsum(1)[:, ::-1], none], axis=1)
        with numpy.errstate(divide="ignore"):
            head, tail = samples / before, samples / after
        head[0], tail[-1] = 0.0, 0.0
        return head, tail

    def _alone(self, table: StageTable, bound: float) -> _Front:
        """Return every stage that can be the last one."""
        ends = numpy.flatnonzero(table.last == self.steps.layers)
        longest = self.count * (table.forward[ends] + table.backward[ends])
        nothing = numpy.full(len(ends), -1)
        return self._kept(table, ends, nothing, longest, table.reduce[ends], bound)

    def _extended(self, table: StageTable, behind: _Front, bound: float) -> _Front:
        """Return every sub-pipeline with one more stage in front."""
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
            stage_seconds, cut = forward + backward, ahead + back
            longest = numpy.maximum(self.count * stage_seconds, self.count * cut + stage_seconds)
            longest = numpy.maximum(longest, behind.longest[sub] + stage_seconds + cut)
            ending = numpy.maximum(table.reduce[stage], behind.ending[sub] - backward - back)
            parts.append(self._kept(table, stage, sub, longest, ending, bound))
        names = ("layer", "group", "longest", "ending", "stage", "following")
        joined = {name: numpy.concatenate([getattr(part, name) for part in parts]) for name in names}
        return self._unbeaten(**joined)

    def _kept(
        self, table: StageTable, stage: Counts, sub: Counts, longest: Numbers, ending: Numbers, bound: float
    ) -> _Front:
        """Return the sub-pipelines that may still become better than the bound and that nothing beats."""
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
        """Return the Pareto front of every place (a layer and a group); or, as in the paper, the best sub-pipeline of
        each."""
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
        best = order[is_new]
        best = best[numpy.argsort(key[best], kind="stable")]
        return _Front(key[best], layer[best], group[best], longest[best], ending[best], stage[best], following[best])

    def _stages(self, tables: list[StageTable], fronts: list[_Front], place: int) -> tuple[PlannedStage, ...]:
        """Read a pipeline back, from its first stage to its last."""
        stages = []
        for table, front in zip(reversed(tables), reversed(fronts)):
            line = int(front.stage[place])
            stages.append(planned_stage(self.steps, table, line))
            place = int(front.following[place])
        return tuple(stages)


def _blocks(sizes: Counts) -> Iterator[Counts]:
    """Yield runs of lines that make about `_PAIRS_AT_ONCE` pairs each."""
    lines = numpy.flatnonzero(sizes)
    if not len(lines):
        return
    number = (numpy.cumsum(sizes[lines]) - 1) // _PAIRS_AT_ONCE
    for block in range(int(number[-1]) + 1):
        members: NDArray[numpy.int64] = lines[number == block]
        if len(members):
            yield members


def coarse_cuts(network: Network, count: int = COARSE_CUTS) -> list[int]:
    """Return cuts that carry little, spread over the network's work."""
    work = numpy.cumsum([layer.macs + 1 for layer in network.layers])
    parts = (work[:-1] / work[-1] * count).astype(numpy.int64)
    sizes, _ = carried(network)
    cuts = []
    for part in range(count):
        inside = 1 + numpy.flatnonzero(parts == part)
        if len(inside):
            cuts.append(int(inside[sizes[inside].argmin()]))
    return cuts


def batches(network: Network, batch_size: int, like: Batch, micro_batches: int | None = None) -> list[Batch]:
    """Return the ways to cut a mini-batch into equal micro-batches that are tried."""
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
    pricing: Callable[[PlanningContext, Batch], Steps] = Steps,
    most_lines: int = MOST_LINES,
) -> list[Pipeline]:
    """Return the best pipelines of each promising way to cut the mini-batch, the fastest first.

    `like`: the other settings of a round. `may_be_alone`: whether one device may do it all, if that is faster.
    `pricing`: makes the steps, with the ways in which stages may be shared and their prices. `most_lines`: how much is
    searched beyond the promising cuts.
    """
    ways = batches(network, batch_size, like, micro_batches)
    most = max(way.samples for way in ways)
    contexts = [PlanningContext(network, cluster, profile, most, like.optimizer_slots)]
    if len(cluster.devices) <= MOST_WITH_GAPS:
        contexts += [contexts[0].ordered(names) for names in orders(cluster)[1:]]
    good_cuts = cache(partial(coarse_cuts, network))
    candidates: list[Pipeline] = []
    rough: list[tuple[float, Search]] = []
    least = inf
    for way in sorted(ways, key=lambda batch: abs(batch.count - USUAL_MICRO_BATCHES)):
        for context in contexts:
            search = Search(pricing(context, way), may_be_alone=may_be_alone)
            if not candidates:  # an early first plan: plans that cannot be better are not considered
                candidates += search.by_stages(good_cuts(FIRST_CUTS))
                least = min((pipeline.seconds for pipeline in candidates), default=inf)
            coarse = search.by_stages(good_cuts(search.coarse), WORTH_A_SEARCH * least, keeping=WORTH_A_SEARCH)
            if coarse:
                candidates += coarse
                rough.append((min(pipeline.seconds for pipeline in coarse), search))
                least = min(least, rough[-1][0])
    if not rough:  # no plan with these cuts
        rough = [(inf, Search(pricing(contexts[0], way), may_be_alone=may_be_alone)) for way in ways]
    for seconds, search in sorted(rough, key=lambda entry: entry[0]):
        if seconds > WORTH_A_SEARCH * least and candidates:
            break
        most_lines -= search.lines
        best = search.best(None if most_lines >= 0 or not candidates else search.near(candidates), least * _SLACK)
        if best is not None:
            candidates.append(best)
            least = min(least, best.seconds)
    if not candidates:
        raise pipeline_shortage(network, cluster, like)
    near_best = {pipeline.stages: pipeline for pipeline in candidates if pipeline.seconds <= WORTH_A_SEARCH * least}
    return sorted(near_best.values(), key=lambda pipeline: pipeline.seconds)
