"""The cost of stages shared by tiles, as arrays beside those of stages shared by samples (steps.py).

    tile of a device     a part p of every map, in proportion to its speed over the stage's own layers, as far as its
                         memory goes: p of the layers' seconds
    halos                rows and columns beyond a tile, found from every operator's read rules on an interior tile;
                         exchanged before every operator that reads beyond (groups are chosen later, by tiles.py)
    sums                 of batch norm and its like, at every one of them, and of weight gradients at the end

A grid is one column of tiles, or, for devices of one kind, the grid with the least to exchange; a depth is not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy
from numpy.typing import NDArray

from manyhands.facts.boxes import cut_points
from manyhands.facts.network import DTYPE_BYTES, Network, Op
from manyhands.planner.context import Batch, DeviceGroup, PlanningContext, every_group
from manyhands.planner.shares import Counts, Numbers, Shares
from manyhands.planner.steps import StageTable, Steps
from manyhands.planner.tiles import MESSAGE_SECONDS
from manyhands.schedule.tileable import maps_of

LEAST_ROWS = 2
"""The fewest rows of the stage's first map that a tile has: thinner ones are all halo."""
HALO_MEMORY = 1.1
"""Memory of tiles relative to their own part: rims are added to it."""
_TINY = 1e-30


@dataclass(frozen=True)
class Tiling:
    """The parts of a network that can be tiled, and the data that its tiles exchange: running sums over the layers, for
    one sample."""

    end: Counts
    """[first] -> the last layer, not included, of the longest tiled stage that starts there; `first`: none."""
    rows: Counts
    columns: Counts
    """[first] -> extents of the map that such a stage reads first."""
    beyond_rows: Numbers
    beyond_columns: Numbers
    """Bytes that an interior tile reads above and below it, were it as wide as the map; and at its sides."""
    exchanges: Numbers
    sums: Numbers
    """The number of times that devices exchange halos, and add up sums other than batch norm's."""

    @staticmethod
    def of(network: Network) -> Tiling:
        count = len(network.layers)
        end, rows, columns = (numpy.arange(count + 1), numpy.zeros(count + 1, int), numpy.zeros(count + 1, int))
        above, beside, exchanges, sums = (numpy.zeros(count + 1) for _ in range(4))
        for index, layer in enumerate(network.layers):
            _, obstacle = maps_of(network, layer.first, len(network.ops))
            last = count if obstacle is None else network.layer_of_op[obstacle]
            image = network.first_map(layer.first) if last > index else None
            if image is not None:
                end[index] = last
                rows[index], columns[index] = network.extents(image.name)[-2:]
            for op in network.ops[layer.first : layer.last]:
                high, wide = _beyond(network, op, -2), _beyond(network, op, -1)
                above[index + 1] += high
                beside[index + 1] += wide
                exchanges[index + 1] += high > 0 or wide > 0
                sums[index + 1] += op.tile_sums > 0 and not op.statistics
        return Tiling(end, rows, columns, above.cumsum(), beside.cumsum(), exchanges.cumsum(), sums.cumsum())


def _beyond(network: Network, op: Op, axis: int) -> float:
    """Return the bytes of one sample that the middle one of three tiles reads from its neighbours; `axis` is a place in
    the spatial axes."""
    if not op.outputs or not network.is_map(op.outputs[0]) or op.tiling not in ("local", "norm"):
        return 0.0
    region = _middle(network.extents(op.outputs[0])[axis])
    beyond = 0.0
    for read in op.reads:
        if not network.is_map(read.tensor):
            continue
        spec, place = network.tensors[read.tensor], network.spatial[read.tensor][axis]
        extent = spec.shape[place]
        low, high = read.rules[place].demand(region, extent)
        owned = _middle(extent)
        lines = max(0, high - low) - max(0, min(high, owned[1]) - max(low, owned[0]))
        beyond += lines * spec.elements / extent * DTYPE_BYTES[spec.dtype]
    return beyond


def _middle(extent: int) -> tuple[int, int]:
    return list(pairwise(cut_points(extent, (1, 1, 1))))[1]


class TileSteps(Steps):
    """Prices of stages by samples, by tiles and on one device."""

    def __init__(
        self, context: PlanningContext, batch: Batch, tiling: Tiling, groups: Sequence[DeviceGroup] | None = None
    ) -> None:
        count = len(context.names)
        super().__init__(context, batch, every_group(count, count) if groups is None else groups)
        self.tiling = tiling

    def stages(self, first: Counts, last: Counts, group: Counts) -> StageTable:
        """Return the given stages by samples, where there are enough, and by tiles, where possible."""
        return self.shared(first, last, group).joined(self.tiled(first, last, group))

    def shared(self, first: Counts, last: Counts, group: Counts) -> StageTable:
        """Return the given stages by samples that have a sample for every device."""
        which = numpy.flatnonzero(self.ends[group] - self.starts[group] <= self.batch.samples)
        return super().stages(first[which], last[which], group[which])

    def tiled(self, first: Counts, last: Counts, group: Counts) -> StageTable:
        """Return the given stages that can be tiled, ignoring memory."""
        size = self.ends[group] - self.starts[group]
        columns = self._columns(first, size, (self.counts[group] > 0).sum(1) == 1)
        which = numpy.flatnonzero((size > 1) & (last <= self.tiling.end[first]) & (columns > 0))
        first, last, group = first[which], last[which], group[which]
        free = numpy.full((len(first), self.counts.shape[1]), numpy.inf)
        return self._tiled(first, last, group, columns[which], free)

    def within_memory(self, table: StageTable, ahead: int) -> StageTable:
        plain = super().within_memory(table.only(numpy.flatnonzero(table.columns == 0)), ahead)
        tiles = table.only(numpy.flatnonzero(table.columns > 0))
        if not len(tiles):
            return plain
        fixed, each = self.memory(tiles.first, tiles.last, ahead)
        each = numpy.maximum(each * self.batch.samples * HALO_MEMORY, 1e-9)
        caps = numpy.stack([(budget - fixed) / each for budget in self.budgets], axis=1)
        tight = ((tiles.parts > caps) & (self.counts[tiles.group] > 0)).any(1)
        which = numpy.flatnonzero(tight & (tiles.columns == 1))
        loose = tiles.only(numpy.flatnonzero(~tight))
        other = self._tiled(
            tiles.first[which], tiles.last[which], tiles.group[which], tiles.columns[which], caps[which]
        )
        return plain.joined(loose).joined(other.only(numpy.flatnonzero(other.shares.fits)))

    def _columns(self, first: Counts, size: Counts, alike: NDArray[numpy.bool_]) -> Counts:
        """Return the number of columns of tiles with the least halo; 0 where the map is too small for so many tiles."""
        rows, columns = self.tiling.rows[first], self.tiling.columns[first]
        chosen = (rows >= LEAST_ROWS * size).astype(numpy.int64)
        for count in set(size[alike].tolist()):
            lines = numpy.flatnonzero(alike & (size == count))
            least = numpy.where(chosen[lines] > 0, columns[lines] * min(1.0, (count - 1) / 2), numpy.inf)
            for wide in range(2, count + 1):
                if count % wide:
                    continue
                high = count // wide
                rim = columns[lines] / wide * min(1.0, (high - 1) / 2) + rows[lines] / high * min(1.0, (wide - 1) / 2)
                legal = (rows[lines] >= LEAST_ROWS * high) & (columns[lines] >= LEAST_ROWS * wide)
                is_better = legal & (rim < 0.95 * least)
                chosen[lines[is_better]] = wide
                least = numpy.where(is_better, rim, least)
        return chosen

    def _tiled(self, first: Counts, last: Counts, group: Counts, columns: Counts, caps: Numbers) -> StageTable:
        counts, samples = self.counts[group], self.batch.samples
        kinds = counts.shape[1]
        has = counts > 0
        speed = numpy.zeros(counts.shape)
        for kind in range(kinds):
            table = self.ladders.total[kind][samples]
            speed[:, kind] = 1 / numpy.maximum(table[last] - table[first], _TINY)
        parts, fits = _divided(speed, counts, caps)
        forward, backward = numpy.zeros(len(first)), numpy.zeros(len(first))
        for kind in range(kinds):
            share = parts[:, kind] * samples
            low = numpy.floor(share).astype(numpy.int64).clip(0, samples - 1)
            over = share - low
            for tables, seconds in ((self.ladders.forward, forward), (self.ladders.backward, backward)):
                table = tables[kind]
                less, more = (table[samples_done, last] - table[samples_done, first] for samples_done in (low, low + 1))
                numpy.maximum(seconds, numpy.where(has[:, kind], less + over * (more - less), 0.0), out=seconds)
        exchange = self._exchange_seconds(first, last, group, columns)
        ahead, back = self.statistics_seconds(first, last, group)
        shares = Shares(numpy.zeros(counts.shape, numpy.int64), numpy.zeros(counts.shape, numpy.int64), fits)
        reduce = self.reduce_seconds(first, last, group)
        forward += exchange + ahead
        backward += exchange * self.bytes.has_backward(last) + back
        return StageTable(first, last, group, forward, backward, reduce, shares, columns, parts)

    def _exchange_seconds(self, first: Counts, last: Counts, group: Counts, columns: Counts) -> Numbers:
        """Return the seconds to exchange the halos of a micro-batch, one way: the way back mirrors it."""
        tiling, size = self.tiling, self.ends[group] - self.starts[group]
        rows = size // numpy.maximum(1, columns)
        above = (tiling.beyond_rows[last] - tiling.beyond_rows[first]) / columns * numpy.minimum(1.0, (rows - 1) / 2)
        beside = (tiling.beyond_columns[last] - tiling.beyond_columns[first]) / rows
        beside = beside * numpy.minimum(1.0, (columns - 1) / 2)
        meetings = tiling.exchanges[last] - tiling.exchanges[first] + tiling.sums[last] - tiling.sums[first]
        seconds: Numbers = (above + beside) * self.batch.samples / self.group_rates[group]
        return seconds + meetings * (self.group_delays[group] + MESSAGE_SECONDS)


def _divided(speed: Numbers, counts: Counts, caps: Numbers) -> tuple[Numbers, NDArray[numpy.bool_]]:
    """Return the fraction of one device of each kind, in proportion to speed as far as `caps` allow, and whether all
    fits."""
    caps = numpy.maximum(caps, 0.0)
    has = counts > 0
    capped = numpy.zeros(counts.shape, bool)
    parts = numpy.zeros(counts.shape)
    for _ in range(counts.shape[1] + 1):
        remaining = 1.0 - (numpy.where(capped, caps, 0.0) * counts).sum(1)
        total = (numpy.where(capped, 0.0, speed) * counts).sum(1)
        even = speed * (remaining / numpy.maximum(total, _TINY))[:, None]
        parts = numpy.where(has, numpy.where(capped, caps, even), 0.0)
        over = has & ~capped & (parts > caps)
        if not over.any():
            break
        capped |= over
    fits = numpy.abs((parts * counts).sum(1) - 1.0) < 1e-6
    return parts, fits & ((parts > 0) | ~has).all(1)
