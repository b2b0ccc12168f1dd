"""The cost of every possible stage and cut of a network on a cluster: the quantities of ASTEROID §3.3, as arrays.

A round of P stages has 2P-1 steps: stages and the communication between them. Of each a planner knows E_f and E_b, the
seconds of one micro-batch forward and backward, and of a stage T_a, the all-reduce of its weights (Eq. 5). Then (with
A the longest step, aligned, and the last backward passes running down to the first stage; Eq. 4, 6 and 11 put together)

    round = max over steps s (M·E^s + Σ_{i<s} E^i)  +  max over steps t (T_a^t - Σ_{i<t} E_b^i),     E = E_f + E_b

Devices are in order of memory, a stage takes an interval of them. What crosses a cut is priced by ports and links, with
a device's part of it by its speed over the whole network, so that a cut's price depends on the two groups only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy
from numpy.typing import NDArray

from manyhands.planner.context import MOST_WITH_GAPS, Batch, DeviceGroup, DevicePairs, PlanningContext, every_group
from manyhands.planner.shares import Counts, Numbers, Shares, exact_shares


@dataclass
class StageTable:
    """Candidate stages: layers [first, last) on a group, and their costs; one line each."""

    first: Counts
    last: Counts
    group: Counts
    forward: Numbers
    backward: Numbers
    reduce: Numbers
    shares: Shares
    columns: Counts
    """Columns of the grid of tiles; 0: shared by samples, or one device."""
    parts: Numbers
    """For tiles: the fraction of every map that one device of each kind has."""

    def __len__(self) -> int:
        return len(self.first)

    def only(self, which: Counts) -> StageTable:
        shares = self.shares
        return StageTable(
            self.first[which], self.last[which], self.group[which], self.forward[which], self.backward[which],
            self.reduce[which], Shares(shares.most[which], shares.full[which], shares.fits[which]), self.columns[which],
            self.parts[which],
        )  # fmt: skip

    def joined(self, other: StageTable) -> StageTable:
        def both(column: str) -> NDArray[Any]:
            return numpy.concatenate([attrgetter(column)(table) for table in (self, other)])

        shares = Shares(both("shares.most"), both("shares.full"), both("shares.fits"))
        first, last, group = both("first"), both("last"), both("group")
        return StageTable(
            first, last, group, both("forward"), both("backward"), both("reduce"), shares, both("columns"),
            both("parts"),
        )  # fmt: skip


class Steps:
    """Prices of stages and cuts for one way of cutting the mini-batch."""

    def __init__(self, context: PlanningContext, batch: Batch, groups: Sequence[DeviceGroup] | None = None) -> None:
        """Set up the prices. `groups`: runs of devices that may share a stage, by default all that a micro-batch has
        samples for."""
        self.cluster, self.batch, self.may_cut = context.cluster, batch, context.network.may_cut
        self._context = context
        self.names, self.kinds, self.budgets = context.names, context.kinds, context.budgets
        self.layers = len(context.network.layers)
        self.ladders, self.bytes = context.ladders, context.bytes
        self.best = [self.ladders.best(kind, batch.samples) for kind in range(len(self.budgets))]
        self.groups = every_group(len(self.names), batch.samples) if groups is None else list(groups)
        self.counts = numpy.zeros((len(self.groups), len(self.budgets)), numpy.int64)
        for number, (a, b) in enumerate(self.groups):
            for device in range(a, b):
                self.counts[number, self.kinds[device]] += 1
        self.starts = numpy.array([a for a, _ in self.groups])
        self.ends = numpy.array([b for _, b in self.groups])
        whole = [self.ladders.total[kind][batch.samples, -1] for kind in self.kinds]
        speeds = batch.samples / numpy.maximum(1e-12, whole)
        self._parts = {g: speeds[g[0] : g[1]] / speeds[g[0] : g[1]].sum() for g in self.groups}

    # Stages

    def least_seconds(self, first: Counts, last: Counts, group: Counts) -> Numbers:
        """Return a lower bound on the seconds of any division of a micro-batch over a group."""
        speed = numpy.zeros(len(first))
        for kind in range(self.counts.shape[1]):
            each = self.best[kind][last] - self.best[kind][first]
            speed += self.counts[group, kind] / numpy.maximum(each, 1e-30)
        seconds: Numbers = self.batch.samples / speed
        return seconds

    def memory(self, first: Counts, last: Counts, ahead: int) -> tuple[Numbers, Numbers]:
        """Return the bytes of stages whatever the share, and the bytes for each sample of it (Eq. 3).

        Beside it, for one operator's weights: their new gradients while these are added up, or what the optimiser's
        step works with.
        """
        b = self.bytes
        held = b.held_at_once(last, ahead)
        fixed = b.held(first, last) + held * (b.fixed[last] - b.fixed[first])
        fixed = fixed + max(self.batch.count > 1, self.batch.optimizer_slots) * b.heaviest[first, last]
        each = held * (b.saved[last] - b.saved[first] + b.crossing[first])
        each = each + numpy.maximum(b.widest[first, last], b.returning[last])
        return fixed, each

    def stages(self, first: Counts, last: Counts, group: Counts) -> StageTable:
        """Return the given stages with the best shares, ignoring memory."""
        free = numpy.full((len(first), self.counts.shape[1]), self.batch.samples)
        return self._solved(first, last, group, free)

    def within_memory(self, table: StageTable, ahead: int) -> StageTable:
        """Return the stages with shares that fit into every device's memory while `ahead` micro-batches are held; those
        that fit nowhere are dropped."""
        first, last, group = table.first, table.last, table.group
        fixed, each = self.memory(first, last, ahead)
        most = [numpy.floor((budget - fixed) / numpy.maximum(each, 1e-9)) for budget in self.budgets]
        caps = numpy.stack(most, axis=1).clip(0, self.batch.samples).astype(numpy.int64)
        tight = ((table.shares.most > caps) & (self.counts[group] > 0)).any(1)
        which = numpy.flatnonzero(tight)
        if not len(which):
            return table.only(numpy.flatnonzero(table.shares.fits))
        loose = table.only(numpy.flatnonzero(~tight & table.shares.fits))
        other = self._solved(first[which], last[which], group[which], caps[which])
        return loose.joined(other.only(numpy.flatnonzero(other.shares.fits)))

    def _solved(self, first: Counts, last: Counts, group: Counts, caps: Counts) -> StageTable:
        def times(kind: int, problems: Counts, samples: Counts) -> Numbers:
            table = self.ladders.total[kind]
            seconds: Numbers = table[samples, last[problems]] - table[samples, first[problems]]
            return seconds

        counts = self.counts[group]
        shares = exact_shares(times, counts, caps, self.batch.samples, self.least_seconds(first, last, group))
        forward, backward = numpy.zeros(len(first)), numpy.zeros(len(first))
        for kind in range(counts.shape[1]):
            samples = shares.most[:, kind]
            for tables, seconds in ((self.ladders.forward, forward), (self.ladders.backward, backward)):
                numpy.maximum(seconds, tables[kind][samples, last] - tables[kind][samples, first], out=seconds)
        if self.batch.is_synchronised:
            ahead, back = self.statistics_seconds(first, last, group)
            forward += ahead
            backward += back
        reduce = self.reduce_seconds(first, last, group)
        none = numpy.zeros(len(first), numpy.int64)
        return StageTable(
            first, last, group, forward, backward, reduce, shares, none, numpy.zeros((len(first), counts.shape[1]))
        )

    def statistics_seconds(self, first: Counts, last: Counts, group: Counts) -> tuple[Numbers, Numbers]:
        """Return the seconds that the batch norms of stages take to add up their sums over all devices, forward and
        backward."""
        b, is_shared = self.bytes, self.ends[group] - self.starts[group] > 1
        norms, sums = b.norms[:, last] - b.norms[:, first], b.sums[:, last] - b.sums[:, first]
        ahead, back = is_shared * (norms * self.group_delays[group] + 2 * sums * self._sum_seconds[group])
        return ahead, back

    def reduce_seconds(self, first: Counts, last: Counts, group: Counts) -> Numbers:
        """Return T_a: the seconds of adding up weight gradients. Those of a weight that later stages hold too are added
        up once the first of them, which is the last to end, has its own."""
        b, is_shared = self.bytes, self.ends[group] - self.starts[group] > 1
        summed = b.summed(first, last)
        seconds: Numbers = (
            self._reduce_seconds[group] * summed + (is_shared & (summed > 0)) * 2 * self.group_delays[group]
        )
        tied = b.tied(first, last)
        if tied.any():
            each, wait = self._tied_seconds
            seconds = seconds + tied * each[group] + (tied > 0) * wait[group]
        return seconds

    @cached_property
    def _tied_seconds(self) -> tuple[Numbers, Numbers]:
        """[group] -> seconds for a byte of weights that another stage holds too, by Eq. 5 with one more device, and
        what the sum waits for: over the slowest links of the group's devices, as the other stage is not known here."""
        size = self.ends - self.starts
        links = [[self._context.slowest_links[name] for name in self.names[a:b]] for a, b in self.groups]
        rates = numpy.array([min(rate for rate, _ in each) for each in links])
        delays = numpy.array([max(delay for _, delay in each) for each in links])
        return 2 * size / (size + 1) / rates, 2 * delays

    @cached_property
    def group_rates(self) -> Numbers:
        """The slowest rate between two devices of each group, in bytes per second."""
        return self._of_pairs(self.pairs.rates, numpy.minimum, numpy.inf)

    @cached_property
    def group_delays(self) -> Numbers:
        """The longest delay between two devices of each group."""
        return self._of_pairs(self.pairs.delays, numpy.maximum, 0.0)

    def _of_pairs(self, table: Numbers, least: numpy.ufunc, alone: float) -> Numbers:
        """Return the least, or most, of the values between any two devices of each group."""
        both_ways = numpy.where(numpy.eye(len(table), dtype=bool), alone, least(table, table.T))
        running = {}
        for a in sorted({a for a, _ in self.groups}):
            inside = least.accumulate(least.accumulate(both_ways[a:, a:], axis=0), axis=1)
            running[a] = inside.diagonal()
        return numpy.array([running[a][b - a - 1] for a, b in self.groups])

    @cached_property
    def pairs(self) -> DevicePairs:
        return DevicePairs.of(self.cluster, self.names)

    @cached_property
    def _is_uniform(self) -> bool:
        """Whether all pairs have the same link, and no host or site has several of the devices."""
        return not self.cluster.links and not self.cluster.sites and self.pairs.has_own_hosts

    @cached_property
    def _reduce_seconds(self) -> Numbers:
        """T_a of Eq. 5 for one byte of weights."""
        size = self.ends - self.starts
        seconds: Numbers = 2 * (size - 1) / size / self.group_rates
        return seconds

    @cached_property
    def _sum_seconds(self) -> Numbers:
        """Seconds per byte to send the sums of every device to every other."""
        seconds: Numbers = (self.ends - self.starts - 1) / self.group_rates
        return seconds

    # Cuts

    @cached_property
    def _cut_rates(self) -> tuple[Numbers, Numbers, Numbers]:
        """[group, next group] -> seconds per byte of a cut forward and backward, and the delay."""
        count = len(self.groups)
        device = self.cluster.device
        ups = numpy.array([device(name).up_bytes_per_second for name in self.names])
        downs = numpy.array([device(name).down_bytes_per_second for name in self.names])
        out = numpy.array([(self._parts[g] / ups[g[0] : g[1]]).max() for g in self.groups])
        into = numpy.array([(self._parts[g] / downs[g[0] : g[1]]).max() for g in self.groups])
        ahead = numpy.maximum(out[:, None], into[None, :])
        back = numpy.maximum(into[:, None], out[None, :])
        delay = numpy.full((count, count), self.cluster.link.delay_seconds)
        if self._is_uniform:
            largest = numpy.array([self._parts[g].max() for g in self.groups])
            link = numpy.minimum(largest[:, None], largest[None, :]) / self.cluster.link.bytes_per_second
            if self.cluster.link.bytes_per_second >= max(ups.max(), downs.max()):
                link = numpy.zeros_like(link)  # only ports limit
            return numpy.maximum(ahead, link), numpy.maximum(back, link), delay
        if len(self.names) > MOST_WITH_GAPS and self.pairs.has_own_hosts:
            return self._neighbours_rates(ahead, back)
        for x, group in enumerate(self.groups):
            for y, other in enumerate(self.groups):
                if group[1] <= other[0]:
                    ahead[x, y], back[x, y], delay[x, y] = self._between(group, other)
        return ahead, back, delay

    def _neighbours_rates(self, ahead: Numbers, back: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return the rates for groups that follow each other without a gap; the slowest link between them carries the
        largest part. With many devices there are too many pairs to price each."""
        rates, delays = self.pairs.rates, self.pairs.delays
        delay = numpy.full(ahead.shape, self.cluster.link.delay_seconds)
        largest = numpy.array([self._parts[g].max() for g in self.groups])
        number = {group: place for place, group in enumerate(self.groups)}
        count = len(self.names)
        for middle in range(1, count):
            before = [number[a, middle] for a in range(middle - 1, -1, -1) if (a, middle) in number]
            after = [number[middle, b] for b in range(middle + 1, count + 1) if (middle, b) in number]
            at = numpy.ix_(before, after)
            part = numpy.minimum(largest[before][:, None], largest[after][None, :])
            for table, seconds in ((rates, ahead), (rates.T, back)):
                slowest = _corner(table, middle, numpy.minimum)[: len(before), : len(after)]
                seconds[at] = numpy.maximum(seconds[at], part / slowest)
            longest = _corner(numpy.maximum(delays, delays.T), middle, numpy.maximum)
            delay[at] = longest[: len(before), : len(after)]
        return ahead, back, delay

    def _between(self, group: DeviceGroup, other: DeviceGroup) -> tuple[float, float, float]:
        """Return the seconds per byte of a cut between two groups, forward and backward, and the longest delay: ports
        of the devices (those of one host together), and every pair's link."""
        ports: dict[tuple[str, str], float] = {}
        slowest = [0.0, 0.0]
        delay = 0.0
        mine, theirs = (numpy.concatenate([[0.0], self._parts[g].cumsum()]) for g in (group, other))
        for i, (a, b) in enumerate(pairwise(mine)):
            for j, (c, d) in enumerate(pairwise(theirs)):
                part = min(b, d) - max(a, c)
                if part <= 1e-12:
                    continue
                pair = self.cluster.device(self.names[group[0] + i]), self.cluster.device(self.names[other[0] + j])
                for way, (sender, receiver) in enumerate((pair, pair[::-1])):
                    link = self.cluster.link_between(sender.name, receiver.name)
                    delay = max(delay, link.delay_seconds)
                    slowest[way] = max(slowest[way], part / link.bytes_per_second)
                    if sender.host_name != receiver.host_name:
                        for key, rate in (
                            ((f"{way}up", sender.host_name), sender.up_bytes_per_second),
                            ((f"{way}down", receiver.host_name), receiver.down_bytes_per_second),
                        ):
                            ports[key] = ports.get(key, 0.0) + part / rate
        for (name, _), seconds in ports.items():
            slowest[int(name[0])] = max(slowest[int(name[0])], seconds)
        return slowest[0], slowest[1], delay

    def cut_seconds(self, layer: Counts, group: Counts, following: Counts) -> tuple[Numbers, Numbers]:
        """Return E_f and E_b of the communication between two stages that meet at a layer."""
        ahead, back, delay = self._cut_rates
        samples = self.batch.samples
        wait = delay[group, following]
        forward = self.bytes.crossing[layer] * samples * ahead[group, following] + wait
        backward = self.bytes.returning[layer] * samples * back[group, following]
        return forward, numpy.where(backward > 0, backward + wait, 0.0)

    @cached_property
    def least_cut_seconds(self) -> tuple[Numbers, Numbers]:
        """[layer, group] -> the least seconds of a cut there before the group, and after it, for any group on the other
        side."""
        ahead, back, _ = self._cut_rates
        size = self.batch.samples
        crossing, returning = self.bytes.crossing[:, None] * size, self.bytes.returning[:, None] * size
        before = crossing * ahead.min(0) + returning * back.min(0)
        after = crossing * ahead.min(1) + returning * back.min(1)
        return before, after


def _corner(table: Numbers, middle: int, least: numpy.ufunc) -> Numbers:
    """Return [n, m] -> the least between the n + 1 devices before the middle and the m + 1 after it."""
    corner: Numbers = least.accumulate(least.accumulate(table[:middle, middle:][::-1], axis=0), axis=1)
    return corner
