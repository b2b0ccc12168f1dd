"""Drawn boxes and layouts, and their points: shared by the tests of boxes and of moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product

from hypothesis import settings
from hypothesis import strategies as st

from manyhands.facts.boxes import Box, Interval, Layout, cut_points
from manyhands.facts.moves import Move

few = settings(max_examples=60, deadline=None)
more = settings(max_examples=150, deadline=None)

Point = tuple[int, ...]
DEVICES = ("a", "b", "c", "d", "e")


def points(box: Box) -> set[Point]:
    return set(product(*(range(start, stop) for start, stop in box.intervals)))


def held_points(layout: Layout, device: str) -> set[Point]:
    return {point for box in layout.boxes(device) for point in points(box)}


def grown(box: Box, by: int, shape: Sequence[int], axes: Sequence[int]) -> Box:
    for axis in axes:
        start, stop = box.intervals[axis]
        box = box.replace(axis, (max(0, start - by), min(shape[axis], stop + by)))
    return box


shapes = st.integers(1, 4).flatmap(lambda rank: st.tuples(*[st.integers(1, 7 - rank)] * rank))


@st.composite
def intervals_of(draw: st.DrawFn, extent: int) -> Interval:
    start = draw(st.integers(0, extent))
    return start, draw(st.integers(start, extent))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], partial: bool = False, covering: bool = True) -> Layout:
    """A layout of one of the kinds in use; with `covering` every element is held."""
    devices = draw(st.permutations(DEVICES))[: draw(st.integers(1, 5))]
    axis = draw(st.integers(0, len(shape) - 1))
    extent = shape[axis]
    kinds = ["whole", "split", "channels", "halo", "mixed"] + ["grid"] * (len(shape) > 1)
    kind = draw(st.sampled_from(kinds if covering else [*kinds, "any"]))
    weights = draw(st.lists(st.integers(0, 3), min_size=len(devices), max_size=len(devices)).filter(any))
    shares = draw(st.permutations(list(pairwise(cut_points(extent, weights)))))  # device order is not axis order
    cuts = dict(zip(devices, shares))
    if kind == "whole":
        return Layout.whole(shape, devices, partial=partial)
    if kind == "mixed":  # one device holds everything, the others a share
        return Layout.split(shape, axis, {**cuts, draw(st.sampled_from(devices)): (0, extent)}, partial=partial)
    if kind == "split":
        return Layout.split(shape, axis, cuts, partial=partial)
    if kind == "channels":  # every index of the axis to one device, or to two
        owners = [draw(st.lists(st.sampled_from(devices), min_size=1, max_size=2, unique=True)) for _ in range(extent)]
        sets = {device: [(i, i + 1) for i in range(extent) if device in owners[i]] for device in devices}
        return Layout.channels(shape, axis, sets, partial=partial)
    if kind == "halo":  # overlapping, and wider than a tile now and then
        width = draw(st.integers(1, 3))
        split = Layout.split(shape, axis, cuts)
        return Layout.of(
            {device: [grown(box, width, shape, [axis])] for device, box in split.pieces()}, partial=partial
        )
    if kind == "grid":
        rows, columns = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (5, 1)]))
        row_axis, column_axis = draw(st.permutations(range(len(shape))))[:2]
        heights = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows).filter(any))
        widths = draw(st.lists(st.integers(0, 3), min_size=columns, max_size=columns).filter(any))
        tiles = DEVICES[: rows * columns]
        return Layout.grid(shape, (row_axis, column_axis), (heights, widths), tiles, partial=partial)
    held: dict[str, list[Box]] = {}
    for device in devices:
        own: list[Box] = []
        for _ in range(draw(st.integers(0, 2))):
            box = Box(tuple(draw(intervals_of(extent)) for extent in shape))
            own += [piece for piece in [box] if all(piece.intersect(other).is_empty for other in own)]
        held[device] = own
    return Layout.of(held, partial=partial)


def volume_between(moves: Iterable[Move]) -> dict[tuple[str, str], int]:
    """Elements sent over each (source, target) link."""
    volumes: dict[tuple[str, str], int] = {}
    for move in moves:
        if not move.is_local:
            link = (move.source, move.target)
            volumes[link] = volumes.get(link, 0) + move.box.volume
    return volumes


def volume(moves: Iterable[Move]) -> int:
    """Elements sent over all links together."""
    return sum(move.box.volume for move in moves if not move.is_local)


def is_partition(layout: Layout, shape: Sequence[int]) -> bool:
    """Whether every element is held by exactly one device, and nothing else is held."""
    whole = Box.whole(shape)
    within = all(whole.contains(box) for _, box in layout.pieces())
    return within and layout.total_volume == whole.volume and layout.covers(shape)
