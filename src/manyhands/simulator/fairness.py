"""Max-min fair rates: the most crowded port or link gives each of its flows an equal part; what these leave is shared
by the others in the same way. All that fill up at the same level are handled together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

Numbers = NDArray[numpy.float64]
Places = NDArray[numpy.int64]

SAME = 1e-12
"""Levels, and end times, that differ by less than this (relatively) differ by rounding only."""
NO_LINK = -1


def fair_rates(
    room: Numbers,
    up: Places,
    down: Places,
    link: Places,
    limit: Numbers,
    times: Numbers | None = None,
    *,
    through: Sequence[Places] = (),
) -> Numbers:
    """Return the rate of each flow. `up` and `down` are the entries of `room` that it crosses, `link` is its link, of
    `limit` bytes a second, or `NO_LINK`; `through` are entries of `room` that it crosses at a relay. `times` counts
    equal flows; each gets the rate."""
    times = numpy.ones(len(up)) if times is None else times
    crossed = [up, down, *through]
    limited = numpy.flatnonzero(link != NO_LINK)
    if len(limited):
        limited_links = link[limited]
        named = numpy.searchsorted(numpy.sort(limited_links), limited_links)  # the same number for the same link
        links = numpy.full(len(limited) + 1, numpy.inf)
        links[named] = limit[limited]
        places = numpy.full(len(up), len(room) + len(links) - 1)
        places[limited] = len(room) + named
        room = numpy.concatenate((room, links))
        crossed.append(places)
    rates = numpy.full(len(up), numpy.inf)
    remaining, rising = room.copy(), numpy.arange(len(up))
    crowd = _count(crossed, times, len(room))
    while len(rising):
        level = numpy.divide(remaining, crowd, out=numpy.full(len(room), numpy.inf), where=crowd > 0)
        levels = [level[places] for places in crossed]
        least = numpy.minimum.reduce(levels)
        # Full is what none of its flows finds a lower level beside; flows with a lower level elsewhere go on rising.
        higher = [level_beside > least * (1 + SAME) for level_beside in levels]
        is_full = numpy.ones(len(room), bool)
        for places, is_higher in zip(crossed, higher):
            is_full[places[is_higher]] = False
        stops = is_full[crossed[0]]
        for places in crossed[1:]:
            stops |= is_full[places]
        part = least[stops]
        rates[rising[stops]] = part
        goes_on = ~stops
        if not goes_on.any():
            return rates
        stopped, count = [places[stops] for places in crossed], times[stops]
        used = numpy.where(part < numpy.inf, part * count, 0.0)
        remaining = numpy.maximum(remaining - _count(stopped, used, len(room)), 0.0)
        crowd -= _count(stopped, count, len(room))
        rising, times, crossed = rising[goes_on], times[goes_on], [places[goes_on] for places in crossed]
    return rates


def fair_rates_of_few(crossed: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
    """Return the rates of a few flows, given what each crosses and how much that carries. It uses no arrays, which take
    longer to set up than to work through."""
    remaining: dict[int, float] = {}
    crowd: dict[int, int] = {}
    flows_on: dict[int, list[int]] = {}
    for flow, ports in enumerate(crossed):
        for place, limit in ports:
            if place in remaining:
                crowd[place] += 1
                flows_on[place].append(flow)
            else:
                remaining[place], crowd[place], flows_on[place] = limit, 1, [flow]
    rates = [math.inf] * len(crossed)
    while crowd:
        part, fullest = min((remaining[place] / count, place) for place, count in crowd.items())
        for flow in flows_on[fullest]:
            if rates[flow] == math.inf:
                rates[flow] = part
                for place, _ in crossed[flow]:
                    remaining[place] = max(0.0, remaining[place] - part)
                    crowd[place] -= 1
                    if not crowd[place]:
                        del crowd[place]
    return rates


def _count(crossed: list[Places], weights: Numbers, size: int) -> Numbers:
    total = numpy.zeros(size)
    for places in crossed:
        total += numpy.bincount(places, weights=weights, minlength=size)
    return total
