"""Divides a micro-batch among the devices of a stage (ASTEROID §3.3, Eq. 7).

    min over y   max over devices d   t_d(y_d)      where   Σ y_d = B,   1 <= y_d <= what d's memory holds

More samples never take less time, so the least maximum is found by raising a threshold: devices take all samples that
they finish below it, and the threshold moves to the next cheapest sample until the whole batch is taken. That is exact,
and it is done for all the stages that a planner considers at once. Devices of one kind (same times, same memory) are
counted, not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

Numbers = NDArray[numpy.float64]
Counts = NDArray[numpy.int64]
Times = Callable[[int, Counts, Counts], Numbers]
"""(kind, problems, samples) -> seconds of one device of that kind in those problems."""

_ROUNDING = 1e-12
_MOST_HALVINGS = 24


@dataclass
class Shares:
    """Shares of many problems: of every kind, `full` devices take `most` samples each and the others one less."""

    most: Counts
    full: Counts
    fits: NDArray[numpy.bool_]
    """Whether the whole micro-batch fits."""

    def of(self, problem: int, counts: Sequence[int]) -> list[list[int]]:
        """Return the samples of each device, by kind."""
        by_kind = []
        for kind, count in enumerate(counts):
            most, full = int(self.most[problem, kind]), int(self.full[problem, kind])
            by_kind.append([most] * full + [most - 1] * (count - full))
        return by_kind


def exact_shares(times: Times, counts: Counts, caps: Counts, batch: int, floors: Numbers) -> Shares:
    """Return the shares that make the slowest device of every problem as fast as possible.

    `counts`: devices of each kind, problems x kinds. `caps`: the most samples one of them holds.
    `floors`: times that no division can beat, to begin with; 0 will do.
    """
    kinds = counts.shape[1]
    has = counts > 0
    caps = numpy.where(has, numpy.minimum(caps, batch), 0)
    fits = ((counts * caps).sum(1) >= batch) & (caps >= has).all(1) & (counts.sum(1) <= batch)
    shares = Shares(has.astype(numpy.int64), numpy.where(has, counts, 0), fits)
    alike = has.sum(1) == 1
    if alike.any():  # devices of one kind: as evenly as possible
        kind_of, size = has.argmax(1), numpy.maximum(1, counts.sum(1))
        rows = numpy.flatnonzero(alike & fits)
        most = -(-batch // size[rows])
        shares.most[rows, kind_of[rows]] = most
        shares.full[rows, kind_of[rows]] = batch - (most - 1) * size[rows]
    mixed = numpy.flatnonzero(~alike & fits)
    if not len(mixed):
        return shares
    ones = [_seconds(times, kind, mixed, has[mixed, kind].astype(numpy.int64)) for kind in range(kinds)]
    floor = numpy.maximum.reduce([floors[mixed] * (1 - _ROUNDING), *ones])
    shares.most[mixed] = _brought_near(times, mixed, counts[mixed], caps[mixed], batch, floor)
    _add(times, shares, counts, caps, batch)
    _remove(times, shares, counts, batch)
    return shares


def _seconds(times: Times, kind: int, problems: Counts, samples: Counts) -> Numbers:
    return numpy.where(samples > 0, times(kind, problems, samples), 0.0)


def _brought_near(times: Times, problems: Counts, counts: Counts, caps: Counts, batch: int, floor: Numbers) -> Counts:
    """Return the samples of each kind below a threshold that is just not enough, or at the floor where that is too
    much."""
    kinds = counts.shape[1]
    low_time = floor.copy()
    high = caps.copy()
    low = numpy.stack(
        [_below(times, k, problems, low_time, numpy.zeros_like(high[:, k]), high[:, k]) for k in range(kinds)], 1
    )
    low = numpy.maximum(low, counts > 0)
    high = numpy.maximum(low, high)
    high_time = numpy.maximum.reduce([_seconds(times, k, problems, high[:, k]) for k in range(kinds)])
    for _ in range(_MOST_HALVINGS):
        going = numpy.flatnonzero(((counts * low).sum(1) < batch) & ((high - low) > 1).any(1))
        if not len(going):
            break
        need = batch - (counts[going] * low[going]).sum(1)
        room = (counts[going] * (high[going] - low[going])).sum(1)
        part = numpy.clip(need / room, 0.05, 0.95)  # times are nearly straight lines: guess, do not halve
        time = low_time[going] + part * (high_time[going] - low_time[going])
        tried = numpy.stack(
            [_below(times, k, problems[going], time, low[going, k], high[going, k]) for k in range(kinds)], axis=1
        )  # fmt: skip
        enough = (counts[going] * tried).sum(1) >= batch
        low[going[~enough]], low_time[going[~enough]] = tried[~enough], time[~enough]
        high[going[enough]], high_time[going[enough]] = tried[enough], time[enough]
    return low


def _below(times: Times, kind: int, problems: Counts, limit: Numbers, low: Counts, high: Counts) -> Counts:
    """Return the most samples, between two numbers, that take no longer than a limit; `low` samples do."""
    while (low < high).any():
        middle = (low + high + 1) >> 1
        within = times(kind, problems, middle) <= limit
        low, high = numpy.where(within, middle, low), numpy.where(within, high, middle - 1)
    return low


def _taken(shares: Shares, counts: Counts) -> Counts:
    total: Counts = (counts * shares.most - (counts - shares.full)).sum(1)
    return total


def _add(times: Times, shares: Shares, counts: Counts, caps: Counts, batch: int) -> None:
    """Raise the threshold to the next cheapest sample until nothing is left."""
    kinds = counts.shape[1]
    remaining = batch - _taken(shares, counts)
    active = numpy.flatnonzero(shares.fits & (remaining > 0))
    upcoming = numpy.full((len(active), kinds), numpy.inf)
    stale = counts[active] > 0
    while len(active):
        for kind in range(kinds):
            look = numpy.flatnonzero(stale[:, kind] & (shares.most[active, kind] < caps[active, kind]))
            upcoming[:, kind][stale[:, kind]] = numpy.inf
            where = active[look]
            upcoming[look, kind] = times(kind, where, shares.most[where, kind] + 1)
        kind_of = upcoming.argmin(1)
        rows = numpy.arange(len(active))
        added = numpy.minimum(counts[active, kind_of], remaining[active])
        shares.most[active, kind_of] += 1
        shares.full[active, kind_of] = added
        remaining[active] -= added
        stale[:] = False
        stale[rows, kind_of] = True
        going = remaining[active] > 0
        active, upcoming, stale = active[going], upcoming[going], stale[going]


def _remove(times: Times, shares: Shares, counts: Counts, batch: int) -> None:
    """Take back surplus samples, the most expensive first, where one device alone sets the threshold."""
    kinds = counts.shape[1]
    surplus = _taken(shares, counts) - batch
    active = numpy.flatnonzero(shares.fits & (surplus > 0))
    while len(active):
        last = numpy.full((len(active), kinds), -numpy.inf)
        for kind in range(kinds):
            look = numpy.flatnonzero((counts[active, kind] > 0) & (shares.most[active, kind] > 1))
            where = active[look]
            last[look, kind] = times(kind, where, shares.most[where, kind])
        kind_of = last.argmax(1)
        removed = numpy.minimum(shares.full[active, kind_of], surplus[active])
        shares.full[active, kind_of] -= removed
        surplus[active] -= removed
        emptied = shares.full[active, kind_of] == 0
        shares.most[active[emptied], kind_of[emptied]] -= 1
        shares.full[active[emptied], kind_of[emptied]] = counts[active[emptied], kind_of[emptied]]
        active = active[surplus[active] > 0]
